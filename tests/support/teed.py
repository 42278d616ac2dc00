"""Run a script of this project as in `SCRIPT FLAGS 2>&1 | tee teed.log`, and return its exit code.

python tests/support/teed.py SCRIPT FLAGS
"""

import os
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

if __name__ == "__main__":
    command = shlex.join([sys.executable, str(ROOT / sys.argv[1]), *sys.argv[2:]])
    shell = f"trap : INT; {command} 2>&1 | tee teed.log; exit ${{PIPESTATUS[0]}}"
    os.execvp("bash", ["bash", "-c", shell])
