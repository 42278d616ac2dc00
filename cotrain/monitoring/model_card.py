"""Model card of an uploaded checkpoint: description, loss, usage, contributors, how to join.

Names and numbers come from untrusted peers and are escaped: they appear as plain text on the page.
"""

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import ModelCard, ModelCardData

from cotrain.models.model import get_model_class
from cotrain.monitoring.contributors import Contributors, build_table
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


def describe_model(metadata: CardMetadata) -> tuple[str, str]:
    """Return what the model is, and the code that loads it."""
    task = metadata.task
    if not isinstance(task, TextTask):
        code = f"""from safetensors.torch import load_model

model = {type(task).__name__}().build_model()  # from the file of the run's --task
load_model(model, "model.safetensors")"""
        return "the model of a task of its own", code
    model_class = get_model_class(task.config).__name__
    if task.args.lora_rank is not None:
        base, revision = task.args.model_name_or_path, task.args.model_revision or "main"
        if Path(base).is_dir():
            base = "FOLDER OF THE BASE"
        code = f"""from peft import PeftModel
from transformers import {model_class}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{metadata.repo_id}")
base = {model_class}.from_pretrained("{base}", revision="{revision}", dtype="auto")
model = PeftModel.from_pretrained(base, "{metadata.repo_id}")  # .merge_and_unload() makes one model of both"""
        described = escape_markdown(f"{base} at revision {revision}")
        return f"adapters (LoRA) for {described}, trained for {task.objective.description}", code
    code = f"""from transformers import {model_class}, AutoTokenizer

tokenizer = AutoTokenizer.from_pretrained("{metadata.repo_id}")
model = {model_class}.from_pretrained("{metadata.repo_id}")"""
    return f"a model of type {task.config.model_type}, trained for {task.objective.description}", code


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
    description, code = describe_model(metadata)
    introduction = (
        "Trained by volunteers on their own machines, together, over the internet, with "
        f"[hivemind](https://github.com/learning-at-home/hivemind). This is step {step:,} of the run "
        f"<b>{escape_markdown(metadata.run_id)}</b>: {description}."
    )
    if loss is not None:
        introduction += f" The training loss at this step was {loss:.4f}."
    usage = f"""## How to load it

```python
{code}
```

Each upload has a tag: `revision="step-{step}"` is this one, whatever comes after it."""
    join = f"""## How to join

With the software of this run, any GPU, and the prepared data if the run does not publish its address:

```bash
{shlex.join(["./run_trainer.py", "--initial_peers", *initial_peers])}
```

Add `--username YOUR_NAME` to be listed above under that name."""
    sections = [
        f"---\n{build_card_data(metadata).to_yaml()}\n---",
        f"# {escape_markdown(metadata.repo_id.split('/')[-1])}",
        introduction,
        f"The [curves of the run]({page}) are public." if page is not None else "",
        usage,
        _contributor_table(contributors),
        join if initial_peers else "",
    ]
    return ModelCard("\n\n".join(filter(None, sections)) + "\n")


def escape_markdown(text: str) -> str:
    """Escape text for Markdown and HTML: every character but letters, digits and spaces becomes an entity.

    Backslashes are not sufficient: they prevent neither HTML nor automatic links.
    """
    return "".join(c if c.isalnum() or c == " " else f"&#{ord(c)};" for c in text)


def _contributor_table(contributors: Contributors) -> str:
    rows = build_table(contributors)
    if not rows:
        return ""
    samples = sum(leader.samples for leader in contributors.top(len(contributors)))
    shown = "" if len(rows) == len(contributors) else f"; the first {len(rows)} are"
    lines = [f"## Contributors\n\n{samples:,} samples came from {plural(len(contributors), 'contributor')}{shown}:\n"]
    lines += ["| | name | peer | samples | steps |", "|---|---|---|---|---|"]
    for place, name, peer, samples, steps in rows:
        lines.append(f"| {place} | {escape_markdown(name)} | {escape_markdown(peer)} | {samples:,} | {steps:,} |")
    return "\n".join(lines)
