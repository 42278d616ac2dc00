"""Files that stand in for the one that is meant: a web page or an error that a download saved, a pointer."""

import json
import re
from pathlib import Path

from safetensors import SafetensorError, safe_open

_AGAIN = "open it to read why, and download the file again"
# Beginning of the name and the content, a line each, in any case -> what it is, what to do
_STAND_INS = {
    r".*\.(part|partial|crdownload)\n": ("the part of a download", "wait for its end, or rename it if it is complete"),
    r".*\nversion https://git-lfs": ("a pointer of Git LFS", "run git lfs pull"),
    r"(?!.*\.parquet\n).*\nPAR1": ("a Parquet file", "let its name end in .parquet"),
    r".*\n(<!doctype html|<html\b)": ("a web page", f"{_AGAIN}; if the page is meant, let its name end in .html"),
    r".*\n(<\?xml[^>]*>\s*)?<error>": ("an error of a web server", _AGAIN),
    r'.*\n(\{"error"[^\n]*\}|([\w:]+ ){0,2}not found|invalid username.*)\s*\Z': ("an error of a web server", _AGAIN),
}  # fmt: skip
_SAYS = re.compile(r"<(?:title|message)\b[^>]*>([^<]+)", re.IGNORECASE)


def find_stand_in(path: Path) -> tuple[str, str] | None:
    """Return what a file is that stands in for another, and what to do; None for other files, and for *.html."""
    with open(path, "rb") as file:
        text = file.read(4096).decode("utf-8-sig", "replace").lstrip()
    matches = (found for pattern, found in _STAND_INS.items() if re.match(pattern, f"{path.name}\n{text}", re.I))
    what, remedy = next(matches, ("", ""))
    says = "".join(filter(str.isprintable, " ".join(" ".join(_SAYS.findall(text)[:1]).split())))[:80]
    is_meant = not what or path.suffix.lower() in (".html", ".htm", ".xhtml")
    return None if is_meant else (f"{what} ('{says}')" if says else what, remedy)


def find_damage(path: Path) -> str | None:
    """Return what is wrong with a .json or .safetensors file, of which only the list of tensors is read, or None."""
    try:
        if path.suffix == ".json":
            json.loads(path.read_bytes())
        elif path.suffix == ".safetensors":
            path.open("rb").close()  # safetensors would say that a file without permission is not there
            safe_open(path, framework="np")  # compares the size with the list of tensors
    except OSError as error:
        return f"'{path}' cannot be read ({error.strerror or error})"
    except (ValueError, SafetensorError):
        return f"'{path}' is {': '.join(find_stand_in(path) or ('damaged or incomplete',))}"
    return None
