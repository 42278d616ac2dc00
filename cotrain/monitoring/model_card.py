"""Model card of an uploaded checkpoint: description, loss, usage, contributors, how to join. Its text: model_card.md.

Names and numbers come from untrusted peers and are escaped: they appear as plain text on the page.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from cotrain.common.names import short
from cotrain.models.model import get_model_class
from cotrain.monitoring.contributors import MAX_ROWS, Contributors
from cotrain.status.status import plural
from cotrain.task import Task
from cotrain.tasks.text import TextTask


@dataclass(frozen=True)
class CardMetadata:
    """What a run's model cards have in common."""

    repo_id: str
    run_id: str
    task: Task
    license: str | None = None
    language: str | None = None


def build_card_data(metadata: CardMetadata) -> ModelCardData:
    """Build the metadata of the card, which the Hub's search uses."""
    task, tags, of_text = metadata.task, ["hivemind", "collaborative-training"], {}
    if isinstance(task, TextTask):
        pipeline_tag = "text-generation" if task.objective.is_causal else "fill-mask"
        tags, of_text = [*tags, task.config.model_type], {"library_name": "transformers", "pipeline_tag": pipeline_tag}
        if task.args.lora_rank is not None:
            base = task.args.model_name_or_path
            of_text |= {"library_name": "peft", "base_model": None if Path(base).is_dir() else base}
    return ModelCardData(language=metadata.language, license=metadata.license, tags=tags, **of_text)


def describe_model(task: Task) -> dict[str, str]:
    """Return what the model is, and the names in the code that loads it."""
    if not isinstance(task, TextTask):
        return {"description": "the model of a task of its own", "task_class": type(task).__name__}
    kind, names = f"a model of type {task.config.model_type}", {"model_class": get_model_class(task.config).__name__}
    if task.args.lora_rank is not None:
        base, revision = task.args.model_name_or_path, task.args.model_revision or "main"
        base = "FOLDER OF THE BASE" if Path(base).is_dir() else base
        names |= {"base": base, "revision": revision}
        kind = f"adapters (LoRA) for {escape_markdown(f'{base} at revision {revision}')}"
    return {"description": f"{kind}, trained for {task.objective.description}", **names}


def build_card(
    metadata: CardMetadata,
    step: int,
    loss: float | None,
    contributors: Contributors,
    initial_peers: Sequence[str],
    page: str | None = None,
) -> ModelCard:
    """Build the model card.

    :param loss: of the training at this step, if it is known
    :param initial_peers: addresses through which newcomers join over the internet; empty if there are none
    :param page: address of the run's curves, see `is_page`
    """
    leaders = contributors.leaders
    rows = [
        (place, escape_markdown(x.name), escape_markdown(short(x.peer_id)), x.samples, x.steps)
        for place, x in enumerate(leaders[:MAX_ROWS], 1)
    ]
    return ModelCard.from_template(
        build_card_data(metadata),
        str(Path(__file__).with_suffix(".md")),
        repo_id=metadata.repo_id,
        title=escape_markdown(metadata.repo_id.split("/")[-1]),
        run_name=escape_markdown(metadata.run_id),
        step=step,
        loss=loss,
        page=page,
        rows=rows,
        samples=sum(leader.samples for leader in leaders),
        contributors=plural(len(leaders), "contributor"),
        is_cut=len(rows) < len(leaders),
        join_command=shlex.join(["./run_trainer.py", "--initial_peers", *initial_peers]) if initial_peers else None,
        **describe_model(metadata.task),
    )


def escape_markdown(text: str) -> str:
    """Escape text for Markdown and HTML: every character but letters, digits and spaces becomes an entity.

    Backslashes are not sufficient: they prevent neither HTML nor automatic links.
    """
    return "".join(c if c.isalnum() or c == " " else f"&#{ord(c)};" for c in text)
