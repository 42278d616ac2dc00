"""Model card of an uploaded checkpoint: description, usage, loss curve, contributors, how to join.

Names and numbers come from untrusted peers and are escaped: they appear as plain text on the page.
"""

import itertools
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData
from transformers import PretrainedConfig

from lib.common.objectives import OBJECTIVES
from lib.monitoring.contributors import Contributors
from lib.monitoring.trackers import read_records
from lib.training.model import get_model_class, get_objective

CURVE_ROWS = 12
TABLE_ROWS = 100


@dataclass(frozen=True)
class CardMetadata:
    """Properties of a run that do not change.

    `model_class`: the class of transformers that loads the model.
    """

    repo_id: str
    run_id: str
    model_type: str
    model_class: str
    objective: str
    license: str | None = None
    language: str | None = None


def build_card_metadata(
    repo_id: str, run_id: str, config: PretrainedConfig, license: str | None = None, language: str | None = None
) -> CardMetadata:
    """What the model card says of a run's model."""
    model_class = get_model_class(config).__name__
    return CardMetadata(repo_id, run_id, config.model_type, model_class, get_objective(config), license, language)


def build_card_data(metadata: CardMetadata) -> ModelCardData:
    """Build the metadata of the card, which the Hub's search uses."""
    return ModelCardData(
        library_name="transformers",
        pipeline_tag=OBJECTIVES[metadata.objective].pipeline_tag,
        language=metadata.language,
        license=metadata.license,
        tags=["hivemind", "collaborative-training", metadata.model_type],
    )


def build_card(
    metadata: CardMetadata,
    step: int,
    curve: Sequence[tuple[int, int, float]],
    contributors: Contributors,
    initial_peers: Sequence[str],
    page: str | None = None,
) -> ModelCard:
    """Build the model card.

    :param curve: see `read_curve`
    :param initial_peers: addresses through which newcomers join over the internet; empty if there are none
    :param page: address of the run's curves, see `is_page`
    """
    sections = [
        _introduction(metadata, step),
        f"The [curves of the run]({page}) are public." if page is not None else "",
        _usage(metadata, step),
        _curve_table(curve),
        _contributor_table(contributors),
        _join(initial_peers),
    ]
    body = "\n\n".join(section for section in sections if section)
    return ModelCard(f"---\n{build_card_data(metadata).to_yaml()}\n---\n\n{body}\n")


def escape_markdown(text: str) -> str:
    """Escape text for Markdown and HTML: every character but letters, digits and spaces becomes an entity.

    Backslashes are not sufficient: they prevent neither HTML nor automatic links.
    """
    return "".join(c if c.isalnum() or c == " " else f"&#{ord(c)};" for c in text)


def read_curve(path: Path, last_step: int, rows: int = CURVE_ROWS) -> list[tuple[int, int, float]]:
    """Read the losses up to `last_step` from metrics.jsonl, as means over at most `rows` ranges of steps.

    :returns: first step, last step and mean loss of each range
    """
    records = [record for record in read_records(path) if record["step"] <= last_step]
    losses = {record["step"]: record["loss"] for record in records if isinstance(record.get("loss"), float)}
    steps = sorted(losses)
    bounds = [round(row * len(steps) / rows) for row in range(rows + 1)]
    groups = [steps[start:end] for start, end in itertools.pairwise(bounds) if start < end]
    return [(group[0], group[-1], statistics.fmean(map(losses.get, group))) for group in groups]


def _introduction(metadata: CardMetadata, step: int) -> str:
    return (
        f"# {escape_markdown(metadata.repo_id.split('/')[-1])}\n\n"
        f"Trained by volunteers on their own machines, together, over the internet, with "
        f"[hivemind](https://github.com/learning-at-home/hivemind). This is step {step:,} of the run "
        f"<b>{escape_markdown(metadata.run_id)}</b>: a model of type {metadata.model_type}, trained for "
        f"{OBJECTIVES[metadata.objective].description}."
    )


def _usage(metadata: CardMetadata, step: int) -> str:
    return (
        "## How to load it\n\n"
        "```python\n"
        f"from transformers import {metadata.model_class}, AutoTokenizer\n\n"
        f'tokenizer = AutoTokenizer.from_pretrained("{metadata.repo_id}")\n'
        f'model = {metadata.model_class}.from_pretrained("{metadata.repo_id}")\n'
        "```\n\n"
        f'Each upload has a tag: `revision="step-{step}"` is this one, whatever comes after it.'
    )


def _curve_table(curve: Sequence[tuple[int, int, float]]) -> str:
    rows = [f"| {first:,} to {last:,} | {loss:.4f} |" for first, last, loss in curve]
    return "\n".join(["## Loss\n", "| steps | mean loss |", "|---|---|", *rows]) if rows else ""


def _contributor_table(contributors: Contributors) -> str:
    leaders = contributors.top(TABLE_ROWS)
    if not leaders:
        return ""
    number = f"{len(contributors):,} contributor{'' if len(contributors) == 1 else 's'}"
    shown = "" if len(leaders) == len(contributors) else f"; the first {len(leaders)} are"
    rows = [f"## Contributors\n\n{contributors.total_samples:,} samples came from {number}{shown}:\n"]
    rows += ["| | name | key | samples | steps |", "|---|---|---|---|---|"]
    for place, leader in enumerate(leaders, 1):
        name, key = escape_markdown(leader.name), escape_markdown(leader.key[:8])
        rows.append(f"| {place} | {name} | {key} | {leader.samples:,} | {leader.steps:,} |")
    return "\n".join(rows)


def _join(initial_peers: Sequence[str]) -> str:
    if not initial_peers:
        return ""
    command = shlex.join(["./run_trainer.py", "--initial_peers", *initial_peers])
    return (
        "## How to join\n\n"
        "With the software of this run, any GPU, and the prepared data if the run does not publish its address:\n\n"
        f"```bash\n{command}\n```\n\n"
        "Add `--username YOUR_NAME` to be listed above under that name."
    )
