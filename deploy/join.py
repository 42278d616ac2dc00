"""Functions of the notebooks for Colab and Kaggle: join a run, or host one behind ngrok.

`python -m deploy.join` prints the batch size for this machine's GPU.
"""

import contextlib
import itertools
import math
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

from cotrain.common.batch_size import fit_batch_size
from cotrain.common.errors import UserError
from cotrain.common.flags import check_peer, check_web_address, split_peers
from peerstep.peer.processes import leave_with_parent

# ALBERT-large with 512 tokens in mixed precision keeps 0.73 GiB of activations per sample, and needs another 0.2 GiB
# for the logits of 30 000 tokens. CUDA, weights and gradients take 1 GiB; the rest is for fragmentation.
GIB_FOR_SAMPLE, GIB_FOR_REST = 1.0, 2.0
STOP_TIMEOUT = 45.0  # seconds; the trainer's own limit is 32
# Becomes a monitor of the trainer beside it, once that has printed its local address; other peers need not reach it
MONITOR = """until address=$(grep -om1 -e '--initial_peers /ip4/[^ ]*' "$0"); do sleep 1; done
exec "$1" run_training_monitor.py $address --host_maddrs /ip4/127.0.0.1/tcp/0 "${@:2}" &>monitor.log"""


def choose_batch_size() -> int:
    """Return the micro-batch size per GPU: the largest power of two that fits the smallest GPU of this machine.

    :raises UserError: if NVIDIA's driver finds no GPU
    """
    query = ["nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=60, check=True, encoding="utf-8").stdout
        mebibytes = min(map(int, output.splitlines()))
    except (OSError, ValueError, subprocess.SubprocessError):
        raise UserError("there is no GPU here: turn it on (see the first cell), and run all cells again") from None
    return fit_batch_size(mebibytes / 1024, GIB_FOR_REST, GIB_FOR_SAMPLE)


def trainer_command(
    initial_peers: str | None, username: str, batch_size: int, more_flags: str = "", tunnel: str = "none"
) -> list[str]:
    """Return the command line of a trainer, from the values of a form. Without a tunnel it is in client mode.

    :param initial_peers: None for the trainer that begins a run; `more_flags` then state the settings of the run
    :raises UserError: if `initial_peers` has no valid address, or the first trainer has no data
    """
    command = [sys.executable, "run_trainer.py", "--disable_tqdm", "--per_device_train_batch_size", str(batch_size)]
    command += ["--client_mode"] if tunnel == "none" else ["--tunnel", tunnel]
    if username.strip():
        command += ["--username", username.strip()]
    if initial_peers is not None:
        peers = split_peers(initial_peers)
        if not peers:
            raise UserError("INITIAL_PEERS is empty: paste the address that the organiser of the run gave you")
        for peer in peers:
            check_peer("INITIAL_PEERS", peer)
        command += ["--initial_peers", *peers]
    words = shlex.split(more_flags)
    for word, value in itertools.pairwise([*words, "--"]):
        if word == "--dataset_url":  # the packages that would find a wrong one take minutes to install
            if value.startswith("--"):
                raise UserError("DATASET_URL is empty: fill in the address of the archive of the data")
            if not value.startswith(("hf://", "s3://")):
                check_web_address("DATASET_URL", value)
    return [*command, *words]


def run(
    command: list[str], folder: Path, log: Path = Path("trainer.log"), monitor_flags: str | None = None, draw=None
) -> None:
    """Run the trainer until it ends or the cell is interrupted. Its output is printed and written to `log`.

    After an interrupt the trainer saves a checkpoint and leaves. UserError is raised if the trainer fails.

    :param monitor_flags: also run a monitor, with these flags
    :param draw: function without arguments, called twice a second
    """
    interrupted = False
    with open(log, "wb") as file, open(log, encoding="utf-8", errors="replace") as output:
        # preexec_fn is safe in a process with threads: the hook acquires none of their locks.
        options = {"stdout": file, "stderr": file, "stdin": subprocess.DEVNULL, "preexec_fn": leave_with_parent}
        commands = [command]
        if monitor_flags is not None:
            commands.append(["bash", "-c", MONITOR, log.absolute(), sys.executable, *shlex.split(monitor_flags)])
        processes = [subprocess.Popen(words, cwd=folder, **options) for words in commands]
        process = processes[0]
        try:
            _show(process, output, draw)
        except KeyboardInterrupt:
            interrupted = True
            print("\nStopping: the trainer saves a checkpoint and leaves the run. Interrupt again to end it at once")
            process.terminate()
            _show(process, output, draw, STOP_TIMEOUT)
        finally:
            for one in reversed(processes):  # the monitor reports the last steps
                one.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    one.wait(STOP_TIMEOUT)
                one.kill()
                one.wait()
    if process.returncode != 0 and not interrupted:
        raise UserError(f"the trainer ended with exit code {process.returncode}; see its last lines above")
    print("The trainer has ended. Run this cell again to rejoin")


def _show(process: subprocess.Popen, output: TextIO, draw, timeout: float = math.inf) -> None:
    """Print the output until the process ends. It is a file: a pipe stays open while child processes of it run."""
    deadline = time.monotonic() + timeout
    while process.poll() is None and time.monotonic() < deadline:
        print(output.read(), end="", flush=True)
        if draw is not None:
            draw()
        time.sleep(0.5)
    print(output.read(), end="", flush=True)


if __name__ == "__main__":
    print(choose_batch_size())
