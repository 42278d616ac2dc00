"""The scripts' progress bars."""

import sys

from tqdm import tqdm

LINE_SECONDS = 10.0


class ProgressBar(tqdm):
    """A bar on a terminal; elsewhere, such as in a log file, a line every LINE_SECONDS."""

    def __init__(self, *args, **options):
        # With `gui`, it is shown by `display` alone; with `miniters`, tqdm's thread adds no line.
        lines = {} if sys.stderr.isatty() else {"gui": True, "mininterval": LINE_SECONDS, "miniters": 1}
        super().__init__(*args, **options, **lines)

    def display(self, *args, **options) -> None:
        super().display(*args, **options) if not self.gui else print(self, file=sys.stderr, flush=True)
