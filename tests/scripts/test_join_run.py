"""A loop in a script of one's own, with `join_run`."""

import re
import signal

import pytest

from tests.support.peers import ALTERED, LOCAL, Script, wait_until

EXAMPLE = "examples/plain_loop.py"
LAST_STEP = 6
LEAST_ACCURACY = 95.0  # after six steps of 8192 samples; one process has 98.1 after as many
ACCURACY = re.compile(r"Accuracy on \d+ other digits: ([\d.]+)%")
# Peers of a user who has read little: the module has other weights in each process unless it is built by `join_run`.
OWN_SCRIPT = """
import os, sys, time, torch
from cotrain import join_run

def build():
    return torch.nn.Linear(4, 2)

with join_run(MODEL, batch_size=8, run_id="own", target_batch_size=1024, initial_peers=sys.argv[1:], OPTIONS
              host_maddrs="/ip4/127.0.0.1/tcp/0", matchmaking_time=3.1) as run:
    for number in range(NUMBER):
        run.step(run.model(torch.randn(8, 4)).square().mean())
        time.sleep(0.02)
AFTER
"""

AFTER = """
from threading import Timer, enumerate
time.sleep(0.5)  # a cancelled timer's thread takes a moment to end
timers = [thread for thread in enumerate() if isinstance(thread, Timer) and "end_process" in str(thread.function)]
print("after, timers:", timers)
"""


def write_script(path, model="build", options="", number="10**9", after="print('after')"):
    text = OWN_SCRIPT
    for name, value in (("MODEL", model), ("OPTIONS", options), ("NUMBER", number), ("AFTER", after)):
        text = text.replace(name, value)
    path.write_text(text, encoding="utf-8")
    return path


def averaged(script: Script) -> int:
    return script.output.count("Averaged updates with 2 peers")


@pytest.mark.early
def test_example_reaches_the_accuracy_of_one_process(scripts):
    """The second peer comes later and is slower; the first one is killed, and resumes."""
    monitor = scripts.start("run_training_monitor.py", "--no_store_checkpoints", "--run_id", "digits", "--host_maddrs",
                            LOCAL, "--refresh_period", 1.0, log="monitor")  # fmt: skip
    first = scripts.start(EXAMPLE, monitor.address, log="first")
    first.wait_for(r"Step #1\b")  # before it, the second would start with the initial weights, too
    second = scripts.start(ALTERED, EXAMPLE, monitor.address, log="second", env={"PACE": "0.05"})
    second.wait_for(r"Joined the collaboration at step #[1-9]")
    wait_until(lambda: averaged(second) >= 2, 120, "two steps of both peers")
    first.kill()
    first = scripts.start(EXAMPLE, monitor.address, log="first")
    first.wait_for(r"Joined the collaboration at step #[1-9]|Resumed from a checkpoint")
    wait_until(lambda: averaged(first) >= 2 and max(first.steps) >= LAST_STEP, 120, f"step {LAST_STEP}")
    assert first.stop(signal.SIGINT) == 0, first.output
    first.assert_nothing_left()
    assert second.stop(signal.SIGTERM) == 0, second.output
    second.assert_nothing_left()
    for script in (first, second):
        assert float(ACCURACY.search(script.output)[1]) > LEAST_ACCURACY, script.output
    assert {path.name for path in scripts.folder.glob("outputs*")} == {"outputs", "outputs-2"}
    assert list(scripts.folder.glob("outputs/checkpoint-*/model.safetensors"))
    monitor.wait_for(rf"Step #{LAST_STEP - 2}\tloss = ")
    assert "Traceback" not in monitor.output + first.output + second.output


def test_error_in_the_loop_ends_the_script_with_its_traceback(scripts):
    script = scripts.start(write_script(scripts.folder / "own.py", number="1 / 0"), log="own")
    assert script.wait() == 1, script.output
    assert re.search(r"Traceback .*in <module>.*1 / 0.*ZeroDivisionError", script.output, re.DOTALL)
    assert "after" not in script.output
    script.assert_nothing_left()


def test_loop_that_ignores_the_end_is_left(scripts):
    """The block saves a checkpoint. The script continues after it: no timer that would end the process is left."""
    path = write_script(scripts.folder / "own.py", after=AFTER)
    script = scripts.start(path, log="own")
    script.wait_for(r"Step #2\b")
    assert script.stop(signal.SIGINT) == 0, script.output
    assert script.output.endswith("after, timers: []\n")
    assert list(scripts.folder.glob("outputs/checkpoint-*"))
    script.assert_nothing_left()


def test_peers_with_other_weights_or_settings_are_told_in_one_line(scripts):
    folder = scripts.folder
    founder = scripts.start(write_script(folder / "own.py", options="learning_rate=0.01,"), log="own")
    address = founder.address
    founder.wait_for(r"Step #1\b")
    weights = scripts.start(write_script(folder / "weights.py", model="torch.nn.Linear(4, 2)"), address, log="weights")
    path = write_script(folder / "settings.py", options="learning_rate=0.02,")
    settings = scripts.start(path, address, log="settings")
    peer = scripts.start(write_script(folder / "peer.py"), address, log="peer")  # adopts the learning rate
    for script, message in (
        (weights, r"weights.py: error: the \d trainers of this run have another model or tokenizer, other initial "),
        (settings, r"settings.py: error: --learning_rate is 0\.02 here and 0\.01 in run own"),
    ):
        assert script.wait() == 1, script.output
        assert re.search(message, script.output) and "Traceback" not in script.output
        script.assert_nothing_left()
    peer.wait_for("Averaged gradients with 2 peers")
    for script in (peer, founder):
        assert script.stop() == 0, script.output


EVALUATING = """
import torch
from cotrain import join_run

with join_run(lambda: torch.nn.Linear(4, 2), batch_size=8, run_id="own", target_batch_size=256, learning_rate=0.1,
              optimizer="adamw", warmup_steps=0, local_updates=LOCAL, host_maddrs="/ip4/127.0.0.1/tcp/0") as run:
    shown, before = -1, None
    while run.step(run.model(torch.randn(8, 4)).square().mean()):
        own = run.model.weight.detach().clone()
        with run.averaged_model() as model:
            step, averaged = run.global_step, model.weight.clone()
            assert model is run.model and not model.training and not model(torch.ones(4)).requires_grad
        assert run.model.training and (step != shown or torch.allclose(run.model.weight, own, atol=1e-6))
        if shown == step:
            assert torch.equal(averaged, before), "the parameters of one step"
        if step > shown:
            print("evaluated", step, flush=True)
        shown, before = step, averaged
"""


@pytest.mark.parametrize("local", [False, True], ids=["gradients", "local updates"])
def test_loop_knows_the_step_and_evaluates_the_parameters_that_all_peers_have(scripts, local):
    path = scripts.folder / "evaluating.py"
    path.write_text(EVALUATING.replace("LOCAL", str(local)), encoding="utf-8")
    script = scripts.start(path, log="evaluating")
    script.wait_for(r"evaluated [3-9]")
    assert script.stop(signal.SIGINT) == 0, script.output
    assert "Traceback" not in script.output
    assert f"proceeding with local {'updates' if local else 'gradients'}" in script.output
