"""Choose mode, batch size and compression of a run from the speed of its peers and of their connections.

    python -m lib.training.plan --peers 8 --upload 10 --samples_per_second 8

The formula of a round is fitted to rounds that benchmarks/home_lines.py has measured. It is for equal peers that
accept incoming connections; the slowest connection of a run determines its rounds.
"""

import math
from dataclasses import MISSING, dataclass, replace

from arguments import GradientCompression, OptimizerArguments
from lib.common.checks import require, require_positive
from lib.common.cli import parse_arguments
from lib.common.errors import run_script
from lib.common.flags import flag

# Constants of the formula, fitted by benchmarks/home_lines.py to ALBERT-large (17.85 M parameters), 2 and 4 peers,
# 5 to 20 Mbit/s and no latency. Residuals: at most 7 % for 22 of 24 points, 9 and 12 % for two.
FIXED_SECONDS = 0.2  # of a round, whatever the connection. The search for the group begins before the step is due
# Seconds of a round / seconds for its tensors at full rate. Plain TCP in both directions at once has 1.14 there.
SLOWDOWN = 1.22
OVERHEAD = 1.02  # bytes on the line / bytes of the tensors
UPDATE_SECONDS = 0.4  # of the optimizer after the round

BITS = {
    "none": 32, "float16": 16, "scaled_float16": 16,
    "uniform8": 8, "quantile8": 8, "blockwise8": 8.06, "blockwise4": 4.25,
}  # fmt: skip
PARAMETER_BITS = 16  # with the default of --state_compression
# A round must end some time before the next one is due: peers do not compute at a constant rate.
MARGIN = 1.25
MIN_STEP_SECONDS = 10.0
# Peers end a round at different moments, relative to its time, and the leader of the next group waits for late peers.
# Of 4 peers with rounds of 95 s, one was 12 s late and missed the next round with the default of 5 s.
LATENESS = 1 / 6
COMPRESSIONS = ("float16", "blockwise8")  # those to recommend, the most accurate first
MIN_LOCAL_STEPS, MAX_LOCAL_STEPS = 50, 500  # of a global step with local updates; DiLoCo has 500
# --average_state_every with local updates. Parameters of 24 global steps were as far apart as with parameters in each
# round, 0.05 % of the norm, with half of the bytes (benchmarks/drift.py).
LOCAL_STATE_EVERY = 4


@dataclass(frozen=True)
class Line:
    """The connection of each peer, in Mbit/s."""

    upload: float
    download: float


@dataclass(frozen=True)
class Mode:
    """What peers send in a round.

    :param compression: value of --gradient_compression
    :param state_every: value of --average_state_every
    """

    local_updates: bool = False
    compression: GradientCompression = "float16"
    state_every: int = 1

    @property
    def flags(self) -> str:
        """The flags of this mode, without those that have their default."""
        flags = ["--local_updates"] if self.local_updates else []
        flags += [f"--gradient_compression {self.compression}"] if self.compression != "float16" else []
        flags += [f"--average_state_every {self.state_every}"] if self.state_every != 1 else []
        return " ".join(flags)

    def bits(self, with_parameters: bool) -> float:
        """Bits that a round has for each parameter of the model."""
        return BITS[self.compression] + PARAMETER_BITS * with_parameters

    @property
    def mean_bits(self) -> float:
        return self.bits(False) + (self.bits(True) - self.bits(False)) / self.state_every


def tensor_bytes(elements: int, peers: int, bits: float) -> float:
    """Return the bytes that each of N equal peers sends, and receives, in a round: 2 (N-1)/N copies of the tensors.

    Butterfly all-reduce: each peer reduces one part of the tensors. It sends every other part to the peer that reduces
    that part, and the average of its part to all other peers.

    :param elements: parameters of the model
    :param bits: bits for each element
    """
    return 2 * (peers - 1) / peers * elements * bits / 8


def line_seconds(elements: int, peers: int, bits: float, line: Line) -> float:
    """Return the seconds that the tensors of a round take on a line of that rate without any overhead."""
    return tensor_bytes(elements, peers, bits) * 8 / (1e6 * min(line.upload, line.download))


def round_seconds(elements: int, peers: int, bits: float, line: Line) -> float:
    """Return the seconds from a due global step to the averages; 0 for one peer."""
    return FIXED_SECONDS + SLOWDOWN * line_seconds(elements, peers, bits, line) if peers > 1 else 0.0


@dataclass(frozen=True)
class Plan:
    """A run of equal peers.

    :param elements: parameters of the model
    :param speed: samples per second of one peer
    :param batch: target batch size
    :param local_step: samples of a local step
    """

    elements: int
    peers: int
    line: Line
    speed: float
    mode: Mode
    batch: int
    local_step: int = 8

    @property
    def round(self) -> float:
        """Seconds of a round, mean of those with and without parameters."""
        return round_seconds(self.elements, self.peers, self.mode.mean_bits, self.line)

    @property
    def longest_round(self) -> float:
        return round_seconds(self.elements, self.peers, self.mode.bits(True), self.line)

    @property
    def compute(self) -> float:
        """Seconds in which the peers compute the target batch."""
        return self.batch / (self.peers * self.speed)

    @property
    def step(self) -> float:
        """Seconds of a global step if rounds overlap with computation."""
        return max(self.compute, self.round + UPDATE_SECONDS)

    @property
    def actual_batch(self) -> float:
        """Samples of a global step if rounds overlap with computation.

        Peers continue to compute during a round. If it is longer than the target batch takes, the next step has more
        samples than the target.
        """
        return self.step * self.peers * self.speed

    @property
    def waiting_share(self) -> float:
        """Fraction of the time computing if peers wait for each round, --no_delay_grad_averaging."""
        return self.compute / (self.compute + self.round + UPDATE_SECONDS)

    @property
    def local_steps(self) -> float:
        """Local steps of each peer in a global step."""
        return self.batch / (self.peers * self.local_step)

    @property
    def sent(self) -> float:
        """Bytes that a peer sends in a round, mean of those with and without parameters."""
        return OVERHEAD * tensor_bytes(self.elements, self.peers, self.mode.mean_bits)

    @property
    def sent_per_1000(self) -> float:
        """Bytes that a peer sends for 1,000 samples that it computes, if global steps have the target batch."""
        return self.sent * 1000 * self.peers / self.batch

    @property
    def sent_per_hour(self) -> float:
        return self.sent * 3600 / self.step

    @property
    def is_hidden(self) -> bool:
        """Whether each round ends well before the next one is due."""
        return self.compute >= max(MIN_STEP_SECONDS, MARGIN * (self.longest_round + UPDATE_SECONDS))

    def hidden_batch(self) -> int:
        """Return the smallest batch whose rounds end well before the next one is due."""
        seconds = max(MIN_STEP_SECONDS, MARGIN * (self.longest_round + UPDATE_SECONDS))
        return math.ceil(seconds * self.peers * self.speed)

    def waiting_batch(self, share: float) -> int:
        """Return the smallest batch with a fraction `share` of the time computing if peers wait for each round."""
        seconds = share / (1 - share) * (self.round + UPDATE_SECONDS)
        return math.ceil(seconds * self.peers * self.speed)


def recommend(plan: Plan) -> Plan:
    """Return the plan in the first mode whose rounds end before the next one is due.

    Without local updates the batch is that of `plan`. If this is too fast for the connections, local updates get a
    batch of MIN_LOCAL_STEPS local steps of each peer, or what a round needs, rounded up to two digits.
    """
    for compression in COMPRESSIONS:
        candidate = replace(plan, mode=Mode(compression=compression))
        if candidate.is_hidden:
            return candidate
    for compression in COMPRESSIONS:
        candidate = replace(plan, mode=Mode(True, compression, LOCAL_STATE_EVERY))
        batch = max(candidate.hidden_batch(), MIN_LOCAL_STEPS * plan.peers * plan.local_step)
        digit = 10 ** max(0, math.floor(math.log10(batch)) - 1)
        candidate = replace(candidate, batch=math.ceil(batch / digit) * digit)
        if candidate.local_steps <= MAX_LOCAL_STEPS:
            break
    return candidate


def describe(plan: Plan) -> list[str]:
    """Describe a plan in lines of text."""
    name = "Local updates" if plan.mode.local_updates else "Ordinary mode"
    timeout = max(60, 10 * math.ceil(plan.longest_round / 5))
    flags = f"{plan.mode.flags} --target_batch_size {plan.batch} --averaging_timeout {timeout}".strip()
    if (patience := math.ceil(plan.longest_round * LATENESS)) > OptimizerArguments.matchmaking_time:
        flags += f" --matchmaking_time {patience}"
    lines = [
        f"{name}: {flags}",
        f"  round: {plan.round:.0f} s; a peer sends {plan.sent / 1e6:.0f} MB, {plan.sent_per_hour / 1e9:.1f} GB/h",
        f"  global step: {plan.step:.0f} s; the batch is {plan.local_steps:.0f} local steps of {plan.local_step} "
        "samples at each peer",
    ]
    if plan.compute < plan.step:
        lines.append(
            f"  a round takes longer than the target batch: steps have {plan.actual_batch:.0f} samples instead"
        )
    lines.append(
        f"  time computing: 100 %, since rounds overlap with local steps; {plan.waiting_share:.0%} with "
        "--no_delay_grad_averaging --no_delay_optimizer_step"
    )
    return lines


@dataclass
class PlanArguments:
    """The run."""

    _argument_group_name = "Run"

    peers: int = flag(MISSING, "Number of trainers")
    upload: float = flag(MISSING, "Upload rate of a trainer in Mbit/s; if they differ, the lowest")
    samples_per_second: float = flag(
        MISSING, "Speed of one trainer, see its line 'Performance: X samples/sec'; if they differ, the mean"
    )
    download: float | None = flag(None, "Download rate in Mbit/s. Default: not the limit")
    model: str = flag("albert-large-v2", "Model, as in --model_name_or_path")
    target_batch_size: int = flag(4096, "Samples of a global step without local updates")
    batch_size_per_step: int = flag(
        8, "Samples of a local step: --per_device_train_batch_size x --gradient_accumulation_steps"
    )

    def __post_init__(self):
        require_positive(self, "peers", "upload", "download", "samples_per_second", "target_batch_size",
                          "batch_size_per_step")  # fmt: skip
        require(self.peers >= 2, f"--peers must be 2 or more, got {self.peers}")


def count_parameters(name: str) -> int:
    """Return the number of trained parameters of a model.

    :param name: value of --model
    :raises UserError: if there is no configuration of this name
    """
    import torch  # the import takes seconds, which --help does not need

    from lib.training.model import build_model, read_config

    with torch.device("meta"):
        model = build_model(read_config(name, "--model"), "")
    return sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)


def main() -> None:
    (args,) = parse_arguments((PlanArguments,), __doc__)
    line = Line(args.upload, args.download or math.inf)
    elements = count_parameters(args.model)
    plan = Plan(elements, args.peers, line, args.samples_per_second, Mode(), args.target_batch_size,
                args.batch_size_per_step)  # fmt: skip
    speed = args.peers * args.samples_per_second
    print(f"{args.model}: {elements / 1e6:.2f} M parameters")
    print(f"{args.peers} peers compute {speed:g} samples/s together and send {args.upload:g} Mbit/s each\n")
    best = recommend(plan)
    print("Recommended")
    print("\n".join(describe(best)))
    if best != plan:
        print("\nInstead of the defaults")
        print("\n".join(describe(plan)))


if __name__ == "__main__":
    run_script(main)
