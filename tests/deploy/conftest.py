"""A fake AWS server (moto), an empty account on it, and a deployment there."""

import logging
from collections.abc import Iterator

import pytest
import requests
from moto.server import ThreadedMotoServer
from moto.utilities.utils import load_resource

from deploy.aws import Deployment
from tests.support.aws import make_settings
from tests.support.fake_stack import complete_moto


@pytest.fixture(scope="module")
def cloud() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    used = [image for image in load_resource("ec2/resources/latest_amis/us-east-1.json") if "al2023" in image["name"]]
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    with pytest.MonkeyPatch.context() as patch:
        # moto would make all its images again for each account, in a fifth of the time of these tests. Only moto sees
        # the variable: a script with another environment than the launcher's is not forked.
        patch.setattr("moto.ec2.models.amis.AMIS", used)
        patch.setattr("moto.ec2.models.amis.environ", {"MOTO_AMIS_PATH": "no others"})
        complete_moto(patch)
        server.start()
        yield "http://{}:{}".format(*server.get_host_and_port())
        server.stop()


@pytest.fixture
def account(cloud, monkeypatch) -> None:
    """Set up an empty account, which boto3 finds in this process and in notebooks."""
    requests.post(f"{cloud}/moto-api/reset", timeout=30).raise_for_status()
    for name, value in {"ENDPOINT_URL": cloud, "ACCESS_KEY_ID": "x", "SECRET_ACCESS_KEY": "x"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)


@pytest.fixture
def deployment(account) -> Deployment:
    return Deployment(make_settings())


@pytest.fixture
def started(deployment) -> Deployment:
    deployment.start_coordinator()
    return deployment
