"""Deployment on AWS, against a fake AWS server (moto)."""

import re

import pytest
from botocore.exceptions import ClientError, NoCredentialsError

from deploy import aws
from deploy.aws import Deployment, Instance
from lib.common.errors import UserError
from tests.support.aws import make_settings, read_user_data


def describe(deployment: Deployment, instance: Instance) -> dict:
    return deployment.ec2.describe_instances(InstanceIds=[instance.id])["Reservations"][0]["Instances"][0]


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
        policy = started.iam.get_role_policy(RoleName="test-us-east-1-coordinator", PolicyName="coordinator")
        (statement,) = policy["PolicyDocument"]["Statement"]
        assert (statement["Action"], statement["Resource"]) == ("ssm:GetParameter", parameter["ARN"])
        assert "test-us-east-1-coordinator" in describe(started, started.instances()[0])["IamInstanceProfile"]["Arn"]
        started.set_trainers(1)
        policy = started.iam.get_role_policy(RoleName="test-us-east-1-trainer", PolicyName="trainer")
        (statement,) = policy["PolicyDocument"]["Statement"]
        assert statement["Action"] == "autoscaling:TerminateInstanceInAutoScalingGroup"
        assert statement["Resource"].endswith("autoScalingGroupName/test-trainers")

    def test_no_secret_in_user_data(self, started):
        started.set_trainers(1)
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

    def test_group(self, started):
        """Other settings in a later call replace those of the group."""
        Deployment(make_settings(max_spot_price=0.1, trainer_types=("g5.xlarge",))).set_trainers(1)
        started.set_trainers(1)
        policy = started._find_group()["MixedInstancesPolicy"]
        distribution = policy["InstancesDistribution"]
        assert (distribution["SpotMaxPrice"], distribution["OnDemandPercentageAboveBaseCapacity"]) == ("0.6", 0)
        types = [override["InstanceType"] for override in policy["LaunchTemplate"]["Overrides"]]
        assert types == list(make_settings().trainer_types)
        (version, *_) = started.ec2.describe_launch_template_versions(
            LaunchTemplateName="test-trainers", Versions=["$Latest"]
        )["LaunchTemplateVersions"]
        machine = version["LaunchTemplateData"]
        assert machine["MetadataOptions"]["HttpTokens"] == "required"
        assert machine["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"] == 40
        assert {tag["ResourceType"] for tag in machine["TagSpecifications"]} >= {"instance", "volume"}

    def test_status(self, started):
        started.set_trainers(1)
        (trainer,) = started.instances("trainer")
        status = started.status()
        assert len(status.splitlines()) == 6
        assert trainer.id in status and status.endswith(f"--initial_peers {started.address()}")
        # 0.0416 + 0.6, two addresses at 0.005, a disk of 40 GiB: moto's groups ignore the disk of the template
        assert "At most $0.66 an hour, $15.74 a day, without traffic" in status
        assert "Linux version" in started.console(trainer.id, lines=1000)

    def test_status_says_why_trainers_are_missing(self, started, monkeypatch):
        started.set_trainers(2)
        monkeypatch.setattr(started, "_find_group", lambda: {"DesiredCapacity": 3})
        failed = {"StatusCode": "Failed", "StatusMessage": "Max spot instance count exceeded"}
        monkeypatch.setattr(started.scaling, "describe_scaling_activities", lambda **_: {"Activities": [failed] * 2})
        assert "2 of 3 trainers\nMax spot instance count exceeded\n\n" in started.status()


# --- cleanup ---------------------------------------------------------------------------------------------------------


class TestCleanUp:
    def left(self, deployment: Deployment) -> dict[str, int]:
        ec2, ssm, iam, ours = deployment.ec2, deployment.ssm, deployment.iam, deployment._ours()
        return {
            "instances": len(deployment.instances()),
            "groups": len(deployment.scaling.describe_auto_scaling_groups()["AutoScalingGroups"]),
            "templates": len(ec2.describe_launch_templates()["LaunchTemplates"]),
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
        started.set_trainers(1)
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
