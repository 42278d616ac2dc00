"""Samples in shards: a thread downloads those that a trainer will need, while it trains on others."""

import bisect
import itertools
import logging
from collections.abc import Collection, Iterable
from functools import lru_cache
from pathlib import Path

from datasets import Dataset

from cotrain.common.atomic_files import lock_folder
from cotrain.common.backoff import Backoff
from cotrain.common.errors import TemporaryError, UserError, describe
from cotrain.common.flags import format_size, parse_size
from cotrain.data.download import fetch_shard
from cotrain.data.loading import open_samples
from cotrain.data.manifest import Manifest
from cotrain.options import Adopted, DataOptions
from peerstep.peer.threads import PeriodicThread

logger = logging.getLogger(__name__)

WINDOW = 4  # shards whose samples are mixed
LOOK_PERIOD = 0.2
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 5.0, 60.0  # seconds between attempts to download a shard


class ShardedSamples:
    """Map-style dataset of the training text in shards, of which some are on disk. Workers get a copy."""

    def __init__(self, args: DataOptions, adopted: Adopted, manifest: Manifest):
        self.args, self.adopted, self.manifest, self.shards = args, adopted, manifest, manifest.shards
        self._starts = list(itertools.accumulate((shard.samples for shard in self.shards), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, number: int) -> dict:
        index = bisect.bisect_right(self._starts, number) - 1
        shard = self.shards[index]
        path = str(Path(self.args.dataset_path, shard.file))
        return _open_shard(path, self.manifest.objective, shard.samples)[number - self._starts[index]]

    def open_cache(self) -> "ShardCache":
        return ShardCache(self.args, self.adopted, self.manifest)


@lru_cache(maxsize=WINDOW)  # a file that is removed takes its place on the disk as long as it is open
def _open_shard(path: str, objective: str, num_samples: int) -> Dataset:
    return Dataset(open_samples([Path(path)], objective, num_samples), fingerprint=path)


class ShardCache(PeriodicThread):
    """Thread that keeps the shards on disk that `ask` names, in this order, as many as --data_cache has room for.

    :raises UserError: if there is no room for three, or another trainer uses the folder
    """

    def __init__(self, args: DataOptions, adopted: Adopted, manifest: Manifest):
        super().__init__(LOOK_PERIOD)
        self.args, self.adopted, self.manifest = args, adopted, manifest
        self.shards, self.limit = manifest.shards, args.data_cache
        largest, packed = (max(getattr(x, name) for x in self.shards) for name in ("unpacked", "bytes"))
        self._room = parse_size("--data_cache", self.limit) - packed
        # Besides the shards that are mixed, one stays for workers that still read from it, and the next one arrives.
        self.window = min(WINDOW, len(self.shards), self._room // largest - 2)
        if self.window < 1:
            needed = (3 * largest + packed) / 1e6
            raise UserError(f"--data_cache {self.limit}: the shards of this data need {needed:.0f}MB or more")
        self.lock = lock_folder(Path(args.dataset_path, "train"), "--dataset_path")
        self.lock.__enter__()  # until the process ends: another trainer would remove the shards of this one
        files = map(self._path, range(len(self.shards)))
        sizes = [file.stat().st_size if file.exists() else -1 for file in files]
        self.here = {index for index, shard in enumerate(self.shards) if sizes[index] == shard.unpacked}
        if args.dataset_url is None and len(self.here) < len(self.shards):
            text = f"{len(self.here)} of {len(self.shards)} shards are in '{args.dataset_path}'"
            raise UserError(f"{text}: pass --dataset_url with the address of the archive beside them")
        self.wanted: list[int] = []
        self.refused: set[int] = set()  # by the host, or damaged there
        self.lost: set[int] = set()  # those of them after which another shard came
        self.fault: Exception | None = None
        self._backoff = Backoff(FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS)

    def _path(self, index: int) -> Path:
        return Path(self.args.dataset_path, self.shards[index].file)

    def ask(self, shards: Iterable[int]) -> None:
        """Choose the shards to have, most urgent first. Those that do not fit are left out, or removed for others."""
        wanted = list(dict.fromkeys(shards))
        sizes = list(itertools.accumulate(self.shards[index].unpacked for index in wanted))
        self.wanted = wanted[: bisect.bisect_right(sizes, self._room)]

    def has(self, shards: Collection[int]) -> bool:
        """Return whether shards are here, except those that are lost.

        :raises UserError: if there is none at all, because the download fails
        """
        if self.fault is not None and not self.here and (len(self.refused) != 1 or len(self.shards) == 1):
            raise self.fault
        return self.here.union(self.lost).issuperset(shards)

    def work(self) -> None:
        """Download the most urgent shard that is missing; those that were refused at last."""
        wanted = self.wanted
        missing = (index for index in wanted if index not in self.here)
        index = min(missing, key=self.refused.__contains__, default=None)
        for old in self.here.difference(wanted):
            self.here.remove(old)
            self._path(old).unlink(missing_ok=True)
        if index is None:
            return
        try:
            fetch_shard(self.args, self.adopted, self.shards[index], self.manifest)
        except Exception as error:  # also a full disk; training continues on the shards that are here
            self.fault, self.period = error, self._backoff.fail()
            if not isinstance(error, TemporaryError):
                self.refused.add(index)
            kept = f"training continues on the {len(self.here)} shards that are here"
            logger.warning(f"{describe(error)}; {kept}, and the download in {self.period:.0f} s")
        else:
            self.here.add(index)
            self.refused.discard(index)
            self.lost = self.refused.copy()
            self.fault, self.period = None, LOOK_PERIOD
            self._backoff.reset()

    def describe(self) -> str:
        here = self.here.copy()
        used = sum(self.shards[index].unpacked for index in here)
        text = f"{len(here)} of {len(self.shards)} shards here, {format_size(used)} of at most {self.limit}"
        return text if self.fault is None else f"{text}; no new ones: {describe(self.fault)}"
