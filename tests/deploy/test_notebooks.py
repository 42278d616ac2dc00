"""Notebooks: as committed, and executed from the first cell to the last, with a fake GPU or a fake AWS."""

import base64
import json
import os
import re
import shutil
import signal
import subprocess
import threading
from importlib.metadata import version
from pathlib import Path

import nbformat
import psutil
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from arguments import TRAINER_ARGUMENTS
from deploy import join
from deploy.aws import Deployment
from deploy.join import Gpu, choose_batch_size, find_gpus, trainer_command
from lib.common.cli import parse_arguments
from lib.common.errors import UserError
from lib.peer.addresses import get_free_port
from tests.support.aws import DATA, IMAGE, make_settings
from tests.support.peers import LOCAL, ROOT, Script, wait_until
from tests.support.tunnels import FakeNgrok

NOTEBOOKS = sorted((ROOT / "deploy").glob("*.ipynb"))
ADDRESS = "/ip4/127.0.0.1/tcp/1/p2p/QmSDukXYoCmQT4ZZWhofaSyxinZHByTqDrsffZFWrMDXH1"
TOKEN = "2abcdefghijklmnopqrstuvwxyz_SECRET"  # of ngrok
SECRETS = r"\bhf_\w{20}|\bAKIA[0-9A-Z]{12}|\bgh[a-z]_\w{20}|\bsk-\w{20}|PRIVATE KEY|aws_secret|\b[0-9a-f]{40}\b"


def fill_in(notebook: nbformat.NotebookNode, **values: object) -> nbformat.NotebookNode:
    """Set the variables in the first cells, as a user does."""
    for name, value in values.items():
        cells = [cell for cell in notebook.cells if re.search(rf"^{name} = ", cell.source, re.MULTILINE)]
        assert len(cells) == 1, f"{name} is assigned {len(cells)} times"
        cells[0].source = re.sub(rf"^{name} = .*$", lambda _: f"{name} = {value!r}", cells[0].source, flags=re.M)  # noqa: B023
    return notebook


def execute(notebook: nbformat.NotebookNode, folder: Path, timeout: int = 120) -> str:
    """Run all cells in a folder; return their output."""
    NotebookClient(
        notebook, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": folder}}
    ).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    return "".join(output.get("text", "") for output in outputs)


@pytest.fixture(autouse=True)
def jupyter_folders(monkeypatch, tmp_path):
    """Redirect Jupyter's folders: kernels leave a history and connection files."""
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))


def write_program(path: Path, text: str) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def nvidia_smi(monkeypatch, tmp_path):
    """Add a fake nvidia-smi with these GPUs (name, MiB) to PATH."""

    def install(*gpus: tuple[str, int], exit_code: int = 0) -> None:
        lines = "\n".join(f"{name}, {memory}" for name, memory in gpus)
        write_program(tmp_path / "bin" / "nvidia-smi", f"#!/bin/sh\ncat <<EOF\n{lines}\nEOF\nexit {exit_code}\n")
        monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")

    return install


# --- as committed ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
class TestCommitted:
    def test_valid_and_stripped(self, path):
        notebook = nbformat.read(path, nbformat.NO_CONVERT)
        nbformat.validate(notebook)
        for cell in notebook.cells:
            if cell.cell_type == "code":
                assert cell.outputs == [] and cell.execution_count is None

    def test_cells_are_short(self, path):
        for cell in nbformat.read(path, nbformat.NO_CONVERT).cells:
            limit = 15 if cell.cell_type == "code" else 40
            assert len(cell.source.splitlines()) <= limit, cell.source

    def test_no_secrets(self, path):
        assert re.findall(SECRETS, path.read_text()) == []


def test_what_counts_as_a_secret():
    for secret in ("hf_" + "a1B2" * 8, "AKIA" + "ABCD1234" * 2, "-----BEGIN RSA PRIVATE KEY-----"):
        assert re.search(SECRETS, f'TOKEN = "{secret}"')


def test_address_to_fill_in_comes_first():
    cells = nbformat.read(ROOT / "deploy" / "join_collaboration.ipynb", nbformat.NO_CONVERT).cells
    first = next(cell.source for cell in cells if cell.cell_type == "code")
    fields = re.findall(r'^(\w+) = ""  # @param {type:"string"}$', first, re.MULTILINE)
    assert fields == ["INITIAL_PEERS", "USERNAME"]
    assert "rules" in cells[0].source


# --- the parts of joining --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("memory", "batch_size"), [(2, 1), (4, 2), (8, 4), (11.2, 8), (14.75, 8), (16, 8), (22.5, 16), (40, 32), (140, 64)]
)
def test_batch_size_by_memory(memory, batch_size):
    assert choose_batch_size([Gpu("x", memory)]) == batch_size


def test_batch_size_by_the_smallest_gpu():
    assert choose_batch_size([Gpu("large", 80), Gpu("small", 6)]) == 4


def test_gpus_are_found(nvidia_smi):
    nvidia_smi(("Tesla T4", 15360), ("NVIDIA A100-SXM4-40GB, the second", 40960))
    assert find_gpus() == [Gpu("Tesla T4", 15.0), Gpu("NVIDIA A100-SXM4-40GB, the second", 40.0)]


def test_no_gpu(nvidia_smi, monkeypatch):
    nvidia_smi(("NVIDIA-SMI has failed", 0), exit_code=9)
    with pytest.raises(UserError, match="there is no GPU here"):
        find_gpus()
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UserError, match="there is no GPU here"):
        find_gpus()


class TestCommand:
    def test_the_trainer_understands_it(self):
        command = trainer_command(
            f" --initial_peers {ADDRESS}, {ADDRESS} ", " Ann O'Nym ", 8,
            "--target_batch_size 512 --per_device_train_batch_size 2",
        )  # fmt: skip
        training, _, collaboration, *_ = parse_arguments(TRAINER_ARGUMENTS, "-", command[2:])
        assert command[1] == "run_trainer.py"
        assert collaboration.client_mode and collaboration.initial_peers == [ADDRESS, ADDRESS]
        assert collaboration.username == "Ann O'Nym"
        assert training.per_device_train_batch_size == 2, "the organiser's flags come last"
        assert collaboration.target_batch_size == 512

    def test_what_may_stay_empty(self):
        assert "--username" not in trainer_command(ADDRESS, "", 4)

    @pytest.mark.parametrize("peers", ["  ", "--initial_peers"])
    def test_what_must_be_filled_in(self, peers):
        with pytest.raises(UserError, match="INITIAL_PEERS is empty"):
            trainer_command(peers, "", 4)


class TestInstall:
    @pytest.fixture
    def installed(self, monkeypatch, tmp_path):
        """Return the packages passed to pip, for a torch that works or fails before and after."""

        def install(*torch_works: bool, exit_code: int = 0) -> list[str]:
            answers, commands = iter(torch_works), []
            monkeypatch.setattr(join, "torch_works", lambda: next(answers))

            def run(command, **_):
                commands.append(command)
                return subprocess.CompletedProcess(command, exit_code)

            monkeypatch.setattr(join.subprocess, "run", run)
            (tmp_path / "requirements.txt").write_text("# pins\nnumpy==2.3.5\ntorch==2.13.0\ntorch-optimizer==0.3.0\n")
            join.install(tmp_path)
            return [word for word in commands[0] if "==" in word]

        return install

    def test_working_torch_is_kept(self, installed):
        assert installed(True) == ["numpy==2.3.5", "torch-optimizer==0.3.0"]

    def test_otherwise_the_pinned_torch_is_installed(self, installed):
        assert installed(False, True) == ["numpy==2.3.5", "torch==2.13.0", "torch-optimizer==0.3.0"]

    def test_failures(self, installed):
        with pytest.raises(UserError, match="torch does not see the GPU"):
            installed(False, False)
        with pytest.raises(UserError, match="pip could not install"):
            installed(True, exit_code=1)

    @pytest.mark.programs
    def test_torch_is_really_tried(self, monkeypatch, tmp_path):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        assert not join.torch_works()
        for number, works in (("2.5.1+cu124", False), ("2.8.0+cu126", True)):
            write_torch(tmp_path, number)
            monkeypatch.setenv("PYTHONPATH", str(tmp_path))
            assert join.torch_works() == works


def write_torch(folder: Path, number: str) -> None:
    """Write a fake torch of a given version that finds a GPU."""
    (folder / "torch.py").write_text(
        f"__version__ = {number!r}\nclass Tensor:\n    def sum(self): return 64.0\n"
        "def ones(*size, device):\n    assert device == 'cuda'\n    return Tensor()\n"
    )


@pytest.mark.programs
def test_a_failure_of_the_trainer_is_one_line(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="the trainer ended with exit code 2"):
        join.run(trainer_command("1.2.3.4:31337", "", 4), ROOT)
    assert "lacks the peer ID" in capsys.readouterr().out


# --- the whole notebook ----------------------------------------------------------------------------------------------

# A fake trainer with the behaviour that the notebook observes; the test above runs the real run_trainer.py.
TRAINER = """
import json, os, signal, sys, time
stopped = []
signal.signal(signal.SIGTERM, lambda *_: stopped.append(1))
print("ARGUMENTS", json.dumps(sys.argv[1:]), flush=True)
with open("notebook.pid", "w") as file:
    file.write(str(os.getppid()))
while "--endless" in sys.argv and not stopped:
    time.sleep(0.05)
print("saved a checkpoint", flush=True)
"""


@pytest.fixture
def repository(tmp_path, monkeypatch, nvidia_smi) -> Path:
    """Create a project to clone, on a machine with a T4 and a matching torch."""
    nvidia_smi(("Tesla T4", 15360))
    (tmp_path / "site").mkdir()
    write_torch(tmp_path / "site", "2.8.0+cu126")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    return make_repository(tmp_path / "repository", TRAINER)


def make_repository(folder: Path, trainer: str) -> Path:
    shutil.copytree(ROOT / "lib" / "common", folder / "lib" / "common", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("lib/__init__.py", "lib/peer/tunnel.py", "deploy/join.py"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "run_trainer.py").write_text(trainer)
    (folder / "requirements.txt").write_text(f"psutil=={version('psutil')}\ntorch==0.0.1  # does not exist\n")
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-c", "init.defaultBranch=main", "-C", folder]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "x"]):
        subprocess.run([*git, *command], check=True)
    return folder


def join_notebook(repository: Path, **values: object) -> nbformat.NotebookNode:
    notebook = nbformat.read(ROOT / "deploy" / "join_collaboration.ipynb", nbformat.NO_CONVERT)
    values = {"INITIAL_PEERS": ADDRESS, "USERNAME": "ann", "REPO_URL": str(repository), **values}
    return fill_in(notebook, **values)


def test_join_notebook(repository, tmp_path):
    folder = tmp_path / "content"
    folder.mkdir()
    printed = execute(join_notebook(repository), folder)
    assert "Tesla T4 with 15 GiB: 8 samples at a time" in printed
    arguments = json.loads(re.search(r"ARGUMENTS (.*)", printed)[1])
    assert arguments == trainer_command(ADDRESS, "ann", 8)[2:]
    assert "saved a checkpoint" in printed and "The trainer has ended" in printed
    assert (folder / "collaborative-training" / "trainer.log").is_file()


def test_join_notebook_inside_the_project_and_interrupted(repository):
    notebook = join_notebook(repository, REPO_URL="", MORE_FLAGS="--endless")
    pid = repository / "notebook.pid"

    def interrupt() -> None:  # as Jupyter interrupts a cell
        wait_until(lambda: pid.exists() and pid.read_text(), 120, "the trainer")
        os.killpg(os.getpgid(int(pid.read_text())), signal.SIGINT)

    watcher = threading.Thread(target=interrupt)
    watcher.start()
    printed = execute(notebook, repository / "deploy")
    watcher.join()
    assert re.search(r"Stopping: .*\n(.*\n)?saved a checkpoint\nThe trainer has ended", printed), printed
    assert not (repository / "deploy" / "collaborative-training").exists()


def test_join_notebook_says_what_is_missing(repository):
    with pytest.raises(CellExecutionError) as raised:
        execute(join_notebook(repository, INITIAL_PEERS=""), repository)
    assert "error: INITIAL_PEERS is empty" in str(raised.value)
    assert "Traceback" not in str(raised.value)


# A real trainer in a project of a notebook: paced, and with fake servers of ngrok.
PACED_TRAINER = """
import os, sys
with open("notebook.pid", "w") as file:
    file.write(str(os.getppid()))
sys.path[:] = [{root!r}, *(folder for folder in sys.path if folder != {site!r})]
from tests.support import ngrok_peer, paced
os.environ["PACE"] = {pace!r}
sys.argv[:1] = ["paced.py", "run_trainer.py"]
paced.main()
"""
MONITOR = """
import os, sys
del os.environ["PYTHONPATH"]
os.execv(sys.executable, [sys.executable, {script!r}, *sys.argv[1:]])
"""


class RunningNotebook(threading.Thread):
    """A notebook that runs in the background, in a project with real scripts.

    :param pace: seconds of a micro-batch
    """

    def __init__(self, project: Path, name: str, pace: str, site: Path, **values: object):
        super().__init__(daemon=True)
        self.project, self.printed = project, ""
        self.notebook = fill_in(nbformat.read(ROOT / "deploy" / name, nbformat.NO_CONVERT), **values)
        make_repository(project, PACED_TRAINER.format(root=str(ROOT), site=str(site), pace=pace))
        (project / "run_training_monitor.py").write_text(MONITOR.format(script=str(ROOT / "run_training_monitor.py")))
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
            return re.search(pattern, path.read_text()) if path.exists() else None

        return wait_until(find, 240, pattern)[0]

    def processes(self) -> list[psutil.Process]:
        kernel = psutil.Process(int((self.project / "notebook.pid").read_text()))
        return kernel.children(recursive=True)

    def interrupt(self) -> str:
        """Interrupt the cell, as Jupyter does, and return the output of the notebook."""
        os.killpg(os.getpgid(int((self.project / "notebook.pid").read_text())), signal.SIGINT)
        self.join(60)
        return self.printed


@pytest.mark.peers
@pytest.mark.early
def test_friend_joins_a_notebook_through_its_tunnel(dataset_url, tmp_path, monkeypatch, nvidia_smi):
    """The friend is in client mode, comes later and has half of the speed."""
    nvidia_smi(("Tesla T4", 15360))
    site = tmp_path / "site"
    site.mkdir()
    write_torch(site, "2.8.0+cu126")
    for name, value in {"PYTHONPATH": site, "OMP_NUM_THREADS": 1, "CUDA_VISIBLE_DEVICES": "", "NGROK_AUTHTOKEN": TOKEN,
                        "FAKE_NGROK_CERTIFICATE": tmp_path / "certificate.pem"}.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    local = f"--host_maddrs {LOCAL} --no_use_relay --dataloader_num_workers 0 --gradient_accumulation_steps 1"
    settings = "--model_name_or_path albert-tiny --target_batch_size 96 --learning_rate 0.01 --warmup_steps 0"
    with FakeNgrok() as servers:
        monkeypatch.setenv("FAKE_NGROK", str(servers.port))
        (tmp_path / "certificate.pem").write_bytes(servers.certificate)
        host = RunningNotebook(
            tmp_path / "host", "host_collaboration.ipynb", "0.25", site, DATASET_URL=dataset_url, SETTINGS=settings,
            MORE_FLAGS=local,
        )  # fmt: skip
        address = host.wait_for(r"--initial_peers /dns4/localhost/tcp/\d+/p2p/\w+")
        host.wait_for("Your current contribution")
        address = address.replace("/dns4/localhost", "/ip4/127.0.0.1")  # data in this machine is for its peers only
        friend = RunningNotebook(
            tmp_path / "friend", "join_collaboration.ipynb", "0.5", site, INITIAL_PEERS=address, USERNAME="friend",
            MORE_FLAGS=local,
        )  # fmt: skip
        friend.wait_for(r"Joined the collaboration at step #\d+")
        friend.wait_for("Averaged gradients with 2 peers")
        host.wait_for(r"Step #\d+\tloss = .*\talive peers = 2", "monitor.log")
        processes = [*host.processes(), *friend.processes()]
        assert not any(TOKEN in word for process in processes for word in process.cmdline())
        printed = {name: notebook.interrupt() for name, notebook in {"friend": friend, "host": host}.items()}
    assert servers.tokens == [TOKEN] and servers.bytes_passed > 0
    for name, text in printed.items():
        assert "Stopping: the trainer saves a checkpoint" in text and "The trainer has ended" in text, text
        assert list((tmp_path / name / "outputs").glob("checkpoint-*")), text
    for file in (*tmp_path.glob("*/*.log"), *tmp_path.glob("*/*outputs/*.json*")):
        assert TOKEN not in file.read_text(), file
    wait_until(lambda: not any(process.is_running() for process in processes), 15, "the end of its processes")


@pytest.mark.long
def test_deploy_notebook(account, tmp_path, launcher):
    """moto assigns addresses in 127/8, so that the notebook's probe can join a monitor at the elastic IP."""
    port = get_free_port()
    deployment = Deployment(make_settings(name="nb", port=port))
    notebook = nbformat.read(ROOT / "deploy" / "deploy_on_aws.ipynb", nbformat.NO_CONVERT)
    fill_in(
        notebook, NAME="nb", REPO_URL="https://example.org/project.git", DATASET_URL=DATA, RUN_ID="r", REALLY=True,
        MORE={"port": port, "trainer_image": IMAGE},
    )  # fmt: skip
    monitors = []

    def be_the_coordinator() -> None:
        wait_until(lambda: deployment.instances("coordinator"), 150, "the coordinator's instance")
        name = "/collaborative-training/nb/identity"
        key = deployment.ssm.get_parameter(Name=name, WithDecryption=True)["Parameter"]["Value"]
        (tmp_path / "identity.key").write_bytes(base64.b64decode(key))
        (elastic_ip,) = deployment.ec2.describe_addresses()["Addresses"]
        host_maddr = f"/ip4/{elastic_ip['PublicIp']}/tcp/{port}"
        monitors.append(
            Script(
                "run_training_monitor.py", "--no_store_checkpoints", "--run_id", "r", "--output_dir", tmp_path / "out",
                "--identity_path", tmp_path / "identity.key", "--host_maddrs", host_maddr,
                log=tmp_path / "monitor.log", launcher=launcher,
            )
        )  # fmt: skip

    machine = threading.Thread(target=be_the_coordinator)
    machine.start()
    try:
        printed = execute(notebook, ROOT / "deploy", timeout=180)
        address = re.search(r"^--initial_peers (\S+)$", printed, re.MULTILINE)[1]
        assert address == monitors[0].address
        assert printed.count("Joined the run 'r': 0 trainers reported") == 2
        assert "AWS keeps 2 trainers running" in printed and "At most $" in printed
        assert printed.rstrip().endswith("Removed all resources of 'nb'")
        assert deployment.instances() == []
        assert monitors[0].stop(signal.SIGTERM) == 0
    finally:
        machine.join()
        for monitor in monitors:
            monitor.kill_all()
