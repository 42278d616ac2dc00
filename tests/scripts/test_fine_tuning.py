"""Peers fine-tune a model together with adapters, with the real scripts."""

import contextlib

import pytest
from peft import AutoPeftModelForCausalLM

from cotrain.data.archive import file_sha256
from cotrain.settings import BASE_FOLDER
from cotrain.training.checkpoints import list_checkpoints
from tests.support.peers import ALTERED, LOCAL, Script, Scripts, prepare_data, read_jsonl, reserve_maddr, served
from tests.training.test_adapters import VOCAB_SIZE, make_base, tokens

STEPS = 12
JOINS = ("--learning_rate", 0.01, "--warmup_steps", 0)  # what `Scripts.trainer` would state otherwise
SETTINGS = ("--lora_rank", 4, "--optimizer", "adamw", "--adam_epsilon", 1e-8, "--learning_rate", 0.01,
            "--warmup_steps", 0, "--target_batch_size", 64, "--metadata_expiration", 10)  # fmt: skip


@pytest.mark.early
def test_unequal_peers_fine_tune_one_base(tmp_path, launcher):
    """The second trainer comes later, is slower, has another training loop, and is killed and started again."""
    prepare_data(tmp_path / "data", "clm", VOCAB_SIZE, launcher=launcher)
    base, other = make_base(tmp_path / "base"), make_base(tmp_path / "other", seed=1)
    before = file_sha256(base / "model.safetensors")
    scripts = Scripts(tmp_path, tmp_path / "data", launcher=launcher)
    try:
        settings = ("--model_name_or_path", base, *SETTINGS)
        monitor = scripts.monitor(*settings, "--save_checkpoint_step_interval", 1)
        joins = ("--initial_peers", monitor.address, *JOINS)
        common = (*joins, "--model_name_or_path", base, "--matchmaking_time", 4, "--max_global_steps", STEPS)
        evaluator = scripts.start(
            "run_evaluator.py", *joins[:2], "--model_name_or_path", base, "--tokenizer_path",
            tmp_path / "data/tokenizer", "--dataset_path", tmp_path / "data/dataset", "--output_dir",
            tmp_path / "evaluator", "--evaluation_steps", 1, "--refresh_period", 0.5, "--max_global_steps", STEPS,
            "--max_eval_samples", 8, log="evaluator",
        )  # fmt: skip
        one = scripts.trainer("one", *common, pace=0.4)
        monitor.wait_for(r"Step #1\t")
        stranger = scripts.trainer("stranger", *joins, "--model_name_or_path", other)
        two = scripts.trainer("two", *common, name_of_script="run_custom_trainer.py", pace=0.8)
        two.wait_for("Averaged gradients with 2 peers")
        two.kill()
        # It is told, and trains alone: a stranger's report must not end a trainer.
        stranger.wait_for(r"The \d trainers? of this run have another model")
        assert stranger.stop() == 0, stranger.output
        assert "Averaged gradients" not in stranger.output
        two = scripts.trainer("two", *common, name_of_script="run_custom_trainer.py", pace=0.8)
        two.wait_for(r"Joined the collaboration at step #\d+")
        assert one.wait() == two.wait() == evaluator.wait() == 0, one.output + two.output + evaluator.output
        assert monitor.stop() == 0
        assert "Traceback" not in "".join(script.output for script in (monitor, one, two, stranger, evaluator))
    finally:
        scripts.close()
    newest = list_checkpoints(tmp_path / "monitor")[0]
    assert newest.name == f"checkpoint-{STEPS}"
    assert sum(file.stat().st_size for file in newest.glob("*.safetensors")) < 60_000
    model = AutoPeftModelForCausalLM.from_pretrained(newest, dtype="auto")
    assert model(input_ids=tokens(), labels=tokens()).loss.isfinite()
    assert file_sha256(base / "model.safetensors") == before
    losses = [record["loss"] for record in read_jsonl(tmp_path / "monitor/metrics.jsonl")]
    assert losses[-1] < losses[0]
    assert read_jsonl(tmp_path / "evaluator/evaluations.jsonl")[-1]["validation loss"] < losses[0]


def test_base_comes_with_the_archive_of_the_data(tmp_path, launcher, data):
    """The organiser has it in a folder. The volunteers have an address alone; the second one is slower, and later."""
    base = make_base(tmp_path / "base")
    (base / "README.md").write_text("It stays here.", encoding="utf-8")
    archive = tmp_path / "www/data.tar.gz"
    prepare_data(tmp_path / "prepared", "clm", VOCAB_SIZE, "--archive", archive, "--base", base, launcher=launcher)
    with served(archive.parent) as url, contextlib.closing(Scripts(tmp_path, data, launcher=launcher)) as scripts:

        def start(script: str, name: str, *flags: object, pace: float = 0.0) -> Script:
            (tmp_path / name).mkdir()  # where it runs
            return scripts.start(ALTERED, script, *flags, log=f"{name}/script", env={"PACE": str(pace)})

        settings = ("--model_name_or_path", BASE_FOLDER, *SETTINGS, "--dataset_url", f"{url}/data.tar.gz")
        settings += ("--dataset_sha256", file_sha256(archive), "--refresh_period", 1)
        monitor = start("run_training_monitor.py", "monitor", "--host_maddrs", reserve_maddr(), *settings)
        join = ("--initial_peers", monitor.address, "--host_maddrs", LOCAL, "--per_device_train_batch_size", 4)
        one = start("run_trainer.py", "one", *join, pace=0.2)
        one.wait_for(r"Step #1\b")
        two = start("run_trainer.py", "two", *join, pace=0.5)
        two.wait_for("Averaged gradients with 2 peers")
        for script in (one, two, monitor):
            assert script.stop() == 0, script.output
            assert "Traceback" not in script.output
    for name in ("one", "two", "monitor"):
        folder = tmp_path / name / BASE_FOLDER
        assert file_sha256(folder / "model.safetensors") == file_sha256(base / "model.safetensors")
        assert not (folder / "README.md").exists()
