"""How trackio shows the curves of a run: loss first, and without smoothing, which shows values that no step has."""

import shlex
from pathlib import Path
from urllib.parse import quote

PLOT_ORDER = "loss,validation loss,performance,alive peers,samples"
ADDRESS = "{host}?project={project}&smoothing=0"


def show_command(folder: Path, project: str) -> str:
    """Return the command that shows the page of a folder, and the address of the page."""
    variables = f"TRACKIO_PLOT_ORDER={shlex.quote(PLOT_ORDER)} TRACKIO_DIR={shlex.quote(str(folder))}"
    address = ADDRESS.format(host="http://127.0.0.1:7860/", project=quote(project))
    return f"{variables} trackio show --project {shlex.quote(project)}  # open {address}"
