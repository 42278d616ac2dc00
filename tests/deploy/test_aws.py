"""Deployment on AWS: the requests, which botocore checks by the models of the services, and the template."""

import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime

import pytest
from botocore.exceptions import ClientError, NoCredentialsError
from botocore.stub import ANY, Stubber
from cfnlint.api import ManualArgs, lint

from cotrain.common.errors import UserError
from deploy.aws import Deployment, readable_errors
from tests.support.aws import COORDINATOR_ADDRESS, make_settings


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"repo_url": ""}, "REPO_URL must be an address"),
        ({"dataset_url": "data.tar.gz"}, "DATASET_URL must be an address"),
        ({"repo_url": "https://me:secret@example.org/x"}, "REPO_URL must be .* without a secret"),
        ({"monitor_flags": "--page 'https://me:secret@example.org/x'"}, "MONITOR_FLAGS must not .* with a secret"),
        ({"trainer_flags": "--dataset_url https://x/x?token=secret@"}, "TRAINER_FLAGS must not .* with a secret"),
        ({"dataset_url": "https://x.s3.amazonaws.com/x.gz?X-Amz-Signature=secret@"}, "DATASET_URL must .* a secret"),
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


@pytest.fixture
def deployment() -> Deployment:
    return Deployment(make_settings())


@pytest.fixture
def answer(deployment) -> Iterator[Callable]:
    """Return a function that adds the answer to the next request of a service, whose options are checked."""
    with ExitStack() as stack:
        stubs = {service: Stubber(getattr(deployment, service)) for service in ("ec2", "stacks", "scaling")}
        for stub in stubs.values():
            stack.enter_context(stub)

        def answer(service: str, method: str, reply: dict | str = {}, **options: object) -> None:  # noqa: B006
            if isinstance(reply, str):
                stubs[service].add_client_error(method, *reply.split(": "), expected_params=options or None)
            else:
                stubs[service].add_response(method, reply, options or None)

        yield answer
        for stub in stubs.values():
            stub.assert_no_pending_responses()


def stack_of(status: str) -> dict:
    outputs = [{"OutputKey": "address", "OutputValue": COORDINATOR_ADDRESS}]
    stack = {"StackName": "test", "StackStatus": status, "CreationTime": datetime.now(UTC), "Outputs": outputs}
    return {"Stacks": [stack]}


def answer_start(answer: Callable, update: str | None = None) -> None:
    """Answer the requests that create the stack, or update one that exists (`update`: an error)."""
    stack = {"StackName": "test", "TemplateBody": ANY, "Parameters": ANY, "Capabilities": ["CAPABILITY_IAM"],
             "Tags": [{"Key": "CollaborativeTraining", "Value": "test"}]}  # fmt: skip
    reply = "AlreadyExistsException: it exists" if update is not None else {"StackId": "test/1"}
    answer("stacks", "create_stack", reply, **stack, OnFailure="DELETE")
    answer("stacks", "describe_stacks", stack_of("CREATE_COMPLETE"), StackName="test" if update else "test/1")
    if update is not None:
        answer("stacks", "update_stack", update, **stack)


def test_coordinator_is_started_once_and_its_address_is_returned(deployment, answer):
    answer_start(answer)
    answer("stacks", "describe_stacks", stack_of("CREATE_COMPLETE"), StackName="test")
    assert deployment.start_coordinator() == COORDINATOR_ADDRESS
    answer_start(answer, update="ValidationError: No updates are to be performed.")
    answer("stacks", "describe_stacks", stack_of("CREATE_COMPLETE"), StackName="test")
    assert deployment.start_coordinator() == COORDINATOR_ADDRESS


def test_number_of_trainers_is_set_with_the_newest_settings(deployment, answer, capsys):
    answer_start(answer, update={"StackId": "test/1"})
    answer("stacks", "describe_stacks", stack_of("UPDATE_COMPLETE"), StackName="test/1")
    answer("scaling", "set_desired_capacity", AutoScalingGroupName="test-trainers", DesiredCapacity=3)
    deployment.set_trainers(3)
    assert capsys.readouterr().out == "AWS keeps 3 trainers running\n"
    answer_start(answer, update="ValidationError: Template error")
    with pytest.raises(UserError, match="the request to AWS failed: .*Template error"):
        deployment.set_trainers(3)


def test_failure_of_the_stack_has_its_first_reason(deployment, answer):
    failures = ("The following resource(s) failed to create", "Resource creation cancelled", "a limit of 0")
    event = {"StackId": "test", "EventId": "1", "StackName": "test", "Timestamp": datetime.now(UTC)}
    events = [{**event, "ResourceStatus": "CREATE_FAILED", "ResourceStatusReason": reason} for reason in failures]
    answer("stacks", "describe_stacks", stack_of("ROLLBACK_COMPLETE"), StackName="test")
    answer(
        "stacks", "describe_stack_events", {"StackEvents": [{**event, "ResourceStatus": "CREATE_COMPLETE"}, *events]}
    )
    with pytest.raises(UserError, match="could not change the stack 'test': a limit of 0"):
        deployment.wait_for("stack_create_complete", "test")


def test_status_lists_the_instances_and_why_trainers_are_missing(deployment, answer, monkeypatch):
    ours = {"Name": "tag:CollaborativeTraining", "Values": ["test"]}
    running = {"Name": "instance-state-name", "Values": ["pending", "running", "stopping", "stopped"]}
    machine = {"InstanceType": "t3.medium", "State": {"Name": "running"}, "Placement": {"AvailabilityZone": "a"}}
    instances = [
        {**machine, "InstanceId": f"i-{role}", "Tags": [{"Key": "Role", "Value": role}], "LaunchTime": started}
        for role, started in (("trainer", datetime(2026, 11, 25, 8)), ("coordinator", datetime(2026, 11, 25, 7)))
    ]
    groups, failed = [], {"StatusCode": "Failed", "StatusMessage": "Max spot instance count exceeded"}
    monkeypatch.setattr(deployment.scaling, "describe_auto_scaling_groups", lambda **_: {"AutoScalingGroups": groups})
    monkeypatch.setattr(deployment.scaling, "describe_scaling_activities", lambda **_: {"Activities": [failed] * 2})
    answer("ec2", "describe_instances", {"Reservations": []}, Filters=[ours, running])
    assert deployment.status() == "No instance is running in 'test'"
    groups.append({"DesiredCapacity": 3})
    answer("ec2", "describe_instances", {"Reservations": [{"Instances": instances}]}, Filters=[ours, running])
    coordinator, trainer, *missing = deployment.status().splitlines()
    row = "coordinator i-coordinator t3.medium a running, started 25 Nov 07:00 UTC"
    assert coordinator.split() == row.split() and trainer.split()[:2] == ["trainer", "i-trainer"]
    assert missing == ["1 of 3 trainers", "Max spot instance count exceeded"]


def test_clean_up_removes_the_stack(deployment, answer):
    answer("stacks", "delete_stack", StackName="test")
    answer("stacks", "describe_stacks", "ValidationError: Stack with id test does not exist")
    deployment.clean_up()


def test_template_is_valid(deployment):
    """By AWS's published schemas of the resources."""
    template = deployment.template()
    assert template["Parameters"].keys() == deployment.parameters().keys()
    found = lint(json.dumps(template), config=ManualArgs(regions=["us-east-1"]))
    # The schemas call the data of a wait condition an object; CloudFormation's functions get it as text.
    text = "{'Fn::GetAtt': ['ready', 'Data']} is not of type 'string'"
    assert [str(problem) for problem in found if problem.message != text] == []


def test_template_has_the_settings_and_few_rights():
    settings = make_settings(disk_gib=60, max_spot_price=0.1, trainer_types=("g5.xlarge",))
    resources, parameters = Deployment(settings).template()["Resources"], Deployment(settings).parameters()
    assert (parameters["DiskGib"], parameters["MaxSpotPrice"], parameters["Port"]) == ("60", "0.1", "31337")
    port = {"IpProtocol": "tcp", "FromPort": {"Ref": "Port"}, "ToPort": {"Ref": "Port"}, "CidrIp": "0.0.0.0/0"}
    assert resources["peers"]["Properties"]["SecurityGroupIngress"] == [port]
    for role in ("coordinator", "trainer"):
        machine = resources[f"{role}Template"]["Properties"]["LaunchTemplateData"]
        assert machine["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"] == {"Ref": "DiskGib"}
        assert machine["MetadataOptions"]["HttpTokens"] == "required"
        assert ("IamInstanceProfile" in machine) == (role == "trainer")
    # Other settings must not stop the coordinator, whose user data AWS runs only once.
    assert resources["coordinator"]["Properties"]["LaunchTemplate"]["Version"] == "1"
    policy = resources["trainers"]["Properties"]["MixedInstancesPolicy"]
    assert policy["LaunchTemplate"]["Overrides"] == [{"InstanceType": "g5.xlarge"}]
    assert "LatestVersionNumber" in str(policy["LaunchTemplate"]["LaunchTemplateSpecification"]["Version"])
    assert policy["InstancesDistribution"]["SpotMaxPrice"] == {"Ref": "MaxSpotPrice"}
    assert policy["InstancesDistribution"]["OnDemandPercentageAboveBaseCapacity"] == 0
    (statement,) = resources["trainerRole"]["Properties"]["Policies"][0]["PolicyDocument"]["Statement"]
    assert statement["Action"] == "autoscaling:TerminateInstanceInAutoScalingGroup"
    assert statement["Resource"]["Fn::Sub"].endswith(":autoScalingGroupName/${Name}-trainers")


def test_trainers_take_the_address_from_the_coordinators_signal(deployment):
    template = deployment.template()
    address = template["Outputs"]["address"]["Value"]
    user_data = template["Resources"]["trainerTemplate"]["Properties"]["LaunchTemplateData"]["UserData"]
    assert user_data["Fn::Base64"]["Fn::Join"][1][1]["Fn::Sub"][1] == {"peer": address}
    position, split = address["Fn::Select"]
    separator, data = split["Fn::Split"]
    assert data == {"Fn::GetAtt": ["ready", "Data"]}
    assert json.dumps({"coordinator": COORDINATOR_ADDRESS}).split(separator)[position] == COORDINATOR_ADDRESS
