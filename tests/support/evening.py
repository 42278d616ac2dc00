#!/usr/bin/env python3
"""A long evening: a monitor and five unequal trainers on hosts of a small internet, compared with one process.

    tests/support/evening.py --minutes 70 --train_file my.txt

A trainer has a slow link, one is a client behind NAT, and the clock of one is wrong. Six times a trainer leaves, every
other one killed, and returns; the monitor's machine restarts; the network is divided, the monitor with the smaller
part. With --attacks, a peer sends NaN, another one writes hostile records, and a trainer freezes. These times scale
with --minutes. Meanwhile, one process trains on as many samples per step at a low priority.

Prints the results, and writes them to results.json. Fails if a peer has ended by itself or logged a traceback, if the
parameters of the peers differ at the end, or if the loss is far from that of the one process. Needs root, 4 GB of
memory, and 1.2 cores. `make soak` runs it.
"""

import argparse
import itertools
import json
import math
import os
import re
import signal
import statistics
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import psutil
import torch
from transformers import AutoModelForCausalLM

from benchmarks.round_records import PeerRecords, read_records, summarize
from cotrain.arguments import DatasetArguments
from cotrain.monitoring.evaluation import Evaluator
from cotrain.tasks.text import build_text_task
from cotrain.training.checkpoints import STATE_FILE, SavedState, list_checkpoints, load_training_state
from peerstep.processes import guard_children
from run_evaluator import EvaluatorArguments
from tests.support.launcher import Launcher
from tests.support.namespaces import Internet, why_unavailable
from tests.support.peers import ALTERED, Script, Scripts, prepare_data, read_jsonl, wait_until

MODEL = {
    "model_type": "gpt2", "n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 64,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
VOCABULARY = 4000  # with it the model has 1.3 million parameters
TRAINERS = {"first": 20.0, "second": 20.0, "clock": 20.0, "slow": 4.0, "client": 50.0}  # uplinks in Mbit/s
PEERS = ("monitor", *TRAINERS)
CLOCK = 600.0  # seconds by which the clock of "clock" is ahead
BATCH, MICRO_BATCH, PACE = 640, 16, 4.0
STEP_SECONDS = BATCH / MICRO_BATCH * PACE / len(TRAINERS)
EVALUATION_STEPS = 2  # of the one process
RUN_ID = "evening"
# Minute of 70, method of `Evening`, and its argument
EVENTS = [
    *((10.0 * number, "leave", name) for number, name in enumerate([*TRAINERS, "first"], 1)),
    *((10.0 * number + 1, "start", name) for number, name in enumerate([*TRAINERS, "first"], 1)),
    (25.0, "leave", "monitor"), (26.0, "start", "monitor"), (43.0, "divide", ""), (48.0, "unite", ""),
]  # fmt: skip
ATTACKS = [(33.0, "attack", ""), (35.0, "freeze", "second"), (38.0, "repel", "")]
PART = ("monitor", "first", "client")  # of the divided network
MAX_DISTANCE = 0.02  # relative to the norm; LAMB moves the weights by up to 0.01 of their norm in a step here
# What differs between two lines of the same kind: peer IDs, names, numbers, addresses
VARIABLE = re.compile(r"Qm\w{6,}…?|\bpeer-\w{7}\b|\(\w{8}\)|/ip4/\S+|[+-]?\d[\d.,]*")


def parameters_of(state: SavedState) -> torch.Tensor:
    num_statistics = len(state.metadata["statistics"])
    return torch.cat([tensor.flatten() for tensor in state.tensors[: len(state.tensors) - num_statistics]])


class Evening:
    """The peers, and the hosts that they run on."""

    def __init__(self, stack: ExitStack, folder: Path, minutes: float):
        self.folder, self.data, self.minutes = folder, folder / "data", minutes
        self.internet = stack.enter_context(Internet())
        launcher = Launcher(folder / "launcher.log")
        stack.callback(launcher.close)
        self.hosts, self.scripts = {}, {}
        for name in PEERS:
            self.hosts[name] = host = self.internet.add_home() if name == "client" else self.internet.add_public()
            self.internet.limit(host, (upload := TRAINERS.get(name, 100.0)), 5 * upload)
            self.scripts[name] = stack.enter_context(closing(Scripts(folder, self.data, host.namespace, launcher)))
        self.running: dict[str, Script] = {}  # peers that have not been told to leave
        self.codes: dict[str, list[int]] = defaultdict(list)  # exit codes
        self.absences: dict[str, list[tuple[float, float]]] = defaultdict(list)  # from the signal to the end
        self.signals = itertools.cycle((signal.SIGINT, signal.SIGKILL))
        self.busy: list[float] = []  # percent of the machine's CPU time
        steps = round(60 * minutes / STEP_SECONDS)
        self.settings = (
            "--run_id", RUN_ID, "--model_name_or_path", self.data / "config.json", "--tokenizer_path",
            self.data / "tokenizer", "--target_batch_size", BATCH, "--learning_rate", 0.01, "--warmup_steps",
            steps // 10, "--total_steps", 2 * steps,
        )  # fmt: skip
        self.local = (
            "--dataset_path", self.data / "dataset", "--per_device_train_batch_size", MICRO_BATCH,
            "--gradient_accumulation_steps", 1, "--dataloader_num_workers", 0, "--use_cpu",
        )  # fmt: skip
        self.start("monitor")
        self.plain = self.scripts["monitor"].start(
            "benchmarks/plain_trainer.py", *self.settings, *self.local, "--max_global_steps", steps + 10,
            "--output_dir", folder / "plain", log="plain",
            env={"RECORD": str(folder / "plain.jsonl"), "EVALUATION_STEPS": str(EVALUATION_STEPS)},
        )  # fmt: skip
        psutil.Process(self.plain.process.pid).nice(19)
        for name in TRAINERS:
            self.start(name)
        for name in TRAINERS:
            self.running[name].wait_for("Local step 1:", 300)

    def start(self, name: str) -> None:
        """Start a peer as its owner would: trainers take the settings of the run from the monitor."""
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
            ALTERED, "run_trainer.py", "--initial_peers", self.address, "--tokenizer_path", self.data / "tokenizer",
            *self.local, "--output_dir", folder, "--backup_every_steps", 1, "--username", name,
            *(["--client_mode"] if name == "client" else []), log=name,
            env={"PACE": str(PACE), "RECORD": str(folder / "record.jsonl"), **env},
        )  # fmt: skip

    def end(self, name: str, number: int) -> None:
        """Send a signal to a peer, wait for its end, and check that none of its processes is left."""
        script, began = self.running.pop(name), time.time()
        script.process.send_signal(number)
        self.codes[name].append(script.wait(120))
        script.assert_nothing_left()
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

    def run(self, events: Sequence[tuple[float, str, str]]) -> None:
        """Let the events happen, and start peers again that have ended by themselves."""
        self.began, began, events = time.time(), time.monotonic(), sorted(events)
        psutil.cpu_percent()
        while (minute := (time.monotonic() - began) / 60 * 70 / self.minutes) < 70:
            if events and minute >= events[0][0]:
                _, what, name = events.pop(0)
                print(f"{time.strftime('%H:%M:%S')} step {self.newest_step()}: {what} {name}", flush=True)
                getattr(self, what)(name)
            for name, script in list(self.running.items()):
                if (code := script.process.poll()) is not None:
                    print(f"{time.strftime('%H:%M:%S')} {name} has ended with {code}", flush=True)
                    self.codes[name].append(code)
                    self.start(name)
            self.busy.append(psutil.cpu_percent())
            time.sleep(1)

    def newest_step(self) -> int:
        rounds = [read_jsonl(self.folder / name / "rounds.jsonl") for name in TRAINERS]
        return max((entries[-1]["step"] for entries in rounds if entries), default=0)

    def read_states(self) -> dict[str, SavedState]:
        """Return the trainers' newest states, and the monitor's checkpoint at the step of the first one."""
        saved = {name: list_checkpoints(self.folder / name) for name in TRAINERS}
        paths = {name: folders[0] / STATE_FILE for name, folders in saved.items() if folders}
        states = {name: load_training_state(path, RUN_ID) for name, path in paths.items()}
        path = self.folder / "monitor" / f"checkpoint-{states['first'].step}" / STATE_FILE
        return states | ({"monitor": load_training_state(path, RUN_ID)} if path.exists() else {})

    def finish(self) -> dict[str, tuple[int, float]]:
        """Compare the states at a step that all have, and stop all peers, the monitor last.

        :returns: by name, the step and the distance from the first trainer's parameters, relative to their norm
        """

        def are_comparable() -> bool:
            states = self.read_states()
            return len(states) == len(PEERS) and len({state.step for state in states.values()}) == 1

        try:
            wait_until(are_comparable, 300, "all have the same step")
        except AssertionError as error:
            print(f"The peers are apart: {error}", flush=True)
        states = self.read_states()
        first = parameters_of(states["first"])
        with ThreadPoolExecutor(len(TRAINERS)) as pool:
            list(pool.map(self.end, TRAINERS, itertools.repeat(signal.SIGINT)))
        self.end("monitor", signal.SIGINT)
        return {
            name: (state.step, ((parameters_of(state) - first).norm() / first.norm()).item())
            for name, state in states.items()
        }

    def read_records(self, last_step: int) -> list[PeerRecords]:
        """Read what the trainers have recorded. An absence lasts until the first local step after it."""
        peers = []
        for name in TRAINERS:
            peer = read_records(name, self.folder / name, clock=CLOCK if name == "clock" else 0.0)
            for began, ended in self.absences[name]:
                back = min((moment for moment, *_ in peer.local_steps if moment > ended), default=math.inf)
                peer.absences.append((began, back))
            peer.rounds = {step: entry for step, entry in peer.rounds.items() if step <= last_step}
            peers.append(peer)
        return peers

    def evaluate(self) -> dict[str, float]:
        """Return the loss on the held-out text of each peer's newest checkpoint."""
        paths = {"model_name_or_path": "config.json", "dataset_path": "dataset", "tokenizer_path": "tokenizer"}
        args = DatasetArguments(**{name: str(self.data / value) for name, value in paths.items()})
        task = build_text_task(args)
        evaluator = Evaluator(task, lambda: False, EvaluatorArguments(use_cpu=True, disable_tqdm=True))
        models = {
            name: AutoModelForCausalLM.from_pretrained(list_checkpoints(self.folder / name)[0]) for name in PEERS
        }
        return {name: evaluator.evaluate(model, 0)["loss"] for name, model in models.items()}

    def read_plain(self, step: int) -> tuple[int, float]:
        """Wait until the one process is at a step, end it, and return its nearest evaluated step and the loss."""

        def losses() -> dict[int, float]:
            events = [event for event in read_jsonl(self.folder / "plain.jsonl") if event["event"] == "evaluation"]
            return {event["step"]: event["loss"] for event in events}

        wait_until(lambda: max(losses(), default=0) >= step or self.plain.process.poll() is not None, 3000,
                   f"step {step} of the one process")  # fmt: skip
        self.plain.kill_all()
        return min(losses().items(), key=lambda item: abs(item[0] - step))

    def count_messages(self) -> dict[str, Counter]:
        """Count the warnings and errors of each kind by peer."""
        kinds: dict[str, Counter] = defaultdict(Counter)
        for name in PEERS:
            output = re.sub(
                r"\x1b\[[\d;]*m", "", (self.folder / f"{name}.log").read_text(encoding="utf-8", errors="replace")
            )
            for text in re.findall(r"(?:\[(?:WARN|ERROR|CRITICAL).*?\] |Traceback )\S.*", output):
                kinds[VARIABLE.sub("…", text)[:150]][name] += 1
        return kinds


def report(evening: Evening, states: dict, losses: dict[str, float], plain: tuple[int, float]) -> list[str]:
    """Print the results, and write them to results.json.

    :param states: step and distance by peer
    :returns: the faults
    """
    last_step = max(step for step, _ in states.values())
    summary, messages = summarize(evening.read_records(last_step), evening.began, math.inf), evening.count_messages()
    rows = {name: {"computed": 0, "applied": 0, "averaged": 0, "missed": 0, "failed": 0, "alone": 0, "absent": 0,
                   "step": None, "distance": math.nan, "loss": losses[name], "codes": evening.codes[name]}
            for name in PEERS}  # fmt: skip
    for peer in summary.peers:
        rows[peer.name] |= {"computed": peer.computed, "applied": peer.applied, **peer.outcomes}
    for name, (step, distance) in states.items():
        rows[name] |= {"step": step, "distance": round(distance, 5)}
    totals = {
        "steps": last_step, "complete rounds": f"{sum(step.is_complete for step in summary.steps)} of "
        f"{len(summary.steps)}, whole: {sum(step.is_whole for step in summary.steps)}",
        "samples": sum(peer.applied for peer in summary.peers), "applied": summary.applied_fraction(),
        "seconds of a step": statistics.median(summary.durations),
        "one process": {"step": plain[0], "samples": plain[0] * BATCH, "loss": plain[1]},
        "ended with 75": sum(codes.count(75) for codes in evening.codes.values()),
        "percent of the machine": statistics.fmean(evening.busy),
    }  # fmt: skip
    incomplete = {step.step: step.details for step in summary.steps if not step.is_whole}
    results = {"peers": rows, "totals": totals, "messages": messages, "incomplete": incomplete}
    (evening.folder / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print("\n".join(f"step {step}: {details[:400]}" for step, details in incomplete.items()))
    print("\n" + "".join(f"{name:>9}" for name in ("peer", *rows["monitor"])))
    for name, row in rows.items():
        print(f"{name:>9}" + "".join(f"{f'{value:.4f}' if isinstance(value, float) else str(value):>9}"
                                     for value in row.values()))  # fmt: skip
    print("\n".join(f"{name:>23}: {value}" for name, value in totals.items()))
    for kind, counts in sorted(messages.items(), key=lambda item: -item[1].total()):
        print(f"{counts.total():>5} {kind}  {dict(counts)}")
    start = math.log(VOCABULARY)  # loss of the initial weights
    checks = {
        "a peer has ended by itself": {*itertools.chain(*evening.codes.values())} <= {0, -signal.SIGKILL},
        "a peer has logged a traceback": not any(kind.startswith("Traceback") for kind in messages),
        "the peers are apart": {row["step"] for row in rows.values()} == {last_step}
        and max(row["distance"] for row in rows.values()) <= MAX_DISTANCE,
        "the loss is far from that of one process": start - losses["monitor"] >= 0.8 * (start - plain[1]),
    }
    return [fault for fault, is_absent in checks.items() if not is_absent]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=70.0, help="default: 70")
    parser.add_argument("--attacks", action="store_true")
    parser.add_argument("--folder", type=Path, help="for data, logs and results; default: a temporary folder")
    parser.add_argument("--train_file", type=Path, help="text, UTF-8; default: Python's documentation topics")
    args = parser.parse_args()
    if reason := why_unavailable():
        sys.exit(reason)
    guard_children()
    torch.set_num_threads(1)
    folder = Path(args.folder or tempfile.mkdtemp(prefix="evening-")).absolute()
    print(f"Logs in {folder}", flush=True)
    flags = ("--max_seq_length", MODEL["n_positions"], "--validation_fraction", 0.1)
    prepare_data(folder / "data", "clm", VOCABULARY, *flags, train_file=args.train_file)
    (folder / "data" / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    os.environ["TMPDIR"] = str(folder)  # the sockets of killed peers stay in this folder
    with ExitStack() as stack:
        evening = Evening(stack, folder, args.minutes)
        evening.run(EVENTS + ATTACKS * args.attacks)
        states = evening.finish()
        faults = report(evening, states, evening.evaluate(), evening.read_plain(states["first"][0]))
    sys.exit("; ".join(faults) or 0)


if __name__ == "__main__":
    main()
