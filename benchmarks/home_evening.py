#!/usr/bin/env python3
"""An evening of volunteers at home: what it is worth in each mode, or what it withstands.

    benchmarks/home_evening.py --train_file my.txt --folder results
    benchmarks/home_evening.py --attacks --minutes 60

Each trainer is on a host with its own line, and micro-batches are paced. Times are those of the evening, three times
those measured. Prints the figures of each evening as JSON, with the loss of the first trainer on held-out text by
minute and by applied samples. Fails if a peer has ended by itself or logged a traceback. Needs root.

Eight trainers in each mode: a third of the size in everything that takes time. A model of 1.4 million parameters on
lines of 3.2 Mbit/s up and 24.6 down has the rounds of ALBERT-large at 14.7 and 112 Mbit/s in a third of the time. Two
trainers have a third of these rates. A packet takes 23 ms of the evening to another home. Each ten minutes a trainer
leaves, every other one killed, and another joins; a line stalls for a minute. Needs 8 GB of memory and 1.5 cores.

With --attacks, five unequal trainers: one has a slow line, one is a client behind NAT, and the clock of one is wrong.
Six times a trainer leaves, every other one killed, and returns. The monitor's machine restarts. A peer sends NaN,
another one writes hostile records, and a trainer freezes. The network is divided, the monitor with the smaller part.
Meanwhile, one process trains on as many samples per step at a low priority. Also fails if the parameters of the peers
differ at the end, or if the loss is far from that of the one process. Needs 60 minutes and 1.2 cores.
"""

import argparse
import itertools
import json
import math
import os
import shutil
import signal
import sys
import time
from collections import defaultdict
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil
import torch

from benchmarks.low_communication import TextTask
from benchmarks.round_records import PeerRecords, read_records, summarize
from benchmarks.swarm import BATCH_SIZE, open_folder
from cotrain.training.builders import build_param_groups
from cotrain.training.checkpoints import STATE_FILE, SavedState, list_checkpoints, load_training_state
from peerstep.peer.processes import guard_children
from tests.support.launcher import Launcher
from tests.support.namespaces import Host, Internet, why_unavailable
from tests.support.peers import ALTERED, Script, Scripts, prepare_data, read_jsonl, wait_until
from tests.support.state import flat

MODEL = {
    "model_type": "gpt2", "n_embd": 160, "n_layer": 4, "n_head": 4, "n_positions": 64,
    "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
}  # fmt: skip
VOCABULARY = 1000
RUN_ID = "evening"
SCALE = 3  # seconds of the evening in a second
STEP_SECONDS = 21.0  # a global step takes 63 s of the evening, as 4,096 samples of 8 T4s
UPLINK, DOWNLINK = 3.24, 7.6  # Mbit/s, and the rate of a downlink / that of the uplink
MONITOR_UPLINK = 100.0
LATENCY = 23.0 / SCALE  # milliseconds
PEERS, SLOW = 8, (3, 6)
MODES = {
    "default": "--learning_rate 0.003",
    "local": "--learning_rate 0.002 --local_updates --gradient_compression blockwise8",
    "topk": "--learning_rate 0.002 --local_updates --gradient_compression topk --average_state_every 64",
}
CLOCK = 600.0  # seconds by which the clock of "clock" is ahead
PART = ("monitor", "first", "client")  # of the divided network
EVALUATION_STEPS = 2  # of the one process
MAX_DISTANCE = 0.02  # relative to the norm; LAMB moves the weights by up to 0.01 of their norm in a step here


@dataclass
class Plan:
    """What happens in an evening.

    :param flags: settings of the run
    :param uplinks: in Mbit/s, of the trainers that begin
    :param pace: seconds of a micro-batch
    :param latency: in milliseconds; with one, the network cannot be divided
    :param events: minute, method of `Evening`, and its argument
    """

    flags: str
    uplinks: dict[str, float]
    pace: float
    latency: float = 0.0
    events: list[tuple[float, str, str]] = field(default_factory=list)


def plan_mode(mode: str, minutes: float) -> Plan:
    flags = f"--optimizer adamw --adam_epsilon 1e-8 --warmup_steps 4 --averaging_timeout 60 {MODES[mode]}"
    uplinks = {f"trainer-{number}": UPLINK / (3 if number in SLOW else 1) for number in range(PEERS)}
    plan, staying = Plan(flags, uplinks, pace=1.0, latency=LATENCY), list(uplinks)
    for number in range(int(minutes / 10)):
        since, stalled = 10.0 * number, staying[(5 * number + 2) % PEERS]
        leaver, newcomer = f"trainer-{number + 1}", f"trainer-{PEERS + number}"
        plan.events += [(since + 5, "stall", stalled), (since + 6, "restore", stalled)]
        plan.events += [(since + 10, "start", newcomer), (since + 10, "leave", leaver)]
        staying.remove(leaver)
        staying.append(newcomer)
    return plan


def plan_attacks(num_steps: int) -> Plan:
    flags = f"--learning_rate 0.01 --warmup_steps {num_steps // 10} --total_steps {2 * num_steps}"
    uplinks = {"first": 20.0, "second": 20.0, "clock": 20.0, "slow": 4.0, "client": 50.0}
    plan = Plan(flags, uplinks, pace=2.0)
    for number, name in enumerate([*uplinks, "first"], 1):
        plan.events += [(9.0 * number, "leave", name), (9.0 * number + 1, "start", name)]
    plan.events += [
        (21.0, "leave", "monitor"), (22.0, "start", "monitor"), (29.0, "attack", ""), (31.0, "freeze", "second"),
        (34.0, "repel", ""), (38.0, "divide", ""), (43.0, "unite", ""),
    ]  # fmt: skip
    return plan


class Evening:
    """The peers of an evening, and the hosts that they run on."""

    def __init__(self, stack: ExitStack, folder: Path, data: Path, launcher: Launcher, plan: Plan):
        self.stack, self.folder, self.data, self.launcher, self.plan = stack, folder, data, launcher, plan
        folder.mkdir(parents=True)
        self.internet = stack.enter_context(Internet(plan.latency))
        self.hosts: dict[str, Host] = {}
        self.scripts: dict[str, Scripts] = {}  # of each host
        self.running: dict[str, Script] = {}  # peers that have not been told to leave
        self.absences: dict[str, list[tuple[float, float]]] = defaultdict(list)  # from the signal to the end
        self.signals = itertools.cycle((signal.SIGINT, signal.SIGKILL))
        self.kept: dict[float, Path] = {}  # the first trainer's states by their time
        self.target = round(len(plan.uplinks) * BATCH_SIZE * STEP_SECONDS / plan.pace)
        self.settings = (
            "--run_id", RUN_ID, "--model_name_or_path", data / "config.json", "--tokenizer_path", data / "tokenizer",
            "--target_batch_size", self.target, *plan.flags.split(),
        )  # fmt: skip
        self.local = (
            "--dataset_path", data / "dataset", "--per_device_train_batch_size", BATCH_SIZE,
            "--gradient_accumulation_steps", 1, "--dataloader_num_workers", 0, "--use_cpu",
        )  # fmt: skip
        for name in ("monitor", *plan.uplinks):
            self.start(name)
        for name in plan.uplinks:
            self.running[name].wait_for("Local step 1:", 300)

    @property
    def trainers(self) -> list[str]:
        return [name for name in self.hosts if name != "monitor"]

    def start(self, name: str) -> None:
        """Start a peer as its owner would: trainers take the settings of the run from the monitor."""
        if name not in self.hosts:
            self.hosts[name] = host = self.internet.add_home() if name == "client" else self.internet.add_public()
            self.restore(name)
            scripts = Scripts(self.folder, self.data, host.namespace, self.launcher)
            self.scripts[name] = self.stack.enter_context(closing(scripts))
        if name != "monitor":
            self.running[name] = self.start_trainer(name, name, {"CLOCK": str(CLOCK)} if name == "clock" else {})
            return
        self.running[name] = self.scripts[name].start(
            "run_training_monitor.py", *self.settings, "--refresh_period", 5, "--save_checkpoint_step_interval", 2,
            "--host_maddrs", f"/ip4/{self.hosts[name].address}/tcp/31337", "--output_dir", self.folder / name,
            log=name,
        )  # fmt: skip
        self.address = self.running[name].address

    def start_trainer(self, name: str, host: str, env: dict[str, str]) -> Script:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        return self.scripts[host].start(
            ALTERED, "run_trainer.py", "--initial_peers", self.address, "--bootstrap_timeout", 180, *self.local,
            "--tokenizer_path", self.data / "tokenizer", "--output_dir", folder, "--backup_every_steps", 1,
            "--username", name, *(["--client_mode"] if name == "client" else []), log=name,
            env={"PACE": str(self.plan.pace), "RECORD": str(folder / "record.jsonl"), **env},
        )  # fmt: skip

    def start_plain(self, num_steps: int) -> Script:
        """Start the one process."""
        script = self.scripts["monitor"].start(
            "benchmarks/plain_trainer.py", *self.settings, *self.local, "--max_global_steps", num_steps + 10,
            "--output_dir", self.folder / "plain", log="plain",
            env={"RECORD": str(self.folder / "plain.jsonl"), "EVALUATION_STEPS": str(EVALUATION_STEPS)},
        )  # fmt: skip
        psutil.Process(script.process.pid).nice(19)
        return script

    # Events

    def stall(self, name: str, fraction: float = 0.01) -> None:
        """Leave a host a fraction of the rate of its line."""
        uplink = MONITOR_UPLINK if name == "monitor" else self.plan.uplinks.get(name, UPLINK)
        self.internet.limit(self.hosts[name], uplink * fraction, DOWNLINK * uplink * fraction)

    def restore(self, name: str) -> None:
        self.stall(name, 1.0)

    def end(self, name: str, number: int) -> None:
        """Send a signal to a peer, wait for its end, and check that it ends as it should and leaves no process."""
        script, began = self.running.pop(name), time.time()
        assert script.stop(number) == (-number if number == signal.SIGKILL else 0), script.output
        script.assert_nothing_left()
        assert "Traceback" not in script.output, script.output
        self.absences[name].append((began, time.time()))

    def leave(self, name: str) -> None:
        self.end(name, signal.SIGKILL if name == "monitor" else next(self.signals))

    def freeze(self, name: str) -> None:
        self.running[name].freeze(8.0)

    def divide(self, _: str) -> None:
        self.internet.divide(*(self.hosts[name] for name in PART))

    def unite(self, _: str) -> None:
        self.internet.divide()

    def attack(self, _: str) -> None:
        hostile = self.scripts["monitor"].start("tests/support/hostile_peer.py", RUN_ID, self.address, log="hostile")
        self.attackers = [hostile, self.start_trainer("poisoner", "monitor", {"ATTACK": "send_nan"})]

    def repel(self, _: str) -> None:
        for script in self.attackers:
            script.kill_all()

    def spend(self, minutes: float) -> None:
        """Let the events happen.

        :raises AssertionError: if a peer has ended by itself, or logged a traceback
        """
        self.began, since, events = time.time(), time.monotonic(), sorted(self.plan.events, key=lambda event: event[0])
        while (minute := (time.monotonic() - since) * SCALE / 60) < minutes:
            if events and minute >= events[0][0]:
                _, what, name = events.pop(0)
                print(f"{time.strftime('%H:%M:%S')} {what} {name}", file=sys.stderr, flush=True)
                getattr(self, what)(name)
            for name, script in self.running.items():
                assert script.process.poll() is None, f"{name} has ended:\n{script.output[-2000:]}"
            self._keep_state()
            time.sleep(0.5)
        self.ended = time.time()

    def _keep_state(self) -> None:
        """Keep the state in the newest checkpoint of the first trainer."""
        for checkpoint in list_checkpoints(self.folder / self.trainers[0])[:1]:
            if (moment := (checkpoint / STATE_FILE).stat().st_mtime) not in self.kept:
                self.kept[moment] = self.folder / f"{moment}.pt"
                shutil.copy(checkpoint / STATE_FILE, self.kept[moment])

    # Results

    def read_equal_states(self) -> dict[str, SavedState]:
        """Return the newest states that the peers have saved if all are of the same step, otherwise an empty dict."""
        saved = {name: list_checkpoints(self.folder / name)[:1] for name in self.trainers}
        states = {name: load_training_state(path / STATE_FILE, RUN_ID) for name, (path,) in saved.items()}
        path = self.folder / "monitor" / f"checkpoint-{states['first'].step}" / STATE_FILE
        if len({state.step for state in states.values()}) > 1 or not path.exists():
            return {}
        return states | {"monitor": load_training_state(path, RUN_ID)}

    def stop(self) -> None:
        """Stop all peers, the monitor last."""
        for name in sorted(self.running, key=lambda name: name == "monitor"):
            self.end(name, signal.SIGINT)

    def read_records(self) -> list[PeerRecords]:
        """Read what the trainers have recorded. An absence lasts until the first local step after it."""
        peers = []
        for name in self.trainers:
            peer = read_records(name, self.folder / name, clock=CLOCK if name == "clock" else 0.0)
            for began, ended in self.absences[name]:
                back = min((moment for moment, *_ in peer.local_steps if moment > ended), default=math.inf)
                peer.absences.append((began, back))
            peers.append(peer)
        return peers


def parameters_of(state: SavedState) -> list[torch.Tensor]:
    return state.tensors[: len(state.tensors) - len(state.metadata["statistics"])]


def loss_of(state: SavedState, task: TextTask) -> float:
    """Return the loss on the held-out text."""
    model = task.build_model(0)
    parameters = [parameter for group in build_param_groups(model, 0.0) for parameter in group["params"]]
    with torch.no_grad():
        for parameter, value in zip(parameters, parameters_of(state), strict=True):
            parameter.copy_(value)
    return task.evaluate(model)


def describe(evening: Evening, minutes: float, task: TextTask) -> dict:
    """Return the figures of an evening, and the loss by its minute and by the run's applied samples."""
    began, ended, records = evening.began, evening.ended, evening.read_records()
    summary = summarize(records, began, ended)
    computed, applied = (sum(getattr(peer, name) for peer in summary.peers) for name in ("computed", "applied"))
    rounds = [entry for peer in records for entry in peer.rounds.values()
              if began < entry["end"] < ended and entry["outcome"] == "averaged"]  # fmt: skip
    curve = []
    for moment, path in sorted(evening.kept.items()):
        if began < moment < ended:
            before = sum(peer.applied for peer in summarize(records, began, moment).peers)
            loss = loss_of(load_training_state(path, RUN_ID), task)
            curve.append([round((moment - began) * SCALE / 60, 1), before, round(loss, 4)])
    computing = len(evening.plan.uplinks) * (ended - began) / evening.plan.pace * BATCH_SIZE
    return {
        "allreduce": fmean(entry["seconds"].get("allreduce", 0.0) for entry in rounds) * SCALE,
        "search": fmean(entry["seconds"].get("matchmaking", 0.0) for entry in rounds),  # not scaled
        "received": fmean(entry["received"] for entry in rounds),
        "steps": len(summary.steps),
        "complete": summary.complete_fraction,
        "computing": computed / computing,
        "applied": applied / computed,
        "load": os.getloadavg()[2] / os.cpu_count(),
        "samples an hour": round(applied / minutes * 60),
        "peers": {peer.name: {"computed": peer.computed, "applied": peer.applied, **peer.outcomes}
                  for peer in summary.peers},
        "incomplete": {step.step: step.details for step in summary.steps if not step.is_whole},
        "curve": curve,
    }  # fmt: skip


def compare(evening: Evening, plain: Script, task: TextTask) -> dict[str, object]:
    """Compare the states of all peers at the same step, and the monitor's loss with that of the one process.

    :returns: steps, losses, and distances from the first trainer's parameters relative to their norm
    :raises AssertionError: if they differ
    """
    states = wait_until(evening.read_equal_states, 300, "all have the same step")
    evening.stop()
    vectors = {name: flat(parameters_of(state)) for name, state in states.items()}
    first = vectors["first"]
    distances = {name: ((vector - first).norm() / first.norm()).item() for name, vector in vectors.items()}
    assert max(distances.values()) <= MAX_DISTANCE, distances
    step, loss, losses = states["first"].step, loss_of(states["monitor"], task), {}

    def is_there() -> bool:
        events = [event for event in read_jsonl(evening.folder / "plain.jsonl") if event["event"] == "evaluation"]
        losses.update({event["step"]: event["loss"] for event in events})
        return max(losses, default=0) >= step or plain.process.poll() is not None

    wait_until(is_there, 3000, f"step {step} of the one process")
    nearest, start = min(losses, key=lambda other: abs(other - step)), math.log(VOCABULARY)
    assert start - loss >= 0.8 * (start - losses[nearest]), f"loss {loss}, of the one process {losses[nearest]}"
    return {"step": step, "distances": distances, "loss": loss, "one process": [nearest, losses[nearest]]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--modes", nargs="+", choices=list(MODES), default=list(MODES))
    parser.add_argument("--attacks", action="store_true", help="instead of the modes")
    parser.add_argument("--minutes", type=float, default=36.0, help="of the evening")
    parser.add_argument("--train_file", type=Path, help="text, UTF-8; default: Python's documentation topics")
    parser.add_argument("--folder", type=Path, help="for data, logs and results; default: a temporary folder")
    args = parser.parse_args()
    if reason := why_unavailable():
        sys.exit(reason)
    guard_children()
    torch.set_num_threads(1)
    num_steps = round(60 * args.minutes / SCALE / STEP_SECONDS)
    plans = {"attacks": plan_attacks(num_steps)} if args.attacks else {
        mode: plan_mode(mode, args.minutes) for mode in args.modes}  # fmt: skip
    with ExitStack() as stack:
        folder, data, launcher = open_folder(stack, args.folder, "home-evening")
        config = data / "config.json"
        if json.loads(config.read_text(encoding="utf-8")) != MODEL:
            shutil.rmtree(data)
            flags = ("--max_seq_length", MODEL["n_positions"], "--validation_fraction", 0.1)
            prepare_data(data, "clm", VOCABULARY, *flags, train_file=args.train_file)
            config.write_text(json.dumps(MODEL), encoding="utf-8")
        task = TextTask(data)
        for name, plan in plans.items():
            with ExitStack() as of_evening:
                evening = Evening(of_evening, folder / name, data, launcher, plan)
                plain = evening.start_plain(num_steps) if args.attacks else None
                evening.spend(args.minutes)
                compared = {} if plain is None else compare(evening, plain, task)
                evening.stop()
                figures = {"evening": name, **describe(evening, args.minutes, task), **compared}
            print(json.dumps(figures), flush=True)


if __name__ == "__main__":
    main()
