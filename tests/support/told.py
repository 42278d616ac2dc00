"""What the people of a run were told, and whether all of it is the same: `read_told`, then `compare`.

Each trainer's log, thanks, `--status` and records of rounds; the monitor's log, metrics.jsonl, contributors.json and
checkpoints. Pure but for `read_told`.

These differences are permitted, and no others:

- Digits: a log rounds. The monitor's loss is the mean of the trainers', weighted by their samples.
- Speed: a trainer's is its own average. The monitor's is the samples of a step by the time since the step before; of
  the first step, after a night, and after a step that was not reported, it is the sum of the trainers' speeds.
- Alive peers: also those that took no part in a step, but one before and one after it.
- Late samples: those of a trainer that took a step apart from the others, or told of it minutes later, are not in the
  line of the step. The monitor tells them in another one, and they are on the leaderboard from then on.
- A trainer that is killed was thanked by nobody, and may have taken a step that it did not live to tell.
- The newest checkpoint may be of an earlier step than the newest one: a trainer that leaves offers no state.
- Samples for a step that the night prevented are in nobody's sums.
"""

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from math import isclose
from pathlib import Path

from cotrain.common.names import label
from cotrain.status.status import find_fault, read_status

NUMBER = r"(-?[\d,]+)"


def whole(text: str) -> int:
    return int(text.replace(",", ""))


def plain_lines(log: str) -> list[str]:
    """Return the lines of a log without colors, times and levels."""
    colorless = re.sub(r"\x1b\[[\d;]*m", "", log)
    return [re.sub(r"^\w{3} \d\d [\d:.]+ \[\w+\] ", "", line) for line in colorless.split("\n")]


@dataclass
class Day:
    """What a trainer said between a start and its end."""

    name: str  # with the end of the peer ID
    steps: dict[int, int] = field(default_factory=dict)  # step -> samples of this trainer
    losses: dict[int, float] = field(default_factory=dict)  # step -> local loss
    speeds: dict[int, float] = field(default_factory=dict)
    total: int = 0  # "Your current contribution"
    thanks: tuple[str, int, int] | None = None  # name, samples, steps; None if it was killed
    progress: list[tuple[int, int, int, int]] = field(default_factory=list)  # samples, target, peers, own samples


@dataclass
class Trainer:
    """A trainer's log, and the files in its folder."""

    name: str
    peer_id: str
    days: list[Day]
    status: dict = field(default_factory=dict)
    sentence: str = ""  # of --status
    rounds: list[dict] = field(default_factory=list)


@dataclass
class Monitor:
    """A monitor's log, and the files in its folder."""

    steps: list[tuple[int, str, int, int, str]] = field(default_factory=list)  # loss and speed are texts
    tables: list[tuple[int, int, dict[str, int], int]] = field(default_factory=list)  # step, samples, rows, number
    late: dict[tuple[int, str], int] = field(default_factory=dict)  # samples by step and name with peer ID
    starts: list[int] = field(default_factory=list)  # lines of steps before each start
    ends: list[tuple[int, int, int | None]] = field(default_factory=list)  # those before each end; step, checkpoint
    targets: set[int] = field(default_factory=set)
    metrics: list[dict] = field(default_factory=list)
    contributors: dict = field(default_factory=dict)
    checkpoints: list[int] = field(default_factory=list)


def parse_trainer(log: str) -> list[Day]:
    days, step = [], 0
    for line in plain_lines(log):
        if found := re.fullmatch(r"This peer is (.+)", line):
            days.append(Day(found[1]))
        if not days:
            continue
        day = days[-1]
        if found := re.fullmatch(r"Step #(\d+)", line):
            step = int(found[1])
        elif found := re.fullmatch(rf"Your current contribution: {NUMBER} samples", line):
            day.steps[step] = day.steps.get(step, 0) + whole(found[1]) - day.total
            day.total = whole(found[1])
        elif found := re.fullmatch(r"Performance: ([\d.]+) samples/sec", line):
            day.speeds[step] = float(found[1])
        elif found := re.fullmatch(r"Local loss: ([\d.]+)", line):
            day.losses[step] = float(found[1])
        elif found := re.fullmatch(
            rf"Thank you, (.+)! You contributed {NUMBER} samples? to {NUMBER} global steps? in \d+ \w+", line
        ):
            day.thanks = found[1], whole(found[2]), whole(found[3])
        elif found := re.match(
            rf"Accumulated {NUMBER} of {NUMBER} samples for step #\d+ from {NUMBER} peers?, {NUMBER} of them", line
        ):
            day.progress.append(tuple(map(whole, found.groups())))
    return days


def parse_monitor(log: str) -> Monitor:
    monitor, samples = Monitor(), 0
    for line in plain_lines(log):
        if found := re.fullmatch(
            r"Step #(\d+)\tloss = (\S+)\talive peers = (\d+)\tsamples = (\d+)\tperformance = (\S+) samples/s", line
        ):
            step, loss, alive, number, speed = found.groups()
            monitor.steps.append((int(step), loss, int(alive), int(number), speed))
        elif found := re.fullmatch(rf"Step #(\d+): {NUMBER} more samples of (.+), reported late", line):
            monitor.late[int(found[1]), found[3]] = whole(found[2])
        elif line.startswith("Running a DHT peer"):
            monitor.starts.append(len(monitor.steps))
        elif found := re.match(rf"{NUMBER} samples in all", line):
            samples = whole(found[1])
        elif found := re.fullmatch(rf"Contributors, by samples: (.+); {NUMBER} in all", line):
            rows = dict(re.findall(r"(\S.*?\)) ([\d,]+)(?:, |$)", found[1]))
            step = monitor.steps[-1][0] if monitor.steps else 0
            monitor.tables.append((step, samples, {name: whole(n) for name, n in rows.items()}, whole(found[2])))
        elif found := re.match(rf"Accumulated {NUMBER} of {NUMBER} samples for step", line):
            monitor.targets.add(whole(found[2]))
        elif found := re.match(r"The monitor has stopped (?:at step #(\d+)|before).*?(?:checkpoint-(\d+))?$", line):
            checkpoint = int(found[2]) if found[2] else None
            monitor.ends.append((len(monitor.steps), int(found[1] or 0), checkpoint))
    return monitor


def read_told(folder: Path, peer_ids: dict[str, str]) -> tuple[Monitor, list[Trainer]]:
    """Read the logs and output folders of a monitor, `monitor`, and of trainers.

    :param peer_ids: name of a trainer's log and folder -> peer ID
    """

    def read_lines(path: Path) -> list[dict]:
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    monitor = parse_monitor((folder / "monitor.log").read_text(encoding="utf-8", errors="replace"))
    monitor.metrics = read_lines(folder / "monitor" / "metrics.jsonl")
    monitor.contributors = json.loads((folder / "monitor" / "contributors.json").read_text(encoding="utf-8"))
    monitor.checkpoints = [
        json.loads(path.read_text(encoding="utf-8"))["step"]
        for path in folder.glob("monitor/checkpoint-*/collaboration.json")
    ]
    trainers = []
    for name, peer_id in peer_ids.items():
        log, own = (folder / f"{name}.log").read_text(encoding="utf-8", errors="replace"), folder / name
        status = json.loads((own / "status.json").read_text(encoding="utf-8"))
        sentence = find_fault(read_status(own), own) or ""
        rounds = read_lines(own / "rounds.jsonl")
        trainers.append(Trainer(name, peer_id, parse_trainer(log), status, sentence, rounds))
    return monitor, trainers


def compare(monitor: Monitor, trainers: list[Trainer]) -> list[str]:
    """Return a sentence for each number that differs, and is not permitted to."""
    checks = (compare_steps, compare_log, compare_sums, compare_trainers, compare_rounds, compare_ends)
    return [fault for check in checks for fault in check(monitor, trainers)]


def differ(what: str, told: object, is_true: object) -> Iterator[str]:
    if told != is_true:
        yield f"{what}: {told}, but {is_true}"


def compare_steps(monitor: Monitor, trainers: list[Trainer]) -> Iterator[str]:
    """Compare metrics.jsonl with the trainers' lines."""
    steps = [record["step"] for record in monitor.metrics]
    known = sorted({step for trainer in trainers for day in trainer.days for step in day.steps})
    yield from differ("steps in metrics.jsonl, and of the trainers", steps, known)
    starts = {record["step"] for number, record in enumerate(monitor.metrics) if number in monitor.starts}
    before = None
    for record in monitor.metrics:
        step, parts = record["step"], []  # samples, loss and speed of each trainer
        for trainer in trainers:
            for day in trainer.days:
                if step in day.steps and (step, day.name) not in monitor.late:
                    parts.append((day.steps[step], day.losses.get(step), day.speeds[step]))
        samples = sum(samples for samples, *_ in parts)
        yield from differ(f"samples of step {step}", record["samples"], samples)
        yield from differ(f"contributors of step {step}", record["contributors"], sum(part[0] > 0 for part in parts))
        if not sum(part[0] > 0 for part in parts) <= record["alive peers"] <= len(trainers):
            yield f"alive peers of step {step}: {record['alive peers']}, but {len(parts)} took part"
        known = [(samples, loss) for samples, loss, _ in parts if samples and loss is not None]
        if known:
            loss = sum(samples * loss for samples, loss in known) / sum(samples for samples, _ in known)
            if record["loss"] is None or not isclose(record["loss"], loss, rel_tol=1e-5):
                yield f"loss of step {step}: {record['loss']}, but the trainers' is {loss:.5f}"
        elif record["loss"] is not None:
            yield f"loss of step {step}: {record['loss']}, but no trainer has one"
        speed = sum(speed for *_, speed in parts)
        if before is not None and step not in starts:
            speed = samples / (record["time"] - before["time"])
        if not isclose(record["performance"], speed, rel_tol=2e-3):
            yield f"performance of step {step}: {record['performance']}, but it is {speed:.3f}"
        for name in {"complete rounds", "applied share", "averaging"} & record.keys():
            if not 0.0 <= record[name] <= 1.0:
                yield f"{name} of step {step}: {record[name]}"
        before = record


def compare_log(monitor: Monitor, trainers: list[Trainer]) -> Iterator[str]:
    """Compare the monitor's lines with metrics.jsonl."""
    expected = [
        (
            record["step"], "unknown" if record["loss"] is None else f"{record['loss']:.5f}", record["alive peers"],
            record["samples"], f"{record['performance']:.2f}",
        )
        for record in monitor.metrics
    ]  # fmt: skip
    yield from differ("number of the monitor's lines", len(monitor.steps), len(expected))
    for line, record in zip(monitor.steps, expected, strict=False):
        yield from differ(f"the monitor's line of step {record[0]}", line, record)


def compare_sums(monitor: Monitor, trainers: list[Trainer]) -> Iterator[str]:
    """Compare contributors.json and the tables in the monitor's log with the trainers' thanks."""
    rows = {row["peer_id"]: row for row in monitor.contributors["contributors"]}
    yield from differ("step of contributors.json", monitor.contributors["step"], monitor.metrics[-1]["step"])
    for trainer in trainers:
        row = rows.pop(trainer.peer_id, {"username": trainer.name, "samples": 0, "steps": 0})
        given = sum(day.total for day in trainer.days)
        num_steps = sum(samples > 0 for day in trainer.days for samples in day.steps.values())
        yield from differ(f"leaderboard's name of {trainer.name}", row["username"], trainer.name)
        yield from differ(f"leaderboard's samples of {trainer.name}", row["samples"], given)
        yield from differ(f"leaderboard's steps of {trainer.name}", row["steps"], num_steps)
    yield from differ("rows of nobody", list(rows), [])
    for (step, name), samples in monitor.late.items():
        told = {day.steps.get(step, 0) for trainer in trainers for day in trainer.days if day.name == name}
        if samples not in told:
            yield f"late samples of {name} in step {step}: {samples}, but {told}"
    for step, samples, table, number in monitor.tables:
        yield from differ(f"samples in all at step {step}", samples, sum(table.values()))
        yield from differ(f"contributors at step {step}", number, len(table))
        for trainer in trainers:
            name = label(trainer.name, trainer.peer_id)
            given = [n for day in trainer.days for taken, n in day.steps.items() if taken <= step]
            late = sum(n for (taken, other), n in monitor.late.items() if other == name and taken <= step)
            if not sum(given) - late <= table.get(name, 0) <= sum(given):
                yield f"{name} in the table of step {step}: {table.get(name, 0)}, but {sum(given)}"


def compare_trainers(monitor: Monitor, trainers: list[Trainer]) -> Iterator[str]:
    """Compare what a trainer said in its log, at its end, and in its status."""
    targets = monitor.targets | {trainer.status["target_batch_size"] for trainer in trainers}
    targets |= {target for trainer in trainers for day in trainer.days for _, target, *_ in day.progress}
    yield from differ("number of targets", len(targets), 1)
    for trainer in trainers:
        name, last, status = label(trainer.name, trainer.peer_id), trainer.days[-1], trainer.status
        for number, day in enumerate(trainer.days, 1):
            yield from differ(f"name of {name} on day {number}", day.name, name)
            if day.thanks is not None:
                yield from differ(f"thanks to {name} on day {number}", day.thanks, (name, day.total, len(day.steps)))
            for samples, target, peers, own in day.progress:
                if not (own <= samples <= len(trainers) * target and 1 <= peers <= len(trainers)):
                    yield f"progress of {name} on day {number}: {own} of {samples} samples from {peers} peers"
        if last.thanks is None:
            continue
        yield from differ(f"name in the status of {name}", status["name"], name)
        yield from differ(f"samples in the status of {name}", status["applied"], last.total)
        yield from differ(f"steps in the status of {name}", status["joined"], len(last.steps))
        given = (f"{last.total:,} sample", f"in {len(last.steps):,} global step")
        if not all(part in trainer.sentence for part in given):
            yield f"--status of {name}: {trainer.sentence!r}, but {given}"
        if not status["applied"] <= status["computed"]:
            yield f"status of {name}: {status['applied']} of {status['computed']} samples applied"
        if last.losses:
            step = max(last.losses)
            if not isclose(status["loss"], last.losses[step], abs_tol=1e-5):
                yield f"loss in the status of {name}: {status['loss']}, but {last.losses[step]}"
            yield from differ(f"step in the status of {name}", status["step"], max(last.steps))


def compare_rounds(monitor: Monitor, trainers: list[Trainer]) -> Iterator[str]:
    """Compare the samples of each step with the weights that the reducers of its round have used."""
    said, untold, seen = Counter(), set(), defaultdict(set)
    for trainer in trainers:
        for day in trainer.days:
            if day.thanks is None:
                untold.add((max(day.steps, default=0) + 1, trainer.peer_id))
            said.update({(step, trainer.peer_id): samples for step, samples in day.steps.items()})
        for entry in trainer.rounds:
            for peer_id, weight in entry["weights"].items():
                seen[entry["step"], peer_id].add(round(weight))
    for step, peer_id in sorted(seen.keys() - untold):
        weights = seen[step, peer_id]
        yield from differ(f"samples of {peer_id[-7:]} in step {step} and weights", {said[step, peer_id]}, weights)


def compare_ends(monitor: Monitor, trainers: list[Trainer]) -> Iterator[str]:
    """Compare the monitor's last words with its files."""
    for number, step, checkpoint in monitor.ends:
        yield from differ("newest step at the monitor's end", step, monitor.steps[number - 1][0] if number else 0)
        if checkpoint is not None and checkpoint > step:
            yield f"newest checkpoint at the monitor's end: {checkpoint}, but the newest step is {step}"
    if monitor.ends:
        newest = max(monitor.checkpoints, default=None)
        yield from differ("newest checkpoint at the monitor's last end", monitor.ends[-1][-1], newest)
    for earlier, later in pairwise(monitor.metrics):
        if later["time"] < earlier["time"]:
            yield f"step {later['step']} ended before step {earlier['step']}"
