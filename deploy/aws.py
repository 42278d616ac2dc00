"""Functions of deploy_on_aws.ipynb: a coordinator and spot trainers on EC2, identified by tags.

No state is kept on the organiser's machine. All resources of a deployment have its name as a tag. Every call queries
the existing resources first, so all calls are idempotent.

The coordinator is an on-demand instance with an elastic IP and an identity stored as an encrypted parameter. Its
address is known before it boots, and does not change when it is replaced. The trainers form an Auto Scaling group,
which replaces interrupted instances. They receive the address and no secret; the settings of the run come from the
coordinator.
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


@dataclass(frozen=True)
class Settings:
    """Settings of a deployment. Prices are in USD per hour.

    :param name: tag of all resources of this deployment, which identifies it
    :param dataset_url: archive written by `tokenize_wikitext103.py --archive`
    :param revision: branch or tag of the project
    :param monitor_flags: flags of the monitor, including the settings of the run, e.g. "--target_batch_size 2048"
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
        services = ("ec2", "ssm", "iam", "autoscaling")
        self.ec2, self.ssm, self.iam, self.scaling = (boto3.client(service, config=config) for service in services)

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

    @readable_errors()
    def status(self) -> str:
        """Return a table of the instances, the address, and why trainers are missing."""
        rows = [("role", "instance", "type", "zone", "state", "address", "hours")]
        rows += [(x.role, x.id, x.type, x.zone, x.state, x.ip, f"{x.hours:.1f}") for x in self.instances()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        if len(rows) == 1:
            return f"No instance is running in '{self.settings.name}'"
        group = self._find_group()
        running = len(self.instances(TRAINER))
        if group is not None and running < group["DesiredCapacity"]:
            activities = self.scaling.describe_scaling_activities(AutoScalingGroupName=self._trainers)["Activities"]
            reasons = [x["StatusMessage"] for x in activities if x["StatusCode"] == "Failed"]
            lines += [f"{running} of {group['DesiredCapacity']} trainers", *reasons[:1]]
        return "\n".join([*lines, "", f"--initial_peers {self.address()}"])

    @readable_errors()
    def costs(self) -> str:
        """Return an estimate of the current costs per hour and per day, at current spot prices, without traffic."""
        now = datetime.now(UTC)
        pages = self.ec2.get_paginator("describe_spot_price_history").paginate(
            InstanceTypes=list(self.settings.trainer_types),
            ProductDescriptions=["Linux/UNIX"],
            StartTime=now,
            EndTime=now,
        )
        history = [entry for page in pages for entry in page["SpotPriceHistory"]]
        prices = {(entry["InstanceType"], entry["AvailabilityZone"]): float(entry["SpotPrice"]) for entry in history}
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
            instance_id = self._launch_coordinator(elastic_ip["PublicIp"])
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
        digest = ["--dataset_sha256", s.dataset_sha256] if s.dataset_sha256 else []
        return self._user_data(
            COORDINATOR,
            "run_training_monitor.py",
            ["--run_id", s.run_id, "--dataset_url", s.dataset_url, *digest, *shlex.split(s.monitor_flags)],
            PUBLIC_IP=public_ip,
            DATASET_URL=s.dataset_url,
            DATASET_SHA256=s.dataset_sha256.lower(),
            IDENTITY_PARAMETER=self._identity_parameter,
        )

    def _launch_coordinator(self, public_ip: str) -> str:
        identity = self.ssm.get_parameter(Name=self._identity_parameter)["Parameter"]["ARN"]
        request = {
            **self._machine(COORDINATOR, self.settings.coordinator_image, self.coordinator_user_data(public_ip)),
            "InstanceType": self.settings.coordinator_type,
            "IamInstanceProfile": {"Name": self._make_instance_profile(COORDINATOR, "ssm:GetParameter", identity)},
        }
        for attempt in range(12):
            try:
                reply = self.ec2.run_instances(**request, MinCount=1, MaxCount=1)
                break
            except ClientError as error:  # a new instance profile takes some seconds to propagate
                if "iamInstanceProfile" not in error.response["Error"]["Message"] or attempt == 11:
                    raise
                time.sleep(5)
        instance_id = reply["Instances"][0]["InstanceId"]
        self._wait("instance_exists", [instance_id])  # otherwise the next query may miss it
        return instance_id

    # --- the trainers ------------------------------------------------------------------------------------------------

    @readable_errors()
    def set_trainers(self, wanted: int) -> None:
        """Keep this many spot trainers running, where they are cheapest, and replace interrupted ones.

        A trainer that completes the run, or cannot start, is not replaced. A lower number terminates trainers.
        """
        s, user_data = self.settings, self.trainer_user_data()
        machine = self._machine(TRAINER, s.trainer_image, base64.b64encode(user_data.encode()).decode())
        group_arn = f"arn:*:autoscaling:{s.region}:*:autoScalingGroup:*:autoScalingGroupName/{self._trainers}"
        action = "autoscaling:TerminateInstanceInAutoScalingGroup"
        machine["IamInstanceProfile"] = {"Name": self._make_instance_profile(TRAINER, action, group_arn)}
        self._delete_template()  # of an earlier call, which may have had other settings
        self.ec2.create_launch_template(
            LaunchTemplateName=self._trainers,
            LaunchTemplateData=machine,
            TagSpecifications=[{"ResourceType": "launch-template", "Tags": self._tags(TRAINER)}],
        )
        subnets = self.ec2.describe_subnets(Filters=[{"Name": "default-for-az", "Values": ["true"]}])["Subnets"]
        group = {
            "AutoScalingGroupName": self._trainers,
            "MinSize": 0,
            "MaxSize": wanted,
            "DesiredCapacity": wanted,
            "VPCZoneIdentifier": ",".join(subnet["SubnetId"] for subnet in subnets),
            "MixedInstancesPolicy": {
                "LaunchTemplate": {
                    "LaunchTemplateSpecification": {"LaunchTemplateName": self._trainers},
                    "Overrides": [{"InstanceType": name} for name in s.trainer_types],
                },
                "InstancesDistribution": {
                    "OnDemandPercentageAboveBaseCapacity": 0,
                    "SpotAllocationStrategy": "price-capacity-optimized",
                    "SpotMaxPrice": str(s.max_spot_price),
                },
            },
        }
        if self._find_group() is None:
            tags = [{**tag, "PropagateAtLaunch": True} for tag in self._tags(TRAINER)]
            self.scaling.create_auto_scaling_group(**group, Tags=tags)
        else:
            self.scaling.update_auto_scaling_group(**group)
        print(f"AWS keeps {wanted} trainers running")

    def trainer_user_data(self) -> str:
        s = self.settings
        flags = ["--initial_peers", self.address(), "--username", f"{s.name}-aws", "--disable_tqdm"]
        return self._user_data(TRAINER, "run_trainer.py", [*flags, *shlex.split(s.trainer_flags)], PUBLIC_IP="")

    @property
    def _trainers(self) -> str:
        return f"{self.settings.name}-trainers"

    def _delete_template(self) -> None:
        for template in self.ec2.describe_launch_templates(Filters=self._ours())["LaunchTemplates"]:
            self.ec2.delete_launch_template(LaunchTemplateId=template["LaunchTemplateId"])

    def _find_group(self) -> dict | None:
        reply = self.scaling.describe_auto_scaling_groups(AutoScalingGroupNames=[self._trainers])
        return next(iter(reply["AutoScalingGroups"]), None)

    # --- cleanup -----------------------------------------------------------------------------------------------------

    @readable_errors()
    def clean_up(self, keep_address: bool = False) -> None:
        """Remove all resources with the tag, including the checkpoints on the coordinator's disk.

        :param keep_address: keep the elastic IP, which costs money, and the identity, so that a new coordinator has
            the same address
        """
        if self._find_group() is not None:
            self.scaling.delete_auto_scaling_group(AutoScalingGroupName=self._trainers, ForceDelete=True)
        self._delete_template()
        instances = [instance.id for instance in self.instances()]
        if instances:
            self.ec2.terminate_instances(InstanceIds=instances)
            print(f"Terminating {len(instances)} instances: this takes some minutes")
            self._wait("instance_terminated", instances, seconds=900)
        if (group := self._find_security_group()) is not None:
            self._delete_security_group(group)
        for role in (COORDINATOR, TRAINER):
            self._delete_instance_profile(role)
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

    def _machine(self, role: str, image: str, user_data: str) -> dict:
        """Return what the coordinator's instance and the template of the trainers have in common."""
        image_id = self._find_image(image)
        return {
            "ImageId": image_id,
            "UserData": user_data,
            "SecurityGroupIds": [self._find_security_group() or self._make_security_group()],
            "BlockDeviceMappings": [self._root_disk(image_id)],
            "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1},
            "TagSpecifications": [{"ResourceType": kind, "Tags": self._tags(role)} for kind in ("instance", "volume")],
        }

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
            "REGION": s.region,
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

    # roles: the coordinator reads the identity, and a trainer gives its machine back. They are global, not per region

    def _profile(self, role: str) -> str:
        return f"{self.settings.name}-{self.settings.region}-{role}"

    def _make_instance_profile(self, role: str, action: str, resource: str) -> str:
        """Create a role that may do this one thing, and return its name."""
        name, tags = self._profile(role), self._tags(role)
        trust = {"Effect": "Allow", "Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
        allow = {"Effect": "Allow", "Action": action, "Resource": resource}
        with ignoring("EntityAlreadyExists"):
            self.iam.create_role(RoleName=name, AssumeRolePolicyDocument=_policy(trust), Tags=tags)
        self.iam.put_role_policy(RoleName=name, PolicyName=role, PolicyDocument=_policy(allow))
        with ignoring("EntityAlreadyExists"):
            self.iam.create_instance_profile(InstanceProfileName=name, Tags=tags)
        with ignoring("LimitExceeded"):  # the profile already has its role
            self.iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)
        return name

    def _delete_instance_profile(self, role: str) -> None:
        name = self._profile(role)
        for delete, arguments in (
            (self.iam.remove_role_from_instance_profile, {"InstanceProfileName": name, "RoleName": name}),
            (self.iam.delete_instance_profile, {"InstanceProfileName": name}),
            (self.iam.delete_role_policy, {"RoleName": name, "PolicyName": role}),
            (self.iam.delete_role, {"RoleName": name}),
        ):
            with ignoring("NoSuchEntity"):
                delete(**arguments)


def _policy(statement: dict) -> str:
    return json.dumps({"Version": "2012-10-17", "Statement": [statement]})


def _peer_id(identity: bytes) -> str:
    """Return the peer ID of a private key, in base58."""
    from hivemind.p2p import PeerID  # the import takes seconds

    return PeerID.from_identity(identity).to_base58()
