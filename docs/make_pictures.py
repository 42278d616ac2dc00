#!/usr/bin/env python3
"""Draw the pictures of a finished run: run_curves.svg from metrics.jsonl, and run_page.png of the page of trackio.

    python docs/make_pictures.py monitor_outputs --project my-albert

The monitor must have run with --report_to trackio, and the page needs Chromium (apt install chromium). Prints the
figures of the caption.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("svg")

import matplotlib.pyplot as plt
from PIL import Image

DOCS = Path(__file__).parent
PLOTS = (("loss", "Loss"), ("alive peers", "Trainers"), ("performance", "Samples per second"))


def draw_curves(folder: Path, target: Path) -> None:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "run", "font.size": 9})
    figure, axes = plt.subplots(1, len(PLOTS), figsize=(9.6, 2.6), layout="constrained")
    minutes = [(record["time"] - records[0]["time"]) / 60 for record in records]
    for axis, (name, title) in zip(axes, PLOTS, strict=True):
        values = [float("nan") if record[name] is None else record[name] for record in records]
        axis.plot(minutes, values, drawstyle="steps-post" if name == "alive peers" else "default", color="#2c6fbb")
        axis.set(title=title, xlabel="minutes", ylim=(None if name == "loss" else 0, None))
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(target, metadata={"Date": None})
    first, last = records[0], records[-1]
    print(f"{last['step']} steps in {minutes[-1]:.0f} minutes, loss {first['loss']:.2f} to {last['loss']:.2f}")
    contributors = json.loads((folder / "contributors.json").read_text(encoding="utf-8"))
    print(f"contributors: {json.dumps(contributors)[:1000]}")


def take_picture(folder: Path, project: str, target: Path) -> None:
    """Take a picture of the tables of trackio's page, with 64 colours."""
    environment = {**os.environ, "TRACKIO_DIR": str(folder / "trackio"), "BROWSER": "true", "PYTHONUNBUFFERED": "1"}
    command = [Path(sys.executable).with_name("trackio"), "show", "--project", project]
    with (
        tempfile.TemporaryDirectory() as temporary,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, encoding="utf-8") as server,
    ):
        try:
            address = next(match[1] for line in server.stdout if (match := re.search(r"(http://\S+:\d+)/", line)))
            screenshot = f"{temporary}/page.png"
            subprocess.run(
                ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--hide-scrollbars",
                 "--disable-background-networking", "--disable-component-update", "--disable-sync",
                 "--window-size=1280,472", "--virtual-time-budget=20000", f"--user-data-dir={temporary}/browser",
                 f"--screenshot={screenshot}", f"{address}/media?project={project}"],
                check=True, stderr=subprocess.DEVNULL, timeout=120,
            )  # fmt: skip
            Image.open(screenshot).convert("RGB").quantize(64).save(target, optimize=True)
        finally:
            server.terminate()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the monitor's --output_dir")
    parser.add_argument("--project", required=True, help="the --run_id")
    options = parser.parse_args()
    draw_curves(options.folder, DOCS / "run_curves.svg")
    take_picture(options.folder, options.project, DOCS / "run_page.png")
