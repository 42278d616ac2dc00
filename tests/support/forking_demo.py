"""Run run_local_demo.py, whose scripts are forked from this process.

python tests/support/forking_demo.py run_local_demo.py FLAGS
"""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parents[2]))

import run_local_demo
from lib.common.errors import run_script
from tests.support.forked import ForkedProcess

if __name__ == "__main__":
    del sys.argv[0]  # error messages name the script that is now sys.argv[0]
    run_local_demo.subprocess = SimpleNamespace(
        Popen=ForkedProcess, DEVNULL=subprocess.DEVNULL, STDOUT=subprocess.STDOUT
    )
    run_script(run_local_demo.main)
