"""Completion of texts by a model, in the monitor and by generate.py."""

import io
import json
import logging
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import AutoConfig, GPT2LMHeadModel, PreTrainedTokenizerFast

import generate
from arguments import DatasetArguments
from cotrain.common.errors import UserError, run_script
from cotrain.models.model import load_config
from cotrain.monitoring.samples import build_pipeline, check_text, complete, fill_masks, report_samples
from cotrain.options import NOTHING
from cotrain.preparation.conversations import set_end_of_turn
from cotrain.tasks.task_loading import build_initial_model
from cotrain.tasks.text import TextTask
from cotrain.training.pretrained import load_checkpoint
from tests.support.conversations import make_chat_tokenizer
from tests.support.models import build_model
from tests.support.peers import TINY_CONFIGS

WORDS = [
    "[PAD]", "[UNK]", "[CLS]", "[SEP]", "<mask>", "the", "capital", "of", "france", "is", "paris", "\x1b[31mred", "▁",
]  # fmt: skip
TEXT = "the capital of [MASK] is paris"


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]",
        mask_token="<mask>", eos_token="[SEP]",
    )  # fmt: skip


def make_model(family: str, likely: str = "france"):
    """Build a tiny model that finds one word likely everywhere."""
    config = AutoConfig.for_model(**TINY_CONFIGS[family], vocab_size=len(WORDS), pad_token_id=0, eos_token_id=3)
    model = build_model(config, "run")
    with torch.no_grad():
        if family == "gpt2":  # no bias: the last layer norm always says the same
            model.transformer.ln_f.weight.zero_()
            model.transformer.ln_f.bias.copy_(100 * model.lm_head.weight[WORDS.index(likely)])
        else:
            model.get_output_embeddings().bias[WORDS.index(likely)] = 20.0
    return model


MASKED = [family for family in TINY_CONFIGS if family != "gpt2"]


@pytest.mark.parametrize("mask", ["[MASK]", "<mask>"])
@pytest.mark.parametrize("family", MASKED)
def test_fillings_are_the_most_likely_ones(family, mask, tokenizer):
    """Also of later parameters: the monitor loads each state into the same model."""
    model = make_model(family)
    completer = build_pipeline(model, tokenizer)
    for likely in ("france", "paris"):
        model.load_state_dict(make_model(family, likely).state_dict())
        (fillings,) = fill_masks(completer, TEXT.replace("[MASK]", mask))
        probabilities = [probability for _, probability in fillings]
        assert len(fillings) == 5 and fillings[0][0] == repr(likely) and probabilities[0] > 0.99
        assert probabilities == sorted(probabilities, reverse=True) and 0 < sum(probabilities) <= 1.0001
    assert [len(fillings) for fillings in fill_masks(completer, "[MASK] capital <mask> france", number=2)] == [2, 2]


@pytest.mark.parametrize("family", ["albert", "gpt2"])
def test_one_line_for_the_log(family, tokenizer):
    """A tokenizer may contain anything; the model is in training mode, with dropout."""
    completer = build_pipeline(make_model(family, likely="\x1b[31mred").train(), tokenizer)
    text = complete(completer, TEXT)
    assert text.isprintable() and "[31mred" in text and text == complete(completer, TEXT)


@pytest.mark.parametrize(
    ("piece", "decoder", "shown"),
    [
        ("▁", decoders.Metaspace(), "' '"),
        ("▁paris", decoders.Metaspace(), "'paris'"),
        ("Ġparis", decoders.ByteLevel(), "'paris'"),
        ("Ċ", decoders.ByteLevel(), r"'\n'"),
        ("##ing", decoders.WordPiece(), "'ing'"),
        (",", decoders.WordPiece(), "','"),
    ],
)
def test_words_are_decoded_and_quoted(tokenizer, piece, decoder, shown):
    """A model that has just begun finds a space and a comma likely."""
    words = [*WORDS[:-1], piece, "a"]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer.backend_tokenizer.model = models.WordLevel(vocabulary, unk_token="[UNK]")
    tokenizer.backend_tokenizer.decoder = decoder
    text = complete(build_pipeline(make_model("albert", likely="▁"), tokenizer), TEXT)
    assert text.startswith(f"{shown} 100.0%, '")


@pytest.mark.parametrize("family", ["albert", "roberta", "gpt2"])
def test_length_is_bounded_by_the_model(family, tokenizer):
    """TINY_CONFIGS have 64 positions, RoBERTa's 66, of which padding takes one; 20 are for the continuation."""
    model = make_model(family)
    longest = {"albert": 64 - 2, "roberta": 65 - 2, "gpt2": 44}[family]  # [CLS] and [SEP] around a text with masks
    text = " ".join(["[MASK]", *["the"] * (longest - 1)])
    check_text(text, tokenizer, model.config, "TEXT")
    complete(build_pipeline(model, tokenizer), text)
    with pytest.raises(UserError, match="TEXT: the sentence has [0-9]+ tokens"):
        check_text(f"{text} the", tokenizer, model.config, "TEXT")
    with pytest.raises(UserError, match="TEXT: the sentence is not in UTF-8"):  # as sys.argv has it
        check_text(b"caf\xe9 [MASK]".decode(errors="surrogateescape"), tokenizer, model.config, "TEXT")


# The monitor


def test_monitor_reports_samples(tokenizer, caplog):
    caplog.set_level(logging.INFO)
    reporters, completer = Mock(), build_pipeline(make_model("albert"), tokenizer)
    report_samples(completer, [TEXT, "[MASK] is [MASK]"], reporters, 7)
    assert len(caplog.messages) == 2 and caplog.messages[0].startswith(f"Step #7\t{TEXT} -> 'france' 100.0%, ")
    report_samples(completer, [TEXT, 7], reporters, 8)
    assert caplog.records[-1].levelno == logging.WARNING
    name, columns, rows, step = reporters.report_table.call_args.args
    assert (name, columns, step) == ("sample texts", ("text", "completion"), 7), "not the name of a curve"
    assert [text for text, _ in rows] == [TEXT, "[MASK] is [MASK]"] and rows[1][1].count("; ") == 1


@pytest.mark.parametrize(
    ("text", "has_mask", "fault"),
    [
        ("no mask", True, "there is no mask in 'no mask'; put [MASK]"),
        (" ", True, "the sentence is empty"),
        (TEXT, False, "the tokenizer has no mask token"),
    ],
)
def test_mask_is_asked_for_at_the_start(tokenizer, text, has_mask, fault):
    if not has_mask:
        tokenizer.mask_token = None
    with pytest.raises(UserError, match=re.escape(f"--sample_text: {fault}")):
        check_text(text, tokenizer, make_model("albert").config, "--sample_text")


# generate.py


@pytest.fixture
def checkpoint(tmp_path, tokenizer) -> Path:
    """Return a complete checkpoint, as the monitor writes it, in an output folder."""
    folder = tmp_path / "out" / "checkpoint-10"
    make_model("albert").save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def show(monkeypatch, capsys):
    """Run generate.py in this process and return (exit code, stdout, stderr)."""

    def show(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, args)])
        with pytest.raises(SystemExit) as exit_info:
            run_script(generate.main)
            sys.exit(0)
        return exit_info.value.code, *capsys.readouterr()

    return show


def test_script_shows_the_fillings(show, checkpoint):
    code, out, err = show(checkpoint, TEXT)
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert lines[0] == TEXT and len(lines) == 6 and lines[1].endswith("%  'france'")
    assert len(show(checkpoint, TEXT, "--number", 3)[1].splitlines()) == 4
    assert "Mask 2 of 2:" in show(checkpoint, "[MASK] [MASK]")[1]


def test_script_takes_the_newest_complete_checkpoint(show, checkpoint):
    for step, missing in ((11, "model.safetensors"), (12, "config.json"), (13, "tokenizer_config.json")):
        newer = shutil.copytree(checkpoint, checkpoint.with_name(f"checkpoint-{step}"))
        (newer / missing).unlink()
    code, out, _ = show(checkpoint.parent, TEXT)
    assert code == 0 and out.splitlines()[0] == f"Checkpoint: {checkpoint}"


def test_script_continues_a_text(show, tmp_path, tokenizer):
    make_model("gpt2").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    code, out, _ = show(tmp_path, "the capital of", "--max_new_tokens", 20)
    assert code == 0 and out == f"the capital of … {' '.join(['france'] * 20)}\n"
    code, out, _ = show(tmp_path, "the capital of")
    assert code == 0 and out.count("france") == 64 - 3, "as many as the model has positions for"


def test_script_answers(show, tmp_path, monkeypatch):
    """In as many lines as the answer has, without control characters."""
    tokenizer = make_chat_tokenizer("chatml")
    set_end_of_turn(tokenizer)
    tokenizer.init_kwargs["objective"] = "chat"
    config = AutoConfig.for_model(**TINY_CONFIGS["gpt2"], vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=2)
    build_model(config, "run").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)

    def generate(_model, ids: torch.Tensor, **_options) -> torch.Tensor:
        assert tokenizer.decode(ids[0]) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"
        return torch.cat([ids, tokenizer("Hi!\n\x07Bye<|im_end|>", return_tensors="pt")["input_ids"]], dim=1)

    monkeypatch.setattr(GPT2LMHeadModel, "generate", generate)
    assert show(tmp_path, "Hello") == (0, "Hi!\nBye\n", "")


def test_folder_that_does_not_exist_is_named(show, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code, _, err = show("monitor_outputs", TEXT)
    assert code == 1 and "CHECKPOINT: there is no folder 'monitor_outputs'; pass " in err
    assert err.count("monitor_outputs") == 1, "recommends what was passed"


MODEL_CODE = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.C", "AutoModelForMaskedLM": "evil.M"}}
TOKENIZER_CODE = {"tokenizer_class": "T", "auto_map": {"AutoTokenizer": ["evil.T", None]}}


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        ("config.json", None, "no complete checkpoint"),
        ("model.safetensors", None, "no complete checkpoint"),  # pickled weights are none
        ("config.json", b"{", "config.json' is damaged or incomplete"),
        ("model.safetensors", b"x" * 100, "model.safetensors' is damaged or incomplete"),
        ("config.json", {"vocab_size": 99}, "weights of"),
        ("config.json", {"model_type": "bert"}, "lacks weights"),
        ("config.json", {"model_type": "t5"}, "is a t5 model"),
        ("config.json", MODEL_CODE, "is a evil model"),
        ("tokenizer_config.json", TOKENIZER_CODE, "never run"),
    ],
)
def test_checkpoint_that_cannot_be_used_is_one_line(show, checkpoint, name, change, reason):
    """`change`: fields of the file, its content, or None to remove it."""
    (checkpoint / "evil.py").write_text(f"open({str(checkpoint / 'trace')!r}, 'w')", encoding="utf-8")
    torch.save(load_file(checkpoint / "model.safetensors"), checkpoint / "pytorch_model.bin")
    file = checkpoint / name
    if isinstance(change, dict):
        change = json.dumps(json.loads(file.read_text(encoding="utf-8")) | change).encode()
    file.write_bytes(change) if change is not None else file.unlink()
    code, _, err = show(checkpoint, TEXT)
    assert code == 1 and err.count("\n") == 1 and err.startswith("generate.py: error: ") and reason in err
    assert "; " in err and "trust_remote_code" not in err
    assert str(checkpoint) not in err.partition("; ")[2]
    assert not (checkpoint / "trace").exists(), "code of the checkpoint was run"


# generate.py as a conversation


@pytest.fixture
def chat_checkpoint(tmp_path) -> Path:
    """Return a model of conversations, with adapters of which the base is another model."""
    tokenizer = make_chat_tokenizer("chatml")
    set_end_of_turn(tokenizer)
    tokenizer.init_kwargs["objective"] = "chat"
    config = AutoConfig.for_model(**{**TINY_CONFIGS["gpt2"], "n_positions": 128}, vocab_size=len(tokenizer))
    build_model(config, "run").save_pretrained(tmp_path / "base")
    args = DatasetArguments(model_name_or_path=str(tmp_path / "base"), lora_rank=4)
    task = TextTask(args, NOTHING, tokenizer, load_config(args, NOTHING, tokenizer), has_weights=True)
    task.save_pretrained(build_initial_model(task, "run"), tmp_path / "checkpoint-1")
    return tmp_path / "checkpoint-1"


@pytest.fixture
def answers(monkeypatch) -> list[str]:
    """Replace the generation: the model answers with the number of the prompt, its base with BASE. Return prompts."""
    prompts = []

    def generate(model, ids: torch.Tensor, **options) -> torch.Tensor:
        tokenizer = options["streamer"].tokenizer
        prompts.append(tokenizer.decode(ids[0]))
        is_base = any(getattr(module, "disable_adapters", False) is True for module in model.modules())
        answer = "" if "nothing" in prompts[-1] else "BASE" if is_base else f"  answer {len(prompts)}\n\x1b[1m"
        new = tokenizer(f"{answer}<|im_end|>", return_tensors="pt")["input_ids"]
        for token in (ids, *new[0]):
            options["streamer"].put(token.reshape(1, -1))
        options["streamer"].end()
        return torch.cat([ids, new], dim=1)

    monkeypatch.setattr(GPT2LMHeadModel, "generate", generate)
    return prompts


@pytest.fixture
def terminal(monkeypatch):
    """Let a user type lines; an exception among them is raised."""

    def terminal(*lines: object) -> None:
        waiting = iter(lines)

        def read(_prompt: str) -> str:
            line = next(waiting, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr("builtins.input", read)
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: True))

    return terminal


def turn(role: str, text: str) -> str:
    return f"<|im_start|>{role}\n{text}<|im_end|>\n"


def test_conversation_has_several_turns(show, chat_checkpoint, answers, terminal):
    terminal("Hello", "", "And nothing?")
    code, out, err = show(chat_checkpoint, "--system", "Be kind")
    assert (code, err) == (0, "")
    assert out.splitlines() == ["answer 1", "[1m", "(an empty answer)", ""]
    first = turn("system", "Be kind") + turn("user", "Hello")
    assert answers[0] == f"{first}<|im_start|>assistant\n"
    assert answers[1].startswith(first + turn("assistant", "answer 1\n[1m") + turn("user", "And nothing?"))


def test_answer_is_shown_while_it_is_generated(chat_checkpoint, monkeypatch):
    """Standard output is buffered by lines."""
    shown, parts = io.BytesIO(), []

    def speak(_model, ids: torch.Tensor, **options) -> torch.Tensor:
        new = options["streamer"].tokenizer("One two three", return_tensors="pt")["input_ids"]
        for token in (ids, *new[0]):
            options["streamer"].put(token.reshape(1, -1))
            parts.append(shown.getvalue().decode())
        return torch.cat([ids, new], dim=1)

    monkeypatch.setattr(GPT2LMHeadModel, "generate", speak)
    talk = generate.Talk(*load_checkpoint(chat_checkpoint), generate.GenerateArguments(use_cpu=True))
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(shown, encoding="utf-8", line_buffering=True))
    talk.reply("Hello")
    assert list(dict.fromkeys(parts)) == ["", "One", "One two"] and shown.getvalue() == b"One two three\n"


def test_long_conversation_forgets_its_beginning(show, chat_checkpoint, answers, terminal):
    terminal("a" * 40, "b" * 40, "c")
    code, _, err = show(chat_checkpoint, "--use_cpu")
    assert code == 0 and "forgets the first messages" in err
    assert "aaa" not in answers[1] and "bbb" in answers[1] + answers[2]


def test_wrong_line_does_not_end_a_conversation(show, chat_checkpoint, answers, terminal):
    terminal("a" * 500, "Hello")
    code, out, err = show(chat_checkpoint)
    assert (code, err) == (0, "") and out.startswith("error: TEXT: the sentence has ") and "answer 1" in out


def test_comparison_shows_base_and_model_side_by_side(show, chat_checkpoint, answers, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    code, out, _ = show(chat_checkpoint, "Hello", "--compare")
    assert code == 0 and [line.split(" | ") for line in out.splitlines()[:2]] == [
        [f"{'BASE':<28}", "TUNED"], [f"{'BASE':<28}", "answer 2"]
    ]  # fmt: skip
    assert "(an empty answer)" in show(chat_checkpoint, "nothing", "--compare")[1]


def test_comparison_needs_a_base(show, checkpoint, tmp_path, tokenizer):
    make_model("gpt2").save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    code, _, err = show(tmp_path, "the", "--compare")
    assert code == 1 and "--compare: this model has no adapters" in err and err.count("\n") == 1


def test_piped_text_is_one_text(show, chat_checkpoint, answers, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("One\nquestion\n"))
    assert show(chat_checkpoint)[:2] == (0, "answer 1\n[1m\n")
    assert turn("user", "One\nquestion") in answers[0]


def test_seed_repeats_what_temperature_chooses(show, chat_checkpoint):
    def answer(*flags: object) -> str:
        code, out, err = show(chat_checkpoint, "Hello", "--max_new_tokens", 12, *flags)
        assert (code, err) == (0, ""), "warnings of libraries"
        return out

    sampled = [answer("--temperature", 1.5, "--seed", seed) for seed in (1, 1, 2)]
    assert sampled[0] == sampled[1] != sampled[2]
    assert answer() == answer() and answer("--temperature", 1.5, "--top_p", 1e-6) == answer()
