#!/usr/bin/env python3
"""Measure a trainer on a GPU: its speed, also beside transformers' Trainer and beside a second peer, and its memory.

benchmarks/gpu.py                  ALBERT-large in bf16 and fp16, on the first GPU
benchmarks/gpu.py --device cpu     a tiny model, to try the script itself

Samples are random and without padding. The trainers take global steps, with
themselves or with each other, but find all peers on the same machine.

plain        transformers' Trainer, which takes a step of AdamW after each local step
one peer     run_trainer.py alone; its overhead is that of averaging, checks and progress reports
two peers    two of them on the same GPU; the sum of their speeds
MFU          floating-point operations of the model per second / peak of the GPU. Those of a sample: three times the
             matrix products of a forward pass, which is 6 x parameters x tokens, and attention. A parameter that
             layers share counts once for each layer. Gradient checkpointing is off
memory       largest amount in use by one process, without the CUDA context"""

import argparse
import json
import math
import os
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.gpu_peer import VOCAB_SIZE
from cotrain.models.model import build_without_weights, read_config
from tests.support.peers import LOCAL, Script

# Dense matrix products in 16 bits with 32-bit accumulation, in units of 10^12 a second; from the vendor's data sheets
PEAK_TFLOPS = {
    "T4": 65, "V100": 125, "A10G": 70, "A100": 312, "L4": 121, "L40S": 362, "RTX 3090": 71, "RTX 4090": 165,
    "H100 PCIe": 756, "H100": 989, "H200": 989,
}  # fmt: skip
MAX_BATCH_SIZE = 64  # a micro-batch of about half a second on the largest GPUs


def count_operations(model_name: str, seq_length: int) -> int:
    """Count the floating-point operations of a forward and a backward pass for one sample."""
    config = read_config(model_name)
    config.vocab_size, config._attn_implementation = VOCAB_SIZE, "eager"
    model = build_without_weights(config)
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        model(input_ids=torch.zeros(1, seq_length, dtype=torch.long))
    return 3 * counter.get_total_flops()


def find_peak(device_name: str) -> float:
    """Return the peak of a GPU in operations per second; NaN if it is not in the table."""
    names = [name for name in PEAK_TFLOPS if name in device_name]
    return PEAK_TFLOPS[max(names, key=len)] * 1e12 if names else math.nan


class Bench:
    """Runs benchmarks/gpu_peer.py in separate processes.

    :param args: the command line
    :param precision: fp32, bf16 or fp16
    """

    def __init__(self, args: argparse.Namespace, precision: str, folder: Path):
        self.args, self.precision, self.folder = args, precision, folder
        self._number = 0

    def run(self, mode: str, batch_size: int, num_peers: int = 1) -> list[dict]:
        """Run `num_peers` processes at the same time.

        :param mode: as in gpu_peer.py
        :returns: the result of each process
        """
        self._number += 1
        folder = self.folder / f"{self._number}-{mode}"
        folder.mkdir()
        peers: list[Script] = []
        with ExitStack() as stack:
            for number in range(num_peers):
                address = ("--initial_peers", peers[0].address) if peers else ()
                peers.append(self._start(mode, batch_size, folder, number, address))
                stack.callback(peers[-1].kill_all)
            if mode == "trainer":
                for peer in peers:
                    peer.wait_for("Local step 1:", timeout=600)
            (folder / "go").touch()
            for peer in peers:
                exit_code = peer.wait(timeout=600 + self.args.warmup + self.args.seconds)
                assert exit_code == 0, peer.output
        return [json.loads((folder / f"{number}.json").read_text(encoding="utf-8")) for number in range(num_peers)]

    def _start(self, mode: str, batch_size: int, folder: Path, number: int, address: tuple) -> Script:
        args = self.args
        flags = (
            "--run_id", "gpu", "--model_name_or_path", args.model, f"--{self.precision}", "--output_dir",
            folder / str(number), "--per_device_train_batch_size", batch_size, "--gradient_accumulation_steps",
            args.accumulation, "--target_batch_size", args.target_batch_size, "--host_maddrs", LOCAL,
            "--save_steps", 10**9, "--disable_tqdm", *(("--use_cpu",) if args.device == "cpu" else ()), *address,
        )  # fmt: skip
        first_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]
        env = {
            "CUDA_VISIBLE_DEVICES": "" if args.device == "cpu" else first_gpu,
            "OMP_NUM_THREADS": str(args.threads), "SEQ_LENGTH": str(args.seq_length), "SECONDS": str(args.seconds),
            "WARMUP": str(args.warmup), "GO": str(folder / "go"), "RECORD": str(folder / f"{number}.json"),
        }  # fmt: skip
        return Script("benchmarks/gpu_peer.py", mode, *flags, log=folder / f"{number}.log", env=env)


def measure(args: argparse.Namespace, precision: str, folder: Path, operations: int, peak: float) -> None:
    """Measure one precision and print its rows of the table."""
    bench = Bench(args, precision, folder)
    batch_size = args.batch_size
    if args.device == "cuda":
        (result,) = bench.run("largest", 1)
        largest = result["largest"]
        batch_size = batch_size or 2 ** int(math.log2(min(MAX_BATCH_SIZE, max(1, largest // 2))))  # two peers fit
        print(f"{precision:<11}{'largest':<11}{largest:>11}{'':>34}{result['memory']:>8.1f} GiB")
    reference = math.nan
    for name, mode, num_peers in (("plain", "plain", 1), ("one peer", "trainer", 1), ("two peers", "trainer", 2)):
        results = bench.run(mode, batch_size, num_peers)
        speed = sum(result["samples_per_second"] for result in results)
        reference = speed if mode == "plain" else reference
        memory = max(result["memory"] for result in results)
        print(f"{precision:<11}{name:<11}{batch_size:>11}{speed:>12.2f}{speed / reference:>11.3f}", end="")
        print(f"{speed * operations / peak:>11.1%}{memory:>8.1f} GiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--precisions", nargs="+", choices=["fp32", "bf16", "fp16"], help="default: bf16 and fp16")
    parser.add_argument("--model", help="a name in configs/, or a config.json of ALBERT; default: albert-large-v2")
    parser.add_argument("--seq_length", type=int, help="tokens of a sample; default: 512")
    parser.add_argument("--batch_size", type=int, help="samples of a micro-batch; default: half of the largest, to 64")
    parser.add_argument("--accumulation", type=int, default=2, help="micro-batches of a local step")
    parser.add_argument("--target_batch_size", type=int, help="samples of a global step; default: 4096")
    parser.add_argument("--warmup", type=float, help="seconds; default: 20")
    parser.add_argument("--seconds", type=float, help="of each measurement; default: 60")
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 1) // 2), help="OpenMP, of a process")
    parser.add_argument("--peak_tflops", type=float, help="of the GPU, for a GPU that the script does not know")
    args = parser.parse_args()
    is_trial = args.device == "cpu"
    args.model = args.model or ("albert-tiny" if is_trial else "albert-large-v2")
    args.precisions = args.precisions or (["bf16"] if is_trial else ["bf16", "fp16"])
    args.seq_length = args.seq_length or (64 if is_trial else 512)
    args.batch_size = args.batch_size or (2 if is_trial else None)
    args.target_batch_size = args.target_batch_size or (128 if is_trial else 4096)
    args.warmup = (3.0 if is_trial else 20.0) if args.warmup is None else args.warmup
    args.seconds = args.seconds or (10.0 if is_trial else 60.0)
    name = "CPU" if is_trial else torch.cuda.get_device_name()
    peak = args.peak_tflops * 1e12 if args.peak_tflops else find_peak(name)
    operations = count_operations(args.model, args.seq_length)
    print(f"{name}; {args.model}, {args.seq_length} tokens, {operations / 1e9:.1f} GFLOP per sample, ", end="")
    print(f"peak {peak / 1e12:.0f} TFLOP/s\n")
    print(f"{'precision':<11}{'':<11}{'micro-batch':>11}{'samples/s':>12}{'of plain':>11}{'MFU':>11}{'memory':>12}")
    for precision in args.precisions:
        with tempfile.TemporaryDirectory() as folder:
            measure(args, precision, Path(folder), operations, peak)


if __name__ == "__main__":
    main()
