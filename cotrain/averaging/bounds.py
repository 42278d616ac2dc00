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


@dataclass(frozen=True)
class Bounds:
    """Bounds on the contribution of an honest peer to a round."""

    weight: float = math.inf  # samples
    gradient_norm: float = 0.0  # of a whole contribution, and so of each part; 0: no bound
    # Root mean square, per element, by which a parameter part may differ from this peer's own part, in addition to
    # half of the own part's norm. None: no reference (the peer is an auxiliary peer or missed an update)
    parameter_step: float | None = None
    compares_norms: bool = False  # a gradient is also bounded by those of the other senders, see outliers.py

    def find_violation(
        self, info: CompressionInfo, part: torch.Tensor, own_part: torch.Tensor, weight: float
    ) -> str | None:
        """Describe how a part from another peer violates the bounds; None if it does not."""
        norm = norm_of(part)
        if not math.isfinite(norm):
            return "values that are not finite"
        if not MIN_WEIGHT <= weight <= self.weight:
            return f"a weight of {weight:g}, the bound is {self.weight:g}"
        if info.role == TensorRole.GRADIENT:
            limit = NORM_TOLERANCE * self.gradient_norm + 1e-6 if self.gradient_norm else MAX_GRADIENT_NORM
            return f"a gradient of norm {norm:.3g}, the bound is {limit:.3g}" if norm > limit else None
        scale = math.sqrt(part.numel())
        if norm > MAX_RMS * scale:
            return f"parameters of norm {norm:.3g}"
        if self.parameter_step is not None and weight > MIN_WEIGHT:
            distance = norm_of(part - own_part)
            bound = 0.5 * norm_of(own_part) + self.parameter_step * scale
            if distance > bound:
                return f"parameters at a distance of {distance:.3g} from this peer's, the bound is {bound:.3g}"
        return None


def norm_of(tensor: torch.Tensor) -> float:
    """Compute the L2 norm in double precision: squares of untrusted values overflow in single precision."""
    return float(torch.linalg.vector_norm(tensor, dtype=torch.float64))
