"""What to do about global steps that are short beside their rounds."""

import math

from peerstep.step.pace import SHORT


def advise_target(target: int, share: float) -> str:
    """Return one line about rounds that take a share of a step above SHORT, with the target for which it is SHORT."""
    needed = 10 * math.ceil(target * share / SHORT / 10)
    return (
        f"a round takes {share:.0%} of a step, and gradients computed meanwhile are of old parameters: "
        f"--target_batch_size {needed} makes it {SHORT:.0%}, see docs/tuning.md#what-a-delay-costs"
    )
