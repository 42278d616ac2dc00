"""Deployment on AWS, against a fake AWS server (moto)."""

import re

import pytest
from botocore.exceptions import ClientError, NoCredentialsError

from deploy.aws import Deployment, Instance
from lib.common.errors import UserError
from tests.support.aws import make_settings, read_user_data


def describe(deployment: Deployment, instance: Instance) -> dict:
    return deployment.ec2.describe_instances(InstanceIds=[instance.id])["Reservations"][0]["Instances"][0]


def refusal(code: str, message: str = "no") -> ClientError:
    return ClientError({"Error": {"Code": code, "Message": message}}, "RunInstances")


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


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (NoCredentialsError(), "run `aws configure`"),
        (refusal("VcpuLimitExceeded", "more than your limit"), "AWS refused RunInstances: VcpuLimitExceeded: more"),
    ],
)
def test_errors_of_aws_are_one_line(deployment, monkeypatch, error, message):
    def refuse(**_):
        raise error

    monkeypatch.setattr(deployment.ec2, "run_instances", refuse)
    with pytest.raises(UserError, match=message):
        deployment.start_coordinator()


class TestCoordinator:
    def test_starting_is_idempotent(self, deployment, capsys):
        (address,) = {deployment.start_coordinator() for _ in range(3)}
        (coordinator,) = deployment.instances()
        assert re.fullmatch(rf"/ip4/{coordinator.ip}/tcp/31337/p2p/Qm\w{{44}}", address)
        assert (coordinator.role, coordinator.type, coordinator.state) == ("coordinator", "t3.medium", "running")
        assert len(deployment.ec2.describe_addresses()["Addresses"]) == 1
        assert f"The coordinator {coordinator.id} is running" in capsys.readouterr().out
        details = describe(deployment, coordinator)
        assert details.get("InstanceLifecycle") != "spot"
        assert details["MetadataOptions"]["HttpTokens"] == "required"
        group = details["SecurityGroups"][0]["GroupId"]
        (rule,) = deployment.ec2.describe_security_groups(GroupIds=[group])["SecurityGroups"][0]["IpPermissions"]
        assert (rule["IpProtocol"], rule["FromPort"], rule["ToPort"]) == ("tcp", 31337, 31337)

    def test_another_name_is_another_deployment(self, started):
        other = Deployment(make_settings(name="other"))
        assert other.instances() == []
        assert other.start_coordinator() != started.address()
        other.clean_up()
        assert len(started.instances()) == 1

    def test_address_outlives_the_machine(self, started):
        address, (first,) = started.address(), started.instances()
        started.ec2.stop_instances(InstanceIds=[first.id])
        assert started.start_coordinator() == address
        assert [(x.id, x.state) for x in started.instances()] == [(first.id, "running")]
        started.ec2.terminate_instances(InstanceIds=[first.id])
        assert started.start_coordinator() == address
        (second,) = started.instances()
        assert second.id != first.id and second.ip == address.split("/")[2]

    def test_only_its_role_may_read_the_identity(self, started):
        started.set_trainers(1)
        parameter = started.ssm.get_parameter(Name="/collaborative-training/test/identity", WithDecryption=True)
        parameter = parameter["Parameter"]
        assert parameter["Type"] == "SecureString"
        for role, action, resource in (
            ("coordinator", "ssm:GetParameter", parameter["ARN"]),
            ("trainer", "autoscaling:TerminateInstanceInAutoScalingGroup", "autoScalingGroupName/test-trainers"),
        ):
            policy = started.iam.get_role_policy(RoleName=f"test-us-east-1-{role}", PolicyName=role)
            (statement,) = policy["PolicyDocument"]["Statement"]
            assert statement["Action"] == action and statement["Resource"].endswith(resource)
        (coordinator,) = started.instances("coordinator")
        assert "test-us-east-1-coordinator" in describe(started, coordinator)["IamInstanceProfile"]["Arn"]
        for instance in started.instances():
            user_data = read_user_data(started, instance)
            assert parameter["Value"][:40] not in user_data and parameter["Value"][-40:] not in user_data

    def test_disk_is_as_large_as_the_image_needs(self, account):
        for wanted, size in ((5, 15), (40, 40)):  # moto's images have 15 GiB
            deployment = Deployment(make_settings(name=f"disk-{wanted}", disk_gib=wanted))
            deployment.start_coordinator()
            volumes = deployment.ec2.describe_volumes(Filters=deployment._ours())["Volumes"]
            assert [volume["Size"] for volume in volumes] == [size]

    @pytest.mark.parametrize(
        ("call", "error"),
        [
            ("run_instances", refusal("InvalidParameterValue", "iamInstanceProfile.name x")),
            ("delete_security_group", refusal("DependencyViolation")),
        ],
    )
    def test_what_passes_by_itself_is_tried_again(self, deployment, monkeypatch, call, error):
        """A new instance profile and the end of a network interface take some seconds."""
        real, refusals = getattr(deployment.ec2, call), [error, error]

        def refuse_twice(**request):
            if refusals:
                raise refusals.pop()
            return real(**request)

        monkeypatch.setattr(deployment.ec2, call, refuse_twice)
        deployment.start_coordinator()
        deployment.clean_up()
        assert not refusals and deployment.instances() == []


def test_probe_joins_a_run_or_gives_up_in_time(scripts, started, monkeypatch):
    with pytest.raises(UserError, match="none of --initial_peers answers"):  # at the address from moto
        started.wait_until_ready(timeout=1)
    monitor = scripts.monitor("--run_id", "r", "--no_store_checkpoints")
    monkeypatch.setattr(started, "address", lambda: monitor.address)
    assert started.wait_until_ready() == "Joined the run 'r': 0 trainers reported in the last minutes, no step yet"


class TestTrainers:
    def test_number_is_kept_until_a_trainer_gives_its_machine_back(self, started):
        started.set_trainers(2)
        first, second = started.instances("trainer")
        started.ec2.terminate_instances(InstanceIds=[first.id])  # as an interruption
        trainers = started.instances("trainer")
        assert len(trainers) == 2 and first.id not in {trainer.id for trainer in trainers}
        started.scaling.terminate_instance_in_auto_scaling_group(
            InstanceId=second.id, ShouldDecrementDesiredCapacity=True
        )
        assert len(started.instances("trainer")) == 1 and second.id not in started.status()
        for number in (3, 3, 1):
            started.set_trainers(number)
            assert len(started.instances("trainer")) == number

    def test_the_coordinator_comes_first(self, deployment):
        with pytest.raises(UserError, match="'test' has no coordinator yet"):
            deployment.set_trainers(1)
        assert deployment.instances() == []

    def test_later_settings_replace_those_of_the_group(self, started):
        Deployment(make_settings(max_spot_price=0.1, trainer_types=("g5.xlarge",))).set_trainers(1)
        started.set_trainers(1)
        policy = started._find_group()["MixedInstancesPolicy"]
        distribution = policy["InstancesDistribution"]
        assert (distribution["SpotMaxPrice"], distribution["OnDemandPercentageAboveBaseCapacity"]) == ("0.6", 0)
        types = [override["InstanceType"] for override in policy["LaunchTemplate"]["Overrides"]]
        assert types == list(make_settings().trainer_types)
        template = {"LaunchTemplateName": "test-trainers", "Versions": ["$Latest"]}
        (version,) = started.ec2.describe_launch_template_versions(**template)["LaunchTemplateVersions"]
        machine = version["LaunchTemplateData"]
        assert machine["MetadataOptions"]["HttpTokens"] == "required"
        assert {tag["ResourceType"] for tag in machine["TagSpecifications"]} >= {"instance", "volume"}

    def test_status(self, started, monkeypatch):
        started.set_trainers(1)
        (trainer,) = started.instances("trainer")
        # 0.0416 + 0.6, two addresses at 0.005, a disk of 40 GiB: moto's groups ignore the disk of the template
        costs = f"At most $0.66 an hour, $15.74 a day, without traffic\n--initial_peers {started.address()}"
        assert trainer.id in started.status() and started.status().endswith(f" 0.0\n\n{costs}")
        assert "Linux version" in started.console(trainer.id, lines=1000)
        monkeypatch.setattr(started, "_find_group", lambda: {"DesiredCapacity": 3})
        failed = {"StatusCode": "Failed", "StatusMessage": "Max spot instance count exceeded"}
        monkeypatch.setattr(started.scaling, "describe_scaling_activities", lambda **_: {"Activities": [failed] * 2})
        assert f"\n1 of 3 trainers\nMax spot instance count exceeded\n\n{costs}" in started.status()


class TestCleanUp:
    def left(self, deployment: Deployment) -> set[str]:
        ec2, ssm, iam, ours = deployment.ec2, deployment.ssm, deployment.iam, deployment._ours()
        resources = {
            "instances": deployment.instances(),
            "groups": deployment.scaling.describe_auto_scaling_groups()["AutoScalingGroups"],
            "templates": ec2.describe_launch_templates()["LaunchTemplates"],
            "security groups": ec2.describe_security_groups(Filters=ours)["SecurityGroups"],
            "addresses": ec2.describe_addresses()["Addresses"],
            "volumes": ec2.describe_volumes(Filters=ours)["Volumes"],
            "parameters": ssm.get_parameters_by_path(Path="/collaborative-training/", Recursive=True)["Parameters"],
            "profiles": iam.list_instance_profiles()["InstanceProfiles"],
            "roles": iam.list_roles()["Roles"],
        }
        return {name for name, found in resources.items() if found}

    def test_clean_up_removes_all_resources(self, started):
        started.set_trainers(1)
        assert len(self.left(started)) == 9
        started.clean_up()
        assert not self.left(started)
        started.clean_up()  # finds no resources
        assert started.status() == "No instance is running in 'test'"

    def test_address_can_be_kept(self, started):
        address = started.address()
        started.clean_up(keep_address=True)
        assert self.left(started) == {"addresses", "parameters"}
        assert started.start_coordinator() == address
