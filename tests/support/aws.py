"""Settings of the deployments that the tests make, and what their machines are given."""

import base64

from deploy.aws import ROLE, Deployment, Settings

IMAGE = "/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64"  # the only image in moto
DATA = "https://example.org/data.tar.gz"


def make_settings(**changes) -> Settings:
    values = {"name": "test", "repo_url": "https://example.org/project.git", "dataset_url": DATA, "run_id": "r",
              "trainer_image": IMAGE}  # fmt: skip
    return Settings(**{**values, **changes})


def ids(deployment: Deployment, role: str) -> list[str]:
    """Return the IDs of the instances with this role."""
    return [one["InstanceId"] for one in deployment.instances() if {"Key": ROLE, "Value": role} in one["Tags"]]


def read_user_data(deployment: Deployment, role: str) -> str:
    """Return the user data of the first instance with this role."""
    instance, *_ = ids(deployment, role)
    reply = deployment.ec2.describe_instance_attribute(InstanceId=instance, Attribute="userData")
    return base64.b64decode(reply["UserData"]["Value"]).decode()
