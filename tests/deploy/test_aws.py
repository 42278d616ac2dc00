"""Deployment on AWS, against a fake AWS server (moto)."""

import importlib
import json
import re
import sys

import pytest
from botocore.exceptions import ClientError, NoCredentialsError
from cfnlint.api import ManualArgs, lint

from cotrain.common.errors import UserError
from deploy.aws import Deployment, readable_errors
from tests.support.aws import ids, make_settings, read_user_data

NAME = "/collaborative-training/test/identity"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "my albert"}, "NAME must have 1 to 30"),
        ({"run_id": "v1.0"}, "RUN_ID"),
        ({"repo_url": ""}, "REPO_URL must be an address"),
        ({"dataset_url": "data.tar.gz"}, "DATASET_URL must be an address"),
        ({"repo_url": "https://me:secret@example.org/x"}, "REPO_URL has a secret"),
        ({"dataset_url": "https://x.s3.amazonaws.com/x.gz?X-Amz-Signature=secret@"}, "DATASET_URL has a secret"),
    ],
)
def test_wrong_settings(changes, message):
    with pytest.raises(UserError, match=message) as raised:
        make_settings(**changes)
    assert "secret@" not in str(raised.value)


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (NoCredentialsError(), "run `aws configure`"),
        (ClientError({"Error": {"Code": "LimitExceeded", "Message": "too many"}}, "X"), "LimitExceeded.*too many"),
    ],
)
def test_errors_of_aws_are_one_line(error, message):
    with pytest.raises(UserError, match=message), readable_errors():
        raise error


def test_missing_boto3_is_one_line_in_the_notebook(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.delitem(sys.modules, "deploy.aws", raising=False)
    with pytest.raises(UserError, match="boto3 is not installed: pip install -r requirements-organiser.txt"):
        importlib.import_module("deploy.aws")


def test_failure_of_the_stack_has_its_first_reason(started, monkeypatch):
    failures = ("The following resource(s) failed to create", "Resource creation cancelled", "a limit of 0")
    events = [{"ResourceStatus": "CREATE_FAILED", "ResourceStatusReason": reason} for reason in failures]
    events += [{"ResourceStatus": "CREATE_COMPLETE"}]
    failed = {"StackName": "test", "StackStatus": "ROLLBACK_COMPLETE", "CreationTime": "2100-01-01"}
    monkeypatch.setattr(started.stacks, "describe_stacks", lambda **_: {"Stacks": [failed]})
    monkeypatch.setattr(started.stacks, "describe_stack_events", lambda **_: {"StackEvents": events})
    with pytest.raises(UserError, match="could not change the stack 'test': a limit of 0"):
        started._wait("stack_create_complete", "test")


def test_template_is_valid(started):
    """AWS's published schemas of the resources; moto accepts more."""
    assert lint(json.dumps(started.template()), config=ManualArgs(regions=["us-east-1"])) == []


class TestCoordinator:
    def test_starting_is_idempotent(self, deployment):
        (address,) = {deployment.start_coordinator() for _ in range(3)}
        assert re.fullmatch(r"/ip4/[\d.]+/tcp/31337/p2p/Qm\w{44}", address)
        (coordinator,) = deployment.instances()
        assert ids(deployment, "coordinator") == [coordinator["InstanceId"]]
        assert len(deployment.ec2.describe_addresses()["Addresses"]) == 1
        group = coordinator["SecurityGroups"][0]["GroupId"]
        (rule,) = deployment.ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]["IpPermissions"]
        assert (rule["IpProtocol"], rule["FromPort"], rule["ToPort"]) == ("tcp", 31337, 31337)

    def test_another_name_is_another_deployment(self, started):
        other = Deployment(make_settings(name="other"))
        assert other.instances() == []
        assert other.start_coordinator() != started.address()
        other.clean_up()
        assert len(started.instances()) == 1

    def test_lost_machine_is_replaced_at_the_same_address(self, started):
        address, (first,) = started.address(), ids(started, "coordinator")
        started.ec2.terminate_instances(InstanceIds=[first])
        (second,) = ids(started, "coordinator")
        assert second != first and started.start_coordinator() == address
        assert f"\nPUBLIC_IP={address.split('/')[2]}\n" in read_user_data(started, "coordinator")

    def test_only_its_role_may_read_the_identity(self, started):
        started.set_trainers(1)
        parameter = started.ssm.get_parameter(Name=NAME, WithDecryption=True)["Parameter"]
        assert parameter["Type"] == "SecureString"
        (elastic_ip,) = started.ec2.describe_addresses()["Addresses"]
        resources = started.template()["Resources"]
        allowed = {
            "coordinator": {"ssm:GetParameter": NAME, "ec2:AssociateAddress": elastic_ip["AllocationId"]},
            "trainer": {"autoscaling:TerminateInstanceInAutoScalingGroup": "autoScalingGroupName/test-trainers"},
        }
        for role, actions in allowed.items():
            (policy,) = resources[f"{role}Role"]["Properties"]["Policies"]
            statements = {statement["Action"]: statement for statement in policy["PolicyDocument"]["Statement"]}
            assert statements.keys() == actions.keys()
            assert all(resource in json.dumps(statements[action]["Resource"]) for action, resource in actions.items())
            machine = resources[f"{role}Template"]["Properties"]["LaunchTemplateData"]
            assert f"{role}Profile" in str(machine["IamInstanceProfile"])
            user_data = read_user_data(started, role)
            assert parameter["Value"][:40] not in user_data and parameter["Value"][-40:] not in user_data

    def test_machine(self, started):
        for wanted, size in ((5, 15), (40, 40)):  # moto's images have 15 GiB
            resources = Deployment(make_settings(disk_gib=wanted)).template()["Resources"]
            machine = resources["coordinatorTemplate"]["Properties"]["LaunchTemplateData"]
            assert machine["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"] == size
            assert machine["MetadataOptions"]["HttpTokens"] == "required"
            assert {tag["ResourceType"] for tag in machine["TagSpecifications"]} == {"instance", "volume"}


def test_probe_joins_a_run_or_gives_up_in_time(scripts, started, monkeypatch):
    with pytest.raises(UserError, match="none of --initial_peers answers"):  # at the address from moto
        started.wait_until_ready(timeout=1)
    monitor = scripts.monitor("--run_id", "r", "--no_store_checkpoints")
    monkeypatch.setattr(started, "address", lambda: monitor.address)
    assert started.wait_until_ready() == "Joined the run 'r': 0 trainers reported in the last minutes, no step yet"


class TestTrainers:
    def test_number_is_kept_until_a_trainer_gives_its_machine_back(self, started):
        started.set_trainers(2)
        first, second = ids(started, "trainer")
        started.ec2.terminate_instances(InstanceIds=[first])  # as an interruption
        trainers = ids(started, "trainer")
        assert len(trainers) == 2 and first not in trainers
        give_back = started.scaling.terminate_instance_in_auto_scaling_group
        give_back(InstanceId=second, ShouldDecrementDesiredCapacity=True)
        assert len(ids(started, "trainer")) == 1 and second not in started.status()
        for number in (3, 3, 1):
            started.set_trainers(number)
            assert len(ids(started, "trainer")) == number

    def test_the_coordinator_comes_first(self, deployment):
        with pytest.raises(UserError, match="'test' has no coordinator yet"):
            deployment.set_trainers(1)
        assert deployment.instances() == []

    def test_later_settings_replace_those_of_the_group(self, started):
        Deployment(make_settings(max_spot_price=0.1, trainer_types=("g5.xlarge",))).set_trainers(1)
        coordinator = ids(started, "coordinator")
        started.set_trainers(1)
        assert ids(started, "coordinator") == coordinator
        groups = started.scaling.describe_auto_scaling_groups()["AutoScalingGroups"]
        policy = next(x["MixedInstancesPolicy"] for x in groups if x["AutoScalingGroupName"] == "test-trainers")
        distribution = policy["InstancesDistribution"]
        assert (distribution["SpotMaxPrice"], distribution["OnDemandPercentageAboveBaseCapacity"]) == ("0.6", 0)
        types = [override["InstanceType"] for override in policy["LaunchTemplate"]["Overrides"]]
        assert types == list(make_settings().trainer_types)

    def test_status(self, started, monkeypatch):
        started.set_trainers(1)
        (trainer,) = ids(started, "trainer")
        # 0.0416 + 0.6 and two addresses at 0.005: moto's groups ignore the disk of the template
        costs = f"At most $0.65 an hour, $15.64 a day, without traffic\n--initial_peers {started.address()}"
        assert trainer in started.status() and started.status().endswith(f" 0.0\n\n{costs}")
        assert "Linux version" in started.console(trainer, lines=1000)
        groups = {"AutoScalingGroups": [{"DesiredCapacity": 3}]}
        monkeypatch.setattr(started.scaling, "describe_auto_scaling_groups", lambda **_: groups)
        failed = {"StatusCode": "Failed", "StatusMessage": "Max spot instance count exceeded"}
        monkeypatch.setattr(started.scaling, "describe_scaling_activities", lambda **_: {"Activities": [failed] * 2})
        assert f"\n1 of 3 trainers\nMax spot instance count exceeded\n\n{costs}" in started.status()


def test_clean_up(started):
    def left() -> set[str]:
        resources = {
            "instances": started.instances(),
            "stacks": started.stacks.describe_stacks()["Stacks"],
            "security groups": started.ec2.describe_security_groups()["SecurityGroups"][1:],  # after the default one
            "addresses": started.ec2.describe_addresses()["Addresses"],
            "parameters": started.ssm.get_parameters(Names=[NAME])["Parameters"],
        }
        return {name for name, found in resources.items() if found}

    started.set_trainers(1)
    address = started.address()
    assert len(left()) == 5
    started.clean_up(keep_address=True)
    assert left() == {"addresses", "parameters"}
    assert started.start_coordinator() == address
    for _ in range(2):  # the second time, there is nothing to remove
        started.clean_up()
        assert not left()
    assert started.status() == "No instance is running in 'test'"
