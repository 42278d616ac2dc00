"""Bounds on what an honest peer contributes to a round, and on what a reducer answers."""

import math
from dataclasses import dataclass

import torch
from hivemind.compression import CompressionInfo, TensorRole

# Weight of a peer without samples. Not 0: a part for which all senders have weight 0 would be 0/0.
MIN_WEIGHT = 1e-6
# Tolerance for the norm of a clipped gradient: compression adds up to some percent.
NORM_TOLERANCE = 1.1
MAX_GRADIENT_NORM = 1e12  # bound without clipping: the square must not overflow in the optimizer's statistics
MAX_RMS = 1e4  # of the elements of a parameter part; models of the supported families stay far below
# Bound on the distance of a parameter part from this peer's, relative to the norm of that: of what one sender adds to
# the mean, and of what a reducer answers. Honest peers differ by rounding, 0.03 to 0.4 %, and by an update that one
# of them has missed: some percent, and 17 % in the first steps of a small model.
SENT_CHANGE, ANSWERED_CHANGE = 0.1, 0.2


class ViolationError(ValueError):
    """Raised for what no honest peer sends, whatever others have sent to it: it is banned for it."""


@dataclass(frozen=True)
class Bounds:
    """Bounds on the contribution of an honest peer to a round. What exceeds them is scaled down, and reported.

    Nobody is banned for a relative bound: others could bring that about, by making this peer's values the outlier.
    """

    weight: float = math.inf  # samples
    gradient_norm: float = 0.0  # of a whole contribution, and so of each part; 0: no bound
    # Root mean square, per element, by which a parameter part may differ from this peer's own part, in addition to
    # `parameter_change` times the own part's norm. None: no reference (a peer that lacks an update)
    parameter_step: float | None = None
    parameter_change: float = SENT_CHANGE
    compares_norms: bool = False  # a gradient is also bounded by those of the other senders, see outliers.py

    def clip(
        self, info: CompressionInfo, part: torch.Tensor, own_part: torch.Tensor, weight: float
    ) -> tuple[torch.Tensor, float, str | None]:
        """Scale a part of another peer down to the bounds, if it exceeds them.

        :returns: the part, its weight, and what was wrong
        :raises ViolationError: if a value or the weight is not finite
        """
        norm, excess = norm_of(part), None
        if not math.isfinite(norm + weight):
            raise ViolationError("values that are not finite")
        if not MIN_WEIGHT <= weight <= self.weight:
            excess = f"a weight of {weight:g}, the bound is {self.weight:g}"
            weight = min(max(weight, MIN_WEIGHT), self.weight)
        if info.role == TensorRole.GRADIENT:
            limit = NORM_TOLERANCE * self.gradient_norm + 1e-6 if self.gradient_norm else MAX_GRADIENT_NORM
            if norm > limit:
                return part * (limit / norm), weight, f"a gradient of norm {norm:.3g}, the bound is {limit:.3g}"
            return part, weight, excess
        scale = math.sqrt(part.numel())
        if norm > MAX_RMS * scale:
            part, excess = part * (MAX_RMS * scale / norm), f"parameters of norm {norm:.3g}"
        if self.parameter_step is not None and weight > MIN_WEIGHT:
            distance = norm_of(part - own_part)
            bound = self.parameter_change * norm_of(own_part) + self.parameter_step * scale
            if distance > bound:
                part = torch.lerp(own_part, part, bound / distance)
                excess = f"parameters at a distance of {distance:.3g} from this peer's, the bound is {bound:.3g}"
        return part, weight, excess


def norm_of(tensor: torch.Tensor) -> float:
    """Compute the L2 norm in double precision: squares of untrusted values overflow in single precision."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
