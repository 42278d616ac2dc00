"""The tuning of the engine: name, default, unit and meaning of each option. Flags have the same names and defaults."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Options:
    """How a peer takes global steps."""

    # The same at all peers of a run
    target_batch_size: int = 4096  # samples of a global step, of all peers together
    target_group_size: int = 256  # peers of a group at most
    average_state_every: int = 8  # global steps from one average of the parameters to the next
    max_grad_norm: float = 1.0  # to which the average is clipped, or with local updates the gradient of a local step
    gradient_compression: str = "float16"  # of rounds, a key of COMPRESSIONS
    state_compression: str = "float16"  # of the parameters in rounds, likewise
    weigh_equally: bool = False  # in a round each peer with samples weighs the same, instead of by its samples
    # Seconds before a step is due at which the search for its group starts, and for which a group waits for a late
    # peer; hivemind needs more than 3
    matchmaking_time: float = 5.0
    # Seconds after which a round ends with what has arrived, and for which a donor of a state may be silent. A peer
    # that is silent for a quarter of them, at least `matchmaking_time`, is left out; a slow one earlier (LATE_SECONDS)
    averaging_timeout: float = 60.0

    # This peer's own
    batch_size_per_step: int  # samples of a local step; `step` may be told others
    batch_size_lead: int = 0  # samples before the target at which the search for a group begins at the latest
    bandwidth: float | None = None  # upload in Mbit/s; None: measured in rounds
    delay_grad_averaging: bool = True  # compute the next gradients during a round
    delay_optimizer_step: bool = True  # and while the step is taken. Set both or the first to False
    load_state_compression: str = "float16"  # of the state that newcomers download from this peer
    load_state_timeout: float = 600.0  # seconds for the download of a state
    folder: Path | None = None  # on a disk, for the copies that others download; None: that for temporary files

    # How often this peer reports its progress, and reads that of the others
    min_refresh_period: float = 0.5  # least seconds between two reads, and between two reports of samples
    max_refresh_period: float = 30.0  # most seconds between two reads
    default_refresh_period: float = 3.0  # the same while no other peer reports any, or after a read that has failed
    expected_drift_peers: float = 3.0  # number of peers that are assumed to join during a global step
    expected_drift_rate: float = 0.2  # the same, as a fraction of the peers
    performance_ema_alpha: float = 0.1  # weight of the newest measurement in the average of samples per second
    metadata_expiration: float = 120.0  # seconds to the expiration of a report, at most 120

    def __post_init__(self):
        if self.delay_grad_averaging and not self.delay_optimizer_step:
            raise ValueError("delay_grad_averaging needs delay_optimizer_step")
