"""What join_collaboration.ipynb does: look at the GPU, choose the batch size, install, run the trainer.

As a program it prints the batch size for this machine's GPU: `python -m deploy.join`.
"""

import math
import re
import resource
import shlex
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from lib.common.errors import UserError
from lib.common.processes import leave_with_parent

# ALBERT-large with 512 tokens in mixed precision keeps 0.73 GiB of activations for a sample, and needs another 0.2 GiB
# for the logits of 30 000 tokens; CUDA, weights and gradients take 1 GiB, and fragments want their share.
GIB_FOR_SAMPLE, GIB_FOR_REST = 1.0, 2.0
MAX_BATCH_SIZE = 64  # what makes a micro-batch of half a second on the largest GPUs

STOP_TIMEOUT = 30.0  # the trainer gives itself 12 seconds
MIN_TORCH = (2, 6)  # for this transformers


@dataclass(frozen=True)
class Gpu:
    name: str
    memory: float  # GiB


def find_gpus() -> list[Gpu]:
    """The GPUs of this machine, as NVIDIA's driver names them.

    :raises UserError: if there is none
    """
    query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        output = ""
    found = re.findall(r"^(.+), *(\d+)$", output, re.MULTILINE)
    if not found:
        raise UserError(
            "there is no GPU here. Colab: Runtime, Change runtime type, T4 GPU. Kaggle: Settings, Accelerator, GPU. "
            "Then run all cells again"
        )
    return [Gpu(name, int(mebibytes) / 1024) for name, mebibytes in found]


def choose_batch_size(gpus: list[Gpu]) -> int:
    """Samples in a micro-batch on each GPU: the largest power of two that surely fits the smallest of them."""
    fits = (min(gpu.memory for gpu in gpus) - GIB_FOR_REST) / GIB_FOR_SAMPLE
    return min(MAX_BATCH_SIZE, 2 ** int(math.log2(max(1.0, fits))))


# --- installation ----------------------------------------------------------------------------------------------------


def install(project: Path) -> None:
    """Install what the trainer needs. A torch that works with this GPU stays: Colab's and Kaggle's fits their driver,
    while the newest may want a newer driver or a newer GPU.

    :raises UserError: if pip fails, or torch does not see the GPU in the end
    """
    keep_torch = torch_works()
    packages = [
        package
        for line in (project / "requirements.txt").read_text().splitlines()
        if (package := line.split("#")[0].strip()) and not (keep_torch and package.startswith("torch=="))
    ]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *packages]
    if subprocess.run(pip, timeout=3600).returncode != 0:
        raise UserError("pip could not install the requirements; see its last lines above")
    if not keep_torch and not torch_works():
        raise UserError("torch does not see the GPU: restart the session and run all cells again, or take another GPU")


def torch_works() -> bool:
    """Whether the installed torch is new enough and computes on the GPU. In a process of its own: the notebook's would
    keep the old one loaded, and some memory of the GPU."""
    code = (
        "import sys, torch\n"
        "version = tuple(int(number) for number in torch.__version__.split('.')[:2])\n"
        f"sys.exit(version < {MIN_TORCH} or float(torch.ones(8, 8, device='cuda').sum()) != 64)"
    )
    try:
        return subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=300).returncode == 0
    except subprocess.TimeoutExpired:
        return False


# --- the trainer -----------------------------------------------------------------------------------------------------


def trainer_command(
    initial_peers: str,
    dataset_url: str,
    username: str,
    batch_size: int,
    run_id: str = "albert",
    dataset_sha256: str = "",
    more_flags: str = "",
) -> list[str]:
    """The command line of a trainer behind a firewall. What the fields of the form hold is trimmed; `more_flags` come
    last and win.

    :raises UserError: if a field that must be filled in is empty
    """
    peers = [word for word in initial_peers.replace(",", " ").split() if word != "--initial_peers"]
    if not peers:
        raise UserError("INITIAL_PEERS is empty: paste the address that the organiser of the run gave you")
    if not dataset_url.strip():
        raise UserError("DATASET_URL is empty: paste the address of the data that the organiser of the run gave you")
    command = [sys.executable, "run_trainer.py", "--client_mode", "--disable_tqdm", "--run_id", run_id.strip()]
    command += ["--per_device_train_batch_size", str(batch_size), "--dataset_url", dataset_url.strip()]
    if dataset_sha256.strip():
        command += ["--dataset_sha256", dataset_sha256.strip()]
    if username.strip():
        command += ["--username", username.strip()]
    return [*command, "--initial_peers", *peers, *shlex.split(more_flags)]


def run(command: list[str], folder: Path, log: Path = Path("trainer.log")) -> None:
    """Run the trainer and show what it prints, which also goes to `log`, until it ends or the cell is interrupted.

    An interrupt lets it finish: it saves a checkpoint and says goodbye. A second one, or the end of the notebook's
    process, ends it at once.

    :raises UserError: if it fails
    """
    _allow_open_files(4096)
    interrupted = False
    with open(log, "wb") as file, open(log, errors="replace") as output:
        # The notebook's process has threads, but the hook takes none of their locks.
        process = subprocess.Popen(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=file, stderr=file, preexec_fn=leave_with_parent
        )
        try:
            try:
                _show(process, output)
            except KeyboardInterrupt:
                interrupted = True
                print("\nStopping: the trainer saves a checkpoint and says goodbye. Interrupt again to end it at once")
                process.terminate()
                _show(process, output, STOP_TIMEOUT)
        finally:
            process.kill()
            code = process.wait()
    if code != 0 and not interrupted:
        raise UserError(f"the trainer ended with exit code {code}; its last lines above say why")
    print("The trainer has ended. Run this cell again to rejoin")


def _allow_open_files(number: int) -> None:
    """As `ulimit -n` does, for the processes that this one starts."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < number:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (number if hard == resource.RLIM_INFINITY else min(number, hard), hard)
        )


def _show(process: subprocess.Popen, output: TextIO, timeout: float = math.inf) -> None:
    """Print what comes until the process ends. It is a file: a pipe would stay open while helpers of it live."""
    deadline = time.monotonic() + timeout
    while process.poll() is None and time.monotonic() < deadline:
        print(output.read(), end="", flush=True)
        time.sleep(0.5)
    print(output.read(), end="", flush=True)


if __name__ == "__main__":
    print(choose_batch_size(find_gpus()))
