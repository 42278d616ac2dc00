"""Deployment on AWS, against a fake AWS server (moto)."""

import importlib
import json
import sys

import pytest
from botocore.exceptions import ClientError, NoCredentialsError
from cfnlint.api import ManualArgs, lint

from cotrain.common.errors import UserError
from deploy.aws import Deployment, readable_errors
from tests.support.aws import ids, make_settings, read_user_data
from tests.support.fake_stack import COORDINATOR_ADDRESS, SIGNAL_URL


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repo_url": ""}, "REPO_URL must be an address"),
        ({"dataset_url": "data.tar.gz"}, "DATASET_URL must be an address"),
        ({"repo_url": "https://me:secret@example.org/x"}, "REPO_URL must be .* without a secret"),
        (
            {"dataset_url": "https://x.s3.amazonaws.com/x.gz?X-Amz-Signature=secret@"},
            "DATASET_URL must be .* without a secret",
        ),
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
    template = started.template()
    assert template["Parameters"].keys() == started.parameters().keys()
    found = lint(json.dumps(template), config=ManualArgs(regions=["us-east-1"]))
    # The schemas call the data of a wait condition an object; CloudFormation's functions get it as text.
    text = "{'Fn::GetAtt': ['ready', 'Data']} is not of type 'string'"
    assert [str(problem) for problem in found if problem.message != text] == []


def test_starting_the_coordinator_is_idempotent(deployment):
    assert {deployment.start_coordinator() for _ in range(3)} == {COORDINATOR_ADDRESS}
    (coordinator,) = deployment.instances()
    assert ids(deployment, "coordinator") == [coordinator["InstanceId"]]
    (elastic_ip,) = deployment.ec2.describe_addresses()["Addresses"]
    assert elastic_ip["InstanceId"] == coordinator["InstanceId"]
    values = f"PUBLIC_IP='{elastic_ip['PublicIp']}' SIGNAL_URL='{SIGNAL_URL}'"
    assert f"\n{values}\n" in read_user_data(deployment, "coordinator")
    group = coordinator["SecurityGroups"][0]["GroupId"]
    (rule,) = deployment.ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]["IpPermissions"]
    assert (rule["IpProtocol"], rule["FromPort"], rule["ToPort"]) == ("tcp", 31337, 31337)


def test_other_settings_are_for_later_trainers(started):
    """They would stop the coordinator, and AWS runs its user data only once."""
    before = started.instances()
    other = Deployment(make_settings(disk_gib=60, max_spot_price=0.1, trainer_types=("g5.xlarge",)))
    other.start_coordinator()
    assert started.instances() == before
    template = started.template()["Resources"]
    assert template["coordinator"]["Properties"]["LaunchTemplate"]["Version"] == "1"
    other.set_trainers(1)
    assert f"\nINITIAL_PEERS='{COORDINATOR_ADDRESS}' REGION='us-east-1'\n" in read_user_data(started, "trainer")
    assert '{"Fn::GetAtt": ["ready", "Data"]}' in json.dumps(template["trainerTemplate"]), "they wait for the address"
    templates = started.ec2.describe_launch_templates()["LaunchTemplates"]
    for one in templates:
        versions = started.ec2.describe_launch_template_versions(LaunchTemplateId=one["LaunchTemplateId"])
        newest = max(versions["LaunchTemplateVersions"], key=lambda version: version["VersionNumber"])
        (disk,) = newest["LaunchTemplateData"]["BlockDeviceMappings"]
        assert (disk["DeviceName"], disk["Ebs"]["VolumeSize"]) == ("/dev/xvda", 60)
    (group,) = started.scaling.describe_auto_scaling_groups()["AutoScalingGroups"]
    policy = group["MixedInstancesPolicy"]
    distribution = policy["InstancesDistribution"]
    assert (distribution["SpotMaxPrice"], distribution["OnDemandPercentageAboveBaseCapacity"]) == ("0.1", 0)
    assert [override["InstanceType"] for override in policy["LaunchTemplate"]["Overrides"]] == ["g5.xlarge"]


def test_machines_have_few_rights(started):
    resources = started.template()["Resources"]
    for role in ("coordinator", "trainer"):
        machine = resources[f"{role}Template"]["Properties"]["LaunchTemplateData"]
        assert machine["MetadataOptions"]["HttpTokens"] == "required"
        assert ("IamInstanceProfile" in machine) == (role == "trainer")
    (policy,) = resources["trainerRole"]["Properties"]["Policies"]
    (statement,) = policy["PolicyDocument"]["Statement"]
    assert statement["Action"] == "autoscaling:TerminateInstanceInAutoScalingGroup"
    assert statement["Resource"]["Fn::Sub"].endswith(":autoScalingGroupName/${Name}-trainers")


def test_number_of_trainers_is_kept_until_one_gives_its_machine_back(started):
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


def test_status(started, monkeypatch):
    started.set_trainers(1)
    (coordinator,), (trainer,) = ids(started, "coordinator"), ids(started, "trainer")
    rows = [line.split() for line in started.status().splitlines()]
    found = sorted(row[:2] for row in rows)  # in any order: both may start in the same second
    assert found == [["coordinator", coordinator], ["trainer", trainer]]
    groups = {"AutoScalingGroups": [{"DesiredCapacity": 3}]}
    monkeypatch.setattr(started.scaling, "describe_auto_scaling_groups", lambda **_: groups)
    failed = {"StatusCode": "Failed", "StatusMessage": "Max spot instance count exceeded"}
    monkeypatch.setattr(started.scaling, "describe_scaling_activities", lambda **_: {"Activities": [failed] * 2})
    assert started.status().endswith("\n1 of 3 trainers\nMax spot instance count exceeded")


def test_clean_up(started):
    def left() -> set[str]:
        resources = {
            "instances": started.instances(),
            "stacks": started.stacks.describe_stacks()["Stacks"],
            "security groups": started.ec2.describe_security_groups()["SecurityGroups"][1:],  # after the default one
            "addresses": started.ec2.describe_addresses()["Addresses"],
        }
        return {name for name, found in resources.items() if found}

    other = Deployment(make_settings(name="other"))
    other.start_coordinator()
    assert len(other.instances()) == len(started.instances()) == 1
    other.clean_up()
    assert other.instances() == [] and len(started.instances()) == 1
    started.set_trainers(1)
    assert len(left()) == 4
    for _ in range(2):  # the second time, there is nothing to remove
        started.clean_up()
        assert not left()
    assert started.status() == "No instance is running in 'test'"
