#!/usr/bin/env python3
"""Measure how long a monitor and a trainer take to start, and the memory of their processes.

benchmarks/startup.py --repeat 3 --imports

Both run on this machine, with a tiny model: a monitor until it prints its address, then a trainer until it has
computed its first gradient. --imports: which packages they import, and for how long. Needs no network.
"""

import argparse
import contextlib
import re
import shutil
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.process_usage import PARTS, measure_cpu, measure_memory
from tests.support.peers import LOCAL, Script, prepare_data

SETTLE_SECONDS = 3.0  # after the start, until the memory is measured
MOST_PACKAGES = 14
READY = {"monitor": r"--initial_peers (/ip4/\S+)", "trainer": r"Local step 1:"}
_IMPORT = re.compile(r"import time:\s+(\d+) \|\s+\d+ \| +([\w.]+)")


@dataclass
class Start:
    """The figures of one start.

    :param seconds: until the script was ready
    :param cpu: CPU seconds of all its processes until then
    :param pss, uss: bytes of memory, by part
    :param imports: seconds of the imports of the main process, by package
    """

    seconds: float
    cpu: float
    pss: Counter
    uss: Counter
    imports: Counter


def start_both(folder: Path, data: Path, with_imports: bool) -> dict[str, Start]:
    """Start a monitor, then a trainer that joins it, and end both."""
    folder.mkdir()
    common = ("--tokenizer_path", data / "tokenizer", "--model_name_or_path", data / "config.json", "--host_maddrs",
              LOCAL)  # fmt: skip
    env = {"PYTHONPROFILEIMPORTTIME": "1"} if with_imports else {}
    scripts: list[Script] = []
    starts = {}
    try:
        for name, script, flags in (
            ("monitor", "run_training_monitor.py", ()),
            ("trainer", "run_trainer.py", ("--dataset_path", data / "dataset", "--use_cpu")),
        ):
            address = ("--initial_peers", scripts[0].address) if scripts else ()
            began = time.monotonic()
            output = ("--output_dir", folder / name)
            scripts.append(Script(script, *common, *flags, *address, *output, log=folder / f"{name}.log", env=env))
            starts[name] = _wait(name, scripts[-1], began)
    finally:
        for script in reversed(scripts):
            with contextlib.suppress(AssertionError, ProcessLookupError):
                script.stop()
            script.kill_all()
    return starts


def _wait(name: str, script: Script, began: float) -> Start:
    """Wait until a script is ready, and measure it."""
    script.wait_for(READY[name])
    seconds, main = time.monotonic() - began, script.process.pid
    cpu = measure_cpu(main, script.family()).total()
    time.sleep(SETTLE_SECONDS)
    family = script.family()
    imports = Counter()
    for microseconds, module in _IMPORT.findall(script.output):
        imports[module.split(".")[0]] += int(microseconds) / 1e6
    return Start(seconds, cpu, measure_memory(main, family, "pss"), measure_memory(main, family, "uss"), imports)


def print_results(rounds: list[dict[str, Start]]) -> None:
    """Print the medians."""
    print(
        f"\n{'':<10}{'ready':>9}{'CPU':>9}  PSS, USS in MB" + "".join(f"{part:>16}" for part in PARTS) + f"{'all':>12}"
    )
    for name in READY:
        starts = [starts[name] for starts in rounds]
        print(f"{name:<10}{statistics.median(start.seconds for start in starts):>7.1f} s", end="")
        print(f"{statistics.median(start.cpu for start in starts):>7.1f} s{'':>16}", end="")
        for part in (*PARTS, None):
            pss, uss = (
                statistics.median(memory.total() if part is None else memory[part] for memory in memories) / 2**20
                for memories in ([start.pss for start in starts], [start.uss for start in starts])
            )
            print(f"{f'{pss:.0f}, {uss:.0f}':>16}", end="")
        print()


def print_imports(starts: dict[str, Start]) -> None:
    """Print the packages whose modules take longest to import, without the time of what they import themselves."""
    for name, start in starts.items():
        slowest = ", ".join(
            f"{package} {seconds:.2f}" for package, seconds in start.imports.most_common(MOST_PACKAGES)
        )
        print(f"{name}: {start.imports.total():.1f} s of imports: {slowest}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="number of starts; the medians are printed")
    parser.add_argument("--imports", action="store_true", help="one more start, which measures the imports")
    parser.add_argument("--folder", type=Path, help="keep the data and the logs in this folder")
    args = parser.parse_args()

    folder = args.folder or Path(tempfile.mkdtemp(prefix="startup-"))
    folder.mkdir(parents=True, exist_ok=True)
    try:
        data = folder / "data"
        if not data.exists():
            data.mkdir()
            prepare_data(data)
        print_results([start_both(folder / f"start-{number}", data, False) for number in range(args.repeat)])
        if args.imports:
            print_imports(start_both(folder / "imports", data, True))
    finally:
        if args.folder is None:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
