"""Notebooks: as committed, and executed from the first cell to the last, with a fake GPU or fake clients of AWS."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from importlib.metadata import version
from pathlib import Path
from unittest.mock import MagicMock

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from arguments import TRAINER_ARGUMENTS
from cotrain.common.argument_parser import parse_arguments
from cotrain.common.errors import UserError
from cotrain.peer.tunnel import NGROK_INSTALL
from deploy import join
from deploy.join import choose_batch_size, trainer_command
from tests.support.aws import COORDINATOR_ADDRESS, DATA
from tests.support.peers import LOCAL, wait_until
from tests.support.processes import ROOT

NOTEBOOKS = sorted((ROOT / "deploy").glob("*.ipynb"))
ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/QmSDukXYoCmQT4ZZWhofaSyxinZHByTqDrsffZFWrMDXH1"
TOKEN = "2abcdefghijklmnopqrstuvwxyz_SECRET"  # of ngrok
SECRETS = r"\bhf_\w{20}|\bAKIA[0-9A-Z]{12}|\bgh[a-z]_\w{20}|\bsk-\w{20}|PRIVATE KEY|aws_secret|\b[0-9a-f]{40}\b"


def read(name: str, **values: object) -> nbformat.NotebookNode:
    """Read a notebook and set the variables in its first cells, as a user does."""
    notebook = nbformat.read(ROOT / "deploy" / name, nbformat.NO_CONVERT)
    for variable, value in values.items():
        (cell,) = (cell for cell in notebook.cells if re.search(rf"^{variable} = ", cell.source, re.MULTILINE))
        before, after = re.split(rf"^{variable} = .*$", cell.source, flags=re.MULTILINE)
        cell.source = f"{before}{variable} = {value!r}{after}"
    return notebook


def execute(notebook: nbformat.NotebookNode, folder: Path, timeout: int = 120) -> str:
    """Run all cells in a folder; return their output."""
    resources = {"metadata": {"path": folder}}
    NotebookClient(notebook, timeout=timeout, kernel_name="python3", resources=resources).execute()
    return "".join(output.get("text", "") for output in outputs_of(notebook))


def outputs_of(notebook: nbformat.NotebookNode) -> list[dict]:
    return [output for cell in notebook.cells for output in cell.get("outputs", [])]


@pytest.fixture(autouse=True)
def jupyter_folders(monkeypatch, tmp_path):
    """Redirect Jupyter's folders: kernels leave a history and connection files."""
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


@pytest.fixture
def nvidia_smi(monkeypatch, tmp_path):
    """Add a fake nvidia-smi that prints these lines, such as a GPU's MiB, to PATH."""

    def install(*lines: object, exit_code: int = 0) -> None:
        text = "\n".join(map(str, lines))
        write_program(tmp_path / "bin" / "nvidia-smi", f"#!/bin/sh\ncat <<EOF\n{text}\nEOF\nexit {exit_code}\n")
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    return install


# --- as committed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_committed_notebooks_are_valid_and_stripped(path):
    notebook = nbformat.read(path, nbformat.NO_CONVERT)
    nbformat.validate(notebook)
    assert all(not cell.get("outputs") and cell.get("execution_count") is None for cell in notebook.cells)
    assert re.findall(SECRETS, path.read_text(encoding="utf-8")) == []
    assert set(re.findall(r"ngrok==[\d.]+", path.read_text(encoding="utf-8"))) <= {NGROK_INSTALL.split()[-1]}


# --- the parts of joining --------------------------------------------------------------------------------------------


def test_batch_size_fits_the_smallest_gpu(nvidia_smi):
    sizes = {2048: 1, 4096: 2, 8192: 4, 11469: 8, 15360: 8, 23028: 16, 40960: 32, 143771: 64}
    for mebibytes, samples in sizes.items():
        nvidia_smi(mebibytes, 200_000)
        assert choose_batch_size() == samples


def test_missing_gpu_is_named(nvidia_smi, monkeypatch):
    for lines, exit_code in ((["NVIDIA-SMI has failed"], 9), (["No devices were found"], 0), ([], 0)):
        nvidia_smi(*lines, exit_code=exit_code)
        with pytest.raises(UserError, match="there is no GPU here"):
            choose_batch_size()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="there is no GPU here"):
        choose_batch_size()


def test_the_trainer_understands_its_command():
    command = trainer_command(
        f" --initial_peers {ADDRESS}, {ADDRESS} ", " Ann O'Nym ", 8,
        "--target_batch_size 512 --per_device_train_batch_size 2",
    )  # fmt: skip
    training, _, collaboration, *_ = parse_arguments(TRAINER_ARGUMENTS, "-", command[2:])
    assert command[1] == "run_trainer.py"
    assert collaboration.client_mode and collaboration.initial_peers == [ADDRESS, ADDRESS]
    assert (collaboration.username, collaboration.target_batch_size) == ("Ann O'Nym", 512)
    assert training.per_device_train_batch_size == 2, "the organiser's flags come last"
    command = trainer_command(ADDRESS, "", 4, tunnel="ngrok")
    _, _, collaboration, *_ = parse_arguments(TRAINER_ARGUMENTS, "-", command[2:])
    assert (collaboration.tunnel, collaboration.client_mode) == ("ngrok", False)
    assert "--username" not in command
    command = trainer_command(None, "", 4, "--run_id friends", "ngrok")
    _, _, collaboration, *_ = parse_arguments(TRAINER_ARGUMENTS, "-", command[2:])
    assert (collaboration.initial_peers, collaboration.run_id) == ([], "friends")
    with pytest.raises(UserError, match="INITIAL_PEERS is empty"):
        trainer_command(" --initial_peers", "", 4)


@pytest.mark.parametrize("address", ["/dns4/x.tcp.ngrok.io/tcp/12345/p2p/ABCDE'", "1.2.3.4:31337", f"{ADDRESS}x0"])
def test_a_wrong_address_is_found_before_the_installation(address):
    with pytest.raises(UserError, match="INITIAL_PEERS"):
        trainer_command(address, "", 4)


@pytest.mark.parametrize(
    ("url", "fault"), [("", "is empty"), ("example.org/data.tar.gz", "http"), ("ftp://x/y", "http")]
)
def test_a_wrong_address_of_the_data_is_found_before_the_installation(url, fault):
    with pytest.raises(UserError, match=f"DATASET_URL.*{fault}"):
        trainer_command(None, "", 4, f"--run_id friends --dataset_url {url} --target_batch_size 1024", "ngrok")
    for good in ("https://example.org/data.tar.gz", "hf://datasets/me/data/data.tar.gz"):
        assert good in trainer_command(None, "", 4, f"--dataset_url {good}", "ngrok")


def test_a_failure_of_the_trainer_is_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="the trainer ended with exit code 2"):
        join.run(trainer_command(ADDRESS, "", 4, "--initial_peers 1.2.3.4:31337"), ROOT)
    assert "lacks the peer ID" in capsys.readouterr().out


# --- the whole notebook ----------------------------------------------------------------------------------------------

TRAINER = 'import json, sys\nprint("ARGUMENTS", json.dumps(sys.argv[1:]))'  # for what comes before the training


@pytest.fixture
def repository(tmp_path, nvidia_smi) -> Path:
    nvidia_smi(15360)  # a T4
    return make_repository(tmp_path / "repository", TRAINER)


def make_repository(folder: Path, trainer: str, monitor: str = "") -> Path:
    for name in ("cotrain/common", "peerstep"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("cotrain/__init__.py", "cotrain/peer/tunnel.py", "cotrain/data/archive.py", "deploy/join.py",
                 "deploy/trainer.service"):  # fmt: skip
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "run_trainer.py").write_text(trainer, encoding="utf-8")
    (folder / "run_training_monitor.py").write_text(monitor, encoding="utf-8")
    (folder / "requirements-organiser.txt").write_text("-r requirements.txt\n", encoding="utf-8")
    (folder / "requirements.txt").write_text(
        f"psutil=={version('psutil')}\ntorch==0.0.1  # does not exist\n", encoding="utf-8"
    )
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "init.defaultBranch=main", "-C", folder]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *command], check=True)
    return folder


def commit_another(repository: Path) -> str:
    """Commit a trainer that fails, as somebody who can push to the branch; return the hash of the commit before."""
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-C", repository]
    commit = subprocess.run(
        [*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True, encoding="utf-8"
    ).stdout.strip()
    (repository / "run_trainer.py").write_text("raise SystemExit('not the commit')\n", encoding="utf-8")
    subprocess.run([*git, "commit", "-q", "-a", "-m", "y"], check=True)
    return commit


def test_join_notebook_runs_the_commit_that_it_names(repository, tmp_path):
    folder = tmp_path / "content"
    folder.mkdir()
    values = {"INITIAL_PEERS": ADDRESS, "USERNAME": "ann", "REPO_URL": str(repository)}
    values["REVISION"] = commit_another(repository)
    printed = execute(read("join_collaboration.ipynb", **values), folder)
    assert "computes 8 samples at a time" in printed
    arguments = json.loads(re.search(r"ARGUMENTS (.*)", printed)[1])
    assert arguments == trainer_command(ADDRESS, "ann", 8)[2:]
    assert "The trainer has ended" in printed
    assert (folder / "collaborative-training" / "trainer.log").is_file()


def test_join_notebook_says_what_is_missing(repository):
    with pytest.raises(CellExecutionError) as raised:
        execute(read("join_collaboration.ipynb"), repository)
    assert "error: INITIAL_PEERS is empty" in str(raised.value)
    assert "Traceback" not in str(raised.value)


# A real trainer in a project of a notebook: paced, and with a fake of ngrok's SDK
PACED_TRAINER = """
import ngrok, os, sys
with open("notebook.pid", "w") as file:
    file.write(str(os.getppid()))
sys.path.insert(0, {root!r})
from tests.support import altered, tunnels
ngrok.SessionBuilder = tunnels.FakeSessionBuilder
tunnels.FakeSessionBuilder.log = "ngrok.txt"
os.environ["PACE"] = {pace!r}
sys.argv[:1] = ["altered.py", "run_trainer.py"]
altered.main()
"""


MONITOR = """
import os, sys
os.execv(sys.executable, [sys.executable, {script!r}, *sys.argv[1:]])
"""


class RunningNotebook(threading.Thread):
    """A notebook that runs in the background, in a project with real scripts.

    :param pace: seconds of a micro-batch
    """

    def __init__(self, project: Path, name: str, pace: str, **values: object):
        super().__init__(daemon=True)
        self.project, self.printed = project, ""
        self.notebook = read(name, **values)
        monitor = MONITOR.format(script=str(ROOT / "run_training_monitor.py"))
        make_repository(project, PACED_TRAINER.format(root=str(ROOT), pace=pace), monitor)
        self.start()

    def run(self) -> None:
        try:
            self.printed = execute(self.notebook, self.project, timeout=300)
        except CellExecutionError as error:
            self.printed = str(error)

    def wait_for(self, pattern: str, log: str = "trainer.log") -> str:
        def find() -> re.Match | None:
            assert self.is_alive(), self.printed
            path = self.project / log
            return re.search(pattern, path.read_text(encoding="utf-8")) if path.exists() else None

        return wait_until(find, 240, pattern)[0]

    def processes(self) -> list[psutil.Process]:
        kernel = psutil.Process(int((self.project / "notebook.pid").read_text(encoding="utf-8")))
        return kernel.children(recursive=True)

    def interrupt(self) -> str:
        """Interrupt the cell, as Jupyter does, and return the output of the notebook."""
        os.killpg(os.getpgid(int((self.project / "notebook.pid").read_text(encoding="utf-8"))), signal.SIGINT)
        self.join(60)
        return self.printed


@pytest.mark.peers
@pytest.mark.early
def test_friend_joins_a_notebook_through_its_tunnel(dataset_url, tmp_path, monkeypatch, nvidia_smi):
    """The friend is in client mode, comes later and has half of the speed."""
    nvidia_smi(15360)
    for name, value in {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "NGROK_AUTHTOKEN": TOKEN}.items():
        monkeypatch.setenv(name, value)
    local = f"--host_maddrs {LOCAL} --dataloader_num_workers 0 --gradient_accumulation_steps 1"
    settings = "--model_name_or_path albert-tiny --target_batch_size 96 --learning_rate 0.01 --warmup_steps 0"
    host = RunningNotebook(
        tmp_path / "host", "host_collaboration.ipynb", "0.25", DATASET_URL=dataset_url,
        FLAGS=f"{settings} {local}", MONITOR_FLAGS="--no_store_checkpoints --refresh_period 1",
    )  # fmt: skip
    address = host.wait_for(r"--initial_peers /dns4/localhost/tcp/\d+/p2p/\w+")
    host.wait_for("Your current contribution")
    address = address.replace("/dns4/localhost", "/ip4/127.0.0.1")  # data in this machine is for its peers only
    friend = RunningNotebook(
        tmp_path / "friend", "join_collaboration.ipynb", "0.5", INITIAL_PEERS=address, USERNAME="friend",
        MORE_FLAGS=local,
    )  # fmt: skip
    friend.wait_for(r"Joined the collaboration at step #\d+")
    friend.wait_for("Averaged gradients with 2 peers")
    host.wait_for("Averaged gradients with 2 peers")
    host.wait_for(r"Joining run friends of organiser Qm\w+\n", "monitor.log")
    host.wait_for(r"Step #\d+\tloss = .*\talive peers = 2", "monitor.log")
    processes = [*host.processes(), *friend.processes()]
    assert not any(TOKEN in word for process in processes for word in process.cmdline())
    printed = {name: notebook.interrupt() for name, notebook in {"friend": friend, "host": host}.items()}
    noted = (tmp_path / "host" / "ngrok.txt").read_text(encoding="utf-8").splitlines()
    assert (noted[0], noted[-1]) == (f"token {TOKEN}", "close")
    shown = [output.get("data", {}) for output in outputs_of(host.notebook)]
    (curve,) = (data["image/png"] for data in shown if "image/png" in data)
    assert len(curve) > 1000
    for name, text in printed.items():
        assert "Stopping: the trainer saves a checkpoint" in text and "The trainer has ended" in text, text
        assert list((tmp_path / name / "outputs").glob("checkpoint-*")), text
    for file in (*tmp_path.glob("*/*.log"), *tmp_path.glob("*/*outputs/*.json*")):
        assert TOKEN not in file.read_text(encoding="utf-8"), file
    wait_until(lambda: not any(process.is_running() for process in processes), 15, "the end of its processes")


def test_deploy_notebook(monkeypatch, capsys):
    """Its cells in this process, with clients of AWS that answer at once."""
    values = {"NAME": "nb", "REPO_URL": "https://example.org/project.git", "DATASET_URL": DATA, "REALLY": True}
    notebook, client = read("deploy_on_aws.ipynb", **values), MagicMock()
    client.describe_stacks.return_value = {"Stacks": [{"Outputs": [{"OutputValue": COORDINATOR_ADDRESS}]}]}
    monkeypatch.setattr("deploy.aws.boto3.client", lambda *_args, **_options: client)
    monkeypatch.chdir(ROOT / "deploy")
    monkeypatch.setattr(sys, "path", list(sys.path))
    names: dict = {}
    for cell in notebook.cells:
        if cell.cell_type == "code":
            exec(re.sub(r"^%pip .*", "", cell.source, flags=re.MULTILINE), names)
    printed = capsys.readouterr().out
    assert f"--initial_peers {COORDINATOR_ADDRESS}\n" in printed and "AWS keeps 2 trainers running" in printed
    assert printed.endswith("Removed all resources of 'nb'\n")
    client.delete_stack.assert_called_once_with(StackName="nb")
