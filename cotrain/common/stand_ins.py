"""Files that stand in for the one that is meant: a web page or an error that a download saved, a pointer."""

import re
from pathlib import Path

HEAD_BYTES = 4096  # read of a file; a page's title is within them
_AGAIN = "open it to read why, and download the file again"
# Name, or beginning of the content, in any case -> what it is, what to do
_NAMES = {
    r".*\.(part|partial|crdownload)": ("the part of a download", "wait for its end, or rename it if it is complete"),
    r"\..*\.icloud": ("a placeholder of iCloud", "download the file in Finder"),
}
_CONTENTS = {
    r"version https://git-lfs": ("a pointer of Git LFS", "run git lfs pull"),
    r"<!doctype html|<html\b": ("a web page", f"{_AGAIN}; if the page is meant, let its name end in .html"),
    r"(<\?xml[^>]*>\s*)?<error>": ("an error of a web server", _AGAIN),
    r'(\{"error"[^\n]*\}|(\w+: )?(\w+ )?not found\.?|invalid username or password\.?)\s*\Z': (
        "an error of a web server", _AGAIN,
    ),
}  # fmt: skip
_SAYS = re.compile(r"<(?:title|message)\b[^>]*>([^<]+)", re.IGNORECASE)


def find_stand_in(path: Path) -> tuple[str, str] | None:
    """Return what a file is that stands in for another, and what to do; None for other files, and for *.html."""
    with open(path, "rb") as file:
        text = file.read(HEAD_BYTES).decode("utf-8-sig", "replace").lstrip()
    if path.suffix.lower() in (".html", ".htm", ".xhtml"):
        return None
    matches = [found for pattern, found in _NAMES.items() if re.fullmatch(pattern, path.name, re.IGNORECASE)]
    matches += [found for pattern, found in _CONTENTS.items() if re.match(pattern, text, re.IGNORECASE)]
    if not matches:
        return None
    what, remedy = matches[0]
    says = "".join(filter(str.isprintable, " ".join(" ".join(_SAYS.findall(text)[:1]).split())))[:80]
    return (f"{what} ('{says}')" if says else what), remedy
