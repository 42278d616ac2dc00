"""The arguments of `join_run`, and the comparison of initial weights."""

import pytest
import torch

from cotrain import join_run
from cotrain.common.errors import UserError
from cotrain.join import fingerprint
from tests.support.fake_device import DeviceTensor


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"learning_rat": 1.0}, "join_run: unknown argument 'learning_rat', did you mean learning_rate or"),
        ({"epochs": 3}, "join_run: unknown argument 'epochs', did you mean one that run_trainer.py --help lists?"),
        ({"run_id": "a.b"}, r"join_run: --run_id 'a.b' must not contain '.'"),
        ({"learning_rate": "fast"}, "join_run: argument --learning_rate/--learning-rate: invalid float value: 'fast'"),
    ],
)
def test_wrong_argument_is_one_line(flags, message, tmp_path, monkeypatch):
    monkeypatch.setattr("sys.excepthook", lambda *error: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError) as error, join_run(lambda: torch.nn.Linear(2, 2), batch_size=1, **flags):
        pass
    assert str(error.value).startswith(message)


def build(seed: int, noise: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Embedding(500, 16), torch.nn.Linear(16, 4), torch.nn.LayerNorm(4))
    for parameter in model.parameters():
        parameter.data *= 1 + noise * torch.randn_like(parameter)
    return model


def test_fingerprint_tells_weights_apart():
    assert len({fingerprint(build(seed)) for seed in range(200)}) == 200
    model, other_head = build(0), build(0)
    torch.nn.init.normal_(other_head[1].weight)
    assert fingerprint(model) != fingerprint(other_head)


def test_fingerprint_is_the_same_for_weights_that_differ_by_rounding():
    assert all(fingerprint(build(seed)) == fingerprint(build(seed, noise=1e-7)) for seed in range(50))


def test_fingerprint_of_a_model_on_a_device_without_float64():
    """Apple's GPUs and Intel's have none: `join_run` never began there."""
    model, moved = build(0), build(0)
    for module in moved:
        for name, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, name, torch.nn.Parameter(DeviceTensor(parameter.detach(), "mps")))
    assert fingerprint(moved) == fingerprint(model)
