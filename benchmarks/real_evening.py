#!/usr/bin/env python3
"""One evening: four unlike volunteers at home fine-tune a real model, beside TRL's SFTTrainer in one process.

    benchmarks/real_evening.py --base FOLDER --train_file chats.json --folder evening         # all parts, in turn
    benchmarks/real_evening.py --folder evening --parts trl --seeds 1 2                       # some of them again

prepare   tokenize_wikitext103.py --base, as an organiser does; a tenth of the conversations is held out
evening   organiser (web server, monitor, evaluator) and volunteers, each on a host with a home line of 14.7 Mbit/s up
          and 112 down, 23 ms from home to home. bob is killed and returns; alice's laptop sleeps; carol is behind NAT;
          dana comes late, has a third of the line, and half of the others' share of the CPU
trl       one process on as many samples, steps and the same schedule (benchmarks/trl_trainer.py), by seed
speed     a trainer of a run alone, and TRL, at the same time on a core each, then with the cores exchanged
report    held-out loss, times and bytes; exports the model; answers to held-out questions; curve.svg

Needs root, two cores and 8 GB. Each part leaves its figures as JSON in --folder; report prints all of them.
"""

import argparse
import itertools
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import ExitStack, closing, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import psutil
import torch
import yaml
from datasets import load_from_disk
from peft import AutoPeftModelForCausalLM
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import set_verbosity_error

from arguments import DatasetArguments
from benchmarks.process_usage import cpu_seconds, measure_memory
from cotrain.data.archive import file_sha256
from cotrain.monitoring.evaluation import Evaluator
from cotrain.options import NOTHING
from cotrain.tasks.task_loading import load_task
from cotrain.training.checkpoints import list_checkpoints
from peerstep.peer.processes import guard_children
from tests.support.launcher import ROOT
from tests.support.namespaces import Host, Internet, why_unavailable
from tests.support.peers import ALTERED, LOCAL, Script, Scripts, read_jsonl, wait_until

PARTS = ("prepare", "evening", "trl", "speed", "report")
UPLINK, DOWNLINK, LATENCY = 14.7, 112.0, 23.0  # Mbit/s and milliseconds
VOLUNTEERS = ("alice", "bob", "carol", "dana")
EVENTS = ((1, "start", "dana"), (3, "kill", "bob"), (6, "sleep", "alice"))  # global step, method of Evening, volunteer
AWAY = {"kill": ("start", 90.0), "sleep": ("wake", 600.0)}  # what follows, after how many seconds
QUESTIONS, MAX_ANSWER = 20, 120  # tokens


def write(path: Path, figures: object) -> None:
    path.write_text(json.dumps(figures, indent=1), encoding="utf-8")


def read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def prepare(args: argparse.Namespace) -> None:
    """Make data, archive and settings of the run: configs/finetune.yaml, changed where an organiser has to."""
    (args.folder / "www").mkdir(parents=True, exist_ok=True)
    command = (
        sys.executable, ROOT / "tokenize_wikitext103.py", "--objective", "chat", "--tokenizer", args.base,
        "--train_file", args.train_file, "--max_seq_length", args.max_seq_length, "--validation_fraction", 0.1,
        "--max_left_out", 0.7, "--archive", "www/data.tar.gz", "--base", args.base,
    )  # fmt: skip
    with open(args.folder / "prepare.log", "wb") as log:
        subprocess.run(list(map(str, command)), cwd=args.folder, stdout=log, stderr=log, check=True)
    settings = yaml.safe_load((ROOT / "configs/finetune.yaml").read_text(encoding="utf-8"))
    settings |= {
        "run_id": "one-evening", "model_name_or_path": "data/model", "target_batch_size": args.target_batch_size,
        "warmup_steps": args.warmup_steps, "total_steps": args.steps,
        "dataset_sha256": file_sha256(args.folder / "www/data.tar.gz"),
    }  # fmt: skip
    write(args.folder / "settings.json", settings)


class Evening:
    """The hosts of an evening and their peers. Each peer has a folder, and runs the command that its owner types."""

    def __init__(self, stack: ExitStack, folder: Path, settings: dict):
        self.stack, self.folder, self.running = stack, folder, {}
        self.commands: dict[str, str] = {}
        self.presence: list[tuple[float, str, str]] = []  # time, volunteer, event
        self.cpu: dict[int, float] = {}  # seconds of each process of the volunteers
        self.internet = stack.enter_context(Internet(LATENCY))
        self.hosts: dict[str, Host] = {}
        web, monitor = self.host("web", 1000, 1000), self.host("monitor", 100, 100)
        server = ["nsenter", f"--net={web.namespace}", sys.executable, "-m", "http.server", "80", "-d", folder / "www"]
        process = subprocess.Popen(list(map(str, server)), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(process.wait)
        stack.callback(process.kill)
        (folder / "monitor").mkdir()
        text = yaml.safe_dump(settings | {"dataset_url": f"http://{web.address}/data.tar.gz"})
        (folder / "monitor/finetune.yaml").write_text(text, encoding="utf-8")
        maddr = f"/ip4/{monitor.address}/tcp/31337"
        command = ("run_training_monitor.py", "--run_config", "finetune.yaml", "--host_maddrs", maddr)
        self.address = self.run("monitor", *command).address
        self.host("evaluator", UPLINK, DOWNLINK)
        for name in VOLUNTEERS:
            rate = 1 / 3 if name == "dana" else 1.0
            self.host(name, rate * UPLINK, rate * DOWNLINK)

    def host(self, name: str, upload: float, download: float) -> Host:
        host = self.internet.add_home() if name == "carol" else self.internet.add_public()
        self.internet.limit(host, upload, download)
        self.hosts[name] = host
        return host

    def run(self, name: str, *command: str, env: dict[str, str] | None = None) -> Script:
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        scripts = self.stack.enter_context(closing(Scripts(folder, self.folder, self.hosts[name].namespace)))
        self.running[name] = script = scripts.start(*command, log=name, env=env)
        self.commands[name] = "./" + " ".join(command[command[0] == ALTERED :])
        return script

    def start(self, name: str) -> None:
        """Start a volunteer's trainer. altered.py only records its local steps."""
        record = {"RECORD": str(self.folder / name / "record.jsonl")}
        flags = ("--client_mode",) if name == "carol" else ()
        script = self.run(name, ALTERED, "run_trainer.py", "--initial_peers", self.address, *flags, env=record)
        if name == "dana":
            psutil.Process(script.process.pid).nice(3 + os.nice(0))  # about half of the others' weight
        self.note(name, "start")

    def kill(self, name: str) -> None:
        self.running.pop(name).kill()
        self.note(name, "kill")

    def sleep(self, name: str) -> None:
        for process in self.running[name].family():
            process.suspend()
        self.note(name, "sleep")

    def wake(self, name: str) -> None:
        for process in self.running[name].family():
            process.resume()
        self.note(name, "wake")

    def note(self, name: str, event: str) -> None:
        self.presence.append((time.time(), name, event))
        print(f"{time.strftime('%H:%M:%S')} {event} {name}", file=sys.stderr, flush=True)

    def measure(self) -> None:
        """Keep the CPU time of the volunteers' processes, also of those that end later."""
        for name in VOLUNTEERS:
            for process in self.running[name].family() if name in self.running else ():
                with suppress(psutil.NoSuchProcess):
                    self.cpu[process.pid] = cpu_seconds(process)

    def traffic(self, name: str) -> tuple[int, int]:
        """Return the bytes that a host has sent and received, with all headers."""
        text = Path(self.hosts[name].namespace).parent.with_name("net").joinpath("dev").read_text(encoding="utf-8")
        for line in text.splitlines():
            interface, _, counters = line.partition(":")
            if interface.strip() in ("wan", "eth0"):
                values = [int(value) for value in counters.split()]
                return values[8], values[0]
        raise ValueError(name)


def spend_evening(args: argparse.Namespace) -> None:
    folder, events = args.folder / "evening", [(*event, 0.0) for event in EVENTS]
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(args.folder / "www", folder / "www")
    settings = read(args.folder / "settings.json")
    with ExitStack() as stack:
        evening = Evening(stack, folder, settings)
        for name in VOLUNTEERS:
            if (1, "start", name) not in EVENTS:
                evening.start(name)
        period = ("--evaluation_steps", "2", "--use_cpu")
        evening.run("evaluator", "run_evaluator.py", "--initial_peers", evening.address, *period)
        began = time.time()
        while any(script.process.poll() is None for script in evening.running.values()):
            assert time.time() < began + 60 * args.minutes, "the run has not ended"
            steps = read_jsonl(folder / "monitor/monitor_outputs/metrics.jsonl")
            newest = max((record["step"] for record in steps), default=0)
            for event in [event for event in events if newest >= event[0] and time.time() >= event[3]]:
                _, what, name, _ = event
                events.remove(event)
                getattr(evening, what)(name)
                if what in AWAY:
                    events.append((0, AWAY[what][0], name, time.time() + AWAY[what][1]))
            evening.measure()
            time.sleep(1)
        figures = {
            "commands": evening.commands, "presence": evening.presence, "ended": time.time(),
            "exit codes": {name: script.process.poll() for name, script in evening.running.items()},
            "traffic": {name: evening.traffic(name) for name in (*VOLUNTEERS, "monitor", "evaluator", "web")},
            "cpu seconds": sum(evening.cpu.values()), "load": os.getloadavg()[2],
        }  # fmt: skip
    write(args.folder / "evening.json", figures)


def train_by_trl(args: argparse.Namespace, out: Path, samples: int, steps: int, seed: int, log: Path) -> Script:
    settings = read(args.folder / "settings.json")
    return Script(
        "benchmarks/trl_trainer.py", args.base, args.folder / "data/tokenized", out, "--samples", samples, "--steps",
        steps, "--warmup_steps", settings["warmup_steps"], "--learning_rate", settings["learning_rate"], "--rank",
        settings["lora_rank"], "--seed", seed, log=log,
    )  # fmt: skip


def run_trl(args: argparse.Namespace) -> None:
    """Train with as many samples as the run's steps had on average, as many seeds at a time as there are cores."""
    steps = read_steps(args.folder)
    samples = round(statistics.fmean(record["samples"] for record in steps))
    for pair in zip(args.seeds[::2], args.seeds[1::2] or [None], strict=False):
        running = []
        for seed in pair:
            if seed is not None:
                out = args.folder / f"trl-{seed}"
                running.append(train_by_trl(args, out, samples, len(steps), seed, args.folder / f"trl-{seed}.log"))
        for script in running:
            assert script.wait(3600) == 0, script.output[-2000:]


def read_steps(folder: Path) -> list[dict]:
    """Return the monitor's newest record of each step."""
    records = read_jsonl(folder / "evening/monitor/monitor_outputs/metrics.jsonl")
    return [by_step for _, by_step in sorted({record["step"]: record for record in records}.items())]


def measure_speed(args: argparse.Namespace) -> None:
    """Compare a trainer of a run, which is alone, with TRL: samples per second and CPU second, and memory."""
    settings, figures = read(args.folder / "settings.json"), {"run": [], "trl": []}
    for number in range(2 * args.repeat):
        folder = args.folder / f"speed-{number}"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        flags = [part for key in ("lora_rank", "optimizer", "learning_rate", "adam_epsilon", "warmup_steps",
                                  "total_steps", "target_batch_size", "gradient_compression")
                 for part in (f"--{key}", settings[key])]  # fmt: skip
        run = Script(
            ALTERED, "run_trainer.py", "--run_id", "alone", "--host_maddrs", LOCAL, "--model_name_or_path", args.base,
            "--tokenizer_path", args.folder / "data/tokenizer", "--dataset_path", args.folder / "data/tokenized",
            "--output_dir", folder / "run", "--use_cpu", "--per_device_train_batch_size", 1, *flags,
            log=folder / "run.log", env={"RECORD": str(folder / "record.jsonl")},
        )  # fmt: skip
        trl = train_by_trl(args, folder / "trl", 4, 10**4, 0, folder / "trl.log")
        scripts = {"run": run, "trl": trl}
        try:
            for place, script in enumerate(scripts.values()):
                core = (place + number) % 2
                wait_until(lambda s=script: s.family(), 60, "a process")
                for process in script.family():
                    process.cpu_affinity([core])
            record = {"run": folder / "record.jsonl", "trl": folder / "trl/steps.jsonl"}
            wait_until(lambda r=record: all(read_jsonl(path) for path in r.values()), 600, "first steps")
            time.sleep(10)
            since = {name: family_cpu(script) for name, script in scripts.items()}
            began, memory = time.time(), {"run": [], "trl": []}
            while time.time() < began + args.seconds:
                time.sleep(2)
                for name, script in scripts.items():
                    memory[name].append(measure_memory(script.process.pid, script.family()).total() / 1e6)
            for name, script in scripts.items():
                seconds, cpu = time.time() - began, family_cpu(script) - since[name]
                done = [entry for entry in read_jsonl(record[name]) if entry["event"] in ("local step", "step")]
                inside = [entry for entry in done if began < entry["time"]]
                samples = sum(entry["samples"] for entry in inside[1:])
                rate = samples / (inside[-1]["time"] - inside[0]["time"])
                figures[name].append({
                    "samples a second": rate, "samples a CPU second": rate * seconds / cpu,
                    "peak MB (PSS)": max(memory[name]), "median MB (PSS)": statistics.median(memory[name]),
                })  # fmt: skip
        finally:
            for script in scripts.values():
                script.kill_all()
        print(json.dumps({name: runs[-1] for name, runs in figures.items()}), flush=True)
    write(args.folder / "speed.json", figures)


def family_cpu(script: Script) -> float:
    return sum(map(cpu_seconds, script.family()))


class Judge:
    """Computes the held-out loss of a checkpoint with adapters, or of the base, as run_evaluator.py does."""

    def __init__(self, args: argparse.Namespace):
        data, self.base = args.folder / "data", args.base
        settings = DatasetArguments(
            model_name_or_path=str(args.base), tokenizer_path=str(data / "tokenizer"),
            dataset_path=str(data / "tokenized"), lora_rank=16,
        )  # fmt: skip
        task = load_task(settings, NOTHING, has_weights=True)
        task.build_model()  # finds out how samples are packed
        self.evaluator = Evaluator(task, use_cpu=True, disable_tqdm=True)

    def load(self, checkpoint: Path | None) -> torch.nn.Module:
        if checkpoint is None:
            return AutoModelForCausalLM.from_pretrained(self.base, dtype="auto")
        return AutoPeftModelForCausalLM.from_pretrained(checkpoint, dtype="auto")

    def loss(self, checkpoint: Path | None) -> float:
        return self.evaluator.evaluate(self.load(checkpoint), 0)["loss"]


def read_questions(args: argparse.Namespace) -> list[tuple[list[int], str]]:
    """Return the first held-out questions, as the model is asked them, and the answers of the data."""
    tokenizer, questions = AutoTokenizer.from_pretrained(args.folder / "data/tokenizer"), []
    for sample in load_from_disk(str(args.folder / "data/tokenized"))["validation"]:
        starts = [place for place, is_start in enumerate(sample["start_mask"]) if is_start]
        for start, end in zip(starts, [*starts[1:], None], strict=True):
            ids, answer = sample["input_ids"][start:end], sample["answer_mask"][start:end]
            length = answer.index(1)
            questions.append((ids[:length], tokenizer.decode(ids[length:], skip_special_tokens=True).strip()))
    return questions[:QUESTIONS]


@torch.inference_mode()
def answer(model: torch.nn.Module, tokenizer, questions: list[list[int]]) -> list[str]:
    """Return greedy answers. An answer that had not ended after MAX_ANSWER tokens ends with …"""
    tokenizer.padding_side, tokenizer.pad_token, answers = "left", tokenizer.pad_token or tokenizer.eos_token, []
    for first in range(0, len(questions), 5):
        batch = tokenizer.pad({"input_ids": questions[first : first + 5]}, return_tensors="pt")
        texts = model.eval().generate(**batch, max_new_tokens=MAX_ANSWER, do_sample=False)
        for tokens in texts[:, batch["input_ids"].shape[1] :]:
            has_ended = bool((tokens == tokenizer.eos_token_id).any())
            text = tokenizer.decode(tokens, skip_special_tokens=True).strip()
            answers.append(text if has_ended else f"{text} …")
    return answers


def describe_volunteer(args: argparse.Namespace, name: str, evening: dict) -> dict:
    """Return a volunteer's figures. Seconds are those since its first start; computing is outside of `step`."""
    folder = args.folder / "evening" / name
    events = read_jsonl(folder / "record.jsonl")
    local = [entry for entry in events if entry["event"] == "local step"]
    rounds = read_jsonl(folder / "outputs/rounds.jsonl")
    averaged = [entry for entry in rounds if entry["outcome"] == "averaged"]
    moments = {what: [t for t, who, event in evening["presence"] if (who, event) == (name, what)]
               for what in ("start", "kill", "sleep", "wake")}  # fmt: skip
    breaks = [*moments["start"][1:], *moments["wake"]]  # a local step that is the first after one is not counted
    spent = waited = 0.0
    for before, after in itertools.pairwise(local):
        if not any(before["time"] < moment < after["time"] for moment in breaks):
            spent += after["time"] - before["time"]
            waited += after["waited"]
    sent, received = evening["traffic"][name]
    return {
        "samples": sum(entry["samples"] for entry in local), "rounds averaged": len(averaged),
        "rounds": {entry["outcome"]: sum(r["outcome"] == entry["outcome"] for r in rounds) for entry in rounds},
        "seconds of a round": statistics.median(entry["seconds"]["round"] for entry in averaged),
        "seconds to the first local step": local[0]["time"] - moments["start"][0],
        "seconds to the first average": averaged[0]["time"] - moments["start"][0],
        "seconds from return to average": [
            min(entry["time"] for entry in averaged if entry["time"] > moment) - moment
            for moment in breaks if any(entry["time"] > moment for entry in averaged)],
        "computing": 1 - waited / spent, "GB sent": sent / 1e9, "GB received": received / 1e9,
    }  # fmt: skip


def draw(args: argparse.Namespace, figures: dict, evening: dict) -> None:
    """Draw the held-out loss by samples, and below it who was there."""
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "evening", "font.size": 9})
    figure, (upper, lower) = plt.subplots(
        2, 1, figsize=(7.2, 4.4), sharex=True, height_ratios=(3, 1.3), layout="constrained"
    )
    steps = read_steps(args.folder)
    done, total = [0], 0
    for record in steps:
        total += record["samples"]
        done.append(total)
    moments = [min(t for t, _, _ in evening["presence"]), *(record["time"] for record in steps)]

    def samples_at(moment: float) -> float:
        after = next((n for n, t in enumerate(moments) if t >= moment), len(moments) - 1)
        if after == 0:
            return 0
        share = (moment - moments[after - 1]) / max(1e-9, moments[after] - moments[after - 1])
        return done[after - 1] + min(1.0, share) * (done[after] - done[after - 1])

    curve = [(done[entry["step"]], entry["validation loss"]) for entry in figures["evaluations"]]
    upper.plot(*zip(*curve, strict=True), "o-", color="#2c6fbb", label="four volunteers")
    losses = figures["loss"]
    upper.axhline(losses["base"], color="#888888", linestyle="--", label="base")
    for number, by_step in enumerate(losses["trl"].values()):
        points = sorted((done[int(step)], loss) for step, loss in by_step.items())
        label = None if number else "TRL, one process"
        upper.plot(*zip(*points, strict=True), "D-", color="#c0562f", markersize=4, label=label)
    upper.set(ylabel="held-out loss")
    upper.legend(frameon=False)
    for place, name in enumerate(reversed(VOLUNTEERS)):
        since = None
        for moment, _, event in [*(e for e in evening["presence"] if e[1] == name), (moments[-1], name, "end")]:
            if event in ("start", "wake"):
                since = samples_at(moment)
            elif since is not None:
                lower.barh(place, samples_at(moment) - since, left=since, height=0.6, color="#2c6fbb")
                since = None
    for moment, name, event in evening["presence"]:
        if event in ("kill", "sleep"):
            text = {"kill": " killed", "sleep": " asleep"}[event]
            lower.text(samples_at(moment), VOLUNTEERS[::-1].index(name), text, va="center", fontsize=8)
    lower.set(yticks=range(len(VOLUNTEERS)), yticklabels=VOLUNTEERS[::-1], xlabel="samples", xlim=(0, total * 1.02))
    for axis in (upper, lower):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(args.folder / "curve.svg", metadata={"Date": None})


def report(args: argparse.Namespace) -> None:
    set_verbosity_error()
    evening, steps, judge = read(args.folder / "evening.json"), read_steps(args.folder), Judge(args)
    outputs = args.folder / "evening/monitor/monitor_outputs"
    checkpoint = list_checkpoints(outputs)[0]
    trl = sorted(args.folder.glob("trl-*/checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))
    of_trl: dict[str, dict[int, float]] = defaultdict(dict)
    for path in trl:
        of_trl[path.parent.name][int(path.name.partition("-")[2])] = judge.loss(path)
    seconds = steps[-1]["time"] - steps[0]["time"]
    applied, after_first = (sum(record["samples"] for record in steps[n:]) for n in (0, 1))
    figures = {
        "loss": {"base": judge.loss(None), "run": judge.loss(checkpoint), "trl": of_trl},
        "volunteers": {name: describe_volunteer(args, name, evening) for name in VOLUNTEERS},
        "run": {
            "steps": len(steps), "samples": applied, "seconds": seconds,
            "samples an hour": after_first / seconds * 3600,
            "over the target": applied / len(steps) / read(args.folder / "settings.json")["target_batch_size"] - 1,
            "samples a CPU second": sum(
                entry["samples"] for name in VOLUNTEERS
                for entry in read_jsonl(args.folder / "evening" / name / "record.jsonl")
                if entry["event"] == "local step") / evening["cpu seconds"],
            "minutes of the evening": (evening["ended"] - evening["presence"][0][0]) / 60,
        },
        "monitor": [{key: record.get(key) for key in ("step", "loss", "alive peers", "samples")} for record in steps],
        "evaluations": read_jsonl(args.folder / "evening/evaluator/evaluator_outputs/evaluations.jsonl"),
        "exit codes": evening["exit codes"], "commands": evening["commands"], "traffic": evening["traffic"],
    }  # fmt: skip
    if (args.folder / "speed.json").exists():
        speed = read(args.folder / "speed.json")
        figures["speed"] = {name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
                            for name, runs in speed.items()}  # fmt: skip
    write(args.folder / "figures.json", figures)
    draw(args, figures, evening)
    print(json.dumps(figures, indent=1))
    shutil.rmtree(args.folder / "my-model", ignore_errors=True)
    command = [sys.executable, ROOT / "export_model.py", checkpoint, args.folder / "my-model"]
    subprocess.run(list(map(str, command)), check=True, stdout=subprocess.DEVNULL)
    questions, tokenizer = read_questions(args), AutoTokenizer.from_pretrained(args.folder / "my-model")
    models = {"base": judge.load(None), "tuned": AutoModelForCausalLM.from_pretrained(args.folder / "my-model")}
    models["TRL"] = judge.load(trl[-1])
    answers = {name: answer(model, tokenizer, [ids for ids, _ in questions]) for name, model in models.items()}
    rows = []
    for place, (ids, text) in enumerate(questions):
        question = tokenizer.decode(ids).split("<|im_start|>user\n")[-1].split("<|im_end|>")[0]
        rows.append({"question": question, "data": text, **{name: answers[name][place] for name in answers}})
        print("\n" + "\n".join(f"[{name}] {text}" for name, text in rows[-1].items()))
    write(args.folder / "answers.json", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", type=Path, required=True, help="folder of a model with a chat template")
    parser.add_argument("--train_file", type=Path, help="conversations")
    parser.add_argument("--folder", type=Path, required=True, help="for data, logs and results")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--max_seq_length", type=int, default=256)
    parser.add_argument("--target_batch_size", type=int, default=64)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--warmup_steps", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="of TRL")
    parser.add_argument("--minutes", type=float, default=60.0, help="after which an evening that has not ended fails")
    parser.add_argument("--seconds", type=float, default=60.0, help="of each measurement of the speed")
    parser.add_argument("--repeat", type=int, default=1, help="of the speed on each core")
    args = parser.parse_args()
    if reason := why_unavailable():
        sys.exit(reason)
    args.base, args.folder = args.base.absolute(), args.folder.absolute()
    guard_children()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: end the peers first
    torch.set_num_threads(1)
    functions = dict(zip(PARTS, (prepare, spend_evening, run_trl, measure_speed, report), strict=True))
    for part in args.parts:
        print(f"{time.strftime('%H:%M:%S')} {part}", file=sys.stderr, flush=True)
        functions[part](args)


if __name__ == "__main__":
    main()
