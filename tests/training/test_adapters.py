"""Fine-tuning with adapters, without peers."""

import copy
import json
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import GatedRepoError, RevisionNotFoundError
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, LlamaModel

from arguments import DatasetArguments, ModelArguments
from cotrain.common.errors import UserError
from cotrain.common.run_folder import find_checkpoint
from cotrain.models import model as models
from cotrain.models import pretrained
from cotrain.models.adapters import add_adapters
from cotrain.models.device import enable_gradient_checkpointing, to_float
from cotrain.models.model import build_without_weights
from cotrain.models.pretrained import digest_weights, load_pretrained
from cotrain.monitoring.evaluation import Evaluator
from cotrain.monitoring.export import export
from cotrain.options import NOTHING, Adopted
from cotrain.tasks.task_loading import build_initial_model, load_task
from cotrain.training.builders import build_param_groups
from cotrain.training.pretrained import load_checkpoint
from tests.support.conversations import make_chat_tokenizer
from tests.support.peers import prepare_data

VOCAB_SIZE, END = 600, "<|im_end|>"


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, launcher):
    folder = tmp_path_factory.mktemp("clm")
    prepare_data(folder, "clm", VOCAB_SIZE, launcher=launcher)
    return folder


def make_base(folder: Path, seed: int = 0, **options) -> Path:
    """Save a small Llama in bf16, and return its folder."""
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder, **options)
    return folder


@pytest.fixture
def base(tmp_path):
    return make_base(tmp_path / "base")


def arguments(prepared: Path, name: object, **flags) -> DatasetArguments:
    flags = {"lora_rank": 4, **flags}
    folders = {"tokenizer_path": str(prepared / "tokenizer"), "dataset_path": str(prepared / "dataset")}
    return DatasetArguments(model_name_or_path=str(name), **folders, **flags)


def build(args: ModelArguments, has_weights: bool = True, adopted: Adopted = NOTHING):
    return build_initial_model(load_task(args, adopted, has_weights=has_weights), "run")


def tokens(size: int = 2, length: int = 16) -> torch.Tensor:
    return torch.randint(VOCAB_SIZE, (size, length), generator=torch.Generator().manual_seed(1))


def change(model: torch.nn.Module) -> None:
    """Give the adapters values that change the model."""
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(0.1 * torch.randn(parameter.shape, generator=generator))


def test_only_adapters_are_trained_and_the_base_keeps_its_precision(prepared, base):
    """They begin equal on all peers, and change nothing."""
    model, stored = build(arguments(prepared, base)), load_file(base / "model.safetensors")
    assert all(map(torch.equal, model.parameters(), build(arguments(prepared, base)).parameters()))
    expected = AutoModelForCausalLM.from_pretrained(base, dtype="auto")(input_ids=tokens()).logits
    assert model(input_ids=tokens()).logits.equal(expected)
    trained = [p for group in build_param_groups(model, 0.01) for p in group["params"]]
    names = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert all("lora_" in name for name in names) and len(trained) == len(names) == 2 * 2 * 7
    assert {parameter.dtype for parameter in trained} == {torch.float32}
    model(input_ids=tokens(), labels=tokens()).loss.backward()
    torch.optim.AdamW(trained, 0.1).step()
    frozen = {name.removeprefix("base_model.model.").replace(".base_layer", ""): parameter
              for name, parameter in model.named_parameters() if not parameter.requires_grad}  # fmt: skip
    assert frozen.keys() == stored.keys() and all(frozen[name].equal(stored[name]) for name in stored)


def test_checkpoint_of_a_monitor_without_the_base_is_the_trainers_model(prepared, base, tmp_path):
    """A merged model is the base plus the products of the adapters."""
    args = arguments(prepared, base, lora_alpha=12)
    trainer = build(args)
    change(trainer)
    task = load_task(args, NOTHING)
    monitor = build_initial_model(task, "run")
    assert all(parameter.is_meta != parameter.requires_grad for parameter in monitor.parameters())
    for groups in zip(build_param_groups(monitor, 0.01), build_param_groups(trainer, 0.01), strict=True):
        for parameter, other in zip(*(group["params"] for group in groups), strict=True):
            parameter.data.copy_(other.data)
    folder = tmp_path / "checkpoint-3"
    task.save_pretrained(monitor, folder)
    assert not (folder / "config.json").exists() and (folder / "adapter_model.safetensors").stat().st_size < 60_000
    opened = AutoPeftModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert opened(input_ids=tokens()).logits.equal(trainer(input_ids=tokens()).logits)
    assert find_checkpoint(folder) == folder
    model, tokenizer = load_checkpoint(folder)
    assert model(input_ids=tokens()).logits.equal(trainer(input_ids=tokens()).logits) and len(tokenizer) == VOCAB_SIZE
    merged = opened.float().merge_and_unload().state_dict()
    adapters, stored = load_file(folder / "adapter_model.safetensors"), load_file(base / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    one, two = (adapters[f"base_model.model.{name}.lora_{matrix}.weight"] for matrix in "AB")
    assert merged[f"{name}.weight"].allclose(stored[f"{name}.weight"].float() + 12 / 4 * two @ one, atol=1e-6)


def test_monitor_of_a_large_base_needs_no_memory_for_it(prepared, monkeypatch):
    monkeypatch.setattr(models.psutil, "virtual_memory", lambda: SimpleNamespace(total=100_000))
    with pytest.raises(UserError, match="the weights of the model takes"):
        load_task(arguments(prepared, "smollm2-135m", lora_rank=None), NOTHING)
    task = load_task(arguments(prepared, "smollm2-135m"), NOTHING)
    assert sum(p.numel() for p in build_initial_model(task, "run").parameters() if p.requires_grad) < 1_500_000


def test_trainers_with_another_tokenizer_or_base_do_not_average(prepared, base, tmp_path, monkeypatch):
    """One whose tokenizer had as many tokens averaged with the others, and nobody noticed."""
    bases = base, make_base(tmp_path / "other", seed=1)
    tasks = [load_task(arguments(prepared, one), NOTHING) for one in bases]
    schemas = {task.schema for task in tasks}
    manifest = tasks[0].load_manifest()
    monkeypatch.setattr(tasks[0], "load_manifest", lambda: replace(manifest, tokenizer_sha256="0" * 64))
    assert len(schemas | {tasks[0].schema}) == 3


def test_other_weights_have_another_digest(prepared, base, tmp_path):
    digest = digest_weights(arguments(prepared, base), NOTHING)
    resharded = make_base(tmp_path / "resharded", max_shard_size="50KB")
    assert len(list(resharded.glob("*.safetensors"))) > 2
    save_file({"x": torch.zeros(1)}, resharded / "model.fp16.safetensors")  # another precision, downloaded before
    assert digest_weights(arguments(prepared, resharded), NOTHING) == digest
    assert digest_weights(arguments(prepared, make_base(tmp_path / "other", seed=1)), NOTHING) != digest
    for content in ("{", "[]", '{"weight_map": {"x": 1}}', '{"weight_map": {"x": "../model.safetensors"}}'):
        (resharded / "model.safetensors.index.json").write_text(content, encoding="utf-8")
        with pytest.raises(UserError, match="index.json' is damaged"):
            digest_weights(arguments(prepared, resharded), NOTHING)


def test_frozen_parameters_of_a_task_keep_their_precision():
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2), torch.nn.Linear(2, 1)).half()
    model[:2].requires_grad_(requires_grad=False)
    assert {tensor.dtype for tensor in to_float(model)[:2].state_dict().values()} == {torch.float16, torch.int64}
    assert {parameter.dtype for parameter in model[2].parameters()} == {torch.float32}
    assert sum(p.numel() for group in build_param_groups(model, 0.0) for p in group["params"]) == 3


def test_gradient_checkpointing_gives_the_same_gradients(prepared, base):
    gradients = []
    for is_checkpointed in (False, True):
        model = build(arguments(prepared, base)).train()
        change(model)
        if is_checkpointed:
            enable_gradient_checkpointing(model)
        model(input_ids=tokens(), labels=tokens()).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.requires_grad])
    assert all(one.equal(two) and one.norm() > 0 for one, two in zip(*gradients, strict=True))


def test_evaluator_does_not_copy_a_frozen_base(prepared, base, monkeypatch):
    args = arguments(prepared, base)
    task, model, seen = load_task(args, NOTHING, has_weights=True), build(args), []
    options = {"max_samples": 2, "batch_size": 2, "use_cpu": True}
    evaluate = task.evaluate
    monkeypatch.setattr(task, "evaluate", lambda model, batch: (seen.append(model), evaluate(model, batch))[1])
    assert Evaluator(task, **options).evaluate(model, 1)["loss"] > 0
    shared = [own is other for own, other in zip(model.parameters(), seen[0].parameters(), strict=True)]
    assert shared == [not parameter.requires_grad for parameter in model.parameters()]


@pytest.mark.parametrize(
    ("device", "place"), [("cuda:0", {"": torch.device("cuda", 0)}), ("cpu", None), ("mps", None)]
)
def test_base_is_loaded_and_tried_where_it_is_trained(prepared, base, monkeypatch, device, place):
    """The CPU read 16 GB of an 8-billion base for each of four forward passes, before a GPU had it."""
    places, open_weights = [], pretrained.open_weights

    def load(*args, device_map=None, **options):
        places.append(device_map)
        return open_weights(*args, **options)

    monkeypatch.setattr(pretrained, "open_weights", load)
    options = {"has_weights": True, "device": torch.device(device)}
    build_initial_model(load_task(arguments(prepared, base), NOTHING, **options), "run")
    assert places == [place]


def test_all_is_read_from_one_commit(prepared, base, tmp_path, monkeypatch):
    """The branch names the newest one; a checkpoint names the commit."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "cache/models--me--model"
    shutil.copytree(base, repository / "snapshots/abc123")
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text("abc123", encoding="utf-8")
    args = arguments(prepared, "me/model", cache_dir=str(tmp_path / "cache"))
    assert args.from_pretrained
    adopted = Adopted(frozenset({"model_name_or_path"}))
    model = build(args, adopted=adopted)
    assert args.model_revision == "abc123" and len(digest_weights(args, adopted)) == 16
    load_task(args, adopted).save_pretrained(model, tmp_path / "saved")
    saved = json.loads((tmp_path / "saved/adapter_config.json").read_text(encoding="utf-8"))
    assert (saved["base_model_name_or_path"], saved["revision"]) == ("me/model", "abc123")


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        (GatedRepoError, r"accept its licence at https://huggingface.co/me/model, run `hf auth login`, and pass"),
        (RevisionNotFoundError, r"'me/model' has no revision abc: ask for its commit"),
    ],
)
def test_hub_says_in_one_line_why_weights_are_not_given(prepared, base, monkeypatch, kind, line):
    error = OSError("You are trying to access\na gated repo")
    error.__cause__ = kind("refused", response=SimpleNamespace(status_code=403, headers={}, request=None))
    config, fail = LlamaConfig.from_pretrained(base), Mock(side_effect=error)
    args = arguments(prepared, "me/model", model_revision="abc")
    adopted = Adopted(frozenset({"model_name_or_path"}))
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    for ask in (partial(load_pretrained, config, args, adopted), partial(load_task, args, adopted)):
        with pytest.raises(UserError, match=line) as refused:
            ask()
        assert "\n" not in str(refused.value)


def save(args: ModelArguments, folder: Path) -> Path:
    """Save a checkpoint with new adapters."""
    load_task(args, NOTHING).save_pretrained(build(args), folder)
    return folder


def change_fields(path: Path, **fields) -> None:
    path.write_text(json.dumps(json.loads(path.read_text(encoding="utf-8")) | fields), encoding="utf-8")


@pytest.mark.parametrize("content", ["{", "[]", '{"peft_type": "FOO"}', '{"peft_type": "LORA"}', "weights"])
def test_adapters_of_a_stranger_are_refused_in_one_line(prepared, base, tmp_path, content):
    folder = save(arguments(prepared, base), tmp_path / "checkpoint")
    assert not (folder / "README.md").exists()
    if content == "weights":
        save_file({}, folder / "adapter_model.safetensors")
    else:
        (folder / "adapter_config.json").write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match="CHECKPOINT: the (adapters in|weights of) '.*' cannot be read"):
        load_checkpoint(folder)


@pytest.mark.parametrize("has_weights", [True, False])
def test_quantized_base_is_refused(prepared, base, has_weights):
    """Its scales would be left out. A monitor, which reads no weights, refuses it too."""
    quantization = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    change_fields(base / "config.json", quantization_config=quantization)
    with pytest.raises(UserError, match=r"--model_name_or_path: the weights of '.*' are quantized: pass"):
        build(arguments(prepared, base), has_weights=has_weights)
    load_task(arguments(prepared, base, lora_rank=None), NOTHING)  # its shape alone


def test_adapters_whose_base_is_elsewhere_say_so(prepared, base, tmp_path):
    """A friend gets the checkpoint, and has the base in another folder."""
    folder = save(arguments(prepared, base), tmp_path / "checkpoint")
    base.rename(tmp_path / "moved")
    with pytest.raises(UserError, match="their base is not at '.*/base': copy it there, or write its path in adapter"):
        load_checkpoint(folder)
    change_fields(folder / "adapter_config.json", base_model_name_or_path="../models/base")  # as on another machine
    with pytest.raises(UserError, match="their base is not at '../models/base': copy it there, or write its path"):
        load_checkpoint(folder)
    change_fields(folder / "adapter_config.json", base_model_name_or_path=str(tmp_path / "moved"))
    load_checkpoint(folder)


@pytest.mark.parametrize("has_base", [True, False])
def test_base_with_adapters_beside_it_is_refused(prepared, base, tmp_path, has_base):
    """transformers would load them, and peft would replace them by new ones."""
    folder = save(arguments(prepared, base), base if has_base else tmp_path / "checkpoint")
    with pytest.raises(UserError, match=r"--model_name_or_path: '.*' has adapters: merge them with ./export_model.py"):
        build(arguments(prepared, folder))


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ({"lora_targets": "q_proj, v_prj"}, "--lora_targets: the model has no layer 'v_prj'; pass"),
        ({"lora_rank": None, "lora_targets": "q_proj"}, "--lora_targets also needs --lora_rank"),
        ({"task": __file__}, "--lora_rank is for language models"),
        ({"lora_rank": None, "load_in_4bit": True}, "--load_in_4bit also needs --lora_rank"),
        ({"load_in_4bit": True}, "--load_in_4bit needs a GPU"),
        ({}, r"--lora_rank: the model at .* lacks weights \(lm_head.weight\)"),
    ],
)
def test_wrong_flags_are_refused(prepared, base, monkeypatch, flags, fault):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if not flags:
        LlamaModel.from_pretrained(base).save_pretrained(base)
    with pytest.raises(UserError, match=fault):
        build(arguments(prepared, base, **flags))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("untrained", ["zero", "equal", "none"])
def test_tokens_that_the_base_never_saw_are_named_and_trained_by_a_flag(prepared, tmp_path, caplog, tied, untrained):
    tokenizer = make_chat_tokenizer("chatml")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    base = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), tie_word_embeddings=tied, **sizes))
    weight, numbers = base.get_input_embeddings().weight.data, tokenizer.convert_tokens_to_ids(["<|im_start|>", END])
    if untrained != "none":
        weight[numbers] = 0 if untrained == "zero" else weight.mean(dim=0) + 1
    base.save_pretrained(tmp_path / "base")
    flags = {"model_name_or_path": str(tmp_path / "base"), "lora_rank": 2}
    add_adapters(copy.deepcopy(base), ModelArguments(**flags), tokenizer)
    lines = [record.getMessage() for record in caplog.records if "never trained" in record.getMessage()]
    assert len(lines) == (untrained != "none") and all("--lora_tokens '<|im_start|>,<|im_end|>'" in x for x in lines)
    caplog.clear()
    model = add_adapters(base, ModelArguments(**flags, lora_tokens="<|im_start|>,<|im_end|>"), tokenizer)
    assert "never trained" not in caplog.text
    rows = [parameter for name, parameter in model.named_parameters() if "trainable_tokens" in name]
    assert [(x.shape, x.dtype, x.requires_grad) for x in rows] == [((2, 32), torch.float32, True)] * (2 - tied)
    change(model)
    expected = model(input_ids=torch.tensor([[numbers[0], 20, numbers[1]]])).logits
    model.save_pretrained(tmp_path / "model")
    tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "exported").mkdir()
    export(tmp_path / "model", tmp_path / "exported", "title", None, ollama=False)
    for loaded in (load_checkpoint(tmp_path / "model")[0], LlamaForCausalLM.from_pretrained(tmp_path / "exported")):
        logits = loaded(input_ids=torch.tensor([[numbers[0], 20, numbers[1]]])).logits
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_observers_have_the_rows_of_tokens_as_trainers_have_them(tmp_path):
    """They download the state into it; a wrong name is an error of everyone."""
    tokenizer = make_chat_tokenizer("chatml")
    config = LlamaConfig(vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1,
                         num_attention_heads=4, architectures=["LlamaForCausalLM"])  # fmt: skip
    args = ModelArguments(model_name_or_path="base", lora_rank=2, lora_tokens="<|im_end|>")
    shapes = [
        {name: x.shape for name, x in add_adapters(base, args, tokenizer).named_parameters() if x.requires_grad}
        for base in (LlamaForCausalLM(config), build_without_weights(config))
    ]
    assert shapes[0] == shapes[1] and sum("trainable_tokens" in name for name in shapes[0]) == 2
    args = ModelArguments(model_name_or_path="base", lora_rank=2, lora_tokens="<|im_End|>")
    with pytest.raises(UserError, match=r"--lora_tokens: the tokenizer has no token '<\|im_End\|>'"):
        add_adapters(LlamaForCausalLM(config), args, tokenizer)


@pytest.mark.gpu
def test_a_base_in_4_bits_learns_on_a_gpu(base):
    pytest.importorskip("bitsandbytes")
    config = LlamaConfig.from_pretrained(base, architectures=["LlamaForCausalLM"])
    args = DatasetArguments(model_name_or_path=str(base), dataset_path="none", lora_rank=4, load_in_4bit=True)
    model = (
        add_adapters(load_pretrained(config, args, NOTHING), args, SimpleNamespace(chat_template=None))
        .to("cuda:0")
        .train()
    )
    optimizer, losses = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 0.01), []
    for _ in range(10):
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(input_ids=tokens().cuda(), labels=tokens().cuda()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    assert any(parameter.dtype == torch.uint8 for parameter in model.parameters())
