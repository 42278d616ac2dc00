"""Run a script as on a volunteer's machine, which has only requirements.txt installed.

python tests/support/volunteer.py run_trainer.py --initial_peers …
"""

import runpy
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from lib.common.errors import ORGANISER_MODULES

if __name__ == "__main__":
    # The tests' launcher, from which this process is forked, has imported none.
    assert not ORGANISER_MODULES & sys.modules.keys()
    sys.modules |= dict.fromkeys(ORGANISER_MODULES)  # None: not installed
    del sys.argv[0]
    runpy.run_path(str(Path(__file__).parents[2] / sys.argv[0]), run_name="__main__")
