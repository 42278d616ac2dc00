"""A small JSON file that a process keeps across restarts: complete or not there, and never a reason not to start."""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from lib.common.atomic_files import new_file
from lib.common.errors import describe, first_line

logger = logging.getLogger(__name__)

T = TypeVar("T")


def write_json(path: Path, content: object) -> None:
    """Replace a file at once.

    :raises OSError: if it cannot be written
    """
    with new_file(path) as temporary:
        temporary.write_text(json.dumps(content, indent=1) + "\n")


class JsonFile:
    """Content that also lives in memory: the file matters after a restart only."""

    def __init__(self, path: Path):
        self.path = path
        self._has_warned = False

    def load(self, parse: Callable[[object], T]) -> T | None:
        """Read the file; one that cannot be used is renamed to NAME.old with a warning.

        :param parse: turns the content into what is returned; raises ValueError, KeyError, TypeError or AttributeError
            if it is not what it should be
        :returns: None if there is no file that can be used
        :raises OSError: if it cannot be read
        """
        if not self.path.exists():
            return None
        try:
            return parse(json.loads(self.path.read_text()))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            kept = self.path.with_name(f"{self.path.name}.old")
            self.path.replace(kept)
            reason = first_line(error)
            logger.warning(f"{self.path} cannot be used ({reason}): starting without it, it is now {kept.name}")
            return None

    def save(self, content: object) -> None:
        """Write the file. A failure, such as a full disk, is one warning until it works again."""
        try:
            write_json(self.path, content)
            self._has_warned = False
        except OSError as error:
            if not self._has_warned:
                logger.warning(f"Cannot write {self.path}: {describe(error)}. Trying again with the next change")
            self._has_warned = True
