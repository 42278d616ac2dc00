"""Functions of deploy_on_aws.ipynb: a coordinator and spot trainers on EC2, as one stack of CloudFormation.

No state is kept on the organiser's machine, and all calls are idempotent. The coordinator keeps its identity on
its disk, and reports its address to CloudFormation, which then creates the trainers: an Auto Scaling group, which
replaces interrupted instances. No machine receives a secret.
"""

import contextlib
import json
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import yaml

from cotrain.common.errors import UserError, describe
from cotrain.common.flags import has_secret

try:
    import boto3
    from botocore.config import Config
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, WaiterError
except ModuleNotFoundError as error:
    raise UserError(describe(error)) from None

TAG, ROLE = "CollaborativeTraining", "Role"  # the tags of all resources
TRAINER = "trainer"

COORDINATOR_IMAGE = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64"
FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Settings:
    """Settings of a deployment."""

    name: str  # of the stack, and tag of all resources of this deployment
    repo_url: str
    dataset_url: str  # archive written by `tokenize_wikitext103.py --archive`
    dataset_sha256: str = ""
    run_id: str = "albert"
    revision: str = "main"  # better its whole hash: a branch or tag may change between two boots
    region: str = "us-east-1"
    port: int = 31337
    monitor_flags: str = ""  # including the settings of the run, e.g. "--target_batch_size 2048"
    trainer_flags: str = ""
    coordinator_type: str = "t3.medium"
    trainer_types: tuple[str, ...] = ("g4dn.xlarge", "g5.xlarge", "g6.xlarge")
    max_spot_price: float = 0.60  # USD per hour
    trainer_image: str = (  # public parameter that names the newest AMI
        "/aws/service/deeplearning/ami/x86_64/base-oss-nvidia-driver-gpu-amazon-linux-2023/latest/ami-id"
    )
    disk_gib: int = 100  # no less than the size of the AMI

    def __post_init__(self):
        for field in ("repo_url", "dataset_url"):
            url = getattr(self, field)
            if "://" not in url or has_secret(url):  # all users of the machines can read it
                raise UserError(f"{field.upper()} must be an address like https://example.org/x, without a secret")
        for field in ("monitor_flags", "trainer_flags"):
            if any("://" in word and has_secret(word.strip("'\"")) for word in getattr(self, field).split()):
                raise UserError(f"{field.upper()} must not have an address with a secret: all programs can read it")


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
    """The stack `settings.name` in one region."""

    def __init__(self, settings: Settings):
        self.settings, self._trainers = settings, f"{settings.name}-{TRAINER}s"
        retries = {"max_attempts": 5, "mode": "standard"}
        config = Config(region_name=settings.region, connect_timeout=10, read_timeout=60, retries=retries)
        services = ("ec2", "cloudformation", "autoscaling")
        self.ec2, self.stacks, self.scaling = (boto3.client(service, config=config) for service in services)

    # --- status ------------------------------------------------------------------------------------------------------

    @readable_errors()
    def instances(self) -> list[dict]:
        """Return EC2's descriptions of the instances that are not terminated, the oldest first."""
        ours = {"Name": f"tag:{TAG}", "Values": [self.settings.name]}
        running = {"Name": "instance-state-name", "Values": ["pending", "running", "stopping", "stopped"]}
        pages = self.ec2.get_paginator("describe_instances").paginate(Filters=[ours, running])
        found = pages.search("Reservations[].Instances[]")
        return sorted(found, key=lambda one: (one["LaunchTime"], one["InstanceId"]))

    @readable_errors()
    def status(self) -> str:
        """Return a table of the instances, and why trainers are missing."""
        lines, trainers = [], 0
        for one in self.instances():
            role = next(tag["Value"] for tag in one["Tags"] if tag["Key"] == ROLE)
            trainers += role == TRAINER
            zone, ip = one["Placement"]["AvailabilityZone"], one.get("PublicIpAddress", "")
            lines.append(
                f"{role:<11}  {one['InstanceId']:<19}  {one['InstanceType']:<12}  {zone:<14}  {ip:<15}  "
                f"{one['State']['Name']}, started {one['LaunchTime']:%d %b %H:%M} UTC"
            )
        groups = self.scaling.describe_auto_scaling_groups(AutoScalingGroupNames=[self._trainers])
        wanted = sum(group["DesiredCapacity"] for group in groups["AutoScalingGroups"])
        if trainers < wanted:
            activities = self.scaling.describe_scaling_activities(AutoScalingGroupName=self._trainers)["Activities"]
            reasons = [x["StatusMessage"] for x in activities if x["StatusCode"] == "Failed"]
            lines += [f"{trainers} of {wanted} trainers", *reasons[:1]]
        return "\n".join(lines) or f"No instance is running in '{self.settings.name}'"

    # --- changes -----------------------------------------------------------------------------------------------------

    @readable_errors()
    def start_coordinator(self) -> str:
        """Start the coordinator unless it exists, and return its address, for --initial_peers."""
        self._deploy()
        (stack,) = self.stacks.describe_stacks(StackName=self.settings.name)["Stacks"]
        return stack["Outputs"][0]["OutputValue"]

    @readable_errors()
    def set_trainers(self, wanted: int) -> None:
        """Keep this many spot trainers running. One that completes the run, or cannot start, is not replaced."""
        self._deploy()
        self.scaling.set_desired_capacity(AutoScalingGroupName=self._trainers, DesiredCapacity=wanted)
        print(f"AWS keeps {wanted} trainers running")

    @readable_errors()
    def clean_up(self) -> None:
        """Remove all resources, also the checkpoints and the address."""
        print("Removing the stack: this takes some minutes")
        self.stacks.delete_stack(StackName=self.settings.name)
        self.wait_for("stack_delete_complete", self.settings.name)
        print(f"Removed all resources of '{self.settings.name}'")

    def _deploy(self) -> None:
        """Create the stack, or update it: running instances stay, and later trainers have the new settings."""
        stack = {
            "StackName": self.settings.name,
            "TemplateBody": json.dumps(self.template()),
            "Parameters": [{"ParameterKey": key, "ParameterValue": value} for key, value in self.parameters().items()],
            "Capabilities": ["CAPABILITY_IAM"],
            "Tags": [{"Key": TAG, "Value": self.settings.name}],
        }
        try:
            reply = self.stacks.create_stack(**stack, OnFailure="DELETE")
            print("Starting the coordinator: it installs the project, which takes about ten minutes")
            self.wait_for("stack_create_complete", reply["StackId"])
        except self.stacks.exceptions.AlreadyExistsException:
            self.wait_for("stack_create_complete", self.settings.name)  # which an interrupted cell may have begun
            try:
                reply = self.stacks.update_stack(**stack)
                self.wait_for("stack_update_complete", reply["StackId"])
            except ClientError as error:
                if "No updates are to be performed" not in str(error):
                    raise

    def wait_for(self, what: str, stack: str) -> None:
        """Wait until AWS has changed the stack; raise UserError with the reason if it could not."""
        try:
            self.stacks.get_waiter(what).wait(StackName=stack, WaiterConfig={"Delay": 5, "MaxAttempts": 480})
        except WaiterError:
            events = self.stacks.describe_stack_events(StackName=stack)["StackEvents"]  # the newest first
            failures = [event["ResourceStatusReason"] for event in events if "FAILED" in event["ResourceStatus"]]
            consequences = re.compile("cancelled|following resource")  # of the failure of another resource
            reason = next((reason for reason in failures if not consequences.search(reason)), "see the AWS console")
            raise UserError(f"AWS could not change the stack '{self.settings.name}': {reason}") from None

    # --- the stack ---------------------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, str]:
        """Return the parameters of the template, but for what it must contain itself."""
        s = self.settings
        digest = ["--dataset_sha256", s.dataset_sha256] if s.dataset_sha256 else []
        flags = ["--run_id", s.run_id, "--dataset_url", s.dataset_url, *digest, *shlex.split(s.monitor_flags)]
        trainer_flags = ["--username", f"{s.name}-aws", "--disable_tqdm", *shlex.split(s.trainer_flags)]
        return {
            "Name": s.name,
            "RepoUrl": shlex.quote(s.repo_url),
            "Revision": shlex.quote(s.revision),
            "CoordinatorFlags": shlex.join(flags),
            "TrainerFlags": shlex.join(trainer_flags),
            "Port": str(s.port),
            "DiskGib": str(s.disk_gib),
            "CoordinatorType": s.coordinator_type,
            "CoordinatorImage": COORDINATOR_IMAGE,
            "TrainerImage": s.trainer_image,
            "MaxSpotPrice": str(s.max_spot_price),
        }

    def template(self) -> dict:
        """Return the template of the stack: the port of the peers, the coordinator, and the group of trainers."""
        template = yaml.safe_load((FOLDER / "stack.yaml").read_text(encoding="utf-8"))
        for name in ("coordinatorTemplate", "trainerTemplate"):
            machine = template["Resources"][name]["Properties"]["LaunchTemplateData"]
            lines = machine["UserData"]["Fn::Base64"]["Fn::Join"][1]
            lines.append((FOLDER / "user_data.sh").read_text(encoding="utf-8"))
        group = template["Resources"]["trainers"]["Properties"]["MixedInstancesPolicy"]["LaunchTemplate"]
        group["Overrides"] = [{"InstanceType": kind} for kind in self.settings.trainer_types]
        return template
