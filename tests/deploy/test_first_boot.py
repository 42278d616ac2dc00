"""First boot of a machine on AWS: its user data, run with fake programs that would require root."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import run_training_monitor
from arguments import TRAINER_ARGUMENTS
from cotrain.common.argument_parser import parse_arguments
from tests.deploy.test_notebooks import commit_another, make_repository, write_program
from tests.support.aws import COORDINATOR_ADDRESS, PUBLIC_IP, SIGNAL_URL, make_user_data

pytestmark = pytest.mark.programs


def test_user_data_is_a_valid_script(tmp_path):
    for role in ("coordinator", "trainer"):
        script = tmp_path / f"{role}.sh"
        script.write_text(make_user_data(role), encoding="utf-8")
        result = subprocess.run(
            [Path(sys.executable).parent / "shellcheck", script], capture_output=True, text=True, encoding="utf-8"
        )
        assert result.returncode == 0, result.stdout + result.stderr


# The instance metadata service, version 2; `addresses` has successive responses, of which the last one repeats.
METADATA = """
case "$*" in
    *"-X PUT"*"X-aws-ec2-metadata-token-ttl-seconds: "*/latest/api/token) echo "the token" ;;
    *"X-aws-ec2-metadata-token: the token"*/meta-data/instance-id) echo i-0123 ;;
    *"X-aws-ec2-metadata-token: the token"*/meta-data/public-ipv4) head -n 1 {0}; sed -i '1{{$!d}}' {0} ;;
    *169.254.169.254*) exit 22 ;;
    *"-X PUT -H Content-Type: --data "*) ;;
    *) exec {1} "$@" ;;
esac"""


class Machine:
    """A machine at its first boot: a folder instead of /opt and /etc, and fake programs that would require root."""

    def __init__(self, folder: Path):
        self.folder, self.addresses = folder / "collaboration", folder / "addresses"
        self.units, self.log, self.output = folder / "units", folder / "log", folder / "output"
        self.units.mkdir()
        self.addresses.write_text("203.0.113.7\n", encoding="utf-8")
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
        for name, value in {"FOLDER": self.folder, "UNITS": self.units, "LOG": self.output}.items():
            user_data, count = re.subn(rf"^{name}=.*$", f"{name}={value}", user_data, count=1, flags=re.MULTILINE)
            assert count == 1
        script = self.folder.parent / "user_data.sh"
        script.write_text(user_data, encoding="utf-8")
        return self.run("bash", "-c", f"set -o pipefail; bash {script} 2>&1 | tee {self.output}")

    def changes(self) -> str:
        """Return what this machine changes in trainer.service."""
        return (self.units / "collaboration.service.d" / "machine.conf").read_text(encoding="utf-8")

    def signal(self) -> dict[str, str]:
        """Return what the machine has told CloudFormation."""
        (sent,) = re.findall(r"^curl .*--data (.*) (\S+)$", self.log.read_text(encoding="utf-8"), re.MULTILINE)
        assert sent[1] == SIGNAL_URL
        return json.loads(sent[0])

    def give_back(self) -> str:
        """Run the service that terminates the instance, and return the log."""
        self.install("aws", "")
        unit = (self.units / "give-back.service").read_text(encoding="utf-8").replace("\\\n", " ")
        (command,) = re.findall(r"^ExecStart=(.+)$", unit, re.MULTILINE)
        assert self.run(*command.split()).returncode == 0
        return self.log.read_text(encoding="utf-8")

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
    return make_repository(tmp_path / "it's a repository", code, monitor=code)


class TestFirstBoot:
    def test_trainer(self, repository, machine):
        flags, revision = "--bandwidth 500 --username 'a b%c$d'", commit_another(repository)
        user_data = make_user_data("trainer", repo_url=f"file://{repository}", revision=revision, trainer_flags=flags)
        result = machine.boot(user_data)
        assert result.returncode == 0, result.stdout + result.stderr
        training, _, peer, *_ = parse_arguments(TRAINER_ARGUMENTS, "-", machine.service_arguments())
        assert peer.initial_peers == [COORDINATOR_ADDRESS] and not peer.client_mode
        assert peer.host_maddrs == ["/ip4/0.0.0.0/tcp/31337"]
        assert peer.announce_maddrs == ["/ip4/203.0.113.7/tcp/31337"]
        assert training.per_device_train_batch_size == 8, "by the GPU's memory"
        assert (peer.bandwidth, peer.username) == (500, "a b%c$d")
        log = machine.log.read_text(encoding="utf-8")
        assert f"-r {machine.folder}/project/requirements.txt" in log
        assert "systemctl enable --now collaboration.service" in log and "start give-back" not in log
        unit = (machine.units / "collaboration.service").read_text(encoding="utf-8") + machine.changes()
        for line in ("Restart=on-failure", "KillMode=mixed", "OnSuccess=give-back.service", "User=collaboration"):
            assert f"\n{line}\n" in unit
        if shutil.which("systemd-analyze"):
            result = machine.run("systemd-analyze", "verify", *machine.units.glob("*.service"))
            assert result.returncode == 0, result.stderr

    def test_coordinator(self, repository, machine):
        data = {"dataset_url": "https://example.org/data.tar.gz", "dataset_sha256": "A" * 64}
        # The elastic IP comes later.
        machine.addresses.write_text(f"198.51.100.1\n198.51.100.1\n{PUBLIC_IP}\n", encoding="utf-8")
        address = COORDINATOR_ADDRESS
        machine.install("systemctl", "[[ $1 != is-failed ]]")
        machine.install(
            "journalctl",
            f"""
            echo Starting
            [[ -e {machine.output}.seen ]] && echo '[INFO] To connect other peers, use --initial_peers {address} /x'
            touch {machine.output}.seen""",
        )
        result = machine.boot(make_user_data("coordinator", repo_url=f"file://{repository}", **data))
        assert result.returncode == 0, result.stdout + result.stderr

        _, run, peer, *_ = parse_arguments(run_training_monitor.ARGUMENTS, "-", machine.service_arguments())
        assert (peer.announce_maddrs, peer.run_id) == ([f"/ip4/{PUBLIC_IP}/tcp/31337"], "r")
        found = run.dataset_url, run.dataset_sha256
        assert found == (data["dataset_url"], "a" * 64), "the trainers take them from the coordinator"
        log = machine.log.read_text(encoding="utf-8")
        assert f"-r {machine.folder}/project/requirements-organiser.txt" in log, "its flags may ask for a dashboard"
        assert machine.signal() == {
            "Status": "SUCCESS", "UniqueId": "coordinator", "Reason": address, "Data": address,
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("repo_url", "reason"),
        [("file:///nothing", "does not appear to be a git repository"), (None, "error: wrong flag")],
    )
    def test_coordinator_that_cannot_start_reports_why(self, repository, machine, repo_url, reason):
        machine.addresses.write_text(f"{PUBLIC_IP}\n", encoding="utf-8")
        machine.install("journalctl", """echo 'error: "wrong" $flag'""")
        result = machine.boot(make_user_data("coordinator", repo_url=repo_url or f"file://{repository}"))
        assert result.returncode != 0 and "could not be set up" in result.stdout
        assert machine.signal()["Status"] == "FAILURE" and reason in machine.signal()["Reason"]
        assert "give-back" not in machine.log.read_text(encoding="utf-8"), "a coordinator waits for its organiser"

    def test_trainer_that_cannot_be_set_up_gives_its_machine_back(self, machine):
        result = machine.boot(make_user_data("trainer", repo_url="file:///nothing"))
        assert result.returncode != 0 and "This machine could not be set up" in result.stdout
        assert "systemctl start give-back.service" in machine.log.read_text(encoding="utf-8")
        assert machine.give_back().endswith(
            "aws autoscaling terminate-instance-in-auto-scaling-group --region us-east-1 --instance-id i-0123 "
            "--should-decrement-desired-capacity\n"
        )
