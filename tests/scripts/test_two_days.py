"""Two days of an organiser and three unlike volunteers: everything that anybody is told is what happened.

All are stopped at once in the evening, and start again from their folders in the morning.
"""

import signal
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from hivemind.utils.crypto import RSAPrivateKey

from cotrain.admission.invitations import make_invitation, save_invitation
from tests.support.namespaces import Host
from tests.support.peers import ALTERED, BATCH_SIZE, Script, Scripts, reserve_maddr, steps_of, wait_until
from tests.support.told import Monitor, Trainer, compare, read_told

CLIENT = "dave"  # behind NAT where there are hosts, and with a wrong clock
CLOCK = -3600.0  # seconds by which it is ahead
EVENINGS = signal.SIGINT, signal.SIGTERM
ALONE = "proceeding with local gradients"


class TwoDays:
    """The peers, which are invited by name and keep their folders overnight.

    :param homes: by name, the scripts of each peer's host
    :param paces: by name, seconds of a trainer's local step
    """

    def __init__(self, folder: Path, homes: dict[str, Scripts], address: str, paces: dict[str, float]):
        self.folder, self.homes, self.address, self.paces = folder, homes, address, paces
        self.running: dict[str, Script] = {}
        authority, self.peer_ids = RSAPrivateKey(), {}
        for name in ("monitor", *paces):
            invitation = make_invitation(authority, name, days=1)
            save_invitation(invitation, self._invitation(name))
            self.peer_ids[name] = str(invitation.peer_id)

    def _invitation(self, name: str) -> Path:
        return self.folder / f"{name}.invitation"

    def start(self, name: str) -> None:
        """Start a peer as its owner would: trainers take the settings of the run from the monitor."""
        scripts, invited = self.homes[name], ("--invitation", self._invitation(name))
        if name == "monitor":
            script = scripts.monitor(
                "--run_id", "days", "--host_maddrs", self.address, *invited, *steps_of(seconds=5, num_trainers=3),
                "--target_group_size", 3, "--matchmaking_time", 4, "--averaging_timeout", 30, "--warmup_steps", 0,
                "--learning_rate", 0.03, "--save_checkpoint_step_interval", 2, "--average_state_every", 2,
                "--refresh_period", 4,
            )  # fmt: skip
        else:
            script = scripts.start(
                ALTERED, "run_trainer.py", "--initial_peers", self.running["monitor"].address, *invited,
                "--tokenizer_path", scripts.data / "tokenizer", "--dataset_path", scripts.data / "dataset",
                "--output_dir", self.folder / name, "--per_device_train_batch_size", BATCH_SIZE,
                "--gradient_accumulation_steps", 1, "--dataloader_num_workers", 0, "--max_refresh_period", 2,
                *(["--client_mode"] if name == CLIENT else []), log=name,
                env={"PACE": str(self.paces[name])} | ({"CLOCK": str(CLOCK)} if name == CLIENT else {}),
            )  # fmt: skip
        self.running[name] = script

    def begin(self) -> None:
        for name in ("monitor", *self.paces):
            self.start(name)

    def train(self, number: int = 3) -> None:
        """Wait until all trainers have averaged so many times more, which the monitor has not read yet."""
        before = {name: self._count_rounds(name) for name in self.paces}

        def have_averaged() -> bool:
            for peer in self.running.values():
                assert peer.process.poll() is None, peer.output
            return all(self._count_rounds(name) >= before[name] + number for name in self.paces)

        wait_until(have_averaged, 240, "steps of all trainers")

    def _count_rounds(self, name: str) -> int:
        return self.running[name].output.count(f"Averaged gradients with {len(self.paces)} peers")

    def end(self, number: int) -> None:
        """Send a signal to all peers at once, and wait for their ends."""
        for script in self.running.values():
            script.process.send_signal(number)
        for script in self.running.values():
            assert script.wait(60) == 0, script.output
            script.assert_nothing_left()

    def read_told(self) -> tuple[Monitor, list[Trainer]]:
        return read_told(self.folder, {name: self.peer_ids[name] for name in self.paces})


@pytest.mark.early
def test_all_are_told_the_same(scripts):
    """On one machine, where all ends and starts are in order."""
    paces = {"alice": 0.25, "slow": 0.5, CLIENT: 0.3}
    days = TwoDays(scripts.folder, dict.fromkeys(("monitor", *paces), scripts), reserve_maddr(), paces)
    for evening in EVENINGS:
        days.begin()
        days.train()
        days.end(evening)
    monitor, trainers = days.read_told()
    assert compare(monitor, trainers) == []
    assert all(day.thanks for trainer in trainers for day in trainer.days)


@pytest.mark.long
def test_all_are_told_the_same_after_accidents(internet, tmp_path, data, launcher):
    """On four hosts. A trainer's line fails, and later the trainer and the monitor are killed.

    The local steps of the one with a thin line take longer than the monitor waits for a trainer that has no part.
    """
    paces = {"alice": 0.25, "thin": 11.0, CLIENT: 0.3}
    hosts: dict[str, Host] = {name: internet.add_public() for name in ("monitor", "alice", "thin")}
    hosts[CLIENT] = internet.add_home()
    internet.limit(hosts["thin"], upload=2.0, download=10.0)
    with ExitStack() as stack:
        homes = {
            name: stack.enter_context(closing(Scripts(tmp_path, data, host.namespace, launcher)))
            for name, host in hosts.items()
        }
        days = TwoDays(tmp_path, homes, f"/ip4/{hosts['monitor'].address}/tcp/31337", paces)
        days.begin()
        days.train()
        internet.divide(hosts["alice"])
        days.running["alice"].wait_for(f"(?s){ALONE}.*{ALONE}", 240)
        internet.divide()
        days.running["alice"].wait_for(f"(?s){ALONE}.*Averaged gradients with 3 peers", 240)
        days.end(EVENINGS[0])
        days.begin()
        days.train(2)
        for victim in ("alice", "monitor"):
            # A step that is killed before it is stored is told in a log alone.
            newest = max(days.running["alice"].steps)
            wait_until(lambda newest=newest: homes["monitor"].newest_step() >= newest, 120, "the report of its step")
            days.running[victim].kill()
            days.start(victim)
            days.train(2)
        days.end(EVENINGS[1])
        assert compare(*days.read_told()) == []
