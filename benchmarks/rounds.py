#!/usr/bin/env python3
"""Measure how many samples are applied in global steps when trainers are slow, freeze or join; compare two commits.

benchmarks/rounds.py --baseline 6b289d5

All peers run on this machine, with a tiny model whose micro-batches sleep: a monitor with an auxiliary peer, a fast
trainer, one whose local step takes 20 s, one in client mode, one that is frozen for 20 s (SIGSTOP of all its
processes) after a quarter of the time, and one that joins after two fifths of the time and whose download takes three
global steps. --calm: equal trainers only, no faults and no auxiliary peer. Needs no network.
"""

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil
from hivemind.p2p import PeerID

from benchmarks.round_records import (
    OUTCOMES,
    PeerRecords,
    RunSummary,
    percentile,
    read_jsonl,
    read_local_records,
    read_log_lines,
    read_round_log,
    summarize,
)
from tests.support.peers import LOCAL, ROOT, Script, prepare_data, wait_until

MICRO_BATCH_SECONDS = 0.5
BATCH_SIZE = 8
FROZEN_SECONDS = 20.0
DOWNLOAD_SECONDS = 36.0
START_SECONDS = 180.0  # timeout for the first local step of all trainers
GRACE_SECONDS = 12.0  # for the rounds in progress at the end

LEGEND = """\
computed    samples of the local steps between the first and the last global step
applied     samples that went into an average with others, in the steps after the first. From rounds.jsonl; without
            it, the growth of "Your current contribution" where "Averaged gradients with N peers" belongs to the step
rounds      how they ended at the trainer; absent: alive when the step was due, but no round of it. Without
            rounds.jsonl "alone" is a step without a line on averaging, and a missed round is absent
waited      seconds inside of the optimizer's step(), in which the trainer computes nothing
complete    steps for which all trainers that were alive when it was due (not frozen, not downloading) were in one
            group. Without rounds.jsonl: all of them averaged, in groups of at least that size
due         when the first trainer began the step: from rounds.jsonl, or the line "Beginning optimizer step"
averaged    when a trainer had the average of gradients and parameters: from rounds.jsonl; without it, of gradients
            alone: the line "Averaged gradients with N peers\""""


@dataclass
class Trainer:
    """One trainer of a run.

    :param pace: seconds per micro-batch
    :param batch_size: samples per micro-batch; each micro-batch is a local step
    """

    name: str
    pace: float = MICRO_BATCH_SECONDS
    batch_size: int = BATCH_SIZE
    client_mode: bool = False
    download_seconds: float = 0.0

    @property
    def samples_per_second(self) -> float:
        return self.batch_size / self.pace


FAST = Trainer("fast")
SLOW = Trainer("slow", pace=20.0, batch_size=4 * BATCH_SIZE)
CLIENT = Trainer("client", client_mode=True)
FROZEN = Trainer("frozen")
NEWCOMER = Trainer("newcomer", download_seconds=DOWNLOAD_SECONDS)


@dataclass
class Side:
    """A run of one commit.

    :param root: folder with the scripts of the commit
    :param folder: folder for the output of the peers
    """

    title: str
    root: Path
    folder: Path
    data: Path
    trainers: list[Trainer]
    target_batch_size: int
    assisted: bool
    scripts: dict[str, Script] = field(default_factory=dict)
    absences: dict[str, list[tuple[float, float]]] = field(default_factory=dict)

    @property
    def run_flags(self) -> tuple:
        return (
            "--run_id", "rounds", "--tokenizer_path", self.data / "tokenizer", "--model_name_or_path",
            self.data / "config.json", "--target_batch_size", self.target_batch_size, "--learning_rate", 0.003,
            "--warmup_steps", 0, "--matchmaking_time", 5, "--averaging_timeout", 30, "--max_refresh_period", 2,
        )  # fmt: skip

    def start_monitor(self) -> None:
        assist = ("--assist_in_averaging", "--assistant_maddrs", LOCAL) if self.assisted else ()
        self.scripts["monitor"] = Script(
            str(self.root / "run_training_monitor.py"), *self.run_flags, "--host_maddrs", LOCAL, "--refresh_period", 1,
            "--output_dir", self.folder / "monitor", *assist, log=self.folder / "monitor.log",
        )  # fmt: skip

    def start(self, trainer: Trainer) -> None:
        mode = ("--client_mode",) if trainer.client_mode else ("--host_maddrs", LOCAL)
        folder = self.folder / trainer.name
        folder.mkdir()
        self.scripts[trainer.name] = Script(
            str(ROOT / "benchmarks" / "paced_peer.py"), self.root / "run_trainer.py", *self.run_flags, *mode,
            "--initial_peers", self.scripts["monitor"].address, "--dataset_path", self.data / "dataset",
            "--output_dir", folder, "--per_device_train_batch_size", trainer.batch_size,
            "--gradient_accumulation_steps", 1, "--dataloader_num_workers", 0, "--use_cpu",
            log=self.folder / f"{trainer.name}.log",
            env={
                "PACE": str(trainer.pace),
                "DOWNLOAD_SECONDS": str(trainer.download_seconds),
                "RECORD": str(folder / "local.jsonl"),
            },
        )  # fmt: skip

    def has_begun(self, trainer: Trainer) -> bool:
        """Whether a trainer has completed a local step."""
        script = self.scripts[trainer.name]
        script.family()
        assert script.process.poll() is None, script.output
        records = read_jsonl(self.folder / trainer.name / "local.jsonl")
        return any(record["event"] == "local step" for record in records)

    def freeze(self, trainer: Trainer, seconds: float) -> None:
        """Stop all processes of a trainer (SIGSTOP) for some seconds."""
        family = self.scripts[trainer.name].family()
        began = time.time()
        try:
            for process in family:
                process.send_signal(signal.SIGSTOP)
            time.sleep(seconds)
        finally:
            for process in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.send_signal(signal.SIGCONT)
            self.absences.setdefault(trainer.name, []).append((began, time.time()))

    def stop(self) -> None:
        """End all processes, trainers first."""
        for script in reversed(self.scripts.values()):
            script.family()
            with contextlib.suppress(ProcessLookupError):
                script.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 20
        for script in self.scripts.values():
            with contextlib.suppress(AssertionError):
                script.wait(max(0.1, deadline - time.monotonic()))
            script.kill_all()

    def read_records(self) -> list[PeerRecords]:
        """Return the records of the trainers that were started."""
        return [self._read_records(trainer) for trainer in self.trainers if trainer.name in self.scripts]

    def _read_records(self, trainer: Trainer) -> PeerRecords:
        folder = self.folder / trainer.name
        peer = PeerRecords(trainer.name, absences=self.absences.get(trainer.name, []))
        if (identity := folder / "identity.key").exists():
            peer.peer_id = str(PeerID.from_identity(identity.read_bytes()))
        read_local_records(peer, folder / "local.jsonl")
        if (folder / "rounds.jsonl").exists():
            read_round_log(peer, folder / "rounds.jsonl")
        else:
            read_log_lines(peer, self.folder / f"{trainer.name}.log")
        return peer


def play(side: Side, seconds: float) -> RunSummary:
    """Run one side for some seconds after all initial trainers have started; the newcomer joins later."""
    side.folder.mkdir(parents=True)
    initial = [trainer for trainer in side.trainers if trainer is not NEWCOMER]
    try:
        side.start_monitor()
        for trainer in initial:
            side.start(trainer)
        for trainer in initial:
            wait_until(partial(side.has_begun, trainer), START_SECONDS, f"the first local step of {trainer.name}")
        began, since = time.time(), time.monotonic()
        events = []
        if FROZEN in side.trainers:
            events.append((seconds / 4, lambda: side.freeze(FROZEN, FROZEN_SECONDS)))
        if NEWCOMER in side.trainers:
            events.append((seconds * 2 / 5, lambda: side.start(NEWCOMER)))
        for moment, act in sorted(events, key=lambda event: event[0]):
            time.sleep(max(0.0, since + moment - time.monotonic()))
            act()
        time.sleep(max(0.0, since + seconds - time.monotonic()))
        ended = time.time()
        time.sleep(GRACE_SECONDS)
    finally:
        side.stop()
    return summarize(side.read_records(), began, ended)


@contextlib.contextmanager
def checked_out(commit: str, folder: Path) -> Iterator[Path]:
    """Check a commit out into a folder, as a git worktree that is removed at the end."""
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--detach", str(folder), commit], check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run([*git, "remove", "--force", str(folder)], check=True, capture_output=True)


def print_table(title: str, summary: RunSummary) -> None:
    """Print the summary of one side."""
    print(f"\n{title}: {len(summary.steps)} global steps in {summary.seconds:.0f} s")
    names = (*OUTCOMES, "absent")
    print(f"  {'trainer':<10}{'computed':>9}{'applied':>9}{'fraction':>10}", end="")
    print("".join(f"{name:>9}" for name in names), f"{'waited':>8}{'downloads':>11}")
    for peer in summary.peers:
        fraction = f"{peer.applied / peer.computed:.0%}" if peer.computed else "-"
        print(f"  {peer.name:<10}{peer.computed:>9}{peer.applied:>9}{fraction:>10}", end="")
        print("".join(f"{peer.outcomes[name]:>9}" for name in names), end=" ")
        print(f"{peer.seconds_waited:>6.1f} s{peer.seconds_downloading:>9.1f} s")
    for step in summary.steps:
        if not step.is_whole:
            print(f"  step {step.step} {'complete, in part' if step.is_complete else 'incomplete'}: {step.details}")


def compare(summaries: dict[str, RunSummary]) -> None:
    """Print the figures of all sides in columns; with two sides, also their ratios."""
    rows = {
        "samples applied / computed": ("{:.3f}", lambda s: s.applied_fraction),
        "samples applied per second": ("{:.1f}", lambda s: s.applied_per_second),
        "global step, p50 (s)": ("{:.1f}", lambda s: percentile(s.durations, 50)),
        "global step, p95 (s)": ("{:.1f}", lambda s: percentile(s.durations, 95)),
        "complete rounds": ("{:.3f}", lambda s: s.complete_fraction),
        "complete and received in full": ("{:.3f}", lambda s: s.whole_fraction),
        "due to averaged, p50 (s)": ("{:.1f}", lambda s: percentile(s.latencies, 50)),
        "due to averaged, p95 (s)": ("{:.1f}", lambda s: percentile(s.latencies, 95)),
        "seconds waited, all trainers": ("{:.1f}", lambda s: s.seconds_waited),
    }
    print(f"\n{'':<32}" + "".join(f"{title:>12}" for title in summaries), end="")
    print(f"{'ratio':>9}" if len(summaries) == 2 else "")
    for name, (form, figure) in rows.items():
        values = [figure(summary) for summary in summaries.values()]
        print(f"{name:<32}" + "".join(f"{form.format(value):>12}" for value in values), end="")
        print(f"{values[1] / values[0]:>9.2f}" if len(values) == 2 and values[0] else "")


def choose_trainers(args: argparse.Namespace) -> list[Trainer]:
    if args.calm:
        return [FAST, *(Trainer(f"fast-{number}") for number in range(2, args.trainers + 1))]
    return [FAST, SLOW, CLIENT, FROZEN, NEWCOMER]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--baseline", help="commit to compare with; default: no comparison")
    parser.add_argument(
        "--minutes", type=float, default=4.0, help="minutes for each commit, after all trainers have begun"
    )
    parser.add_argument(
        "--step_seconds", type=float, default=13.0, help="target seconds of a global step with all initial trainers"
    )
    parser.add_argument("--calm", action="store_true", help="equal trainers only: no churn, no auxiliary peer")
    parser.add_argument("--trainers", type=int, default=2, help="number of trainers with --calm")
    parser.add_argument("--folder", type=Path, help="keep the logs in this folder")
    args = parser.parse_args()

    trainers = choose_trainers(args)
    rate = sum(trainer.samples_per_second for trainer in trainers if trainer is not NEWCOMER)
    folder = args.folder or Path(tempfile.mkdtemp(prefix="rounds-"))
    folder.mkdir(parents=True, exist_ok=True)
    summaries: dict[str, RunSummary] = {}
    try:
        data = folder / "data"
        if not data.exists():
            data.mkdir()
            prepare_data(data)
        with contextlib.ExitStack() as stack:
            roots = {}
            if args.baseline is not None:
                roots[args.baseline] = stack.enter_context(checked_out(args.baseline, folder / "baseline"))
            roots["this commit"] = ROOT
            for title, root in roots.items():
                side = Side(
                    title, root, folder / title.replace(" ", "-"), data, trainers,
                    target_batch_size=round(args.step_seconds * rate), assisted=not args.calm,
                )  # fmt: skip
                summaries[title] = play(side, 60 * args.minutes)
                print_table(title, summaries[title])
                sys.stdout.flush()
    finally:
        if args.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
    compare(summaries)
    print(f"\n{LEGEND}\nload average {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
