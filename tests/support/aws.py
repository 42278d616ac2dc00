"""Settings of the deployments that the tests make, and what CloudFormation makes of their template."""

import re

from deploy.aws import Deployment, Settings

DATA = "https://example.org/data.tar.gz"
PUBLIC_IP, SIGNAL_URL = "203.0.113.1", "https://signals.example.org/x?Signature=1&Expires=2"
COORDINATOR_ADDRESS = f"/ip4/{PUBLIC_IP}/tcp/31337/p2p/QmVUecCSp9yW9fE14vhp7fjCTHiWyA7gDhZxZk3B7RiXZG"


def make_settings(**changes) -> Settings:
    values = {"name": "test", "repo_url": "https://example.org/project.git", "dataset_url": DATA, "run_id": "r"}
    return Settings(**{**values, **changes})


def make_user_data(role: str, **changes) -> str:
    """Return the user data of a coordinator or a trainer of a deployment."""
    deployment = Deployment(make_settings(**changes))
    machine = deployment.template()["Resources"][f"{role}Template"]["Properties"]["LaunchTemplateData"]
    separator, (shebang, substituted, script) = machine["UserData"]["Fn::Base64"]["Fn::Join"]
    text = substituted["Fn::Sub"] if role == "coordinator" else substituted["Fn::Sub"][0]
    values = deployment.parameters() | {"address": PUBLIC_IP, "signal": SIGNAL_URL, "peer": COORDINATOR_ADDRESS,
                                        "AWS::Region": "us-east-1"}  # fmt: skip
    return separator.join([shebang, re.sub(r"\$\{([\w:]+)\}", lambda name: values[name[1]], text), script])
