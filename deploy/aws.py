"""Functions of deploy_on_aws.ipynb: a coordinator and spot trainers on EC2, identified by tags.

No state is kept on the organiser's machine. All resources of a deployment have its name as a tag. Every call queries
the existing resources first, so all calls are idempotent.

The coordinator is an on-demand instance with an elastic IP and an identity stored as an encrypted parameter, so its
address does not change when it is replaced. The trainers form an Auto Scaling group, which replaces interrupted
instances. They receive the address and no secret; the settings of the run come from the coordinator.
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
from collections.abc import Callable, Iterator
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
PUBLIC_IP_PRICE = 0.005  # USD per hour and public IPv4 address
DISK_PRICE = 0.08 / 730  # USD per hour and GiB of gp3


@dataclass(frozen=True)
class Settings:
    """Settings of a deployment. Prices are in USD per hour.

    :param name: tag of all resources of this deployment, which identifies it
    :param dataset_url: archive written by `tokenize_wikitext103.py --archive`
    :param revision: branch or tag of the project
    :param monitor_flags: flags of the monitor, including the settings of the run, e.g. "--target_batch_size 2048"
    :param coordinator_price: on-demand price, for the limit of costs
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
        name = re.fullmatch(r"[A-Za-z0-9-]{1,30}", self.name)
        require(name is not None, "NAME must have 1 to 30 characters: letters, digits and '-'")
        require("." not in self.run_id and bool(self.run_id.strip()), "RUN_ID must not be empty or contain '.'")
        require(0 < self.port < 65536, f"port: {self.port} is not a port; choose one from 1 to 65535")
        require(bool(self.trainer_types), "trainer_types: name at least one instance type")
        for field in ("repo_url", "dataset_url"):
            parts, flag = urlsplit(getattr(self, field)), field.upper()
            require(bool(parts.scheme and parts.path), f"{flag} must be an address like https://example.org/x")
            require(parts.password is None, f"{flag} contains a password, which all users of the machines can read")


def require(condition: bool, message: str) -> None:
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
    age: float  # seconds since the start


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


def retry(call: Callable[..., dict], fault: str, **request) -> dict:
    """Repeat a call for two minutes while AWS's answer contains the words `fault`."""
    for attempt in range(24):
        try:
            return call(**request)
        except ClientError as error:
            if fault not in str(error) or attempt == 23:
                raise
        time.sleep(5)


class Deployment:
    """All resources tagged with `settings.name` in one region."""

    def __init__(self, settings: Settings):
        self.settings, self._trainers = settings, f"{settings.name}-trainers"
        self._identity_parameter = f"/collaborative-training/{settings.name}/identity"
        retries = {"max_attempts": 5, "mode": "standard"}
        config = Config(region_name=settings.region, connect_timeout=10, read_timeout=60, retries=retries)
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
                age=(datetime.now(UTC) - one["LaunchTime"]).total_seconds(),
            )
            for page in pages
            for reservation in page["Reservations"]
            for one in reservation["Instances"]
        ]
        return sorted(found, key=lambda instance: (-instance.age, instance.id))

    @readable_errors()
    def address(self) -> str:
        """Return the address of the coordinator, for --initial_peers of the trainers.

        :raises UserError: if there is no coordinator yet
        """
        elastic_ip, key = self._find_elastic_ip(), self._find_identity()
        if elastic_ip is None or key is None:
            raise UserError(f"'{self.settings.name}' has no coordinator yet: start it first")
        from hivemind.p2p import PeerID  # the import takes seconds

        peer_id = PeerID.from_identity(key).to_base58()
        return f"/ip4/{elastic_ip['PublicIp']}/tcp/{self.settings.port}/p2p/{peer_id}"

    @readable_errors()
    def status(self) -> str:
        """Return a table of the instances, why trainers are missing, the highest costs, and the address."""
        instances, group = self.instances(), self._find_group()
        if not instances:
            return f"No instance is running in '{self.settings.name}'"
        rows = [("role", "instance", "type", "zone", "state", "address", "hours")]
        rows += [(x.role, x.id, x.type, x.zone, x.state, x.ip, f"{x.age / 3600:.1f}") for x in instances]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        trainers = sum(instance.role == TRAINER for instance in instances)
        if group is not None and trainers < group["DesiredCapacity"]:
            activities = self.scaling.describe_scaling_activities(AutoScalingGroupName=self._trainers)["Activities"]
            reasons = [x["StatusMessage"] for x in activities if x["StatusCode"] == "Failed"]
            lines += [f"{trainers} of {group['DesiredCapacity']} trainers", *reasons[:1]]
        disks = sum(volume["Size"] for volume in self.ec2.describe_volumes(Filters=self._ours())["Volumes"])
        costs = self.settings.coordinator_price + trainers * self.settings.max_spot_price
        costs += len(instances) * PUBLIC_IP_PRICE + disks * DISK_PRICE
        lines += ["", f"At most ${costs:.2f} an hour, ${24 * costs:.2f} a day, without traffic"]
        return "\n".join([*lines, f"--initial_peers {self.address()}"])

    @readable_errors()
    def console(self, instance_id: str, lines: int = 40) -> str:
        """Return the last lines of an instance's console, which AWS shows with a delay of some minutes."""
        output = self.ec2.get_console_output(InstanceId=instance_id).get("Output", "")
        return "\n".join(output.splitlines()[-lines:]) or "No output yet: AWS shows it with a delay of some minutes"

    # --- the coordinator ---------------------------------------------------------------------------------------------

    @readable_errors()
    def start_coordinator(self) -> str:
        """Start the coordinator unless it exists, and return its address."""
        elastic_ip = self._find_elastic_ip() or self.ec2.allocate_address(
            Domain="vpc", TagSpecifications=[{"ResourceType": "elastic-ip", "Tags": self._tags("address")}]
        )
        if self._find_identity() is None:
            self._make_identity()
        existing = self.instances(COORDINATOR)
        if existing:
            coordinator = existing[0]
            print(f"The coordinator {coordinator.id} is {coordinator.state}")
            if coordinator.state in ("stopping", "stopped"):
                self._wait("instance_stopped", [coordinator.id])
                self.ec2.start_instances(InstanceIds=[coordinator.id])
            instance_id = coordinator.id
        else:
            instance_id = self._launch_coordinator(elastic_ip["PublicIp"])
            print(f"Started the coordinator {instance_id}")
        self._wait("instance_running", [instance_id])
        allocation = elastic_ip["AllocationId"]
        self.ec2.associate_address(AllocationId=allocation, InstanceId=instance_id, AllowReassociation=True)
        return self.address()

    def wait_until_ready(self, timeout: float = 1200.0) -> str:
        """Wait until this machine can join the coordinator; return the output of the probe.

        :raises UserError: if the coordinator is not reachable within `timeout` seconds
        """
        print("Joining the coordinator. A new machine installs for about ten minutes")
        command = [sys.executable, "-W", "ignore", "-m", "deploy.probe", "--run_id", self.settings.run_id]
        command += ["--initial_peers", self.address(), "--bootstrap_timeout", str(timeout)]
        result = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=timeout + 120)
        if result.returncode != 0:
            reason = next(iter(result.stderr.strip().splitlines()[-1:]), "no answer")
            raise UserError(f"{reason}. To see the machine's output: print(deployment.console(INSTANCE_ID))")
        return result.stdout.strip()

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
        profile = self._make_instance_profile(COORDINATOR, "ssm:GetParameter", identity)
        reply = retry(
            self.ec2.run_instances,
            "iamInstanceProfile",  # a new one takes some seconds to propagate
            **self._machine(COORDINATOR, self.settings.coordinator_image, self.coordinator_user_data(public_ip)),
            InstanceType=self.settings.coordinator_type,
            IamInstanceProfile={"Name": profile},
            MinCount=1,
            MaxCount=1,
        )
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
        template = {
            "LaunchTemplateSpecification": {"LaunchTemplateName": self._trainers},
            "Overrides": [{"InstanceType": name} for name in s.trainer_types],
        }
        spot = {
            "OnDemandPercentageAboveBaseCapacity": 0,
            "SpotAllocationStrategy": "price-capacity-optimized",
            "SpotMaxPrice": str(s.max_spot_price),
        }
        group = {
            "AutoScalingGroupName": self._trainers,
            "MinSize": 0,
            "MaxSize": wanted,
            "DesiredCapacity": wanted,
            "VPCZoneIdentifier": ",".join(subnet["SubnetId"] for subnet in subnets),
            "MixedInstancesPolicy": {"LaunchTemplate": template, "InstancesDistribution": spot},
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
            self._wait("instance_terminated", instances)
        for group in self.ec2.describe_security_groups(Filters=self._ours())["SecurityGroups"]:
            # Network interfaces are removed some time after their instances.
            retry(self.ec2.delete_security_group, "DependencyViolation", GroupId=group["GroupId"])
        for role in (COORDINATOR, TRAINER):
            self._delete_instance_profile(role)
        if not keep_address:
            if (address := self._find_elastic_ip()) is not None:
                self.ec2.release_address(AllocationId=address["AllocationId"])
            with ignoring("ParameterNotFound"):
                self.ssm.delete_parameter(Name=self._identity_parameter)
        print(f"Removed all resources of '{self.settings.name}'" + (", except its address" if keep_address else ""))

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _ours(self, role: str | None = None) -> list[dict]:
        filters = [{"Name": f"tag:{TAG}", "Values": [self.settings.name]}]
        return filters if role is None else [*filters, {"Name": f"tag:{ROLE_TAG}", "Values": [role]}]

    def _tags(self, role: str) -> list[dict]:
        tags = {"Name": f"{self.settings.name}-{role}", TAG: self.settings.name, ROLE_TAG: role}
        return [{"Key": key, "Value": value} for key, value in tags.items()]

    def _wait(self, what: str, instances: list[str]) -> None:
        self.ec2.get_waiter(what).wait(InstanceIds=instances)  # ten minutes at most

    def _machine(self, role: str, image: str, user_data: str) -> dict:
        """Return what the coordinator's instance and the template of the trainers have in common."""
        image_id = self.ssm.get_parameter(Name=image)["Parameter"]["Value"] if image.startswith("/") else image
        (found,) = self.ec2.describe_images(ImageIds=[image_id])["Images"]
        disks = {mapping["DeviceName"]: mapping.get("Ebs") for mapping in found["BlockDeviceMappings"]}
        size = max(self.settings.disk_gib, disks[found["RootDeviceName"]]["VolumeSize"])
        disk = {"VolumeSize": size, "VolumeType": "gp3", "DeleteOnTermination": True}
        return {
            "ImageId": image_id,
            "UserData": user_data,
            "SecurityGroupIds": [self._security_group()],
            "BlockDeviceMappings": [{"DeviceName": found["RootDeviceName"], "Ebs": disk}],
            "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1},
            "TagSpecifications": [{"ResourceType": kind, "Tags": self._tags(role)} for kind in ("instance", "volume")],
        }

    def _user_data(self, role: str, script: str, flags: list[str], **more: str) -> str:
        s = self.settings
        values = {
            "ROLE": role,
            "FOLDER": "/opt/collaboration",
            "UNITS": "/etc/systemd/system",
            "METADATA": "http://169.254.169.254/latest",
            "REPO_URL": s.repo_url,
            "REVISION": s.revision,
            "PORT": str(s.port),
            "REGION": s.region,
            "SCRIPT": script,
            **more,
        }
        head = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
        shebang, body = (Path(__file__).parent / "user_data.sh").read_text().split("\n", 1)
        user_data = "\n".join([shebang, *head, f"FLAGS=({shlex.join(flags)})", "", body])
        size = len(user_data.encode())
        require(size <= MAX_USER_DATA, f"the user data has {size} bytes of {MAX_USER_DATA}: pass fewer flags")
        return user_data

    def _security_group(self) -> str:
        """Return a security group that allows incoming connections to the peers' port only."""
        for group in self.ec2.describe_security_groups(Filters=self._ours())["SecurityGroups"]:
            return group["GroupId"]
        group = self.ec2.create_security_group(
            GroupName=f"{self.settings.name}-peers",
            Description="Peers of a collaborative training",
            TagSpecifications=[{"ResourceType": "security-group", "Tags": self._tags("peers")}],
        )["GroupId"]
        self.ec2.get_waiter("security_group_exists").wait(GroupIds=[group])
        port = {"FromPort": self.settings.port, "ToPort": self.settings.port}
        rule = {"IpProtocol": "tcp", **port, "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}
        self.ec2.authorize_security_group_ingress(GroupId=group, IpPermissions=[rule])
        return group

    # the address: an elastic IP and an identity

    def _find_elastic_ip(self) -> dict | None:
        return next(iter(self.ec2.describe_addresses(Filters=self._ours())["Addresses"]), None)

    def _find_identity(self) -> bytes | None:
        with ignoring("ParameterNotFound"):
            parameter = self.ssm.get_parameter(Name=self._identity_parameter, WithDecryption=True)["Parameter"]
            return base64.b64decode(parameter["Value"])
        return None

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

    def _make_instance_profile(self, role: str, action: str, resource: str) -> str:
        """Create a role that may do this one thing, and return its name."""
        name, tags = f"{self.settings.name}-{self.settings.region}-{role}", self._tags(role)
        trust = {"Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}
        allow = {"Action": action, "Resource": resource}
        trust, allow = (
            json.dumps({"Version": "2012-10-17", "Statement": [{"Effect": "Allow", **statement}]})
            for statement in (trust, allow)
        )
        with ignoring("EntityAlreadyExists"):
            self.iam.create_role(RoleName=name, AssumeRolePolicyDocument=trust, Tags=tags)
        self.iam.put_role_policy(RoleName=name, PolicyName=role, PolicyDocument=allow)
        with ignoring("EntityAlreadyExists"):
            self.iam.create_instance_profile(InstanceProfileName=name, Tags=tags)
        with ignoring("LimitExceeded"):  # the profile already has its role
            self.iam.add_role_to_instance_profile(InstanceProfileName=name, RoleName=name)
        return name

    def _delete_instance_profile(self, role: str) -> None:
        name = f"{self.settings.name}-{self.settings.region}-{role}"
        role_name, profile = {"RoleName": name}, {"InstanceProfileName": name}
        for delete, arguments in (
            (self.iam.remove_role_from_instance_profile, {**profile, **role_name}),
            (self.iam.delete_instance_profile, profile),
            (self.iam.delete_role_policy, {**role_name, "PolicyName": role}),
            (self.iam.delete_role, role_name),
        ):
            with ignoring("NoSuchEntity"):
                delete(**arguments)
