"""Order of a peer's samples, which lasts across restarts."""

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sized
from functools import partial
from pathlib import Path

import numpy as np
from torch.utils.data import Sampler

from cotrain.common.json_file import JsonFile
from cotrain.common.seeds import derive_seed
from cotrain.data.own_samples import OwnSamples

logger = logging.getLogger(__name__)

BLOCK_STEPS = 32  # local steps whose samples are marked as used at a time
LOOK_PERIOD = 0.2
PATIENCE = 20.0  # seconds of waiting for a shard, after which samples of others are repeated


class PassOrder:
    """Random order of the samples in one pass: an order of the shards, of which data that is not in shards has one.

    With W shards in the window, a shard is divided among W stages: each stage mixes parts of W shards, and needs one
    new shard. So the first stage needs one shard alone.

    :param key: the peer ID, the seed and the number of the pass, on which the order depends
    """

    def __init__(self, sizes: list[int], window: int, *key: object):
        self.sizes, self.window, self._key = sizes, window, key
        self.starts = [0, *itertools.accumulate(sizes)]
        self.shards = self.generator().permutation(len(sizes)).tolist()
        self.num_stages = len(sizes) + window - 1

    def generator(self, *parts: object) -> np.random.Generator:
        return np.random.default_rng(derive_seed(*self._key, *parts))

    def divide(self, stage: int) -> tuple[int, list[tuple[int, int, int]]]:
        """Return what a stage mixes: shards, each with the bounds of its part; and how often the data has ended."""
        repetition, newest = divmod(stage, self.num_stages)
        parts = [(self.shards[newest - k], k) for k in range(self.window) if 0 <= newest - k < len(self.shards)]
        bounds = [(x, self.sizes[x] * k // self.window, self.sizes[x] * (k + 1) // self.window) for x, k in parts]
        return repetition, bounds

    def find_stage(self, position: int) -> tuple[int, int]:
        """Return the stage of a position, and the number of samples before it in the stage."""
        for stage in itertools.count():
            length = sum(stop - start for _, start, stop in self.divide(stage)[1])
            if position < length:
                return stage, position
            position -= length


class PeerSampler(Sampler):
    """Samples in a random order that differs between peers and passes: each once in a pass, also after restarts.

    Samples are marked as used in blocks before they are used. After a restart, the rest of a block is left out until
    the next pass; none is repeated.

    :param batch_size_per_step: samples of a local step. The length of a pass is a multiple of it: a pass omits the
        last samples of its order or, if the data has fewer samples, repeats some. The Trainer would make a local step
        of the remainder at the end of a pass, which hivemind's optimizer would count as a full one.
    :param path: file for the position. None: a restart begins the first pass again
    :param should_stop: ends the process while it waits for a shard
    """

    def __init__(
        self,
        samples: Sized,
        peer_id: str,
        seed: int,
        batch_size_per_step: int = 1,
        path: Path | None = None,
        should_stop: Callable[[], bool] = bool,
    ):
        self.samples, self.step_size, self.should_stop = samples, batch_size_per_step, should_stop
        self.file = None if path is None else JsonFile(path)
        self.cache = samples.open_cache() if hasattr(samples, "open_cache") else None
        sizes = [len(samples)] if self.cache is None else [shard.samples for shard in self.cache.shards]
        window = 1 if self.cache is None else self.cache.window
        self._draw = partial(PassOrder, sizes, window, peer_id, seed)
        self.passes = self.position = self._marked = 0
        self.order = self._draw(0)
        if self.file is not None and (kept := self.file.load(lambda kept: tuple(map(int, kept)))):
            self.passes, self.position, *data = kept
            self._marked, self.order = self.position, self._draw(self.passes)
            if self.position >= len(self) or data != [len(samples), window]:  # of another order
                self._begin_pass()
        self.began, self.waited, self.num_repeated = time.monotonic(), 0.0, 0
        self._plan: list[int] = []
        self._last_shards: list[int] = []
        if self.cache is not None:
            self._last_shards = sorted(self.cache.here)[:1]  # one stays: the host may be away
            self._ask(self.order.find_stage(self.position)[0])
            self.cache.start()

    def __len__(self) -> int:
        return max(1, self.order.starts[-1] // self.step_size) * self.step_size

    def _begin_pass(self) -> None:
        self.passes, self.position, self._marked = self.passes + 1, 0, 0
        self.order = self._draw(self.passes)

    def __iter__(self) -> Iterator[int]:
        if self.position >= len(self):
            self._begin_pass()
        order = self.order
        first, skipped = order.find_stage(self.position)
        for stage in itertools.count(first):
            if self.cache is not None:
                yield from self._await_shards(stage)
            numbers, (repetition, bounds) = [], order.divide(stage)
            for shard, start, stop in bounds:
                source = next(x for x in [shard, *self._plan] if self.cache is None or x in self.cache.here)
                drawn = order.generator(repetition, shard).permutation(order.sizes[source])
                numbers.append(order.starts[source] + np.resize(drawn, order.sizes[shard])[start:stop])
                if source != shard:
                    logger.warning(f"A shard is left out: {stop - start:,} samples of others come again instead")
                    self.num_repeated += stop - start
            numbers = order.generator("stage", stage).permutation(np.concatenate(numbers))
            for number in numbers[skipped:].tolist():
                if self.position >= len(self):
                    return
                if self.position >= self._marked:
                    self._mark()
                self.position += 1
                yield number
            skipped = 0

    def _mark(self) -> None:
        """Mark the next block of samples as used."""
        self._marked = min(self.position + BLOCK_STEPS * self.step_size, len(self))
        if self.file is not None:
            self.file.save([self.passes, self._marked, self.order.starts[-1], self.order.window])

    def _ask(self, stage: int) -> list[int]:
        """Tell the cache which shards are needed from a stage on, and return those of the stage."""
        order = self.order
        shards = [shard for shard, *_ in order.divide(stage)[1]]
        later = order.shards[stage % order.num_stages + 1 :] + self._draw(self.passes + 1).shards
        self._plan = [*shards, *self._last_shards, *later]  # workers may still read from the last ones
        self.cache.ask(self._plan)
        return shards

    def _await_shards(self, stage: int) -> Iterator[int]:
        """Wait for the shards of a stage. After PATIENCE seconds, yield local steps of samples of others meanwhile."""
        old, needed, began = self._last_shards, self._ask(stage), time.monotonic()
        generator, num_repeated = self.order.generator("repeat", stage), self.num_repeated
        self._last_shards = needed
        while not self.cache.has(needed):
            if self.should_stop():
                raise SystemExit(0)
            here = [shard for shard in [*old, *needed] if shard in self.cache.here]
            if not here or time.monotonic() - began < PATIENCE:
                time.sleep(LOOK_PERIOD)
                self.waited += LOOK_PERIOD
            else:
                if self.num_repeated == num_repeated:
                    logger.warning(f"No new shard: training again on samples of {len(set(here))} that are here")
                for shard in generator.choice(here, self.step_size).tolist():
                    self.num_repeated += 1
                    yield self.order.starts[shard] + int(generator.integers(self.order.sizes[shard]))
        if self.num_repeated > num_repeated:
            logger.info(f"A new shard is here, after {self.num_repeated - num_repeated} samples that came again")

    def describe(self) -> str:
        """Return one line about the position, and about the shards if there are any."""
        text = f"{self.position / len(self):.0%} of pass {self.passes + 1}"
        if isinstance(self.samples, OwnSamples):
            return f"{text}; {self.samples.describe(self.passes * len(self) + self.position)} so far"
        if self.cache is None:
            return text
        waited = self.waited / max(1.0, time.monotonic() - self.began)
        return f"{text}; {self.cache.describe()}; {waited:.1%} of the time waiting, {self.num_repeated} samples again"
