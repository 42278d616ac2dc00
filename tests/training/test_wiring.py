"""Each flag of a run reaches the object that it is for."""

import contextlib
from collections import ChainMap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hivemind.compression import CompressionInfo, TensorRole

from arguments import CollaborationArguments, LocalTrainingArguments, ProgressTrackerArguments
from cotrain.common.errors import UserError
from cotrain.options import NOTHING, TrainerOptions
from cotrain.training import builders
from cotrain.training.hf_trainer import build_training_arguments
from peerstep import optimizer as optimizer_module
from peerstep.options import Options
from peerstep.tensors.compression import build_state_compression
from tests.support.fakes import FAKE_PEER

# Values unlike the defaults
HYPERPARAMETERS = {
    "optimizer": "lamb", "total_steps": 1000, "warmup_steps": 10, "learning_rate": 0.25, "adam_beta1": 0.5,
    "adam_beta2": 0.75, "adam_epsilon": 0.125, "weight_decay": 0.375, "clamp_value": 3.0, "max_grad_norm": 0.625,
    "local_updates": True, "outer_learning_rate": 0.3125, "outer_momentum": 0.4375, "max_update_norm": 0.5625,
}  # fmt: skip
COLLABORATION = {
    "target_batch_size": 640, "client_mode": False, "batch_size_lead": 64, "bandwidth": 7.0, "averaging_timeout": 80.0,
    "matchmaking_time": 9.0, "average_state_every": 3, "gradient_compression": "blockwise8",
    "state_compression": "scaled_float16", "load_state_compression": "none", "load_state_timeout": 100.0,
    "delay_grad_averaging": False, "delay_optimizer_step": False, "target_group_size": 17,
    "weigh_equally": True,
}  # fmt: skip
TRACKER = {
    "min_refresh_period": 0.25, "max_refresh_period": 11.0, "default_refresh_period": 4.0, "expected_drift_peers": 5.0,
    "expected_drift_rate": 0.5, "performance_ema_alpha": 0.75, "metadata_expiration": 33.0,
}  # fmt: skip


class Received(SimpleNamespace):
    """Object that keeps what its builder passes to it."""

    def __init__(self, *args, **kwargs):
        super().__init__(**kwargs, args=args)
        self.shutdown = self.start = lambda: None
        self.schema_id, self.main_parameters, self.gradients, self.layout = "", [], [], SimpleNamespace(parameters=[])


@pytest.fixture
def built(monkeypatch) -> dict[str, ChainMap]:
    """The attributes of the trainer's optimizer and its parts with and without local updates, and of an observer."""
    for name in ("TrainingStateAverager", "RoundAverager", "ProgressTracker", "GradientAccumulator", "LocalTraining"):
        monkeypatch.setattr(optimizer_module, name, Received)
    monkeypatch.setattr(builders, "TrainingStateAverager", Received)
    monkeypatch.setattr(builders, "supervise", lambda *_args, **_options: contextlib.nullcontext())
    found, model = {}, torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.LayerNorm(2))
    for name, local_updates in (("local", True), ("plain", False)):
        training = LocalTrainingArguments(**{**HYPERPARAMETERS, "local_updates": local_updates})
        collaboration = CollaborationArguments(run_id="run", **COLLABORATION)
        args = TrainerOptions(training, None, collaboration, ProgressTrackerArguments(**TRACKER), NOTHING)
        optimizer = builders.build_optimizer(model, FAKE_PEER, 8, args)
        parts = optimizer.grad_averager.args[1], optimizer.tracker.args[2], optimizer.coordinator.options
        assert all(options is optimizer.options for options in parts)
        parts = optimizer, optimizer.state_averager, optimizer.grad_averager
        more = {"max_norm": optimizer.accumulator.max_norm, "training": optimizer.accumulator}
        found[name] = ChainMap(more, *map(vars, reversed(parts)))
    with builders.open_observer(model, FAKE_PEER, "run", training, download_timeout=70.0) as observer:
        return {**found, "observer": ChainMap(vars(observer))}


def test_hyperparameters_reach_the_optimizer(built):
    """With local updates, the inner optimizer has them, and the outer one is SGD with Nesterov momentum."""
    plain, local, observer = built["plain"], built["local"], built["observer"]
    groups, build_inner, build_schedule, max_local_grad_norm, *_ = local["training"].args
    inner = build_inner(groups)
    for lamb in (inner, plain["optimizer"](plain["params"]), observer["optimizer"](observer["params"])):
        assert [group["weight_decay"] for group in lamb.param_groups] == [0.375, 0.0]
        for group in lamb.param_groups:
            assert (group["lr"], group["betas"], group["eps"]) == (0.25, (0.5, 0.75), 0.125)
        assert lamb.clamp_value == 3.0 and not getattr(lamb, "debias", False)
    assert local["scheduler"] is None and max_local_grad_norm == 0.625
    for group in local["optimizer"](local["params"]).param_groups:
        assert (group["lr"], group["momentum"], group["nesterov"], group["weight_decay"]) == (0.3125, 0.4375, True, 0)
    for schedule in (plain["scheduler"], build_schedule):
        (factor, *_) = schedule(inner).lr_lambdas
        assert factor(4) == 0.5, "of step 5, in the middle of the warm-up"
        assert factor(505) == 0.5, "in the middle of the decay"


BOTH = ("plain", "local")
# Flag, objects, attribute, value that they receive
TABLE = [
    ("averaging_timeout", BOTH, "donor_timeout", 80.0),
    ("load_state_timeout", BOTH, "download_timeout", 100.0),
    ("load_state_timeout", ("observer",), "donor_timeout", 35.0),
    ("", ("observer",), "allow_state_sharing", False),
    ("local_updates", ("local",), "local_updates", True),
    ("local_updates", ("plain",), "local_updates", False),
    ("max_grad_norm", ("plain",), "max_norm", 0.625),
    ("max_update_norm", ("local",), "max_norm", 0.5625),
    ("learning_rate", BOTH, "learning_rate", 0.25),
]


def test_flags_have_the_defaults_of_the_engine():
    parts = LocalTrainingArguments(), CollaborationArguments(run_id="run"), ProgressTrackerArguments()
    flags, options = ChainMap(*map(vars, parts)), vars(Options(batch_size_per_step=8))
    assert {name: flags.get(name, value) for name, value in options.items()} == options


@pytest.mark.parametrize("name", BOTH)
def test_flags_are_handed_on_whole_as_options(built, name):
    expected = {**COLLABORATION, **HYPERPARAMETERS, **TRACKER, "batch_size_per_step": 8}
    options = vars(built[name]["options"])
    shared = expected.keys() & options.keys()
    assert {flag: options[flag] for flag in shared} == {flag: expected[flag] for flag in shared}
    assert options.keys() - shared == {"folder"} and options["folder"] == Path("outputs")


@pytest.mark.parametrize(("flag", "objects", "attribute", "expected"), TABLE)
def test_flag_reaches_what_it_is_for(built, flag, objects, attribute, expected):
    for name in objects:
        assert built[name][attribute] == expected, (flag, name)


@pytest.mark.parametrize("name", ["float16", "blockwise8"])
def test_statistics_are_sent_in_16_bits_at_least(name):
    """8 bits have no values for small second moments; single numbers are not compressed."""
    compression = build_state_compression(name)
    tensor = torch.rand(100_000) * 1e-7
    info = CompressionInfo.from_tensor(tensor, role=TensorRole.OPTIMIZER)
    assert (compression.extract(compression.compress(tensor, info)) - tensor).abs().max() < 6e-8
    info = CompressionInfo.from_tensor(tensor, role=TensorRole.PARAMETER)
    num_bytes = len(compression.compress(tensor, info).buffer)
    assert num_bytes < 110_000 if name == "blockwise8" else num_bytes == 200_000
    one = torch.tensor([1 / 3])
    info = CompressionInfo.from_tensor(one, role=TensorRole.OPTIMIZER)
    assert compression.extract(compression.compress(one, info)) == one


def test_local_flags_reach_transformers(tmp_path):
    """Clipping and schedule belong to the global step, and masks and dropout differ between peers."""
    values = {
        "per_device_train_batch_size": 3, "gradient_accumulation_steps": 5, "save_steps": 7,
        "logging_steps": 11, "logging_first_step": False, "dataloader_num_workers": 13,
    }  # fmt: skip
    flags = LocalTrainingArguments(**values, learning_rate=0.25, use_cpu=True, bf16=True, output_dir=str(tmp_path))
    args = build_training_arguments(flags, "peer")
    for name, value in {**values, "learning_rate": 0.25, "bf16": True, "fp16": False, "use_cpu": True}.items():
        assert getattr(args, name) == value, name
    assert args.output_dir == str(tmp_path) and args.max_grad_norm == 0.0 and args.ignore_data_skip
    assert args.dataloader_drop_last, "each local step reports the same number of samples"
    assert not args.remove_unused_columns and args.max_steps > 10**9
    seeds = {build_training_arguments(flags, peer).seed for peer in ("peer", "another")}
    flags.seed = 1
    assert len(seeds | {build_training_arguments(flags, "peer").seed}) == 3


def test_trainer_with_sparse_gradients_ends_with_one_line():
    args = CollaborationArguments(run_id="run", gradient_compression="topk")
    args = TrainerOptions(
        LocalTrainingArguments(output_dir="outputs"), None, args, ProgressTrackerArguments(), NOTHING
    )
    with pytest.raises(UserError, match="--gradient_compression topk also needs --local_updates"):
        builders.build_optimizer(torch.nn.Linear(2, 2), FAKE_PEER, 8, args)
