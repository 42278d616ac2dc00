"""Run run_forever.py, with short waits, for a script of this project, which is forked from this process.

python tests/support/quick_supervisor.py SCRIPT FLAGS
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil

import run_forever
from tests.support.forked import ForkedProcess

if __name__ == "__main__":
    psutil.Popen = ForkedProcess
    run_forever.FIRST_PAUSE, run_forever.SILENT_SECONDS, run_forever.STOP_SECONDS = 0.2, 20.0, 2.0
    sys.argv[1:] = [sys.executable, str(Path(__file__).parents[2] / sys.argv[1]), *sys.argv[2:]]
    run_forever.main()
