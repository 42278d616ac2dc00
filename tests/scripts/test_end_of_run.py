"""The end of the schedule is the end of a run: all of its processes say so and end, and stay ended."""

import signal

import pytest

from cotrain.training.checkpoints import list_checkpoints
from tests.support.peers import LONG_STEPS, join_together, read_jsonl

ENDED = "Step #2 is the last of the schedule: the run has ended."


@pytest.mark.early
def test_run_of_three_ends_at_its_last_step(scripts):
    """Bob is slower, and states no schedule. Carol joins when the run has ended. The evaluator takes the last step.

    A service starts alice again after a reboot, when all are gone. Without the last step she tries again later.
    """
    schedule = ("--total_steps", 2, "--warmup_steps", 0)
    monitor = scripts.monitor("--run_id", "short", *schedule, "--refresh_period", 5)
    joins = ("--run_id", "short", "--initial_peers", monitor.address)
    peers = (*joins, *schedule)
    trainers = [
        scripts.trainer(name, *flags, *LONG_STEPS, "--username", name, pace=pace)
        for name, flags, pace in (("alice", peers, 0.25), ("bob", joins, 0.5))
    ]
    evaluator = scripts.start(
        "run_evaluator.py", *peers, "--tokenizer_path", scripts.data / "tokenizer", "--dataset_path",
        scripts.data / "dataset", "--model_name_or_path", scripts.data / "config.json", "--output_dir",
        scripts.folder / "evaluator", "--evaluation_steps", 2, "--refresh_period", 1, "--max_eval_samples", 8,
        log="evaluator",
    )  # fmt: skip
    join_together(*trainers)
    carol = scripts.trainer("carol", *peers, *LONG_STEPS, "--username", "carol")
    carol.wait_for("Joining the collaboration through")
    carol.process.send_signal(signal.SIGSTOP)
    monitor.wait_for(ENDED)
    carol.process.send_signal(signal.SIGCONT)
    everybody = [*trainers, carol, evaluator, monitor]
    for script in everybody:
        assert script.wait() == 0, script.output
        assert "Traceback" not in script.output and "ERROR" not in script.output, script.output
        script.assert_nothing_left()
    for trainer in (*trainers, carol):
        newest = list_checkpoints(trainer.log.parent / trainer.log.stem)
        assert [path.name for path in newest] == ["checkpoint-2"]
        assert f"{ENDED} The model is in '{newest[0]}'" in trainer.output
    assert [trainer.output.count("Thank you") for trainer in (*trainers, carol, monitor)] == [1, 1, 0, 1]
    assert list_checkpoints(scripts.folder / "monitor")[0].name == "checkpoint-2"
    assert [record["step"] for record in read_jsonl(scripts.folder / "monitor/metrics.jsonl")] == [1, 2]
    assert read_jsonl(scripts.folder / "evaluator/evaluations.jsonl")[-1]["step"] == 2

    again = scripts.trainer("alice", *joins, "--bootstrap_timeout", 4)
    assert again.wait() == 0 and ENDED in again.output
    newest = list_checkpoints(scripts.folder / "alice")[0]
    newest.rename(newest.with_name("moved"))
    assert scripts.trainer("alice", *joins, "--bootstrap_timeout", 4).wait() == 75
