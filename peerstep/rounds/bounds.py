"""Bounds on what an honest peer contributes to a round, and on what a reducer answers."""

import math
from dataclasses import dataclass

import torch
from hivemind.compression import CompressionInfo, TensorRole

# Weight of a peer without samples. Not 0: a part for which all senders have weight 0 would be 0/0.
MIN_WEIGHT = 1e-6
MAX_GRADIENT_NORM = 1e12  # of a part: the square must not overflow in the optimizer's statistics
# Bound on the distance of a parameter part from this peer's, relative to the norm of that: of what one sender adds to
# the mean; times ANSWERED_FACTOR, of what a reducer answers. Honest peers differ by rounding, 0.03 to 0.4 %, and by an
# update that one of them has missed: some percent, and 17 % in the first steps of a small model.
PARAMETER_CHANGE, ANSWERED_FACTOR = 0.1, 2.0
# Bound on the norm of a reducer's averages of gradients, relative to that of this peer's gradients there. Their noise
# is smaller in a mean over more samples.
ANSWERED_NORM = 4.0


class ViolationError(ValueError):
    """A value that no honest peer sends, even after hostile input. Its sender is banned."""


@dataclass(frozen=True)
class Bounds:
    """Bounds on the contribution of an honest peer to a round. What exceeds them is scaled down, and reported.

    Nobody is banned for a relative bound: others could bring that about, by making this peer's values the outlier.
    """

    max_weight: float = math.inf  # samples
    # Root mean square, per element, by which a parameter part may differ from this peer's own part, in addition to
    # `parameter_change` times the own part's norm
    parameter_step: float = math.inf
    parameter_change: float = PARAMETER_CHANGE
    has_gradient: bool = False  # whether a reducer's averages are bounded by this peer's gradients
    believes_weights: bool = False  # see relative_bounds.py
    weighs_equally: bool = False  # whether each sender of a gradient has the weight 1, whatever it claims
    are_updates: bool = False  # what is averaged are local updates instead of gradients

    def clip(
        self, info: CompressionInfo, part: torch.Tensor, own_part: torch.Tensor, weight: float, slack: float = 0.0
    ) -> tuple[torch.Tensor, float, str | None]:
        """Scale a part of another peer down to the bounds, if it exceeds them.

        :param slack: see Part
        :returns: the part, its weight, and what was wrong
        :raises ViolationError: if a value or the weight is not finite
        """
        norm, excess = norm_of(part), None
        if not math.isfinite(norm + weight):
            raise ViolationError("values that are not finite")
        if not MIN_WEIGHT <= weight <= self.max_weight:
            excess = f"a weight of {weight:g}, the bound is {self.max_weight:g}"
            weight = min(max(weight, MIN_WEIGHT), self.max_weight)
        if info.role == TensorRole.GRADIENT:
            if norm > MAX_GRADIENT_NORM:  # see relative_bounds.py for the relative bounds
                part, excess = part * (MAX_GRADIENT_NORM / norm), f"a gradient of norm {norm:.3g}"
            return part, weight, excess
        distance = norm_of(part - own_part) if weight > MIN_WEIGHT else 0.0
        bound = self.parameter_change * norm_of(own_part) + self.parameter_step * math.sqrt(part.numel()) + slack
        if distance > bound:
            part = torch.lerp(own_part, part, bound / distance)
            excess = f"parameters at a distance of {distance:.3g} from this peer's, the bound is {bound:.3g}"
        return part, weight, excess


def norm_of(tensor: torch.Tensor) -> float:
    """Compute the L2 norm, in double precision if squares of untrusted values overflow in single precision."""
    norm = float(torch.linalg.vector_norm(tensor))
    return norm if math.isfinite(norm) else float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
