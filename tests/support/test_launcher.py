"""Tests of the launcher: a forked script has the environment that the same script has when it is started anew."""

import os

import pytest

from tests.support.namespaces import Host, why_unavailable
from tests.support.peers import Script

PROGRAM = """
import os, sys
print("hivemind" in sys.modules, end=" ")
print(*(f"{name}={os.environ.get(name)}" for name in ("CUDA_VISIBLE_DEVICES", "HOME", "NGROK_AUTHTOKEN", "PACE")))
print(os.getcwd(), sys.argv)
print(os.readlink("/proc/self/ns/net"))
"""


@pytest.fixture
def run(tmp_path, launcher):
    """Return a function that runs PROGRAM; it returns whether the program was forked, and its output."""
    path = tmp_path / "script.py"
    path.write_text(PROGRAM)

    def run(**options) -> tuple[bool, str]:
        script = Script(path, "argument", log=tmp_path / "script.log", **options)
        assert script.wait() == 0, script.output
        forked, _, rest = script.output.partition(" ")
        return forked == "True", rest

    return run


def test_forked_script_has_the_environment_of_a_new_one(run, launcher, monkeypatch):
    assert run(launcher=launcher) == (True, run()[1])
    env = {"PACE": "0.5"}
    monkeypatch.setenv("HOME", "/elsewhere")
    monkeypatch.setenv("NGROK_AUTHTOKEN", "x")
    forked, output = run(env=env, launcher=launcher)
    assert forked and "HOME=/elsewhere NGROK_AUTHTOKEN=x PACE=0.5" in output and output == run(env=env)[1]
    monkeypatch.delenv("HOME")
    forked, output = run(launcher=launcher)
    assert forked and "HOME=None NGROK_AUTHTOKEN=x PACE=None" in output and output == run()[1]


def test_script_is_not_forked_if_the_imports_would_read_another_environment(run, launcher, monkeypatch):
    gpu = {"CUDA_VISIBLE_DEVICES": "0"}
    assert not run(env=gpu, launcher=launcher)[0]
    assert run(env=gpu, launcher=launcher, late={"CUDA_VISIBLE_DEVICES"})[0]
    monkeypatch.setenv("HF_HOME", "/elsewhere")
    assert not run(launcher=launcher)[0]


@pytest.mark.skipif(why_unavailable() is not None, reason=str(why_unavailable()))
def test_forked_script_enters_a_network_namespace(run, launcher):
    host = Host()
    try:
        forked, output = run(launcher=launcher, namespace=host.namespace)
        assert forked and os.readlink(host.namespace) in output
        assert os.readlink("/proc/self/ns/net") not in output
    finally:
        host.close()
