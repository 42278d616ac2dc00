"""Functions of deploy_on_aws.ipynb: a coordinator and spot trainers on EC2, as one stack of CloudFormation.

No state is kept on the organiser's machine, and all calls are idempotent. Coordinator and trainers are Auto Scaling
groups, which replace instances that fail or are interrupted. The coordinator's elastic IP and its identity, an
encrypted parameter, are outside of the stack, so its address stays the same. The trainers receive no secret.
"""

import base64
import contextlib
import json
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from urllib3.util import parse_url

from cotrain.common.errors import UserError, describe
from cotrain.common.flags import has_secret

try:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, WaiterError
except ModuleNotFoundError as error:
    raise UserError(describe(error)) from None

PROJECT = Path(__file__).parent.parent
TAG, ROLE = "CollaborativeTraining", "Role"  # the tags of all resources
COORDINATOR, TRAINER = "coordinator", "trainer"

PUBLIC_IP_PRICE = 0.005  # USD per hour and public IPv4 address
DISK_PRICE = 0.08 / 730  # USD per hour and GiB of gp3


@dataclass(frozen=True)
class Settings:
    """Settings of a deployment. Prices are in USD per hour.

    :param name: name of the stack, and tag of all resources of this deployment
    :param dataset_url: archive written by `tokenize_wikitext103.py --archive`
    :param revision: commit (its whole hash) of the project; a branch or tag may change between two boots
    :param monitor_flags: flags of the monitor, including the settings of the run, e.g. "--target_batch_size 2048"
    :param coordinator_price: on-demand price, for the limit of costs
    :param coordinator_image: an AMI, or the public parameter that names the newest one; so is `trainer_image`
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
        name = re.fullmatch(r"[A-Za-z][A-Za-z0-9-]{0,29}", self.name)
        require(name is not None, "NAME must have 1 to 30 characters: a letter, then letters, digits and '-'")
        require("." not in self.run_id and bool(self.run_id.strip()), "RUN_ID must not be empty or contain '.'")
        for field in ("repo_url", "dataset_url"):
            url, flag = getattr(self, field), field.upper()
            is_address = bool(parse_url(url).scheme and parse_url(url).path)
            require(is_address, f"{flag} must be an address like https://example.org/x")
            require(not has_secret(url), f"{flag} has a secret, which all users of the machines can read")


def require(condition: bool, message: str) -> None:
    if not condition:
        raise UserError(message)


def resource(kind: str, **properties: object) -> dict:
    """Return a resource of a template."""
    return {"Type": f"AWS::{kind}", "Properties": properties}


def policy(statements: list[dict]) -> dict:
    return {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", **statement} for statement in statements]}


def arn(service: str, name: str) -> dict:
    return {"Fn::Sub": f"arn:${{AWS::Partition}}:{service}:${{AWS::Region}}:${{AWS::AccountId}}:{name}"}


@contextlib.contextmanager
def readable_errors() -> Iterator[None]:
    """Convert exceptions of boto3 into UserError with a message of one line."""
    try:
        yield
    except NoCredentialsError:
        raise UserError("no AWS credentials found: run `aws configure`, or set AWS_PROFILE") from None
    except (BotoCoreError, ClientError) as error:
        raise UserError(f"the request to AWS failed: {error}") from None


class Deployment:
    """The stack `settings.name` in one region, and its address."""

    def __init__(self, settings: Settings):
        self.settings, self._trainers = settings, f"{settings.name}-{TRAINER}s"
        self._identity_parameter = f"/collaborative-training/{settings.name}/identity"
        self._ours = [{"Name": f"tag:{TAG}", "Values": [settings.name]}]
        retries = {"max_attempts": 5, "mode": "standard"}
        config = Config(region_name=settings.region, connect_timeout=10, read_timeout=60, retries=retries)
        services = ("ec2", "ssm", "cloudformation", "autoscaling")
        self.ec2, self.ssm, self.stacks, self.scaling = (boto3.client(service, config=config) for service in services)

    # --- status ------------------------------------------------------------------------------------------------------

    @readable_errors()
    def instances(self) -> list[dict]:
        """Return EC2's descriptions of the instances that are not terminated, the oldest first."""
        running = {"Name": "instance-state-name", "Values": ["pending", "running", "stopping", "stopped"]}
        pages = self.ec2.get_paginator("describe_instances").paginate(Filters=[*self._ours, running])
        found = pages.search("Reservations[].Instances[]")
        return sorted(found, key=lambda one: (one["LaunchTime"], one["InstanceId"]))

    @readable_errors()
    def address(self) -> str:
        """Return the address of the coordinator, for --initial_peers; raise UserError if there is none yet."""
        elastic_ip, key = self._find_elastic_ip(), self._find_identity()
        if elastic_ip is None or key is None:
            raise UserError(f"'{self.settings.name}' has no coordinator yet: start it first")
        from hivemind.p2p import PeerID  # the import takes seconds

        peer_id = PeerID.from_identity(key).to_base58()
        return f"/ip4/{elastic_ip['PublicIp']}/tcp/{self.settings.port}/p2p/{peer_id}"

    @readable_errors()
    def status(self) -> str:
        """Return a table of the instances, why trainers are missing, the highest costs, and the address."""
        instances = self.instances()
        if not instances:
            return f"No instance is running in '{self.settings.name}'"
        rows = [("role", "instance", "type", "zone", "state", "address", "hours")]
        for one in instances:
            tags = {tag["Key"]: tag["Value"] for tag in one["Tags"]}
            zone, ip = one["Placement"]["AvailabilityZone"], one.get("PublicIpAddress", "")
            hours = f"{(datetime.now(UTC) - one['LaunchTime']).total_seconds() / 3600:.1f}"
            rows.append((tags[ROLE], one["InstanceId"], one["InstanceType"], zone, one["State"]["Name"], ip, hours))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
        trainers = sum(role == TRAINER for role, *_ in rows)
        groups = self.scaling.describe_auto_scaling_groups(AutoScalingGroupNames=[self._trainers])
        wanted = sum(group["DesiredCapacity"] for group in groups["AutoScalingGroups"])
        if trainers < wanted:
            activities = self.scaling.describe_scaling_activities(AutoScalingGroupName=self._trainers)["Activities"]
            reasons = [x["StatusMessage"] for x in activities if x["StatusCode"] == "Failed"]
            lines += [f"{trainers} of {wanted} trainers", *reasons[:1]]
        disks = sum(volume["Size"] for volume in self.ec2.describe_volumes(Filters=self._ours)["Volumes"])
        costs = self.settings.coordinator_price + trainers * self.settings.max_spot_price
        costs += len(instances) * PUBLIC_IP_PRICE + disks * DISK_PRICE
        lines += ["", f"At most ${costs:.2f} an hour, ${24 * costs:.2f} a day, without traffic"]
        return "\n".join([*lines, f"--initial_peers {self.address()}"])

    @readable_errors()
    def console(self, instance_id: str, lines: int = 40) -> str:
        """Return the last lines of an instance's console, which AWS shows with a delay of some minutes."""
        output = self.ec2.get_console_output(InstanceId=instance_id).get("Output", "")
        return "\n".join(output.splitlines()[-lines:]) or "No output yet: AWS shows it with a delay of some minutes"

    def wait_until_ready(self, timeout: float = 1200.0) -> str:
        """Wait until this machine can join the coordinator, at most `timeout` seconds; return the probe's output."""
        print("Joining the coordinator. A new machine installs for about ten minutes")
        command = [sys.executable, "-W", "ignore", "-m", "deploy.probe", "--run_id", self.settings.run_id]
        command += ["--initial_peers", self.address(), "--bootstrap_timeout", str(timeout)]
        result = subprocess.run(command, cwd=PROJECT, capture_output=True, text=True, timeout=timeout + 120)
        if result.returncode != 0:
            reason = next(iter(result.stderr.strip().splitlines()[-1:]), "no answer")
            raise UserError(f"{reason}. To see the machine's output: print(deployment.console(INSTANCE_ID))")
        return result.stdout.strip()

    # --- changes -----------------------------------------------------------------------------------------------------

    @readable_errors()
    def start_coordinator(self) -> str:
        """Start the coordinator unless it exists, and return its address."""
        if self._find_elastic_ip() is None:
            tags = [{"ResourceType": "elastic-ip", "Tags": self._tags("address")}]
            self.ec2.allocate_address(Domain="vpc", TagSpecifications=tags)
        if self._find_identity() is None:
            self._make_identity()
        self._deploy()
        return self.address()

    @readable_errors()
    def set_trainers(self, wanted: int) -> None:
        """Keep this many spot trainers running. One that completes the run, or cannot start, is not replaced."""
        self._deploy()
        self.scaling.set_desired_capacity(AutoScalingGroupName=self._trainers, DesiredCapacity=wanted)
        print(f"AWS keeps {wanted} trainers running")

    @readable_errors()
    def clean_up(self, keep_address: bool = False) -> None:
        """Remove all resources, also the checkpoints; `keep_address` keeps the elastic IP and the identity."""
        print("Removing the stack: this takes some minutes")
        self.stacks.delete_stack(StackName=self.settings.name)
        self._wait("stack_delete_complete", self.settings.name)
        if not keep_address:
            if (elastic_ip := self._find_elastic_ip()) is not None:
                self.ec2.release_address(AllocationId=elastic_ip["AllocationId"])
            self.ssm.delete_parameters(Names=[self._identity_parameter])
        print(f"Removed all resources of '{self.settings.name}'" + (", except its address" if keep_address else ""))

    def _deploy(self) -> None:
        """Create the stack, or update it: running instances stay, and later ones have the new settings."""
        stack = {
            "StackName": self.settings.name,
            "TemplateBody": json.dumps(self.template()),
            "Capabilities": ["CAPABILITY_IAM"],
            "Tags": [{"Key": TAG, "Value": self.settings.name}],
        }
        try:
            reply = self.stacks.create_stack(**stack, OnFailure="DELETE")
            self._wait("stack_create_complete", reply["StackId"])
        except self.stacks.exceptions.AlreadyExistsException:
            try:
                reply = self.stacks.update_stack(**stack)
                self._wait("stack_update_complete", reply["StackId"])
            except ClientError as error:
                if "No updates are to be performed" not in str(error):
                    raise

    def _wait(self, what: str, stack: str) -> None:
        """Wait until AWS has changed the stack; raise UserError with the reason if it could not."""
        try:
            self.stacks.get_waiter(what).wait(StackName=stack, WaiterConfig={"Delay": 5, "MaxAttempts": 360})
        except WaiterError:
            events = self.stacks.describe_stack_events(StackName=stack)["StackEvents"]  # the newest first
            failures = [event["ResourceStatusReason"] for event in events if "FAILED" in event["ResourceStatus"]]
            consequences = re.compile("cancelled|following resource")  # of the failure of another resource
            reason = next((reason for reason in failures if not consequences.search(reason)), "see the AWS console")
            raise UserError(f"AWS could not change the stack '{self.settings.name}': {reason}") from None

    # --- the stack ---------------------------------------------------------------------------------------------------

    def template(self) -> dict:
        """Return the template of the stack: the port of the peers, and the groups of coordinator and trainers."""
        s, user_data, elastic_ip = self.settings, self.trainer_user_data(), self._find_elastic_ip()
        port = {"IpProtocol": "tcp", "FromPort": s.port, "ToPort": s.port, "CidrIp": "0.0.0.0/0"}
        address = (f"elastic-ip/{elastic_ip['AllocationId']}", "instance/*", "network-interface/*")
        coordinator_may = [
            {"Action": "ssm:GetParameter", "Resource": arn("ssm", f"parameter{self._identity_parameter}")},
            {"Action": "ec2:AssociateAddress", "Resource": [arn("ec2", name) for name in address]},
        ]
        group = arn("autoscaling", f"autoScalingGroup:*:autoScalingGroupName/{self._trainers}")
        trainer_may = [{"Action": "autoscaling:TerminateInstanceInAutoScalingGroup", "Resource": group}]
        on_demand = {"OnDemandPercentageAboveBaseCapacity": 100}
        spot = {"SpotAllocationStrategy": "price-capacity-optimized", "SpotMaxPrice": str(s.max_spot_price)}
        spot["OnDemandPercentageAboveBaseCapacity"] = 0
        resources = {
            "peers": resource("EC2::SecurityGroup", GroupDescription="Port of the peers", SecurityGroupIngress=[port]),
            **self._machine(COORDINATOR, s.coordinator_image, self.coordinator_user_data(elastic_ip), coordinator_may),
            **self._machine(TRAINER, s.trainer_image, user_data, trainer_may),
            "coordinators": self._group(COORDINATOR, [s.coordinator_type], (1, 1), on_demand),
            # The stack does not state the number of trainers: it would fail if AWS cannot start them all.
            "trainers": self._group(TRAINER, s.trainer_types, (0, 1000), spot),
        }
        return {"Resources": resources}

    def _machine(self, role: str, image: str, user_data: str, may: list[dict]) -> dict[str, dict]:
        """Return the launch template of a role, with what its machines may do."""
        image_id = self.ssm.get_parameter(Name=image)["Parameter"]["Value"] if image.startswith("/") else image
        (found,) = self.ec2.describe_images(ImageIds=[image_id])["Images"]
        disks = {mapping["DeviceName"]: mapping.get("Ebs") for mapping in found["BlockDeviceMappings"]}
        size = max(self.settings.disk_gib, disks[found["RootDeviceName"]]["VolumeSize"])
        disk = {"VolumeSize": size, "VolumeType": "gp3", "DeleteOnTermination": True}
        machine = {
            "ImageId": image_id,
            "UserData": base64.b64encode(user_data.encode()).decode(),
            "IamInstanceProfile": {"Arn": {"Fn::GetAtt": [f"{role}Profile", "Arn"]}},
            "SecurityGroupIds": [{"Fn::GetAtt": ["peers", "GroupId"]}],
            "BlockDeviceMappings": [{"DeviceName": found["RootDeviceName"], "Ebs": disk}],
            "MetadataOptions": {"HttpTokens": "required", "HttpPutResponseHopLimit": 1},
            "TagSpecifications": [{"ResourceType": kind, "Tags": self._tags(role)} for kind in ("instance", "volume")],
        }
        trust = policy([{"Principal": {"Service": "ec2.amazonaws.com"}, "Action": "sts:AssumeRole"}])
        policies = [{"PolicyName": role, "PolicyDocument": policy(may)}]
        return {
            f"{role}Role": resource("IAM::Role", AssumeRolePolicyDocument=trust, Policies=policies),
            f"{role}Profile": resource("IAM::InstanceProfile", Roles=[{"Ref": f"{role}Role"}]),
            f"{role}Template": resource("EC2::LaunchTemplate", LaunchTemplateData=machine),
        }

    def _group(self, role: str, types: Iterable[str], sizes: tuple[int, int], distribution: dict) -> dict:
        """Return an Auto Scaling group in all zones; `sizes` are its smallest and largest number of instances."""
        version = {"Fn::GetAtt": [f"{role}Template", "LatestVersionNumber"]}
        template = {
            "LaunchTemplateSpecification": {"LaunchTemplateId": {"Ref": f"{role}Template"}, "Version": version},
            "Overrides": [{"InstanceType": name} for name in types],
        }
        return resource(
            "AutoScaling::AutoScalingGroup",
            AutoScalingGroupName=f"{self.settings.name}-{role}s",
            MinSize=str(sizes[0]),
            MaxSize=str(sizes[1]),
            AvailabilityZones={"Fn::GetAZs": ""},
            MixedInstancesPolicy={"LaunchTemplate": template, "InstancesDistribution": distribution},
        )

    def coordinator_user_data(self, elastic_ip: dict) -> str:
        s = self.settings
        digest = ["--dataset_sha256", s.dataset_sha256] if s.dataset_sha256 else []
        return self._user_data(
            COORDINATOR,
            "run_training_monitor.py",
            ["--run_id", s.run_id, "--dataset_url", s.dataset_url, *digest, *shlex.split(s.monitor_flags)],
            PUBLIC_IP=elastic_ip["PublicIp"],
            ALLOCATION_ID=elastic_ip["AllocationId"],
            IDENTITY_PARAMETER=self._identity_parameter,
        )

    def trainer_user_data(self) -> str:
        s = self.settings
        flags = ["--initial_peers", self.address(), "--username", f"{s.name}-aws", "--disable_tqdm"]
        return self._user_data(TRAINER, "run_trainer.py", [*flags, *shlex.split(s.trainer_flags)])

    def _user_data(self, role: str, script: str, flags: list[str], **more: str) -> str:
        s = self.settings
        values = {"ROLE": role, "REPO_URL": s.repo_url, "REVISION": s.revision, "REGION": s.region, "SCRIPT": script}
        values |= {"PORT": str(s.port), **more}
        head = [f"{name}={shlex.quote(value)}" for name, value in values.items()]
        shebang, body = (Path(__file__).parent / "user_data.sh").read_text().split("\n", 1)
        return "\n".join([shebang, *head, f"FLAGS=({shlex.join(flags)})", "", body])

    # --- helpers -----------------------------------------------------------------------------------------------------

    def _tags(self, role: str) -> list[dict]:
        tags = {"Name": f"{self.settings.name}-{role}", TAG: self.settings.name, ROLE: role}
        return [{"Key": key, "Value": value} for key, value in tags.items()]

    def _find_elastic_ip(self) -> dict | None:
        return next(iter(self.ec2.describe_addresses(Filters=self._ours)["Addresses"]), None)

    def _find_identity(self) -> bytes | None:
        reply = self.ssm.get_parameters(Names=[self._identity_parameter], WithDecryption=True)
        return next((base64.b64decode(parameter["Value"]) for parameter in reply["Parameters"]), None)

    def _make_identity(self) -> None:
        from cotrain.admission.invitations import load_identity  # the import takes seconds

        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "identity.key"
            load_identity(path)
            self.ssm.put_parameter(
                Name=self._identity_parameter,
                Value=base64.b64encode(path.read_bytes()).decode(),
                Type="SecureString",
                Description="Private key of the coordinator, which determines its peer ID",
                Tags=self._tags("identity"),
            )
