#!/usr/bin/env python3
"""Run a script as on a volunteer's machine, which has only requirements.txt installed.

python tests/support/volunteer.py run_trainer.py --initial_peers …
"""

import runpy
import sys
from importlib.machinery import PathFinder
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from lib.common.errors import ORGANISER_MODULES

ROOT = Path(__file__).parents[2]


class VolunteerFinder(PathFinder):
    """Finds installed modules except the organiser's modules."""

    @classmethod
    def find_spec(cls, fullname, path=None, target=None):
        if fullname.partition(".")[0] in ORGANISER_MODULES:
            return None
        return super().find_spec(fullname, path, target)


if __name__ == "__main__":
    sys.meta_path[sys.meta_path.index(PathFinder)] = VolunteerFinder
    sys.argv = sys.argv[1:]
    runpy.run_path(str(ROOT / sys.argv[0]), run_name="__main__")
