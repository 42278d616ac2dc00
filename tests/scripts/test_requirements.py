"""The lists of requirements, and what needs one of the organiser's packages and prints how to install it.

Data preparation, trainers, monitor and evaluator run without these packages in all tests, see support/launcher.py.
"""

import importlib
import sys

import pytest

from cotrain.common.errors import ORGANISER_MODULES, UserError
from tests.support.peers import ROOT


def read_requirements(name: str) -> list[str]:
    lines = (line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines())
    return [line for line in lines if line]


def test_each_list_builds_on_the_one_before():
    trainer, organiser = read_requirements("requirements.txt"), read_requirements("requirements-organiser.txt")
    assert organiser[0] == "-r requirements.txt"
    assert read_requirements("requirements-dev.txt")[0] == "-r requirements-organiser.txt"
    assert {line.split("==")[0] for line in organiser[1:]} == ORGANISER_MODULES
    assert not {line.split("==")[0] for line in trainer} & ORGANISER_MODULES


def test_missing_boto3_is_one_line_in_the_notebook(monkeypatch):
    monkeypatch.setitem(sys.modules, "boto3", None)
    monkeypatch.delitem(sys.modules, "deploy.aws", raising=False)
    with pytest.raises(UserError, match="boto3 is not installed: pip install -r requirements-organiser.txt"):
        importlib.import_module("deploy.aws")
