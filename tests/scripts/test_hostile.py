"""Attacks on a run of three unequal trainers: by outsiders with records and streams, and by members of its rounds."""

import re
import time

import pytest
from hivemind.utils.crypto import RSAPrivateKey
from safetensors.torch import load_file

from cotrain.training.checkpoints import list_checkpoints
from tests.support.attacks import ATTACKS
from tests.support.peers import BATCH_SIZE, Script, invite, join_together, read_jsonl, steps_of, wait_until

PACES = {"quick": 0.25, "usual": 0.5, "slow": 1.0}
NUM_SAMPLES = 2000  # of a measurement; they take the three trainers some 20 seconds
OUTSIDERS = {"records": "tests/support/hostile_peer.py", "streams": "tests/support/flooding_peer.py"}
OUTSIDERS |= {"eclipse": "tests/support/eclipsing_peer.py", "misfit": "tests/support/misfit_peer.py"}


def count_samples(folder) -> int:
    """Return the samples of the honest trainers that a round with others has applied."""
    rounds = [entry for name in PACES for entry in read_jsonl(folder / name / "rounds.jsonl")]
    return sum(entry["samples"] for entry in rounds if entry["outcome"] == "averaged")


class Run:
    """A monitor and three trainers, with the fraction of their samples that they apply without an attack.

    :param authority: signs the invitations of all peers, if the run has some
    :param num_samples, save_every: samples of a measurement, and steps of a checkpoint
    """

    def __init__(
        self, scripts, authority: RSAPrivateKey | None = None, num_samples: int = NUM_SAMPLES, save_every: int = 4
    ):
        self.scripts, self.authority, self.num_samples = scripts, authority, num_samples
        self.monitor = scripts.monitor("--save_checkpoint_step_interval", save_every, *self.invited("monitor"))
        self.common = (
            "--initial_peers", self.monitor.address, *steps_of(seconds=2, num_trainers=2), "--target_group_size", 8,
            "--averaging_timeout", 6, "--logging_steps", 1,
        )  # fmt: skip
        self.trainers = [self.start_trainer(name, pace=pace) for name, pace in PACES.items()]
        join_together(*self.trainers)
        wait_until(lambda: count_samples(scripts.folder) > 0, 120, "the first rounds")
        self.without = min(1.0, self.measure())  # more than all: samples from before the measurement were applied

    def invited(self, name: str) -> tuple:
        path = self.scripts.folder / f"{name}.invitation"
        return () if self.authority is None else ("--invitation", invite(self.authority, path))

    def start_trainer(self, name: str, **options) -> Script:
        return self.scripts.trainer(name, *self.common, *self.invited(name), **options)

    def count_computed(self) -> int:
        """Return the samples that the honest trainers have computed."""
        return sum(BATCH_SIZE * len(re.findall("Local step ", trainer.output)) for trainer in self.trainers)

    def measure(self) -> float:
        """Return the samples that rounds apply, as a fraction of those that are computed meanwhile."""
        computed, applied = self.count_computed(), count_samples(self.scripts.folder)
        wait_until(lambda: self.count_computed() >= computed + self.num_samples, 300, "the samples")
        return (count_samples(self.scripts.folder) - applied) / (self.count_computed() - computed)

    def check(self, attacker: Script, least: float = 0.9) -> None:
        """Check that the honest trainers apply as many samples as without the attack."""
        measured = []
        for _ in range(3):  # a step may end just after a measurement, or a busy machine exceed --averaging_timeout
            measured.append(self.measure() / self.without)
            if measured[-1] >= least:
                break
        assert max(measured) >= least, (measured, self.without)
        for script in (self.monitor, *self.trainers):
            assert script.process.poll() is None and "Traceback" not in script.output, script.output
            lines = script.output.splitlines()
            warnings = [line for line in lines if "WARN" in line and attacker.peer_id and attacker.peer_id in line]
            assert len(warnings) <= 12, warnings
        print(f"{attacker.log.stem}: {measured}")

    def count_together(self, since: float) -> float:
        """Return the fraction of the honest trainers' rounds since a time (`time.time`) that had all of them."""
        honest = {trainer.address.rpartition("/")[2] for trainer in self.trainers}
        rounds = [entry for name in PACES for entry in read_jsonl(self.scripts.folder / name / "rounds.jsonl")]
        groups = [entry.get("group", ()) for entry in rounds if entry["time"] > since]
        return sum(honest <= set(group) for group in groups) / len(groups)


def start_outsider(run: Run, name: str) -> Script:
    script = run.scripts.start(OUTSIDERS[name], "albert", run.monitor.address, log=name)
    script.wait_for("attacked [3-9] trainers")  # those that have been killed are in the DHT for a while
    script.peer_id = ""
    return script


def start_member(run: Run, name: str) -> Script:
    script = run.start_trainer(name, pace=0.5, env={"ATTACK": name})
    script.wait_for("Beginning optimizer step")
    script.peer_id = script.address.rpartition("/")[2]
    return script


def attack(run: Run, name: str) -> None:
    """Check that an attack costs the honest trainers less than a tenth of their samples, and a newcomer can join."""
    attacker = (start_outsider if name in OUTSIDERS else start_member)(run, name)
    newcomer = None
    try:
        run.check(attacker)
        newcomer = run.start_trainer(f"newcomer_{name}", pace=0.5)
        newcomer.wait_for("Loaded the state of step #")
        newcomer.wait_for(r"Averaged gradients with [3-5] peers")
    finally:
        for script in filter(None, (attacker, newcomer)):
            script.kill_all()


@pytest.mark.early
def test_large_join_requests_and_then_hostile_records_stop_neither_trainers_nor_monitor(scripts):
    """A leader sent requests of 4 MB on, in a message that no member accepted. In half of the rounds, one was alone.

    The writer of the records knows one address. Such records brought a run from 29 rounds a minute to 0.
    """
    run, since = Run(scripts), time.time()
    attack(run, "flood_requests")
    assert run.count_together(since) >= 0.8

    hostile = start_outsider(run, "records")
    run.check(hostile, least=0.8)
    newcomer = scripts.trainer("newcomer", *run.common)
    newcomer.wait_for("Loaded the state of step #")
    newcomer.wait_for(r"Averaged gradients with [34] peers")
    step = int(newcomer.wait_for(r"\bStep #(\d+)")[1])
    run.monitor.wait_for(rf"Step #{step}\t")
    records = scripts.metrics()
    assert [record["step"] for record in records] == list(range(1, len(records) + 1)), "none lost, false or repeated"
    assert all(5 < record["loss"] < 8 for record in records)
    assert list_checkpoints(scripts.folder / "monitor"), run.monitor.output


@pytest.mark.long
def test_node_that_hides_records_stops_no_round(scripts):
    """From half a minute on, each trainer was alone, the monitor saw nobody, and a newcomer began anew."""
    run = Run(scripts)
    hostile = start_outsider(run, "eclipse")
    hostile.wait_for("took [1-9]")
    time.sleep(30)  # the reports from before have expired, or are so old that nobody waits for their peers
    since = time.time()
    run.check(hostile, least=0.8)
    assert run.count_together(since) >= 0.8
    newcomer = run.start_trainer("newcomer", pace=0.5)
    newcomer.wait_for("Loaded the state of step #")
    newcomer.wait_for(r"Averaged gradients with [45] peers")


def test_stranger_with_another_model_keeps_no_run_from_beginning(scripts):
    """Each trainer that started ended after 5 s, with a code after which systemd does not start it again."""
    monitor = scripts.monitor()
    stranger = scripts.start(OUTSIDERS["misfit"], "albert", monitor.address, log="misfit")
    stranger.wait_for("attacked")
    trainer = scripts.trainer(
        "alice", "--initial_peers", monitor.address, *steps_of(seconds=2, num_trainers=1), pace=0.5
    )
    trainer.wait_for("None of them is an initial peer: starting without them")
    trainer.wait_for(r"\bStep #1\b")
    stranger.kill_all()


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("is_invited", [False, True], ids=["open", "invited"])
def test_no_attack_stops_the_honest_trainers(scripts, is_invited):
    run = Run(scripts, RSAPrivateKey() if is_invited else None)
    for name in ["stay_silent", "answer_two_faced"] if is_invited else ["streams", *ATTACKS]:
        attack(run, name)


def norm_of_newest_checkpoint(run: Run) -> float:
    path = list_checkpoints(run.scripts.folder / "monitor")[-1]
    return sum(float(tensor.norm()) ** 2 for tensor in load_file(path / "model.safetensors").values()) ** 0.5


@pytest.mark.early
def test_three_liars_at_once_change_no_model_and_stop_no_round(scripts):
    """A node that hides records, a leader of false groups, and a donor of a false state beside three honest trainers.

    The monitor saved what the first of them to be asked gave it.
    """
    run = Run(scripts, num_samples=500, save_every=1)
    wait_until(lambda: list_checkpoints(scripts.folder / "monitor"), 120, "a checkpoint")
    before = norm_of_newest_checkpoint(run)
    liars = [start_outsider(run, "eclipse")]
    liars += [start_member(run, name) for name in ("lead_takeover", "offer_false_state")]
    leader, donor = (re.escape(liar.peer_id) for liar in liars[1:])
    for trainer in run.trainers:
        trainer.wait_for(rf"{leader}\W* formed a false group")
    run.monitor.wait_for(f"(?:Postponed|Refused) the state that {donor} offers")
    run.check(liars[2], least=0.8)
    saved = run.monitor.output.count("Saved ")
    wait_until(lambda: run.monitor.output.count("Saved ") > saved, 120, "a later checkpoint")
    assert before / 1.2 < norm_of_newest_checkpoint(run) < 1.2 * before
    newcomer = run.start_trainer("newcomer", pace=0.5)
    # The leader lies about groups alone: the state that it offers is the one of the others.
    assert newcomer.wait_for(r"Loaded the state of step #\d+ from (\S+)")[1] != donor
    newcomer.wait_for(r"Averaged gradients with [3-6] peers")


@pytest.mark.long
@pytest.mark.parametrize("is_invited", [False, True], ids=["open", "invited"])
def test_false_leader_changes_no_model_and_is_named(scripts, is_invited):
    """In one step that it led, the parameters of all trainers became its own times -3, and the monitor saved them."""
    run = Run(scripts, RSAPrivateKey() if is_invited else None)
    wait_until(lambda: list_checkpoints(scripts.folder / "monitor"), 120, "a checkpoint")
    before = norm_of_newest_checkpoint(run)
    attacker = start_member(run, "lead_takeover")
    try:
        attacker.wait_for("LED step")
        for trainer in run.trainers:
            trainer.wait_for(rf"{attacker.peer_id}\W* formed a false group")
            assert ("'alice' (" in trainer.output) == is_invited, trainer.output
        run.check(attacker)
    finally:
        attacker.kill_all()
    assert before / 1.2 < norm_of_newest_checkpoint(run) < 1.2 * before
