"""Functions of deploy_on_aws.ipynb: a coordinator and spot trainers on EC2, identified by tags.

No state is kept on the organiser's machine. All resources of a deployment have its name as a tag. Every call queries
the existing resources first, so all calls are idempotent.

The coordinator is an on-demand instance with an elastic IP and an identity stored as an encrypted parameter. Its
address is known before it boots, and does not change when it is replaced. Trainers receive the address and no secret.
"""

import base64
import contextlib
import json
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from lib.common.errors import UserError, describe

try:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, PartialCredentialsError
except ModuleNotFoundError as error:
    raise UserError(describe(error)) from None

PROJECT = Path(__file__).parent.parent
TAG, ROLE_TAG = "CollaborativeTraining", "Role"
COORDINATOR, TRAINER = "coordinator", "trainer"
EXISTING = ("pending", "running", "stopping", "stopped")

MAX_USER_DATA = 16 * 1024  # bytes, EC2's limit
METADATA = "http://169.254.169.254/latest"  # the same on every instance
PUBLIC_IP_PRICE = 0.005  # USD per hour and public IPv4 address
DISK_PRICE = 0.08 / 730  # USD per hour and GiB of gp3

# AWS cannot serve this offer now; `top_up` tries the next one. Any other error ends the search.
_NO_CAPACITY = {"InsufficientInstanceCapacity", "InsufficientHostCapacity", "SpotMaxPriceTooLow", "Unsupported"}


@dataclass(frozen=True)
class Settings:
    """Settings of a deployment. Prices are in USD per hour.

    :param name: tag of all resources of this deployment, which identifies it
    :param dataset_url: archive written by `tokenize_wikitext103.py --archive`
    :param revision: branch or tag of the project
    :param common_flags: flags of every peer, e.g. "--target_batch_size 2048"; `monitor_flags` and `trainer_flags` are
        those of the monitor and of the trainers
    :param coordinator_price: on-demand price, for the estimate of costs
    :param coordinator_image: an AMI, or the public parameter that names the newest one; Amazon Linux 2023. The same
        holds for `trainer_image`, which includes NVIDIA's driver
    """

    name: str
    repo_url: str
    dataset_url: str
    dataset_sha256: str = ""
    run_id: str = "albert"
    revision: str = "main"
    region: str = "us-east-1"
    port: int = 31337
    common_flags: str = ""
    monitor_flags: str = ""
    trainer_flags: str = ""
    coordinator_type: str = "t3.medium"
    coordinator_price: float = 0.0416
    coordinator_image: str = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64"
    trainer_types: tuple[str, ...] = ("g4dn.xlarge", "g5.xlarge", "g6.xlarge")
    max_spot_price: float = 0.60
    trainer_image: str = (
        "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-amazon-linux-2023/latest/ami-id"
    )
    disk_gib: int = 40

    def __post_init__(self):
        _require(
            bool(re.fullmatch(r"[A-Za-z0-9-]{1,30}", self.name)),
            "NAME must have 1 to 30 characters: letters, digits and '-'",
        )
        _require("." not in self.run_id and bool(self.run_id.strip()), "RUN_ID must not be empty or contain '.'")
        _require(0 < self.port < 65536, f"port: {self.port} is not a port; choose one from 1 to 65535")
        _require(bool(self.trainer_types), "trainer_types: name at least one instance type")
        for field in ("repo_url", "dataset_url"):
            parts = urlsplit(getattr(self, field))
            _require(
                bool(parts.scheme and parts.path), f"{field.upper()} must be an address like https://example.org/x"
            )
            _require(
                parts.password is None,
                f"{field.upper()} contains a password, which all users of the machines can "
                "read; pass an address without it",
            )


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


@dataclass(frozen=True)
class Instance:
    id: str
    role: str
    type: str
    zone: str
    state: str
    ip: str
    launched: datetime

    @property
    def hours(self) -> float:
        return (datetime.now(UTC) - self.launched).total_seconds() / 3600


@dataclass(frozen=True)
class SpotOffer:
    price: float
    type: str
    zone: str


@contextlib.contextmanager
def readable_errors() -> Iterator[None]:
    """Convert exceptions of boto3 into UserError with a message of one line."""
    try:
        yield
    except (NoCredentialsError, PartialCredentialsError):
        raise UserError("no AWS credentials found: run `aws configure`, or set AWS_PROFILE") from None
    except ClientError as error:
        details = error.response["Error"]
        raise UserError(f"AWS refused {error.operation_name}: {details['Code']}: {details['Message']}") from None
    except BotoCoreError as error:
        raise UserError(f"the request to AWS failed: {error}") from None


@contextlib.contextmanager
def ignoring(*codes: str) -> Iterator[None]:
    """Suppress errors of AWS with one of these codes."""
    try:
        yield
    except ClientError as error:
        if error.response["Error"]["Code"] not in codes:
            raise


class Deployment:
    """All resources tagged with `settings.name` in one region."""

    def __init__(self, settings: Settings):
        self.settings = settings
        config = Config(
            region_name=settings.region,
            connect_timeout=10,
            read_timeout=60,
            retries={"max_attempts": 5, "mode": "standard"},
        )
        self.ec2, self.ssm, self.iam = (boto3.client(service, config=config) for service in ("ec2", "ssm", "iam"))

    # --- existing resources ------------------------------------------------------------------------------------------

    @readable_errors()
    def instances(self, role: str | None = None) -> list[Instance]:
        """Return the instances that are not terminated, the oldest first."""
        filters = [*self._ours(role), {"Name": "instance-state-name", "Values": list(EXISTING)}]
        pages = self.ec2.get_paginator("describe_instances").paginate(Filters=filters)
        found = [
            Instance(
                id=one["InstanceId"],
                role=next(tag["Value"] for tag in one["Tags"] if tag["Key"] == ROLE_TAG),
                type=one["InstanceType"],
                zone=one["Placement"]["AvailabilityZone"],
                state=one["State"]["Name"],
                ip=one.get("PublicIpAddress", ""),
                launched=one["LaunchTime"],
            )
            for page in pages
            for reservation in page["Reservations"]
            for one in reservation["Instances"]
        ]
        return sorted(found, key=lambda instance: (instance.launched, instance.id))

    @readable_errors()
    def address(self) -> str:
        """Return the address of the coordinator, for --initial_peers of the trainers.

        :raises UserError: if there is no coordinator yet
        """
        elastic_ip, key = self._find_elastic_ip(), self._find_identity()
        if elastic_ip is None or key is None:
            raise UserError(f"'{self.settings.name}' has no coordinator yet: start it first")
        return f"/ip4/{elastic_ip['PublicIp']}/tcp/{self.settings.port}/p2p/{_peer_id(key)}"

    def status(self) -> str:
        """Return a table of the instances, and the address."""
        rows = [("role", "instance", "type", "zone", "state", "address", "hours")]
        rows += [(x.role, x.id, x.type, x.zone, x.state, x.ip, f"{x.hours:.1f}") for x in self.instances()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        if len(rows) == 1:
            return f"No instance is running in '{self.settings.name}'"
        return "\n".join([*lines, "", f"--initial_peers {self.address()}"])

    @readable_errors()
    def costs(self) -> str:
        """Return an estimate of the current costs per hour and per day, at current spot prices, without traffic."""
        prices = {(offer.type, offer.zone): offer.price for offer in self._spot_prices()}
        lines, total = [], 0.0
        for x in self.instances():
            price = self.settings.coordinator_price if x.role == COORDINATOR else prices.get((x.type, x.zone), 0.0)
            price += PUBLIC_IP_PRICE
            lines.append(f"{x.role:12} {x.type:12} {x.zone:12} ${price:.3f} an hour, ${price * x.hours:.2f} so far")
            total += price
        disks = sum(volume["Size"] for volume in self.ec2.describe_volumes(Filters=self._ours())["Volumes"])
        lines.append(f"{disks} GiB of disks ${disks * DISK_PRICE:.3f} an hour")
        total += disks * DISK_PRICE
        return "\n".join([*lines, f"Together ${total:.2f} an hour, ${24 * total:.2f} a day, without traffic"])

    @readable_errors()
    def console(self, instance_id: str, lines: int = 40) -> str:
        """Return the last lines of an instance's console, which AWS shows with a delay of some minutes."""
        output = self.ec2.get_console_output(InstanceId=instance_id).get("Output", "")
        return "\n".join(output.splitlines()[-lines:]) or "No output yet: AWS shows it with a delay of some minutes"

    # --- the coordinator ---------------------------------------------------------------------------------------------

    @readable_errors()
    def start_coordinator(self) -> str:
        """Start the coordinator unless it exists, and return its address."""
        elastic_ip = self._find_elastic_ip() or self._allocate_elastic_ip()
        if self._find_identity() is None:
            self._make_identity()
        existing = self.instances(COORDINATOR)
        if existing:
            coordinator = existing[0]
            print(f"The coordinator {coordinator.id} is {coordinator.state}")
            for other in existing[1:]:  # two calls ran at the same time
                print(f"Terminating a second coordinator: {other.id}")
                self.ec2.terminate_instances(InstanceIds=[other.id])
            if coordinator.state in ("stopping", "stopped"):
                self._wait("instance_stopped", [coordinator.id])
                self.ec2.start_instances(InstanceIds=[coordinator.id])
            instance_id = coordinator.id
        else:
            profile = self._make_instance_profile()
            (instance_id,) = self._launch(
                COORDINATOR,
                self.settings.coordinator_image,
                self.coordinator_user_data(elastic_ip["PublicIp"]),
                InstanceType=self.settings.coordinator_type,
                IamInstanceProfile={"Name": profile},
            )
            print(f"Started the coordinator {instance_id}")
        self._wait("instance_running", [instance_id])
        self.ec2.associate_address(
            AllocationId=elastic_ip["AllocationId"], InstanceId=instance_id, AllowReassociation=True
        )
        return self.address()

    def wait_until_ready(self, timeout: float = 1200.0) -> str:
        """Wait until this machine can join the coordinator; return the output of the probe.

        :raises UserError: if the coordinator is not reachable within `timeout` seconds
        """
        command = [sys.executable, "-W", "ignore", "-m", "deploy.probe", "--run_id", self.settings.run_id]
        command += ["--initial_peers", self.address(), "--bootstrap_timeout", str(min(60.0, timeout))]
        deadline = time.monotonic() + timeout
        while True:
            result = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=240)
            if result.returncode == 0:
                return result.stdout.strip()
            left = deadline - time.monotonic()
            if left <= 0:
                reason = next(iter(result.stderr.strip().splitlines()[-1:]), "no answer")
                raise UserError(f"{reason}. To see the machine's output: print(deployment.console(INSTANCE_ID))")
            print(
                "Not reachable yet: a new machine installs for about ten minutes. Trying for another "
                f"{left / 60:.0f} minutes"
            )

    def coordinator_user_data(self, public_ip: str) -> str:
        s = self.settings
        return self._user_data(
            COORDINATOR,
            "run_training_monitor.py",
            ["--run_id", s.run_id, *shlex.split(s.common_flags), *shlex.split(s.monitor_flags)],
            PUBLIC_IP=public_ip,
            DATASET_URL=s.dataset_url,
            DATASET_SHA256=s.dataset_sha256.lower(),
            IDENTITY_PARAMETER=self._identity_parameter,
            REGION=s.region,
        )

    # --- the trainers ------------------------------------------------------------------------------------------------

    @readable_errors()
    def top_up(self, wanted: int) -> int:
        """Start the missing spot trainers, the cheapest offers first; return the number of started instances.

        :raises UserError: if not enough spot instances are available
        """
        user_data = self.trainer_user_data()
        running = len(self.instances(TRAINER))
        started: list[str] = []
        for offer in self.spot_offers():
            missing = wanted - running - len(started)
            if missing <= 0:
                break
            with ignoring(*_NO_CAPACITY):
                new = self._launch(
                    TRAINER,
                    self.settings.trainer_image,
                    user_data,
                    number=missing,
                    InstanceType=offer.type,
                    Placement={"AvailabilityZone": offer.zone},
                    InstanceInitiatedShutdownBehavior="terminate",
                    InstanceMarketOptions={
                        "MarketType": "spot",
                        "SpotOptions": {
                            "MaxPrice": str(self.settings.max_spot_price),
                            "SpotInstanceType": "one-time",
                            "InstanceInterruptionBehavior": "terminate",
                        },
                    },
                )
                print(f"Started {len(new)} x {offer.type} in {offer.zone} at ${offer.price:.3f} an hour")
                started += new
        print(f"{running + len(started)} of {wanted} trainers")
        if running + len(started) < wanted:
            raise UserError(
                f"no more spot instances for at most ${self.settings.max_spot_price} an hour: try later, with other "
                f"types, or in another region"
            )
        return len(started)

    def spot_offers(self) -> list[SpotOffer]:
        """Return the current offers of all zones up to `max_spot_price`, the cheapest first."""
        offers = [offer for offer in self._spot_prices() if offer.price <= self.settings.max_spot_price]
        return sorted(offers, key=lambda offer: offer.price)

    def trainer_user_data(self) -> str:
        s = self.settings
        flags = ["--run_id", s.run_id, "--initial_peers", self.address(), "--dataset_url", s.dataset_url]
        if s.dataset_sha256:
            flags += ["--dataset_sha256", s.dataset_sha256]
        flags += ["--username", f"{s.name}-aws", "--disable_tqdm"]
        flags += [*shlex.split(s.common_flags), *shlex.split(s.trainer_flags)]
        return self._user_data(TRAINER, "run_trainer.py", flags, PUBLIC_IP="")

    def _spot_prices(self) -> list[SpotOffer]:
        now = datetime.now(UTC)
        pages = self.ec2.get_paginator("describe_spot_price_history").paginate(
            InstanceTypes=list(self.settings.trainer_types),
            ProductDescriptions=["Linux/UNIX"],
            StartTime=now,
            EndTime=now,
        )
        return [
            SpotOffer(float(entry["SpotPrice"]), entry["InstanceType"], entry["AvailabilityZone"])
            for page in pages
            for entry in page["SpotPriceHistory"]
        ]

    # --- cleanup -----------------------------------------------------------------------------------------------------

    @readable_errors()
    def clean_up(self, keep_address: bool = False) -> None:
        """Remove all resources with the tag, including the checkpoints on the coordinator's disk.

        :param keep_address: keep the elastic IP, which costs money, and the identity, so that a new coordinator has
            the same address
        """
        requests = self.ec2.describe_spot_instance_requests(
            Filters=[*self._ours(), {"Name": "state", "Values": ["open", "active"]}]
        )["SpotInstanceRequests"]
        if requests:
            ids = [request["SpotInstanceRequestId"] for request in requests]
            self.ec2.cancel_spot_instance_requests(SpotInstanceRequestIds=ids)
            print(f"Cancelled {len(ids)} spot requests")
        instances = [instance.id for instance in self.instances()]
        if instances:
            self.ec2.terminate_instances(InstanceIds=instances)
            print(f"Terminating {len(instances)} instances: this takes some minutes")
            self._wait("instance_terminated", instances, seconds=900)
        groups = self.ec2.describe_security_groups(Filters=self._ours())["SecurityGroups"]
        for group in groups:
            self._delete_security_group(group["GroupId"])
        self._delete_instance_profile()
        if not keep_address:
            for address in self.ec2.describe_addresses(Filters=self._ours())["Addresses"]:
                self.ec2.release_address(AllocationId=address["AllocationId"])
                print(f"Released {address['PublicIp']}")
            with ignoring("ParameterNotFound"):
                self.ssm.delete_parameter(Name=self._identity_parameter)
                print("Deleted the identity")
        print(f"Removed all resources of '{self.settings.name}'" + (", except its address" if keep_address else ""))

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _ours(self, role: str | None = None) -> list[dict]:
        filters = [{"Name": f"tag:{TAG}", "Values": [self.settings.name]}]
        return filters if role is None else [*filters, {"Name": f"tag:{ROLE_TAG}", "Values": [role]}]

    def _tags(self, role: str) -> list[dict]:
        tags = {"Name": f"{self.settings.name}-{role}", TAG: self.settings.name, ROLE_TAG: role}
        return [{"Key": key, "Value": value} for key, value in tags.items()]

    def _wait(self, what: str, instances: list[str], seconds: int = 600) -> None:
        self.ec2.get_waiter(what).wait(
            InstanceIds=instances, WaiterConfig={"Delay": 5, "MaxAttempts": max(1, seconds // 5)}
        )

    def _launch(self, role: str, image: str, user_data: str, number: int = 1, **options) -> list[str]:
        """Start up to `number` instances, and wait until AWS lists them: otherwise the next query may miss them.

        :returns: instance IDs
        """
        image_id = self._find_image(image)
        kinds = ["instance", "volume"] + ["spot-instances-request"] * ("InstanceMarketOptions" in options)
        request = {
            "ImageId": image_id,
            "MinCount": 1,
            "MaxCount": number,
            "UserData": user_data,
            "SecurityGroupIds": [self._find_security_group() or self._make_security_group()],
            "BlockDeviceMappings": [self._root_disk(image_id)],
            "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1},
            "TagSpecifications": [{"ResourceType": kind, "Tags": self._tags(role)} for kind in kinds],
            **options,
        }
        for attempt in range(12):
            try:
                reply = self.ec2.run_instances(**request)
                break
            except ClientError as error:  # a new instance profile takes some seconds to propagate
                is_new = "IamInstanceProfile" in options and "iamInstanceProfile" in error.response["Error"]["Message"]
                if not is_new or attempt == 11:
                    raise
                time.sleep(5)
        ids = [instance["InstanceId"] for instance in reply["Instances"]]
        self._wait("instance_exists", ids)
        return ids

    def _find_image(self, image: str) -> str:
        return self.ssm.get_parameter(Name=image)["Parameter"]["Value"] if image.startswith("/") else image

    def _root_disk(self, image_id: str) -> dict:
        """Return the root disk's mapping. Its size is `disk_gib`, or that of the image if larger."""
        (image,) = self.ec2.describe_images(ImageIds=[image_id])["Images"]
        name = image["RootDeviceName"]
        disk = next(mapping["Ebs"] for mapping in image["BlockDeviceMappings"] if mapping["DeviceName"] == name)
        size = max(self.settings.disk_gib, disk["VolumeSize"])
        return {"DeviceName": name, "Ebs": {"VolumeSize": size, "VolumeType": "gp3", "DeleteOnTermination": True}}

    def _user_data(self, role: str, script: str, flags: list[str], **more: str) -> str:
        s = self.settings
        values = {
            "ROLE": role,
            "FOLDER": "/opt/collaboration",
            "UNITS": "/etc/systemd/system",
            "METADATA": METADATA,
            "REPO_URL": s.repo_url,
            "REVISION": s.revision,
            "PORT": str(s.port),
            "SCRIPT": script,
            **more,
        }
        head = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
        body = (Path(__file__).parent / "user_data.sh").read_text()
        user_data = "\n".join(["#!/bin/bash", *head, f"FLAGS=({shlex.join(flags)})", "", body])
        size = len(user_data.encode())
        _require(
            size <= MAX_USER_DATA, f"the user data has {size} bytes, the limit is {MAX_USER_DATA}: use fewer flags"
        )
        return user_data

    # the security group

    def _find_security_group(self) -> str | None:
        groups = self.ec2.describe_security_groups(Filters=self._ours())["SecurityGroups"]
        return groups[0]["GroupId"] if groups else None

    def _make_security_group(self) -> str:
        """Create a security group that allows incoming connections to the peers' port only."""
        group = self.ec2.create_security_group(
            GroupName=f"{self.settings.name}-peers",
            Description="Peers of a collaborative training",
            TagSpecifications=[{"ResourceType": "security-group", "Tags": self._tags("peers")}],
        )["GroupId"]
        self.ec2.get_waiter("security_group_exists").wait(GroupIds=[group])
        anybody = [{"CidrIp": "0.0.0.0/0"}]
        port = self.settings.port
        with ignoring("InvalidPermission.Duplicate"):
            self.ec2.authorize_security_group_ingress(
                GroupId=group,
                IpPermissions=[{"IpProtocol": "tcp", "FromPort": port, "ToPort": port, "IpRanges": anybody}],
            )
        return group

    def _delete_security_group(self, group: str) -> None:
        for attempt in range(24):  # network interfaces are removed some time after their instances
            try:
                self.ec2.delete_security_group(GroupId=group)
                print("Deleted the security group")
                return
            except ClientError as error:
                if error.response["Error"]["Code"] != "DependencyViolation" or attempt == 23:
                    raise
                time.sleep(5)

    # the address: an elastic IP and an identity

    def _find_elastic_ip(self) -> dict | None:
        return next(iter(self.ec2.describe_addresses(Filters=self._ours())["Addresses"]), None)

    def _allocate_elastic_ip(self) -> dict:
        return self.ec2.allocate_address(
            Domain="vpc", TagSpecifications=[{"ResourceType": "elastic-ip", "Tags": self._tags("address")}]
        )

    @property
    def _identity_parameter(self) -> str:
        return f"/collaborative-training/{self.settings.name}/identity"

    def _find_identity(self) -> bytes | None:
        try:
            parameter = self.ssm.get_parameter(Name=self._identity_parameter, WithDecryption=True)["Parameter"]
        except self.ssm.exceptions.ParameterNotFound:
            return None
        return base64.b64decode(parameter["Value"])

    def _make_identity(self) -> None:
        from lib.peer.peer import load_identity  # the import takes seconds

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "identity.key"
            load_identity(path)
            with ignoring("ParameterAlreadyExists"):
                self.ssm.put_parameter(
                    Name=self._identity_parameter,
                    Value=base64.b64encode(path.read_bytes()).decode(),
                    Type="SecureString",
                    Description="Private key of the coordinator, which determines its peer ID",
                    Tags=self._tags("identity"),
                )

    # the role that may read the identity

    @property
    def _profile(self) -> str:
        return f"{self.settings.name}-{self.settings.region}-coordinator"

    def _make_instance_profile(self) -> str:
        """Create a role that may read the identity's parameter and nothing else. Roles are global, not per region."""
        name = self._profile
        parameter = self.ssm.get_parameter(Name=self._identity_parameter)["Parameter"]["ARN"]
        trust = {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
        allow = {"Effect": "Allow", "Action": "ssm:GetParameter", "Resource": parameter}
        tags = self._tags(COORDINATOR)
        with ignoring("EntityAlreadyExists"):
            self.iam.create_role(RoleName=name, AssumeRolePolicyDocument=_policy(trust), Tags=tags)
        self.iam.put_role_policy(RoleName=name, PolicyName="identity", PolicyDocument=_policy(allow))
        with ignoring("EntityAlreadyExists"):
            self.iam.create_instance_profile(InstanceProfileName=name, Tags=tags)
        with ignoring("LimitExceeded"):  # the profile already has its role
            self.iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)
        return name

    def _delete_instance_profile(self) -> None:
        name = self._profile
        with ignoring("NoSuchEntity"):
            self.iam.remove_role_from_instance_profile(InstanceProfileName=name, RoleName=name)
        with ignoring("NoSuchEntity"):
            self.iam.delete_instance_profile(InstanceProfileName=name)
        with ignoring("NoSuchEntity"):
            self.iam.delete_role_policy(RoleName=name, PolicyName="identity")
        with ignoring("NoSuchEntity"):
            self.iam.delete_role(RoleName=name)
            print("Deleted the coordinator's role")


def _policy(statement: dict) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})


def _peer_id(identity: bytes) -> str:
    """Return the peer ID of a private key, in base58."""
    from hivemind.p2p import PeerID  # the import takes seconds

    return PeerID.from_identity(identity).to_base58()
