"""Export of a checkpoint: one folder that other programs open, with the adapters merged into their base."""

import contextlib
import shutil
import sys
from pathlib import Path
from typing import Any

import jinja2
from huggingface_hub import ModelCard, ModelCardData, snapshot_download
from transformers import PreTrainedTokenizerBase

from cotrain.common.errors import UserError, first_line
from cotrain.common.hub_cache import find_downloads
from cotrain.common.progress_bar import ProgressBar
from cotrain.common.run_folder import list_checkpoints, step_of
from cotrain.models.model import build_without_weights, get_objective, read_config
from cotrain.monitoring.model_card import escape_markdown
from cotrain.monitoring.samples import is_causal
from cotrain.training.pretrained import find_base, load_checkpoint

_LICENSES = ("LICENSE*", "LICENCE*", "NOTICE*", "USE_POLICY*", "Notice*", "License*")
_ROLES = ("system", "user", "assistant", "user")
_TEXTS = ("SYSTEM-TEXT", "FIRST-TEXT", "ANSWER-TEXT", "SECOND-TEXT")
_STATED = ("license", "license_name", "license_link", "language")


def export_size(checkpoint: Path) -> int:
    """Return the bytes that the weights of an export take, without loading them. A base on the Hub counts as bf16."""
    source, adapters = find_base(checkpoint)
    if Path(source).is_dir():
        return sum(path.stat().st_size for path in Path(source).glob("model*.safetensors"))
    config = read_config(source, flag="CHECKPOINT", revision=adapters and adapters.revision)
    return 2 * sum(parameter.numel() for parameter in build_without_weights(config).parameters())


def export(checkpoint: Path, folder: Path, title: str, license: str | None, ollama: bool) -> bool:
    """Write the model of a checkpoint, its tokenizer, its card and the license of its base to an empty folder.

    A model without adapters is copied. It is loaded in any case: a damaged checkpoint is no export.

    :param license: default: the one that the base states
    :param ollama: also write a Modelfile
    :returns: whether the model generates text
    :raises UserError: if the checkpoint is damaged, or its model is not suitable
    """
    source, adapters = find_base(checkpoint)
    model, tokenizer = load_checkpoint(checkpoint)
    if ollama and not is_causal(model.config):
        raise UserError("--ollama: this model fills masks, and Ollama generates text; drop the flag")
    if adapters is not None:
        try:
            model = model.merge_and_unload(progressbar=sys.stderr.isatty(), safe_merge=True)
        except ValueError as error:
            raise UserError(f"CHECKPOINT: the adapters cannot be merged ({first_line(error)})") from None
        model.save_pretrained(folder)
    else:
        weights = sorted(checkpoint.glob("model*.safetensors*"))
        for path in ProgressBar([checkpoint / "config.json", *weights], desc="Copying"):
            shutil.copyfile(path, folder / path.name)
        if model.can_generate():
            model.generation_config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    stated = _copy_license(Path(source), adapters and adapters.revision, folder)
    stated |= {} if license is None else {"license": license}
    step = step_of(checkpoint) if checkpoint in list_checkpoints(checkpoint.parent) else None
    _write_card(folder, step, title, model, tokenizer, source if adapters else None, stated)
    if ollama:
        text = Path(__file__).with_name("Modelfile.jinja").read_text(encoding="utf-8")
        parts = read_template(tokenizer) if tokenizer.chat_template else None
        content = jinja2.Template(text, keep_trailing_newline=True).render(parts=parts, end=tokenizer.eos_token)
        (folder / "Modelfile").write_text(content, encoding="utf-8")
    return is_causal(model.config)


def _copy_license(source: Path, revision: str | None, folder: Path) -> dict[str, object]:
    """Copy the license files of a base, or of a checkpoint; return what its card states of license and language."""
    stated = {}
    with contextlib.suppress(Exception):  # no card; or no Hub, from which the weights may have come earlier
        if not source.is_dir():
            options = {"allow_patterns": [*_LICENSES, "README.md"], **find_downloads(str(source), None)}
            source = Path(snapshot_download(str(source), revision=revision, **options))
        for path in (path for pattern in _LICENSES for path in source.glob(pattern) if path.is_file()):
            shutil.copyfile(path, folder / path.name)
        stated = ModelCard.load(source / "README.md").data.to_dict()
    return {name: stated[name] for name in _STATED if name in stated}


def _write_card(
    folder: Path, step: int | None, title: str, model, tokenizer: PreTrainedTokenizerBase, base: str | None,
    stated: dict[str, Any],
) -> None:  # fmt: skip
    task = "text-generation" if is_causal(model.config) else "fill-mask"
    public = None if base is None or Path(base).is_dir() else base
    data = ModelCardData(base_model=public, library_name="transformers", pipeline_tag=task, **stated)
    ModelCard.from_template(
        data,
        str(Path(__file__).with_name("exported_card.md")),
        title=escape_markdown(title),
        folder=title,
        step=step,
        task=task,
        base=base and (escape_markdown(public) if public else "a base that is not on the Hub"),
        kind=model.config.model_type,
        is_chat=get_objective(model.config, tokenizer) == "chat",
        mask=tokenizer.mask_token,
        stated_license=escape_markdown(str(stated.get("license", ""))),
    ).save(folder / "README.md")


def read_template(tokenizer: PreTrainedTokenizerBase) -> dict[str, str] | None:
    """Return the text that a chat template writes before and after messages, as parts of a template of Ollama.

    Ollama does not read Jinja. None if the template is not made of such parts: Ollama may recognize it by itself.
    """
    messages = [{"role": role, "content": text} for role, text in zip(_ROLES, _TEXTS, strict=True)]

    def render(*places: int, prompt: bool = False) -> str:
        chosen = [messages[place] for place in places]
        text = str(tokenizer.apply_chat_template(chosen, tokenize=False, add_generation_prompt=prompt))
        # Ollama begins a text with this token, if the tokenizer does.
        return text.removeprefix(str(tokenizer.bos_token)) if adds_bos else text

    adds_bos = tokenizer.bos_token_id is not None and tokenizer("x")["input_ids"][0] == tokenizer.bos_token_id
    system, user, answer, more = _TEXTS
    try:
        asked, answered = render(0, 1), render(0, 1, 2)
        parts = {
            "answer": render(0, 1, prompt=True).removeprefix(asked),
            "after_answer": answered.partition(answer)[2],
        }
        parts["user"] = render(0, 1, 2, 3).removeprefix(answered).partition(more)[0]
        parts["after_user"] = asked.partition(user)[2]
        parts["system"], _, after = asked.partition(user)[0].partition(system)
        parts["after_system"] = after.removesuffix(parts["user"])
        parts["start"] = render(1).partition(user)[0].removesuffix(parts["user"])
        turns = f"{parts['user']}{user}{parts['after_user']}{parts['answer']}{answer}{parts['after_answer']}"
        turns += f"{parts['user']}{more}{parts['after_user']}{parts['answer']}"
        equal = f"{parts['system']}{system}{parts['after_system']}{turns}" == render(0, 1, 2, 3, prompt=True)
        equal &= parts["start"] + turns == render(1, 2, 3, prompt=True)
        is_plain = not any(mark in text for text in parts.values() for mark in ('"""', "{{", "}}"))
        return parts if is_plain and equal else None
    except Exception:  # it takes no system message, for example
        return None
