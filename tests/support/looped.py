"""Run a script of this project in the loop of docs/running.md, with short pauses.

python tests/support/looped.py SCRIPT FLAGS
"""

import os
import re
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def make_loop(command: list[str]) -> list[str]:
    """Return a shell command: the loop of docs/running.md around another command, without long pauses."""
    (loop,) = re.findall(r"^until .*?^done$", (ROOT / "docs" / "running.md").read_text(encoding="utf-8"), re.M | re.S)
    loop = loop.replace("./run_trainer.py --initial_peers ADDRESS", shlex.join(command))
    return ["bash", "-c", loop.replace("sleep 30", "sleep 0.2")]


if __name__ == "__main__":
    command = make_loop([sys.executable, str(ROOT / sys.argv[1]), *sys.argv[2:]])
    os.execvp(command[0], command)
