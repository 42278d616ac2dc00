"""Training on conversations: several in a row of a batch, loss and exact match of their answers, generation."""

import json
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from arguments import ModelArguments
from cotrain.data.sampler import PeerSampler
from cotrain.data.schemas import SCHEMAS
from cotrain.models.model import get_objective, initialize_model, load_config
from cotrain.models.objectives import OBJECTIVES
from cotrain.monitoring.samples import build_pipeline, check_text, complete, continue_text
from cotrain.options import NOTHING
from cotrain.preparation.conversations import encode_conversation, read_conversations, set_end_of_turn
from cotrain.preparation.packing import pack_conversations
from cotrain.status.loss_meter import LossMeter
from cotrain.tasks.text import TextTask, keeps_apart, match_answers
from cotrain.training.loop import TrainingLoop
from tests.support.conversations import chat, make_chat_tokenizer
from tests.support.families import FAMILIES, GROUPED, SIZES
from tests.training.test_hf_trainer import build_trainer

ROWS = [chat(f"What is {a}?", f"{a * a}!", "Sure?", "Yes") for a in range(4)] + [chat("Hi", "Ho"), chat("a", "b")]
TYPES = {name: family[:2] for name, family in FAMILIES.items() if family[2] == "clm"} | {
    "bloom": ("bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 2}),
    "mamba": ("mamba", {"hidden_size": 32, "num_hidden_layers": 2}),
    "convolutions": ("lfm2", {**GROUPED, "layer_types": ["conv", "full_attention"]}),
    "experts": ("qwen3_moe", {**GROUPED, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
}
PACKED = {"gpt2", "llama", "qwen3", "gemma", "gpt_neox", "mistral", "experts"}


def build(name: str, length: int = 120, **more) -> tuple[TextTask, Dataset]:
    """Return the task of a small model, and ROWS packed into samples."""
    tokenizer = make_chat_tokenizer("chatml")
    set_end_of_turn(tokenizer)
    tokenizer.init_kwargs["objective"] = "chat"
    model_type, fields = TYPES[name]
    sizes = {"n_positions": 256} if model_type == "gpt2" else {"max_position_embeddings": 256}
    args = ModelArguments(json.dumps({**fields, **sizes, **more, "model_type": model_type}))
    task = TextTask(args, NOTHING, tokenizer, load_config(args, NOTHING, tokenizer))
    encoded = [encode_conversation(x, tokenizer) for x in read_conversations("f", ROWS)]
    samples = [{key: sample[key] for key in SCHEMAS["chat"].names} for sample in pack_conversations(encoded, length)]
    return task, Dataset.from_list(samples).with_format(None)


def make_model(task: TextTask) -> torch.nn.Module:
    """Build the model with weights that are large enough for each token to matter."""
    torch.manual_seed(0)
    model = task.build_model()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.2)
    return model.eval()


@pytest.mark.parametrize("name", TYPES)
def test_each_conversation_is_computed_as_if_alone(name):
    task, samples = build(name)
    model = make_model(task)
    assert task.is_packed == (name in PACKED)
    assert task.is_packed == keeps_apart(model), "not only with the initial weights"
    assert any(sum(sample["start_mask"]) > 1 for sample in samples)
    batch = task.collate(list(samples))
    run = {"use_cache": False} if task.is_packed else {}
    with torch.no_grad():
        logits = model(**{name: x for name, x in batch.items() if name != "labels"}, **run).logits
    for document in read_conversations("f", ROWS):
        ids = torch.tensor(encode_conversation(document, task.tokenizer)[0]).long()
        windows = batch["input_ids"].unfold(1, len(ids), 1)
        row, start = (windows == ids).all(dim=-1).nonzero()[0].tolist()
        alone = model(input_ids=ids[None]).logits[0]
        torch.testing.assert_close(logits[row, start : start + len(ids)], alone, rtol=1e-3, atol=1e-4)


def test_a_base_model_with_adapters_is_tried_too():
    """A monitor has one without weights, which computes nothing."""
    task, samples = build("llama")
    task.args.lora_rank, task.args.model_name_or_path = 4, "base"
    model = task.build_model()
    assert {parameter.device.type for parameter in model.parameters()} == {"cpu", "meta"} and not task.is_packed
    task.has_weights = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("cotrain.tasks.text.load_pretrained", lambda config, **_: initialize_model(config))
        model = task.build_model()
    assert task.is_packed and task.compute_loss(model, task.collate(list(samples))) > 0


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_batch_has_labels_for_answers_alone(is_packed):
    task, samples = build("llama")
    task.is_packed = is_packed
    batch = task.collate(list(samples))
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert len(batch["labels"]) == (len(samples) if is_packed else len(ROWS))
    answers = [message["content"] for row in ROWS for message in row["messages"][1::2]]
    learnt = task.tokenizer.decode(batch["labels"][batch["labels"] != -100]).split("<|im_end|>")
    assert sorted(learnt) == sorted([*answers, ""])
    assert ("position_ids" in batch) == is_packed and "attention_mask" not in batch
    if is_packed:
        assert int((batch["position_ids"] == 0).sum()) >= len(ROWS) and int(batch["position_ids"].max()) < 120


def test_loss_and_gradient_do_not_depend_on_packing():
    task, samples = build("llama")
    model = make_model(task)
    losses, gradients = [], []
    for is_packed in (True, False):
        task.is_packed = is_packed
        batch = task.collate(list(samples))
        model.zero_grad()
        loss = task.compute_loss(model, batch)
        loss.backward()
        losses.append(loss.item())
        gradients.append(torch.cat([parameter.grad.flatten() for parameter in model.parameters()]))
        with torch.no_grad():
            metrics = task.evaluate(model, batch)
        assert float(metrics["loss"][0]) == pytest.approx(losses[-1], rel=1e-5)
        assert metrics["exact_match"][1] == 10
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-5)


def test_flash_attention_gets_one_row():
    """It keeps conversations apart in a batch of one row only (transformers' `_is_packed_sequence`)."""
    task, samples = build("llama")
    task.is_packed = True
    given = {}

    class Model(torch.nn.Module):
        config = SimpleNamespace(_attn_implementation="flash_attention_2")

        def forward(self, **batch):
            given.update(batch)
            return SimpleNamespace(loss=torch.zeros(()))

    batch = task.collate(list(samples))
    task.compute_loss(Model(), batch)
    assert len(batch["input_ids"]) > 1 and given.pop("use_cache") is False
    assert {tuple(tensor.shape) for tensor in given.values()} == {(1, batch["input_ids"].numel())}


def test_exact_match_is_what_greedy_decoding_generates():
    task, samples = build("llama")
    model = make_model(task).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    batch, seen = task.collate(list(samples)), set()
    for step in range(300):
        optimizer.zero_grad()
        loss = task.compute_loss(model, batch)
        loss.backward()
        optimizer.step()
        if step % 30 < 29:
            continue
        model.eval()
        with torch.no_grad():
            share, count = task.evaluate(model, batch)["exact_match"]
        completer, right = build_pipeline(model, task.tokenizer), 0
        for row in ROWS:
            for number in range(1, len(row["messages"]), 2):
                prompt, answer = row["messages"][:number], row["messages"][number]["content"]
                (output,) = completer(prompt, max_new_tokens=len(answer) + 1, do_sample=False, return_full_text=False)
                right += output["generated_text"] == answer
        assert right == round(share * count) and count == 10
        seen.add(right)
        model.train()
    assert {0, 10} & seen and max(seen) == 10, "it has learnt all answers"
    assert complete(build_pipeline(model, task.tokenizer), "What is 3?") == "9!"
    means = {"loss": loss.item(), "exact_match": 1.0}
    assert task.summarize(dict(means)) == pytest.approx(means)


def test_exact_match_counts_each_answer():
    labels = torch.tensor([[-100, 1, 2, -100, 3], [4, -100, 5, 6, 7]])
    predicted = torch.tensor([[0, 1, 2, 0, 9], [4, 0, 5, 9, 7]])
    share, count = match_answers(torch.nn.functional.one_hot(predicted, 10), labels)
    assert (share, count) == (0.5, 4)
    assert match_answers(torch.zeros(1, 2, 3), torch.full((1, 2), -100)) == (1.0, 0)


def test_the_tokenizer_decides_what_a_causal_model_is_trained_for():
    task, _ = build("gpt2")
    config, tokenizer = task.config, task.tokenizer
    assert task.objective.has_answers and config.architectures == ["GPT2LMHeadModel"]
    assert not getattr(config, "is_decoder", False), "only a model of masked text needs to be told"
    assert config.eos_token_id == tokenizer.convert_tokens_to_ids("<|im_end|>")
    for stated, objective in (("chat", "chat"), ("clm", "clm"), (None, "clm"), ("mlm", "clm")):
        tokenizer.init_kwargs["objective"] = stated
        assert get_objective(load_config(task.args, NOTHING, tokenizer), tokenizer) == objective
    args = ModelArguments(json.dumps({**SIZES, "model_type": "bert", "max_position_embeddings": 64}))
    tokenizer.init_kwargs["objective"] = "chat"
    config = load_config(args, NOTHING, tokenizer)
    assert config.architectures == ["BertLMHeadModel"] and config.is_decoder


def test_a_question_fits_with_its_template():
    task, _ = build("gpt2", n_positions=64)
    model = make_model(task)
    length = 64 - 20 - len(task.tokenizer.apply_chat_template([{"role": "user", "content": ""}], tokenize=True,
                                                              add_generation_prompt=True)["input_ids"])  # fmt: skip
    room = check_text("x" * length, task.tokenizer, model.config, "TEXT")
    assert room == 20
    continue_text(build_pipeline(model, task.tokenizer), "x" * length, room)
    with pytest.raises(Exception, match="the sentence has 45 tokens"):
        check_text("x" * (length + 1), task.tokenizer, model.config, "TEXT")


# --- weights of micro-batches ----------------------------------------------------------------------------------------


def reference_gradient(task: TextTask, model: torch.nn.Module, samples) -> torch.Tensor:
    """Return the gradient of one process that has all tokens in one batch."""
    model.zero_grad()
    task.compute_loss(model, task.collate(list(samples))).backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("objective", ["chat", "clm", "mlm"])
def test_local_step_weighs_each_token_whatever_the_micro_batch(objective, tmp_path):
    """By both loops; of conversations, texts of other lengths, and masked text."""
    task, samples = build("llama", length=40)
    rows = [samples[number] for number in (0, 1, 2, 3)]
    if objective != "chat":
        task.objective = OBJECTIVES[objective]
        lengths = (5, 9, 17, 30)
        rows = [{"input_ids": list(range(n)), "attention_mask": [1] * n} for n in lengths]
        task.tokenizer.pad_token = "<|endoftext|>"
        task.is_packed = False
    if objective == "mlm":
        task.collate = lambda some: {
            "input_ids": torch.tensor([(row["input_ids"] + [1] * 30)[:30] for row in some]),
            "labels": torch.tensor([(row["input_ids"] + [-100] * 30)[:30] for row in some]),
        }
        task.compute_loss = lambda model, batch: torch.nn.functional.cross_entropy(
            model(batch["input_ids"]).logits.flatten(0, 1), batch["labels"].flatten()
        )
    model = make_model(task)
    expected = reference_gradient(task, model, rows)
    counts = [int(task.weigh(task.collate([row]))) for row in rows]
    assert len(set(counts)) > 1

    options = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    trainer = build_trainer(
        tmp_path, PeerSampler(range(4), "peer", 0), model=model, samples=rows, task=task, **options
    )
    trainer.train()
    torch.testing.assert_close(trainer.gradients[0], expected, rtol=1e-5, atol=1e-6)

    model.zero_grad()
    gradients = []
    optimizer = SimpleNamespace(zero_grad=lambda: None, step=lambda: gradients.append(
        torch.cat([parameter.grad.flatten() for parameter in model.parameters()])))  # fmt: skip
    session = SimpleNamespace(model=model, optimizer=optimizer, loss_meter=LossMeter(), after_local_step=lambda: False)
    training = SimpleNamespace(
        per_device_train_batch_size=1, gradient_accumulation_steps=4, logging_steps=9, use_cpu=True, fp16=False,
        bf16=False, fp32=True, save_steps=9,
    )  # fmt: skip
    loop = TrainingLoop(session, training, torch.device("cpu"))
    for row in rows:
        batch = task.collate([row])
        loop.step(task.compute_loss(model, batch), task.weigh(batch))
    torch.testing.assert_close(gradients[0], expected, rtol=1e-5, atol=1e-6)
