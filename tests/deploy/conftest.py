"""A fake AWS server (moto), an empty account on it, and a deployment there; a web server with the data."""

import functools
import logging
import threading
from collections.abc import Iterator
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

import pytest
import requests
from moto.server import ThreadedMotoServer
from moto.utilities.utils import load_resource

from deploy.aws import Deployment
from lib.data.archive import DATASET, TOKENIZER, write_archive
from tests.support.aws import make_settings


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


@pytest.fixture
def dataset_url(data, tmp_path) -> Iterator[str]:
    (tmp_path / "www").mkdir()
    write_archive(tmp_path / "www" / "data.tar.gz", {DATASET: data / "dataset", TOKENIZER: data / "tokenizer"})
    handler = functools.partial(SimpleHTTPRequestHandler, directory=tmp_path / "www")
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/data.tar.gz"
        server.shutdown()
