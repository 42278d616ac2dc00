"""Deployment on AWS: against a fake AWS server (moto), the first boot of a machine with fake programs, and the whole
notebook with a real monitor as the coordinator."""

import base64
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import nbformat
import pytest
import requests
from botocore.exceptions import ClientError, NoCredentialsError
from moto.server import ThreadedMotoServer
from moto.utilities.utils import load_resource

import run_training_monitor
from arguments import TRAINER_ARGUMENTS
from deploy import aws
from deploy.aws import Deployment, Instance, Settings, SpotOffer
from lib.common.cli import parse_arguments
from lib.common.errors import UserError
from lib.data.archive import write_archive
from lib.peer.addresses import get_free_port
from tests.deploy.test_notebooks import execute, fill_in, make_repository, write_program
from tests.support.peers import ROOT, Script, wait_until

IMAGE = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64"  # the only image in moto
DATA = "https://example.org/data.tar.gz"


@pytest.fixture(scope="module")
def cloud() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    used = [image for image in load_resource("ec2/resources/latest_amis/us-east-1.json") if "al2023" in image["name"]]
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    with pytest.MonkeyPatch.context() as patch:
        # moto would make all its images again for each account, in a fifth of the time of these tests.
        patch.setattr("moto.ec2.models.amis.AMIS", used)
        patch.setattr("moto.ec2.models.amis.environ", {"MOTO_AMIS_PATH": "no others"})
        server.start()
        yield "http://{}:{}".format(*server.get_host_and_port())
        server.stop()


@pytest.fixture
def account(cloud, monkeypatch) -> None:
    """Set up an empty account, which boto3 finds in this process and in notebooks."""
    requests.post(f"{cloud}/moto-api/reset", timeout=30).raise_for_status()
    for name, value in {"ENDPOINT_URL": cloud, "ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "x"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)


def make_settings(**changes) -> Settings:
    values = {"name": "test", "repo_url": "https://example.org/project.git", "dataset_url": DATA, "run_id": "r",
              "trainer_image": IMAGE}  # fmt: skip
    return Settings(**{**values, **changes})


@pytest.fixture
def deployment(account, monkeypatch) -> Deployment:
    monkeypatch.setattr(aws.time, "sleep", lambda seconds: None)
    return Deployment(make_settings())


@pytest.fixture
def started(deployment) -> Deployment:
    deployment.start_coordinator()
    return deployment


def describe(deployment: Deployment, instance: Instance) -> dict:
    return deployment.ec2.describe_instances(InstanceIds=[instance.id])["Reservations"][0]["Instances"][0]


def read_user_data(deployment: Deployment, instance: Instance) -> str:
    reply = deployment.ec2.describe_instance_attribute(InstanceId=instance.id, Attribute="userData")
    return base64.b64decode(reply["UserData"]["Value"]).decode()


def refusal(code: str, message: str = "no") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, "RunInstances")


# --- the settings ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "my albert"}, "NAME must have 1 to 30"),
        ({"run_id": "v1.0"}, "RUN_ID"),
        ({"port": 0}, "port: 0"),
        ({"repo_url": ""}, "REPO_URL must be an address"),
        ({"dataset_url": "data.tar.gz"}, "DATASET_URL must be an address"),
        ({"repo_url": "https://me:secret@example.org/x"}, "REPO_URL contains a password"),
        ({"trainer_types": ()}, "trainer_types"),
    ],
)
def test_wrong_settings(changes, message):
    with pytest.raises(UserError, match=message) as raised:
        make_settings(**changes)
    assert "secret@" not in str(raised.value)


def test_no_credentials_is_one_line(deployment, monkeypatch):
    def refuse(**_):
        raise NoCredentialsError

    monkeypatch.setattr(deployment.ec2, "describe_addresses", refuse)
    with pytest.raises(UserError, match="run `aws configure`"):
        deployment.address()


# --- the coordinator -------------------------------------------------------------------------------------------------


class TestCoordinator:
    def test_starting_is_idempotent(self, deployment, capsys):
        addresses = {deployment.start_coordinator() for _ in range(3)}
        (coordinator,) = deployment.instances()
        (address,) = addresses
        assert re.fullmatch(rf"/ip4/{coordinator.ip}/tcp/31337/p2p/Qm\w{{44}}", address)
        assert (coordinator.role, coordinator.type, coordinator.state) == ("coordinator", "t3.medium", "running")
        details = describe(deployment, coordinator)
        assert details.get("InstanceLifecycle") != "spot"
        assert details["MetadataOptions"]["HttpTokens"] == "required"
        assert len(deployment.ec2.describe_addresses()["Addresses"]) == 1
        assert f"The coordinator {coordinator.id} is running" in capsys.readouterr().out

    def test_another_name_is_another_deployment(self, started):
        other = Deployment(make_settings(name="other"))
        assert other.instances() == []
        assert other.start_coordinator() != started.address()
        other.clean_up()
        assert len(started.instances()) == 1

    def test_address_outlives_the_machine(self, started):
        address, (first,) = started.address(), started.instances()
        started.ec2.terminate_instances(InstanceIds=[first.id])
        assert started.start_coordinator() == address
        (second,) = started.instances()
        assert second.id != first.id and second.ip == address.split("/")[2]

    def test_a_stopped_one_is_started(self, started):
        (coordinator,) = started.instances()
        started.ec2.stop_instances(InstanceIds=[coordinator.id])
        started.start_coordinator()
        assert [(x.id, x.state) for x in started.instances()] == [(coordinator.id, "running")]

    def test_of_two_the_older_stays(self, started, monkeypatch):
        (first,) = started.instances()
        while first.hours * 3600 < 1:  # AWS reports start times in whole seconds
            time.sleep(0.1)
        with monkeypatch.context() as patch:
            patch.setattr(started, "instances", lambda role=None: [])
            started.start_coordinator()  # a concurrent call that did not find the first instance
        assert len(started.instances()) == 2
        started.start_coordinator()
        assert [x.id for x in started.instances()] == [first.id]

    def test_only_the_port_is_open(self, started):
        (group,) = started.ec2.describe_security_groups(Filters=[{"Name": "tag-key", "Values": [aws.TAG]}])[
            "SecurityGroups"
        ]
        (rule,) = group["IpPermissions"]
        assert (rule["IpProtocol"], rule["FromPort"], rule["ToPort"]) == ("tcp", 31337, 31337)
        assert [x["GroupId"] for x in describe(started, started.instances()[0])["SecurityGroups"]] == [
            group["GroupId"]
        ]

    def test_identity_is_encrypted_and_only_the_role_may_read_it(self, started):
        name = "/collaborative-training/test/identity"
        parameter = started.ssm.get_parameter(Name=name)["Parameter"]
        assert parameter["Type"] == "SecureString"
        policy = started.iam.get_role_policy(RoleName="test-us-east-1-coordinator", PolicyName="identity")
        (statement,) = policy["PolicyDocument"]["Statement"]
        assert (statement["Action"], statement["Resource"]) == ("ssm:GetParameter", parameter["ARN"])
        assert "test-us-east-1-coordinator" in describe(started, started.instances()[0])["IamInstanceProfile"]["Arn"]
        started.top_up(1)
        assert "IamInstanceProfile" not in describe(started, started.instances("trainer")[0])

    def test_no_secret_in_user_data(self, started):
        started.top_up(1)
        key = started.ssm.get_parameter(Name="/collaborative-training/test/identity", WithDecryption=True)
        secret = key["Parameter"]["Value"]
        for instance in started.instances():
            user_data = read_user_data(started, instance)
            assert user_data.startswith("#!/bin/bash\n")
            assert secret[:40] not in user_data and secret[-40:] not in user_data

    def test_disk_is_as_large_as_the_image_needs(self, account):
        for wanted, size in ((5, 15), (40, 40)):  # moto's images have 15 GiB
            deployment = Deployment(make_settings(name=f"disk-{wanted}", disk_gib=wanted))
            deployment.start_coordinator()
            volumes = deployment.ec2.describe_volumes(
                Filters=[{"Name": f"tag:{aws.TAG}", "Values": [f"disk-{wanted}"]}]
            )
            assert [volume["Size"] for volume in volumes["Volumes"]] == [size]

    def test_a_new_profile_may_take_a_while(self, deployment, monkeypatch):
        real, refusals = (
            deployment.ec2.run_instances,
            [refusal("InvalidParameterValue", "iamInstanceProfile.name x")] * 2,
        )

        def run_instances(**request):
            if refusals:
                raise refusals.pop()
            return real(**request)

        monkeypatch.setattr(deployment.ec2, "run_instances", run_instances)
        deployment.start_coordinator()
        assert not refusals and len(deployment.instances()) == 1

    def test_a_refusal_is_one_line(self, deployment, monkeypatch):
        def run_instances(**_):
            raise refusal("VcpuLimitExceeded", "You have requested more vCPU capacity than your limit")

        monkeypatch.setattr(deployment.ec2, "run_instances", run_instances)
        with pytest.raises(UserError, match="AWS refused RunInstances: VcpuLimitExceeded: You have requested"):
            deployment.start_coordinator()

    def test_probe_gives_up_in_time(self, started, monkeypatch):
        """No process listens at the address from moto."""
        with pytest.raises(UserError, match="none of --initial_peers answers"):
            started.wait_until_ready(timeout=1)


# --- the trainers ----------------------------------------------------------------------------------------------------


class TestTrainers:
    def test_missing_trainers_are_started(self, started):
        assert [started.top_up(number) for number in (2, 2, 3, 1)] == [2, 0, 1, 0]
        trainers = started.instances("trainer")
        assert len(trainers) == 3
        assert describe(started, trainers[0])["InstanceLifecycle"] == "spot"
        started.ec2.terminate_instances(InstanceIds=[trainers[0].id])
        assert started.top_up(3) == 1

    def test_the_coordinator_comes_first(self, deployment):
        with pytest.raises(UserError, match="'test' has no coordinator yet"):
            deployment.top_up(1)
        assert deployment.instances() == []

    def test_next_offer_where_there_is_no_capacity(self, started, monkeypatch):
        offers = [SpotOffer(0.3, "g5.xlarge", "us-east-1a"), SpotOffer(0.2, "g4dn.xlarge", "us-east-1b")]
        offers.append(SpotOffer(0.9, "g6.xlarge", "us-east-1c"))
        monkeypatch.setattr(started, "_spot_prices", lambda: offers)
        real, asked = started.ec2.run_instances, []

        def run_instances(**request):
            asked.append((request["InstanceType"], request["Placement"]["AvailabilityZone"], request["MaxCount"]))
            if request["InstanceType"] == "g4dn.xlarge":
                raise refusal("InsufficientInstanceCapacity")
            return real(**request)

        monkeypatch.setattr(started.ec2, "run_instances", run_instances)
        with pytest.raises(UserError, match=r"no more spot instances for at most \$0.6"):
            started.top_up(2)
        assert asked == [("g4dn.xlarge", "us-east-1b", 2), ("g5.xlarge", "us-east-1a", 2)], "the cheapest first"
        assert [x.type for x in started.instances("trainer")] == ["g5.xlarge"]

    def test_request(self, started, monkeypatch):
        requests = []
        real = started.ec2.run_instances
        monkeypatch.setattr(
            started.ec2, "run_instances", lambda **request: requests.append(request) or real(**request)
        )
        started.top_up(1)
        (request,) = requests
        assert request["InstanceMarketOptions"]["SpotOptions"]["MaxPrice"] == "0.6"
        assert request["InstanceInitiatedShutdownBehavior"] == "terminate"
        kinds = {tag["ResourceType"] for tag in request["TagSpecifications"]}
        assert kinds == {"instance", "volume", "spot-instances-request"}

    def test_status_and_costs(self, started, monkeypatch):
        started.top_up(1)
        (trainer,) = started.instances("trainer")
        monkeypatch.setattr(started, "_spot_prices", lambda: [SpotOffer(0.2, trainer.type, trainer.zone)])
        status, costs = started.status(), started.costs()
        assert len(status.splitlines()) == 5
        assert trainer.id in status and status.endswith(f"--initial_peers {started.address()}")
        # 0.0416 + 0.2, two addresses at 0.005, two disks of 40 GiB
        assert "Together $0.26 an hour, $6.25 a day, without traffic" in costs
        assert re.search(r"trainer .* \$0\.205 an hour", costs)
        assert "Linux version" in started.console(trainer.id, lines=1000)


# --- cleanup ---------------------------------------------------------------------------------------------------------


class TestCleanUp:
    def left(self, deployment: Deployment) -> dict[str, int]:
        ec2, ssm, iam, ours = deployment.ec2, deployment.ssm, deployment.iam, deployment._ours()
        requests = ec2.describe_spot_instance_requests()["SpotInstanceRequests"]
        return {
            "instances": len(deployment.instances()),
            "spot requests": len([x for x in requests if x["State"] in ("open", "active")]),
            "security groups": len(ec2.describe_security_groups(Filters=ours)["SecurityGroups"]),
            "addresses": len(ec2.describe_addresses()["Addresses"]),
            "volumes": len(ec2.describe_volumes(Filters=ours)["Volumes"]),
            "parameters": len(
                ssm.get_parameters_by_path(Path="/collaborative-training/", Recursive=True)["Parameters"]
            ),
            "profiles": len(iam.list_instance_profiles()["InstanceProfiles"]),
            "roles": len(iam.list_roles()["Roles"]),
        }

    def test_clean_up_removes_all_resources(self, started):
        started.top_up(1)
        tags = [{"ResourceType": "spot-instances-request", "Tags": [{"Key": aws.TAG, "Value": "test"}]}]
        started.ec2.request_spot_instances(
            LaunchSpecification={"ImageId": "ami-12c6146b", "InstanceType": "g5.xlarge"}, TagSpecifications=tags
        )
        assert all(self.left(started).values())
        started.clean_up()
        assert not any(self.left(started).values()), self.left(started)
        started.clean_up()  # finds no resources
        assert started.status() == "No instance is running in 'test'"

    def test_address_can_be_kept(self, started):
        address = started.address()
        started.clean_up(keep_address=True)
        left = {name for name, number in self.left(started).items() if number}
        assert left == {"addresses", "parameters"}
        assert started.start_coordinator() == address

    def test_security_group_goes_after_its_interfaces(self, started, monkeypatch):
        real, refusals = started.ec2.delete_security_group, [refusal("DependencyViolation")] * 2

        def delete(**request):
            if refusals:
                raise refusals.pop()
            return real(**request)

        monkeypatch.setattr(started.ec2, "delete_security_group", delete)
        started.clean_up()
        assert not any(self.left(started).values())


# --- user data -------------------------------------------------------------------------------------------------------


@pytest.fixture
def user_data(started) -> dict[str, str]:
    started.top_up(1)
    return {instance.role: read_user_data(started, instance) for instance in started.instances()}


@pytest.mark.parametrize("role", ["coordinator", "trainer"])
def test_user_data_is_a_valid_script(user_data, role, tmp_path):
    script = tmp_path / "user_data.sh"
    script.write_text(user_data[role])
    assert len(user_data[role]) < aws.MAX_USER_DATA
    subprocess.run(["bash", "-n", script], check=True)
    result = subprocess.run([Path(sys.executable).parent / "shellcheck", script], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_user_data_has_a_limit(started):
    with pytest.raises(UserError, match="the user data has .* use fewer flags"):
        Deployment(make_settings(trainer_flags="--debug " * 2000))._user_data("trainer", "x", ["--debug"] * 2000)


class Metadata(BaseHTTPRequestHandler):
    """Instance metadata service, version 2. `server.values`: path -> successive responses; the last one repeats."""

    def do_PUT(self) -> None:
        self.answer("the token" if self.path == "/latest/api/token" else None)

    def do_GET(self) -> None:
        self.server.paths.append(self.path)
        if self.headers["X-aws-ec2-metadata-token"] != "the token":
            self.send_error(401)
            return
        answers = self.server.values.get(self.path.removeprefix("/latest/meta-data/"), [None])
        self.answer(answers.pop(0) if len(answers) > 1 else answers[0])

    def answer(self, text: str | None) -> None:
        if text is None:
            self.send_error(404)
            return
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_) -> None:
        pass


@pytest.fixture
def metadata() -> Iterator[ThreadingHTTPServer]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    server.values, server.paths = {"public-ipv4": ["203.0.113.7"]}, []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


class Machine:
    """A machine at its first boot: a folder instead of /opt and /etc, and fake programs that would require root."""

    def __init__(self, folder: Path, metadata: ThreadingHTTPServer):
        self.folder, self.metadata = folder / "collaboration", metadata
        self.units, self.log = folder / "units", folder / "log"
        self.units.mkdir()
        python = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
        pip = f'#!/bin/sh\necho pip "$@" >> {self.log}\n'
        venv = f'mkdir -p "$3/bin"\ncat > "$3/bin/python" <<"E"\n{python}E\ncat > "$3/bin/pip" <<"E"\n{pip}E\n'
        programs = {
            "dnf": "", "systemctl": "", "chown": "", "sleep": "exec /bin/sleep 0.02", "useradd": 'mkdir -p "$4"',
            "runuser": 'shift 3; exec "$@"', "python3.11": venv + 'chmod +x "$3"/bin/*',
            "nvidia-smi": "echo Tesla T4, 15360",
        }  # fmt: skip
        for name, code in programs.items():
            self.install(name, code)

    def install(self, name: str, code: str) -> None:
        write_program(self.folder.parent / "bin" / name, f'#!/bin/bash\necho {name} "$@" >> {self.log}\n{code}\n')

    def run(self, *command: object) -> subprocess.CompletedProcess:
        environment = {**os.environ, "PATH": f"{self.folder.parent / 'bin'}:{os.environ['PATH']}"}
        return subprocess.run(list(map(str, command)), env=environment, capture_output=True, text=True, timeout=60)

    def boot(self, user_data: str) -> subprocess.CompletedProcess:
        url = f"http://127.0.0.1:{self.metadata.server_port}/latest"
        places = {"FOLDER": self.folder, "UNITS": self.units, "METADATA": url}
        for name, value in places.items():
            user_data, count = re.subn(rf"^{name}=.*$", f"{name}={value}", user_data, count=1, flags=re.MULTILINE)
            assert count == 1
        script = self.folder.parent / "user_data.sh"
        script.write_text(user_data)
        return self.run("bash", script)

    def service_arguments(self) -> list[str]:
        """Return the command line that systemd would run."""
        unit = (self.units / "collaboration.service").read_text()
        result = self.run(re.search(r"^ExecStart=(.*)$", unit, re.MULTILINE)[1])
        assert result.returncode == 0, result.stderr
        return json.loads(result.stdout)


@pytest.fixture
def machine(tmp_path, metadata) -> Machine:
    return Machine(tmp_path, metadata)


@pytest.fixture
def repository(tmp_path) -> Path:
    folder = make_repository(tmp_path / "repository", "import json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    (folder / "run_training_monitor.py").write_text((folder / "run_trainer.py").read_text())
    git = ["git", "-c", "user.name=x", "-c", "user.email=x@example.org", "-C", folder]
    subprocess.run([*git, "add", "."], check=True)
    subprocess.run([*git, "commit", "-q", "-m", "y"], check=True)
    return folder


class TestFirstBoot:
    def test_trainer(self, started, repository, machine):
        settings = make_settings(repo_url=f"file://{repository}", trainer_flags="--bandwidth 500 --username 'a b%c$d'")
        result = machine.boot(Deployment(settings).trainer_user_data())
        assert result.returncode == 0, result.stdout + result.stderr
        training, dataset, peer, *_ = parse_arguments(TRAINER_ARGUMENTS, "-", machine.service_arguments())
        assert peer.initial_peers == [started.address()] and peer.run_id == "r" and not peer.client_mode
        assert (peer.host_maddrs, peer.announce_maddrs) == (
            ["/ip4/0.0.0.0/tcp/31337"],
            ["/ip4/203.0.113.7/tcp/31337"],
        )
        assert training.per_device_train_batch_size == 8, "by the GPU's memory"
        assert dataset.dataset_url == DATA
        assert (peer.bandwidth, peer.username) == (500, "a b%c$d")
        log = machine.log.read_text()
        assert f"-r {machine.folder}/project/requirements.txt" in log
        assert "systemctl enable --now collaboration.service spot-watch.service" in log

    def test_coordinator(self, started, repository, machine, metadata, data, tmp_path):
        ip = started.instances()[0].ip
        metadata.values["public-ipv4"] = ["198.51.100.1", "198.51.100.1", ip]  # the elastic IP is associated later
        key = started.ssm.get_parameter(Name="/collaborative-training/test/identity", WithDecryption=True)
        machine.install("aws", f"echo {key['Parameter']['Value']}")
        folders = {"data/albert_tokenized_wikitext": data / "dataset", "data/tokenizer": data / "tokenizer"}
        digest = write_archive(tmp_path / "data.tar.gz", folders)
        settings = make_settings(
            repo_url=f"file://{repository}",
            dataset_url=f"file://{tmp_path}/data.tar.gz",
            dataset_sha256=digest.upper(),
        )
        user_data = Deployment(settings).coordinator_user_data(ip)
        result = machine.boot(user_data)
        assert result.returncode == 0, result.stdout + result.stderr

        _, _, peer, *_ = parse_arguments(run_training_monitor.ARGUMENTS, "-", machine.service_arguments())
        assert (peer.announce_maddrs, peer.run_id) == ([f"/ip4/{ip}/tcp/31337"], "r")
        identity = machine.folder / "identity.key"
        assert peer.identity_path == str(identity)
        assert base64.b64encode(identity.read_bytes()).decode() == key["Parameter"]["Value"]
        assert identity.stat().st_mode & 0o777 == 0o600
        assert key["Parameter"]["Value"] not in result.stdout + result.stderr
        assert [path.name for path in (machine.folder / "project" / "data").iterdir()] == ["tokenizer"]
        log = machine.log.read_text()
        assert f"-r {machine.folder}/project/requirements-organiser.txt" in log, "its flags may ask for a dashboard"
        assert "aws ssm get-parameter --region us-east-1 --name /collaborative-training/test/identity" in log

        result = machine.boot(user_data.replace(digest, "0" * 64))
        assert result.returncode != 0 and "could not be set up" in result.stdout
        assert "poweroff" not in machine.log.read_text(), "a coordinator waits for its organiser"

    def test_units_are_valid(self, started, repository, machine):
        assert (
            machine.boot(Deployment(make_settings(repo_url=f"file://{repository}")).trainer_user_data()).returncode
            == 0
        )
        units = sorted(machine.units.iterdir())
        assert [unit.name for unit in units] == ["collaboration.service", "spot-watch.service"]
        text = units[0].read_text()
        for line in ("Restart=on-failure", "KillMode=mixed", "SuccessAction=poweroff", "User=collaboration"):
            assert f"\n{line}\n" in text
        if shutil.which("systemd-analyze"):
            result = machine.run("systemd-analyze", "verify", *units)
            assert result.returncode == 0, result.stderr

    def test_failed_setup_terminates_the_instance(self, started, machine, tmp_path):
        settings = make_settings(repo_url=f"file://{tmp_path}/nothing")
        result = machine.boot(Deployment(settings).trainer_user_data())
        assert result.returncode != 0
        assert "This machine could not be set up" in result.stdout
        assert "systemctl poweroff" in machine.log.read_text()

    def test_trainer_stops_before_a_spot_interruption(self, started, repository, machine, metadata):
        assert (
            machine.boot(Deployment(make_settings(repo_url=f"file://{repository}")).trainer_user_data()).returncode
            == 0
        )
        path, results = "/latest/meta-data/spot/instance-action", []
        watch = threading.Thread(target=lambda: results.append(machine.run(machine.folder / "spot_watch.sh")))
        watch.start()
        wait_until(lambda: metadata.paths.count(path) >= 2, 120, "two questions")
        assert "systemctl stop" not in machine.log.read_text()
        metadata.values["spot/instance-action"] = ['{"action": "terminate", "time": "2030-01-01T00:00:00Z"}']
        watch.join(20)
        assert results and results[0].returncode == 0
        assert machine.log.read_text().splitlines()[-1] == "systemctl stop collaboration"


# --- the whole notebook ----------------------------------------------------------------------------------------------


@pytest.mark.peers
@pytest.mark.early
def test_deploy_notebook(account, tmp_path, monkeypatch, launcher):
    """moto assigns addresses in 127/8, so that the notebook's probe can join a monitor at the elastic IP."""
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / "jupyter"))
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
        assert "2 of 2 trainers" in printed and "Together $" in printed
        assert printed.rstrip().endswith("Removed all resources of 'nb'")
        assert deployment.instances() == []
        assert monitors[0].stop(signal.SIGTERM) == 0
    finally:
        machine.join()
        for monitor in monitors:
            monitor.kill_all()
