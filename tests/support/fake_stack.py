"""What moto's CloudFormation lacks: wait conditions, attached elastic IPs, and instances from launch templates."""

import json

import pytest
from moto.cloudformation import parsing
from moto.core.common_models import CloudFormationModel
from moto.ec2.models import ec2_backends
from moto.ec2.models.elastic_ip_addresses import ElasticAddress
from moto.ec2.models.instances import Instance

SIGNAL_URL = "https://signals.example.org/x?Signature=1&Expires=2"
COORDINATOR_ADDRESS = "/ip4/203.0.113.1/tcp/31337/p2p/QmVUecCSp9yW9fE14vhp7fjCTHiWyA7gDhZxZk3B7RiXZG"


class FakeResource:
    physical_resource_id = "fake"

    @staticmethod
    def cloudformation_name_type() -> str:
        return ""

    @classmethod
    def create_from_cloudformation_json(cls, resource_name, cloudformation_json, account_id, region_name, **kwargs):
        return cls()

    def delete(self, account_id, region_name) -> None:
        pass


# moto finds the direct subclasses of its model.
class WaitConditionHandle(FakeResource, CloudFormationModel):
    physical_resource_id = SIGNAL_URL

    @staticmethod
    def cloudformation_type() -> str:
        return "AWS::CloudFormation::WaitConditionHandle"


class WaitCondition(FakeResource, CloudFormationModel):
    """A condition for which the coordinator has sent its signal."""

    @staticmethod
    def cloudformation_type() -> str:
        return "AWS::CloudFormation::WaitCondition"

    def get_cfn_attribute(self, attribute_name: str) -> str:
        assert attribute_name == "Data"
        return json.dumps({"coordinator": COORDINATOR_ADDRESS})


class ElasticIpAssociation(FakeResource, CloudFormationModel):
    @staticmethod
    def cloudformation_type() -> str:
        return "AWS::EC2::EIPAssociation"

    @classmethod
    def create_from_cloudformation_json(cls, resource_name, cloudformation_json, account_id, region_name, **kwargs):
        ec2, properties = ec2_backends[account_id][region_name], cloudformation_json["Properties"]
        instance = ec2.get_instance_by_id(properties["InstanceId"])
        ec2.associate_address(instance, allocation_id=properties["AllocationId"])
        return cls()


def create_instance(resource_name, cloudformation_json, account_id, region_name, **kwargs) -> Instance:
    options = {
        "launch_template": cloudformation_json["Properties"]["LaunchTemplate"],
        "is_instance_type_default": True,
    }
    return ec2_backends[account_id][region_name].run_instances(None, 1, None, [], **options).instances[0]


def release(address: ElasticAddress, account_id, region_name) -> None:
    ec2_backends[account_id][region_name].release_address(allocation_id=address.allocation_id)


def complete_moto(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(parsing, "NULL_MODELS", [])
    patch.setattr(Instance, "create_from_cloudformation_json", create_instance)
    patch.setattr(ElasticAddress, "delete", release, raising=False)
