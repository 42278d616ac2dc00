"""What people take home: checkpoints that stop where they were taught to stop, and their export."""

import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file
from tokenizers import processors
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GPT2LMHeadModel, pipeline

import export_model
from arguments import DatasetArguments
from cotrain.common.errors import run_script
from cotrain.models.model import load_config
from cotrain.monitoring.export import read_template
from cotrain.options import NOTHING
from cotrain.preparation.conversations import set_end_of_turn
from cotrain.tasks.task_loading import build_initial_model
from cotrain.tasks.text import TextTask
from cotrain.training import pretrained
from cotrain.training.pretrained import load_checkpoint
from tests.support.conversations import make_chat_tokenizer
from tests.support.models import build_model
from tests.support.peers import TINY_CONFIGS
from tests.training.test_adapters import change, tokens

END = 2  # <|im_end|>, which ends an answer
ELSEWHERE = 0  # <|endoftext|>, at which the base ends
QUESTION = [{"role": "user", "content": "Hello"}]


@pytest.fixture
def run(monkeypatch, capsys):
    """Run export_model.py in this process and return (exit code, stdout, stderr)."""

    def run(*args: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["export_model.py", *map(str, args)])
        with pytest.raises(SystemExit) as exit_info:
            run_script(export_model.main)
            sys.exit(0)
        return exit_info.value.code, *capsys.readouterr()

    return run


def chat_tokenizer(bos: bool = False):
    tokenizer = make_chat_tokenizer("chatml")
    if bos:
        begin = [("<s>", tokenizer.bos_token_id)]
        post = processors.TemplateProcessing(single="<s> $A", pair="<s> $A $B", special_tokens=begin)
        tokenizer.backend_tokenizer.post_processor = post
    set_end_of_turn(tokenizer)
    tokenizer.init_kwargs["objective"] = "chat"
    return tokenizer


def make_chat_base(folder: Path, end: int | list[int], vocab_size: int, **options) -> Path:
    """Save a model in bf16 that answers with nothing: it ends the text at once, by another token than its `end`."""
    config = AutoConfig.for_model(**TINY_CONFIGS["gpt2"], vocab_size=vocab_size, pad_token_id=None, bos_token_id=None)
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).to(torch.bfloat16)
    with torch.no_grad():  # no bias: the last layer norm always says the same
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.copy_(1000 * model.lm_head.weight[END])
    model.config.eos_token_id = end
    model.generation_config = GenerationConfig(eos_token_id=end, **options)
    model.save_pretrained(folder)
    return folder


def make_task(base: Path, tokenizer, lora_rank: int | None = 4) -> TextTask:
    args = DatasetArguments(model_name_or_path=str(base), lora_rank=lora_rank, from_pretrained=True)
    return TextTask(args, NOTHING, tokenizer, load_config(args, NOTHING, tokenizer), has_weights=True)


def save(task: TextTask, folder: Path) -> Path:
    """Write a checkpoint of a task whose trained weights have changed."""
    model = build_initial_model(task, "run")
    if hasattr(model, "peft_config"):
        change(model)
    folder.mkdir(parents=True)
    task.save_pretrained(model, folder)
    torch.save({}, folder / "training_state.pt")
    (folder / "collaboration.json").write_text("{}", encoding="utf-8")
    (folder / "evil.py").write_text("", encoding="utf-8")
    return folder


def ends(folder: Path) -> tuple:
    """Return the end-of-text token of tokenizer, configuration and generation_config."""
    parts = AutoTokenizer.from_pretrained(folder), AutoConfig.from_pretrained(folder)
    return *(part.eos_token_id for part in parts), GenerationConfig.from_pretrained(folder).eos_token_id


@pytest.mark.parametrize(
    ("end", "agreed", "has_bos", "lora_rank"),
    [(ELSEWHERE, END, False, 4), ([ELSEWHERE, END], [ELSEWHERE, END], True, 4), (ELSEWHERE, END, True, None)],
)
def test_exported_model_stops_where_it_was_taught_to(tmp_path, run, end, agreed, has_bos, lora_rank):
    """The base has no padding token, and may have several ends. Its tokenizer may add a BOS, its template does not."""
    tokenizer = chat_tokenizer(has_bos)
    base = make_chat_base(tmp_path / "base", end, len(tokenizer))
    checkpoint = save(make_task(base, tokenizer, lora_rank), tmp_path / "out/checkpoint-7")
    saved = GenerationConfig.from_pretrained(checkpoint)
    assert saved.eos_token_id == agreed and saved.pad_token_id is not None
    code, out, err = run(tmp_path / "out", tmp_path / "model")
    assert code == 0 and "error" not in err and "Warning" not in err, err
    assert re.search(r"checkpoint-7 to \S+: [\d.]+ [kM]B; [\d.,]+ GB are free", out) and "convert_hf_to_gguf.py" in out
    exported = tmp_path / "model"
    assert ends(exported) == (END, END, agreed)
    assert not any((exported / name).exists() for name in ("training_state.pt", "collaboration.json", "evil.py"))
    assert not any(path.name.startswith("adapter") for path in exported.iterdir())
    answer = pipeline("text-generation", str(exported), device="cpu")(QUESTION, max_new_tokens=20, return_tensors=True)
    assert answer[0]["generated_token_ids"][-1] == END
    prompt = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True)["input_ids"]
    assert len(answer[0]["generated_token_ids"]) == len(prompt) + 1, "it runs on after its answer"


def test_settings_of_a_base_that_transformers_does_not_save_are_mended(tmp_path, run):
    """Llama 2 states a temperature, and not that it samples."""
    tokenizer = chat_tokenizer()
    base = make_chat_base(tmp_path / "base", ELSEWHERE, len(tokenizer))
    path = base / "generation_config.json"
    path.write_text(json.dumps({"eos_token_id": ELSEWHERE, "temperature": 0.9, "top_p": 0.6}), encoding="utf-8")
    assert run(save(make_task(base, tokenizer), tmp_path / "c"), tmp_path / "m")[0] == 0
    settings = GenerationConfig.from_pretrained(tmp_path / "m")
    assert (settings.do_sample, settings.temperature, settings.eos_token_id) == (True, 0.9, END)
    save(make_task(base, tokenizer, lora_rank=None), tmp_path / "full")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_model_computes_what_base_and_adapters_do(tmp_path, run, dtype):
    """To the rounding of its type: bf16 has 8 bits."""
    tokenizer = chat_tokenizer()
    config = AutoConfig.for_model(**TINY_CONFIGS["gpt2"], vocab_size=len(tokenizer))
    build_model(config, "run").to(dtype).save_pretrained(tmp_path / "base")
    checkpoint = save(make_task(tmp_path / "base", tokenizer), tmp_path / "c")
    assert run(checkpoint, tmp_path / "m")[0] == 0
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "m", dtype="auto")
    both = AutoPeftModelForCausalLM.from_pretrained(checkpoint, dtype="auto")
    ids = tokens() % len(tokenizer)
    one, two, base = (m(input_ids=ids).logits.float() for m in (merged, both, both.get_base_model().float()))
    assert merged.dtype == dtype
    assert (one - two).abs().max() < {torch.float32: 1e-5, torch.bfloat16: 0.02}[dtype] * base.abs().max()
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "base")(input_ids=ids).logits
    assert (one - plain).abs().max() > 0.2 * base.abs().max(), "the adapters change nothing"


@pytest.mark.parametrize("family", ["gpt2", "albert"])
def test_model_without_adapters_is_copied_and_opens(tmp_path, run, family):
    """All of its weights, also those of a head that a pipeline does not use."""
    tokenizer = chat_tokenizer()
    tokenizer.init_kwargs["objective"] = "clm"
    if family == "albert":
        tokenizer.add_special_tokens({"mask_token": "[MASK]", "pad_token": "[PAD]"})
        tokenizer.init_kwargs["objective"] = "mlm_sop"
    checkpoint, out = tmp_path / "out/checkpoint-3", tmp_path / "model"
    config = AutoConfig.for_model(**TINY_CONFIGS[family], vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=END)
    build_model(config, "run").save_pretrained(checkpoint)
    tokenizer.save_pretrained(checkpoint)
    (checkpoint / "training_state.pt").write_bytes(b"x")
    (checkpoint / "LICENSE").write_text("Take it.", encoding="utf-8")
    code, shown, err = run(checkpoint, out, "--license", "mit")
    assert code == 0, err
    assert load_file(out / "model.safetensors").keys() == load_file(checkpoint / "model.safetensors").keys()
    assert (out / "model.safetensors").read_bytes() == (checkpoint / "model.safetensors").read_bytes()
    assert not (out / "training_state.pt").exists() and (out / "LICENSE").read_text(encoding="utf-8") == "Take it."
    card = (out / "README.md").read_text(encoding="utf-8")
    assert "license: mit" in card and "step 3" in card and ("llama" in shown) == (family == "gpt2")
    if family == "gpt2":
        assert pipeline("text-generation", str(out), device="cpu")("Once", max_new_tokens=3)
        return
    assert len(pipeline("fill-mask", str(out), device="cpu")("A [MASK]")) == 5
    code, _, err = run(checkpoint, tmp_path / "other", "--ollama")
    assert code == 1 and "--ollama: this model fills masks" in err and not (tmp_path / "other").exists()


def test_license_and_card_are_those_of_the_base(tmp_path, run):
    tokenizer = chat_tokenizer()
    base = make_chat_base(tmp_path / "base", END, len(tokenizer))
    (base / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: en\ntags: [x]\n---\nHi", encoding="utf-8")
    (base / "NOTICE.txt").write_text("By somebody", encoding="utf-8")
    assert run(save(make_task(base, tokenizer), tmp_path / "checkpoint-5"), tmp_path / "m")[0] == 0
    card = (tmp_path / "m/README.md").read_text(encoding="utf-8")
    assert "license: apache-2.0" in card and "language: en" in card and "step 5" in card and "Hi" not in card
    assert (tmp_path / "m/NOTICE.txt").read_text(encoding="utf-8") == "By somebody"


@pytest.mark.parametrize("fault", ["exists", "file", "disk", "damaged", "none", "no base"])
def test_failed_export_is_one_line_and_leaves_nothing(tmp_path, run, monkeypatch, fault):
    tokenizer = chat_tokenizer()
    base = make_chat_base(tmp_path / "base", END, len(tokenizer))
    checkpoint, out = save(make_task(base, tokenizer), tmp_path / "c"), tmp_path / "new/out"
    if fault == "exists":
        out.mkdir(parents=True)
        (out / "config.json").write_text("{}", encoding="utf-8")
        (out / ".git").write_text("mine", encoding="utf-8")
    elif fault == "file":
        out.parent.write_text("", encoding="utf-8")
    elif fault == "disk":
        monkeypatch.setattr(shutil, "disk_usage", lambda _path: SimpleNamespace(free=10_000))
    elif fault == "damaged":
        (checkpoint / "adapter_model.safetensors").write_bytes(b"x" * 100)
    elif fault == "none":
        checkpoint = tmp_path / "nothing"
    else:
        shutil.rmtree(base)
    before = sorted(tmp_path.rglob("*"))
    code, _, err = run(checkpoint, out, "--overwrite")
    assert code == 1 and err.count("export_model.py: error: ") == 1 and "Traceback" not in err, err
    assert err.splitlines()[-1].startswith("export_model.py: error: ")
    assert sorted(path for path in tmp_path.rglob("*") if path != out.parent) == [x for x in before if x != out.parent]


def test_modelfile_writes_the_template_of_the_model(tmp_path, run):
    tokenizer = chat_tokenizer()
    base = make_chat_base(tmp_path / "base", ELSEWHERE, len(tokenizer))
    code, shown, _ = run(save(make_task(base, tokenizer), tmp_path / "c"), tmp_path / "m", "--ollama")
    assert code == 0 and "ollama create" in shown
    text = (tmp_path / "m/Modelfile").read_text(encoding="utf-8")
    assert text.endswith('PARAMETER stop "<|im_end|>"\n') and "\nFROM .\n" in text
    turn = '{{ if eq .Role "user" }}<|im_start|>user\n{{ .Content }}<|im_end|>\n{{ else if eq .Role "assistant" }}'
    assert f"{{{{ range .Messages }}}}{turn}<|im_start|>assistant\n{{{{ .Content }}}}<|im_end|>\n" in text
    assert text.count('"""') == 2 and '{{ end }}{{ end }}<|im_start|>assistant\n"""' in text


DEFAULT = (
    "{{ bos_token }}{% if messages[0].role != 'system' %}<|im_start|>system\nBe kind.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(("bos", "begin"), [(True, ""), (False, "<s>")])
def test_default_instructions_of_a_template_are_kept(bos, begin):
    """Ollama writes the BOS where the tokenizer does."""
    tokenizer = chat_tokenizer(bos)
    tokenizer.chat_template = DEFAULT
    parts = read_template(tokenizer)
    assert parts["start"] == f"{begin}<|im_start|>system\nBe kind.<|im_end|>\n"
    assert parts["system"] == f"{begin}<|im_start|>system\n"


@pytest.mark.parametrize("style", ["alternating", "reasoning", "changing"])
def test_template_that_has_no_such_parts_is_left_to_ollama(style):
    assert read_template(make_chat_tokenizer(style)) is None


def test_large_export_is_opened_in_its_own_precision(tmp_path, run, monkeypatch):
    """8 billion parameters are 16 GB, and would be 32. A small one is computed exactly, on any processor."""
    tokenizer = chat_tokenizer()
    base = make_chat_base(tmp_path / "base", END, len(tokenizer))
    assert run(save(make_task(base, tokenizer), tmp_path / "c"), tmp_path / "m")[0] == 0
    assert load_checkpoint(tmp_path / "m")[0].dtype == torch.float32
    monkeypatch.setattr(pretrained, "MAX_FLOAT", 100)
    assert load_checkpoint(tmp_path / "m")[0].dtype == torch.bfloat16
