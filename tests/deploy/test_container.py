"""Dockerfile and compose file: what they name exists. No container is built: that needs a daemon and gigabytes."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from arguments import TRAINER_ARGUMENTS
from run_training_monitor import ARGUMENTS
from tests.support.processes import ROOT

COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text(encoding="utf-8"))
DOCKERFILE = (ROOT / "deploy" / "Dockerfile").read_text(encoding="utf-8")
FLAGS = {"run_trainer.py": TRAINER_ARGUMENTS, "run_training_monitor.py": ARGUMENTS}


def test_image_has_the_files_that_it_names():
    for sources in re.findall(r"^COPY (.+) \S+$", DOCKERFILE, re.MULTILINE):
        assert all((ROOT / source).exists() for source in sources.split())
    ignored = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert {".venv", ".git", "**/*.key", "webhook*"} <= set(ignored), "neither gigabytes nor secrets"
    (requirements,) = re.findall(r"-r (\S+)", DOCKERFILE)
    assert (ROOT / requirements).is_file()
    assert re.search(r"^USER (?!root)", DOCKERFILE, re.MULTILINE)


@pytest.mark.parametrize("name", COMPOSE["services"])
def test_service_has_known_flags_and_what_a_peer_needs(name):
    service = COMPOSE["services"][name]
    script, *words = service["command"]
    assert script.startswith("/app/") and (ROOT / script.removeprefix("/app/")).is_file()
    known = {option.name for kind in FLAGS[Path(script).name] for option in fields(kind)}
    assert {word[2:] for word in words if word.startswith("--")} <= known
    for default in re.findall(r":-(/app/[^}]+)}", " ".join(words)):
        assert (ROOT / default.removeprefix("/app/")).is_file()
    build = service["build"]
    assert (ROOT / "deploy" / build["context"] / build["dockerfile"]).is_file()
    # docs/cloud.md: shared memory, the host's network, and a minute to stop
    assert (service["shm_size"], service["network_mode"], service["stop_grace_period"]) == ("2g", "host", "60s")
    assert service["init"] and service["ulimits"]["nofile"] == 65536
    assert {volume.partition(":")[0] for volume in service["volumes"]} <= COMPOSE["volumes"].keys()
    assert ("deploy" in service) == name.endswith("-gpu")
