"""What a training state consists of, and the checks of a state that another peer offers."""

import math
from collections import defaultdict
from collections.abc import Sequence

import torch

from peerstep.reports.marks import MAX_STEP, Position, parse_marks
from peerstep.tensors.checks import TensorSpec

FLOAT16_ERROR = 6e-8  # of the root of a small second moment, and of a first moment


class StateLoadError(ValueError):
    """Raised if an offered state cannot be used."""


class OldStateError(StateLoadError):
    """Raised if a state is older than required."""


def read_position(metadata: object, min_step: int = 0) -> Position:
    """Return the step and the marks in the metadata of a state.

    :raises ValueError: if one of them is missing or malformed; OldStateError if the step is before `min_step`
    """
    fields = metadata if isinstance(metadata, dict) else {}
    if type(step := fields.get("epoch")) is not int or not 0 <= step <= MAX_STEP:
        raise StateLoadError("it has no step number")
    if step < min_step:
        raise OldStateError(f"it is of step #{step}, no later than #{min_step - 1}")
    return Position(step, parse_marks(fields.get("marks")))


class StateLayout:
    """The tensors of a state: the parameters of an optimizer, then its statistics.

    Single numbers among the statistics are tensors of float64. Second moments, which the optimizer names, are sent to
    other peers as their roots.

    :param optimizer: with all of its statistics
    """

    def __init__(self, optimizer: torch.optim.Optimizer):
        self.optimizer = optimizer
        self.parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.sizes = torch.tensor([parameter.numel() for parameter in self.parameters], dtype=torch.float64)
        self.names = [name for _, name in self._statistics()]
        self.max_metadata_bytes = 2**16 + 256 * len(self.names)  # of a state; a name has some 10 bytes
        self.num_groups = len(self.groups(self.tensors()))
        numbers = enumerate(self.names, len(self.parameters))
        self.second_moments = {number for number, name in numbers if name in optimizer.second_moments}  # pyright: ignore[reportAttributeAccessIssue]

    def _statistics(self) -> list[tuple[dict, str]]:
        """Return where each statistic is: the statistics of a parameter, which accelerate replaces, and the name."""
        states = (self.optimizer.state[parameter] for parameter in self.parameters)
        return [(statistics, name) for statistics in states for name in sorted(statistics)]

    def tensors(self) -> list[torch.Tensor]:
        """Return the tensors of the current state."""
        values = (statistics[name] for statistics, name in self._statistics())
        numbered = (
            v if isinstance(v, torch.Tensor) and v.ndim else torch.as_tensor(v, dtype=torch.float64) for v in values
        )
        return [*self.parameters, *numbered]

    @torch.no_grad()
    def copy_from(self, tensors: list[torch.Tensor]) -> None:
        """Copy a state that was checked into the parameters and the statistics."""
        first = len(self.parameters)
        torch._foreach_copy_(self.parameters, tensors[:first])
        for (statistics, name), value in zip(self._statistics(), tensors[first:], strict=True):
            if isinstance(statistics[name], torch.Tensor):
                statistics[name].copy_(value)
            else:
                statistics[name] = int(value) if name == "step" else float(value)

    def specs(self, metadata: dict) -> list[TensorSpec]:
        """Return the specs of the tensors of a state; StateLoadError if it is another optimizer's."""
        if metadata.get("statistics") != self.names:
            raise StateLoadError(
                "it is the state of another optimizer (all peers need the same, and all or none local updates) or "
                "of another version"
            )
        return [TensorSpec(tuple(t.shape), str(t.dtype).removeprefix("torch.")) for t in self.tensors()]

    def check(self, metadata: dict, tensors: Sequence[torch.Tensor]) -> None:
        """Check that a state has this peer's shapes and optimizer, and finite values.

        A negative scalar statistic, such as a step count, or second moment would make the next update NaN.

        :raises StateLoadError: if the state does not fit
        """
        if [tuple(tensor.shape) for tensor in tensors] != [spec.shape for spec in self.specs(metadata)]:
            raise StateLoadError("its tensors have other shapes (another model, or an incomplete state)")
        if not all_finite(tensors):
            raise StateLoadError("its parameters or its optimizer statistics are not finite")
        first = len(self.parameters)
        for index, (tensor, name) in enumerate(zip(tensors[first:], self.names, strict=True), first):
            if (index in self.second_moments or not tensor.ndim) and tensor.numel() and tensor.min() < 0:
                raise StateLoadError("its optimizer statistics are negative")
            if name == "step" and tensor > MAX_STEP:
                raise StateLoadError("its optimizer has an impossible step count")

    def unpack(self, metadata: dict, tensors: Sequence[torch.Tensor]) -> None:
        """Square the roots in a received state, in place, and check the state.

        |m| <= C sqrt(v) for a first moment of any gradients (Cauchy-Schwarz), with C = 7.3 for the default betas.
        Otherwise the next step might change the weights by a factor of 8e7. A state on the own disk may be of other
        betas.

        :raises StateLoadError: if the state does not fit, or no gradients could have made its moments
        """
        for index in self.second_moments:
            tensors[index].square_()
        self.check(metadata, tensors)
        beta1, beta2 = self.optimizer.param_groups[0].get("betas", (0.0, 0.0))
        squared = (1 - beta1) ** 2 / ((1 - beta2) * (1 - beta1**2 / beta2)) if beta1**2 < beta2 else math.inf
        ratio, first = max(10.0, 1.01 * squared**0.5), len(self.parameters)
        for index in self.second_moments:
            name = self.names[index - first].removesuffix("_sq")
            has_first = self.names[index - first - 1] == name  # the names are sorted
            if has_first and (tensors[index - 1].abs() > ratio * (tensors[index].sqrt() + FLOAT16_ERROR)).any():
                raise StateLoadError("its optimizer has moments that no gradients could have made")

    def groups(self, tensors: Sequence[torch.Tensor]) -> list[Sequence[torch.Tensor]]:
        """Return each parameter of a state, then its statistics of each name, without single numbers."""
        first, groups = len(self.parameters), defaultdict(list)
        for name, tensor in zip(self.names, tensors[first:], strict=True):
            if tensor.ndim:
                groups[name].append(tensor)
        return [*([parameter] for parameter in tensors[:first]), *groups.values()]


def all_finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether no tensor has NaN or Inf. Takes one fused norm and one synchronization with the device.

    The Euclidean norm overflows for finite values above 1e19. Only then all values are examined, which takes a CPU
    nine times as long, as does the maximum norm.
    """
    floating = [tensor.float() for tensor in tensors if tensor.is_floating_point() and tensor.numel()]
    if not floating or bool(torch.nn.utils.get_total_norm(floating).isfinite()):
        return True
    return all(bool(tensor.isfinite().all()) for tensor in floating)
