"""Publishes the settings of a run, so that newcomers find them at any peer and the run does not need its organiser."""

import time
from collections.abc import Mapping
from dataclasses import dataclass

from hivemind.utils import get_logger

from cotrain.common.errors import UserError
from cotrain.options import ModelOptions, TrainerOptions
from cotrain.peer.adoption import Entry
from cotrain.peer.signed_settings import KEY, SETTINGS, TASK, RunConfig, find_kept_file
from peerstep.local_peer import LocalPeer
from peerstep.reports.records import store_record

logger = get_logger(__name__)


@dataclass
class RunConfigRelay:
    """Publishes a run's signed settings, so that newcomers find them at any peer."""

    peer: LocalPeer
    config: RunConfig | None
    lifetime: float  # seconds until the record expires
    is_organiser: bool = False  # whether this peer signs the settings, and may change them
    _stored: tuple[RunConfig | None, float] = (None, 0.0)  # what was published last, and when it is due again

    @classmethod
    def of_run(cls, peer: LocalPeer, args: TrainerOptions) -> "RunConfigRelay":
        """Return the relay of a trainer that has joined a run, or begins one and is its organiser."""
        relay = cls(peer, None, args.collaboration.statistics_expiration)
        if not args.collaboration.initial_peers:
            stated = {name: getattr(part, name) for part in args for name in SETTINGS if hasattr(part, name)}
            try:
                relay.config = RunConfig.sign(stated, peer.private_key)
            except UserError as error:
                logger.warning(f"Newcomers need the flags of this trainer, which publishes no settings: {error}")
            return relay
        relay.config = RunConfig.load(find_kept_file(args))
        return relay

    @classmethod
    def of_monitor(
        cls, peer: LocalPeer, entry: Entry, stated: Mapping[str, object], lifetime: float
    ) -> "RunConfigRelay":
        """Return the relay of a monitor, which as the organiser signs the flags that its command line states.

        :raises UserError: if they cannot be published
        """
        if not entry.is_organiser:
            return cls(peer, entry.config, lifetime)
        (model,) = [args for args in entry.arguments if isinstance(args, ModelOptions)]
        found = {TASK: model.task_sha256, "model_revision": model.model_revision}  # the revision that was loaded
        own = {"run_id": peer.run_id, **stated, **{name: x for name, x in found.items() if x is not None}}
        return cls(peer, RunConfig.sign(own, peer.private_key), lifetime, is_organiser=True)

    def publish(self, page: str | None = None) -> None:
        """Publish the settings, if there are any, once in a third of their lifetime and whenever they have changed.

        :param page: setting of the run that the organiser may learn after its start
        """
        if self.is_organiser and self.config is not None and self.config.settings.get("page") != page:
            self.config = RunConfig.sign({**self.config.settings, "page": page}, self.peer.private_key)
        stored, due_at = self._stored
        if self.config is not None and (self.config is not stored or time.monotonic() >= due_at):
            self._stored = self.config, time.monotonic() + self.lifetime / 3
            store_record(self.peer.dht, KEY, self.peer.public_key, self.config.record, self.lifetime)
