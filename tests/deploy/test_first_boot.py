"""First boot of a machine on AWS: its user data, run with fake programs that would require root."""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import run_training_monitor
from cotrain.arguments import TRAINER_ARGUMENTS
from cotrain.common.flags import parse_arguments
from deploy.aws import Deployment
from tests.deploy.test_notebooks import commit_another, make_repository, write_program
from tests.support.aws import make_settings, read_user_data

pytestmark = pytest.mark.programs


def test_user_data_is_a_valid_script(started, tmp_path):
    started.set_trainers(1)
    for role in ("coordinator", "trainer"):
        script = tmp_path / f"{role}.sh"
        script.write_text(read_user_data(started, role))
        result = subprocess.run([Path(sys.executable).parent / "shellcheck", script], capture_output=True, text=True)
        assert result.returncode == 0, result.stdout + result.stderr


# The instance metadata service, version 2; `addresses` has successive responses, of which the last one repeats.
METADATA = """
case "$*" in
    *"-X PUT"*"X-aws-ec2-metadata-token-ttl-seconds: "*/latest/api/token) echo "the token" ;;
    *"X-aws-ec2-metadata-token: the token"*/meta-data/instance-id) echo i-0123 ;;
    *"X-aws-ec2-metadata-token: the token"*/meta-data/public-ipv4) head -n 1 {0}; sed -i '1{{$!d}}' {0} ;;
    *169.254.169.254*) exit 22 ;;
    *) exec {1} "$@" ;;
esac"""


class Machine:
    """A machine at its first boot: a folder instead of /opt and /etc, and fake programs that would require root."""

    def __init__(self, folder: Path):
        self.folder, self.addresses = folder / "collaboration", folder / "addresses"
        self.units, self.log = folder / "units", folder / "log"
        self.units.mkdir()
        self.addresses.write_text("203.0.113.7\n")
        python = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
        pip = f'#!/bin/sh\necho pip "$@" >> {self.log}\n'
        venv = f'mkdir -p "$3/bin"\ncat > "$3/bin/python" <<"E"\n{python}E\ncat > "$3/bin/pip" <<"E"\n{pip}E\n'
        programs = {
            "dnf": "", "systemctl": "", "chown": "", "sleep": "exec /bin/sleep 0.02", "useradd": 'mkdir -p "$4"',
            "runuser": 'shift 3; exec "$@"', "python3.11": venv + 'chmod +x "$3"/bin/*',
            "nvidia-smi": "echo 15360", "curl": METADATA.format(self.addresses, shutil.which("curl")),
        }  # fmt: skip
        for name, code in programs.items():
            self.install(name, code)

    def install(self, name: str, code: str) -> None:
        write_program(self.folder.parent / "bin" / name, f'#!/bin/bash\necho {name} "$@" >> {self.log}\n{code}\n')

    def run(self, *command: object, **options: object) -> subprocess.CompletedProcess:
        environment = {**os.environ, "PATH": f"{self.folder.parent / 'bin'}:{os.environ['PATH']}"}
        options |= {"env": environment, "capture_output": True, "text": True, "timeout": 60}
        return subprocess.run(list(map(str, command)), **options)

    def boot(self, user_data: str) -> subprocess.CompletedProcess:
        for name, value in {"FOLDER": self.folder, "UNITS": self.units}.items():
            user_data, count = re.subn(rf"^{name}=.*$", f"{name}={value}", user_data, count=1, flags=re.MULTILINE)
            assert count == 1
        script = self.folder.parent / "user_data.sh"
        script.write_text(user_data)
        return self.run("bash", script)

    def changes(self) -> str:
        """Return what this machine changes in trainer.service."""
        return (self.units / "collaboration.service.d" / "machine.conf").read_text()

    def service_arguments(self) -> list[str]:
        """Return the command line that systemd would run."""
        (command,) = re.findall(r"^ExecStart=(.+)$", self.changes(), re.MULTILINE)
        assert "\nExecStart=\n" in self.changes(), "systemd refuses a second command"
        result = self.run(command, cwd=re.search(r"^WorkingDirectory=(.*)$", self.changes(), re.MULTILINE)[1])
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)


@pytest.fixture
def machine(tmp_path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture
def repository(tmp_path) -> Path:
    code = "import json, sys\nprint(json.dumps(sys.argv[1:]))\n"
    return make_repository(tmp_path / "repository", code, monitor=code)


class TestFirstBoot:
    def test_trainer(self, started, repository, machine):
        settings = make_settings(
            repo_url=f"file://{repository}",
            revision=commit_another(repository),
            trainer_flags="--bandwidth 500 --username 'a b%c$d'",
        )
        result = machine.boot(Deployment(settings).trainer_user_data())
        assert result.returncode == 0, result.stdout + result.stderr
        training, _, peer, *_ = parse_arguments(TRAINER_ARGUMENTS, "-", machine.service_arguments())
        assert peer.initial_peers == [started.address()] and not peer.client_mode
        assert peer.host_maddrs == ["/ip4/0.0.0.0/tcp/31337"]
        assert peer.announce_maddrs == ["/ip4/203.0.113.7/tcp/31337"]
        assert training.per_device_train_batch_size == 8, "by the GPU's memory"
        assert (peer.bandwidth, peer.username) == (500, "a b%c$d")
        log = machine.log.read_text()
        assert f"-r {machine.folder}/project/requirements.txt" in log
        assert "systemctl enable --now collaboration.service" in log
        unit = (machine.units / "collaboration.service").read_text() + machine.changes()
        for line in ("Restart=on-failure", "KillMode=mixed", "OnSuccess=give-back.service", "User=collaboration"):
            assert f"\n{line}\n" in unit
        if shutil.which("systemd-analyze"):
            result = machine.run("systemd-analyze", "verify", *machine.units.glob("*.service"))
            assert result.returncode == 0, result.stderr

    def test_coordinator(self, started, repository, machine):
        ip = started.address().split("/")[2]
        machine.addresses.write_text(f"198.51.100.1\n198.51.100.1\n{ip}\n")  # the elastic IP comes later
        key = started.ssm.get_parameter(Name="/collaborative-training/test/identity", WithDecryption=True)
        machine.install("aws", f"[[ $1 != ssm ]] || echo {key['Parameter']['Value']}")
        data = {"dataset_url": "https://example.org/data.tar.gz", "dataset_sha256": "A" * 64}
        settings = make_settings(repo_url=f"file://{repository}", **data)
        (elastic_ip,) = started.ec2.describe_addresses()["Addresses"]
        user_data = Deployment(settings).coordinator_user_data(elastic_ip)
        result = machine.boot(user_data)
        assert result.returncode == 0, result.stdout + result.stderr

        _, run, peer, *_ = parse_arguments(run_training_monitor.ARGUMENTS, "-", machine.service_arguments())
        assert (peer.announce_maddrs, peer.run_id) == ([f"/ip4/{ip}/tcp/31337"], "r")
        found = run.dataset_url, run.dataset_sha256
        assert found == (data["dataset_url"], "a" * 64), "the trainers take them from the coordinator"
        identity = machine.folder / "identity.key"
        assert peer.identity_path == str(identity)
        assert base64.b64encode(identity.read_bytes()).decode() == key["Parameter"]["Value"]
        assert identity.stat().st_mode & 0o777 == 0o600
        assert key["Parameter"]["Value"] not in result.stdout + result.stderr
        log = machine.log.read_text()
        assert f"-r {machine.folder}/project/requirements-organiser.txt" in log, "its flags may ask for a dashboard"
        assert "aws ssm get-parameter --region us-east-1 --name /collaborative-training/test/identity" in log
        address = f"--instance-id i-0123 --allocation-id {elastic_ip['AllocationId']} --allow-reassociation"
        assert f"aws ec2 associate-address --region us-east-1 {address}\n" in log

        result = machine.boot(user_data.replace(f"file://{repository}", "file:///nothing"))
        assert result.returncode != 0 and "could not be set up" in result.stdout
        assert "aws autoscaling" not in machine.log.read_text(), "a coordinator waits for its organiser"

    @pytest.mark.parametrize("set_up", [True, False])
    def test_a_trainer_gives_its_machine_back(self, started, repository, machine, tmp_path, set_up):
        machine.install("aws", "")
        settings = make_settings(repo_url=f"file://{repository if set_up else tmp_path / 'nothing'}")
        result = machine.boot(Deployment(settings).trainer_user_data())
        assert (result.returncode == 0) == set_up
        assert ("This machine could not be set up" in result.stdout) == (not set_up)
        if set_up:
            assert "aws autoscaling" not in machine.log.read_text()
            assert machine.run(machine.folder / "give_back.sh").returncode == 0
        assert (
            "aws autoscaling terminate-instance-in-auto-scaling-group --region us-east-1 --instance-id i-0123 "
            "--should-decrement-desired-capacity\n" in machine.log.read_text()
        )
