"""Tests of the settings that an organiser publishes, without peers."""

import contextlib
import dataclasses
import hashlib
import json
import math
import os
import re
import signal
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.utils.crypto import RSAPrivateKey

from arguments import TRAINER_ARGUMENTS, BaseTrainingArguments, ModelArguments
from cotrain.admission.invitations import load_identity, peer_id_of
from cotrain.common.argument_parser import ArgumentParser
from cotrain.common.errors import TemporaryError, UserError
from cotrain.common.flags import find_settings
from cotrain.common.signals import StopSignal
from cotrain.models.config import to_published_model
from cotrain.models.model import build_without_weights, check_size, read_config
from cotrain.options import NOTHING, TrainerOptions
from cotrain.peer import adoption, relay, signed_settings
from cotrain.peer.adoption import Entry, find_run_config, refuse_differences
from cotrain.peer.relay import RunConfigRelay
from cotrain.peer.signed_settings import RunConfig, check_safe, choose
from cotrain.settings import Hyperparameters, StepSettings
from peerstep.rounds.averager import PROTOCOL
from run_training_monitor import ARGUMENTS as MONITOR_ARGUMENTS
from tests.support.peers import wait_until

SETTINGS = {"run_id": "tree", "learning_rate": 0.01, "local_updates": True, "gradient_compression": "blockwise8"}
LOOPBACK = "/ip4/127.0.0.1/tcp/1/p2p/QmRgnx8Tgb2B3b9i7XfeAVDiD4z7hNrmXEUWgSAFZYVGVV"
PUBLIC = LOOPBACK.replace("127.0.0.1", "8.8.4.4")


@pytest.fixture(scope="module")
def keys() -> list[RSAPrivateKey]:
    return [RSAPrivateKey() for _ in range(3)]


def id_of(key: RSAPrivateKey):
    return peer_id_of(key.get_public_key())


def published(config: RunConfig, publisher: RSAPrivateKey) -> dict[bytes, object]:
    return {RSASignatureValidator(publisher).local_public_key: config.record}


def parse(*words: str):
    return ArgumentParser(TRAINER_ARGUMENTS, "test").parse(words)


def signed(
    key: RSAPrivateKey, settings: object, signed_at: float = 0.0, protocol: int = PROTOCOL
) -> dict[str, object]:
    text = json.dumps({"protocol": protocol, "time": signed_at, "settings": settings})
    public_key = key.get_public_key().to_bytes()
    return {"text": text, "public_key": public_key, "signature": key.sign(text.encode())}


def test_signed_settings_are_read_as_they_were_stated(keys):
    record = RunConfig.sign({**SETTINGS, "output_dir": "x", "refresh_period": 3}, keys[0]).record
    config = RunConfig.parse(record, id_of(keys[1]))
    assert config.settings == SETTINGS and config.protocol == PROTOCOL
    assert (config.organiser, config.publisher) == (id_of(keys[0]), id_of(keys[1]))
    config = RunConfig.parse({**record, "more": "x" * 1000}, id_of(keys[0]))
    assert config.record == record, "what is not signed is not passed on"


def test_a_model_is_published_by_its_name_or_as_its_configuration(keys, tmp_path, monkeypatch):
    def publish(model: str, **settings) -> str | None:
        config = RunConfig.sign({**SETTINGS, **settings, "model_name_or_path": model}, keys[0])
        return config.settings["model_name_or_path"]

    monkeypatch.chdir(tmp_path)
    assert publish("name/model.v2") == "name/model.v2"
    Path("model").mkdir()
    Path("model/config.json").write_text('{"model_type": "gpt2", "n_layer": 3, "auto_map": {}}', encoding="utf-8")
    for path in ("model", "./model/config.json", str(tmp_path / "model")):
        assert publish(path) == '{"model_type":"gpt2","n_layer":3}'
    assert publish("model", from_pretrained=True) is None, "the weights are in the folder"
    with pytest.raises(UserError, match="no model configuration"):
        publish("../no such file")


def test_altered_records_are_refused(keys):
    record = RunConfig.sign(SETTINGS, keys[0]).record
    changes = ({"text": record["text"].replace("0.01", "0.02")}, {"public_key": keys[1].get_public_key().to_bytes()},
               {"signature": b"x"}, {"signature": None}, {"text": record["text"] + " " * 9000})  # fmt: skip
    for altered in (*({**record, **change} for change in changes), None, [], {}, {"text": 1}, b"\xc1"):
        with pytest.raises(ValueError, match="not a run configuration"):
            RunConfig.parse(altered, id_of(keys[0]))


@pytest.mark.parametrize(
    "settings",
    [
        {"learning_rate": 1.0},  # no run ID
        {**SETTINGS, "output_dir": "/tmp"},
        {**SETTINGS, "initial_peers": LOOPBACK},
        {**SETTINGS, "dataset_url": "--debug"},
        {**SETTINGS, "dataset_url": "http://a\nb"},
        {**SETTINGS, "dataset_url": "http://" + "a" * 1000},
        {**SETTINGS, "optimizer": ["lamb", "--debug"]},
        {**SETTINGS, "optimizer": {"a": 1}},
        {**SETTINGS, "learning_rate": math.inf},
        {**SETTINGS, "clamp_value": -math.inf},
        {**SETTINGS, "weight_decay": math.nan},
        {**SETTINGS, "target_batch_size": 10**23},
        [],
    ],
)
def test_signed_text_with_anything_but_settings_is_refused(keys, settings):
    with pytest.raises(ValueError, match="not a run configuration"):
        RunConfig.parse(signed(keys[0], settings), id_of(keys[0]))


def test_the_organisers_peer_id_is_believed_before_what_a_trainer_relays(keys):
    organiser, trainer, stranger = keys
    true, false = RunConfig.sign(SETTINGS, organiser), RunConfig.sign({**SETTINGS, "learning_rate": 9.0}, stranger)

    def believed(records: dict, *initial_peers: RSAPrivateKey, known: RSAPrivateKey | None = None) -> dict | None:
        config = choose(records, set(map(id_of, initial_peers)), known and id_of(known))
        return config and config.record

    records = published(true, trainer) | published(false, stranger)
    assert believed(records, organiser) == believed(records, trainer) == true.record
    assert believed(records) is None
    # A trainer that is asked may vouch for another organiser, but not against the one whose address is given.
    records = published(true, organiser) | published(false, trainer)
    assert believed(records, organiser, trainer) == true.record
    # The organiser of an earlier start is believed last: a false trainer may have vouched for it.
    assert believed(records, organiser, known=stranger) == true.record
    assert believed(records, trainer, known=organiser) == false.record
    assert believed(records, known=organiser) == true.record
    assert believed(records, trainer) == false.record
    # A damaged record hides no other.
    records = {b"no owner": true.record, b"[owner:x]": true.record, "text": 1} | published(true, trainer)
    assert believed(records, trainer) == true.record


def test_the_newest_settings_and_those_of_the_stated_run_are_believed(keys, monkeypatch):
    organiser, trainer, stranger = keys
    records, now = {}, time.time()
    for number, (run_id, publisher) in enumerate((("a", trainer), ("b", organiser), ("a", stranger))):
        monkeypatch.setattr(signed_settings, "run_time", lambda now=now + number: now)
        records |= published(RunConfig.sign({"run_id": run_id, "seq_length": number + 1}, organiser), publisher)
    for run_id, newest in (("a", 3), ("b", 2), (None, 3), ("c", 3)):
        assert choose(records, set(map(id_of, keys)), run_id=run_id).settings["seq_length"] == newest
    config = choose(records, {id_of(trainer)})
    assert config.settings["seq_length"] == 3, "whoever publishes them"
    assert config.publisher == id_of(trainer), "who vouches for the organiser"


@pytest.mark.parametrize(("signed_at", "valid"), [("9e15", False), ("NaN", False), ("+7200", False), ("+600", True)])
def test_settings_from_the_future_are_refused(keys, signed_at, valid):
    """They would outlast all that the organiser signs later."""
    value = time.time() + float(signed_at) if signed_at[0] == "+" else float(signed_at)
    record = signed(keys[0], SETTINGS, value)
    with contextlib.nullcontext() if valid else pytest.raises(ValueError, match="signed in the future"):
        assert RunConfig.parse(record, id_of(keys[0])).settings == SETTINGS


@pytest.fixture
def adopt(tmp_path, monkeypatch):
    """Return a function for the arguments of a trainer whose initial peer publishes these settings."""

    def adopt(published: RunConfig | None, *words: str) -> Entry:
        monkeypatch.setattr(adoption, "visit_run", lambda *_: published)
        return find_run_config(parse("--initial_peers", PUBLIC, "--output_dir", str(tmp_path), *words), stop=None)

    return adopt


def test_another_organiser_than_before_is_named(keys, adopt, caplog):
    for key, text in ((keys[0], ""), (keys[0], ""), (keys[1], "The organiser has changed: it was")):
        caplog.clear()
        adopt(RunConfig.sign(SETTINGS, key))
        assert (text in caplog.text) and ("has changed" in caplog.text) == bool(text)


def test_a_run_without_settings_needs_the_flags(adopt, monkeypatch):
    with pytest.raises(TemporaryError, match="^the initial peers publish no settings of a run; .*pass --run_id.*$"):
        adopt(None)
    monkeypatch.setenv("RANK", "0")
    entry = adopt(None, "--run_id", "mine")
    assert entry.arguments[2].run_id == "mine" and entry.adopted == NOTHING
    assert "RANK" not in os.environ, "accelerate would wait in C for a second rank"


@pytest.fixture
def find_as_monitor(keys, tmp_path, monkeypatch):
    """Return a function for what a monitor finds that joins through a peer, and for its output folder.

    :param published: what this peer publishes; None: nothing, an error: it does not answer
    """

    def find(published: RunConfig | TemporaryError | None, *words: str, via: RSAPrivateKey = keys[0]):
        def visit(*_):
            if isinstance(published, Exception):
                raise published
            return published

        monkeypatch.setattr(adoption, "visit_run", visit)
        address = f"/ip4/127.0.0.1/tcp/1/p2p/{id_of(via)}"
        line = ArgumentParser(MONITOR_ARGUMENTS, "test").parse(
            ["--initial_peers", address, "--output_dir", str(tmp_path), *words]
        )
        entry = find_run_config(line, stop=None, is_monitor=True)
        return entry.arguments, entry.config, entry.is_organiser, entry.is_alone, entry.adopted.names

    return find


SILENCE = TemporaryError("none of --initial_peers answers")


def test_monitor_takes_the_settings_and_relays_them(find_as_monitor, keys):
    config = RunConfig.sign({**SETTINGS, "page": "https://example.org/curves", "ends_at": "2100-01-02"}, keys[0])
    (_, run_args, peer_args), relayed, *state, names = find_as_monitor(config)
    assert (peer_args.run_id, peer_args.page, run_args.learning_rate) == ("tree", "https://example.org/curves", 0.01)
    assert run_args.gradient_compression == "blockwise8" and peer_args.ends_at == "2100-01-02"
    assert "learning_rate" in names and relayed is config and state == [False, False]
    _, relayed, *state, _ = find_as_monitor(config, "--learning_rate", "0.01", "--page", "https://example.org/mine")
    assert relayed is config and state == [False, False], "equal flags, and optional ones"
    with pytest.raises(UserError, match=r"--learning_rate is 0\.02 here and 0\.01 in run tree: drop the flag"):
        find_as_monitor(config, "--learning_rate", "0.02")


def test_monitor_whose_peers_do_not_answer(find_as_monitor, keys):
    """It continues with settings that these peers had before, and otherwise begins the run that its flags state."""
    with pytest.raises(TemporaryError, match="none of --initial_peers answers"):
        find_as_monitor(SILENCE)
    _, config, *state, _ = find_as_monitor(SILENCE, "--model_name_or_path", "albert-tiny")
    assert config is None and state == [True, True]
    known = RunConfig.sign(SETTINGS, keys[0])
    find_as_monitor(known)
    (_, run_args, peer_args), config, *state, _ = find_as_monitor(SILENCE)
    assert (peer_args.run_id, run_args.learning_rate) == ("tree", 0.01) and config == known and state == [False, True]
    with pytest.raises(UserError, match="--learning_rate"):
        find_as_monitor(SILENCE, "--learning_rate", "0.02")
    with pytest.raises(TemporaryError, match="none of"):
        find_as_monitor(SILENCE, via=keys[1])  # the kept settings may be of another run
    vouched = dataclasses.replace(known, publisher=id_of(keys[2]))
    find_as_monitor(vouched, via=keys[2])
    assert find_as_monitor(SILENCE, via=keys[2])[1] == vouched


@pytest.mark.parametrize(("words", "is_organiser"), [(("--run_id", "own"), False), (("--run_config", "FILE"), True)])
def test_monitor_of_a_run_without_settings_states_them(find_as_monitor, tmp_path, words, is_organiser):
    (tmp_path / "run.yaml").write_text("run_id: own\n", encoding="utf-8")
    with pytest.raises(TemporaryError, match="publish no settings of a run; try again later, or pass --run_id"):
        find_as_monitor(None, "--learning_rate", "0.02")
    words = [word.replace("FILE", str(tmp_path / "run.yaml")) for word in words]
    (*_, peer_args), config, *state, _ = find_as_monitor(None, *words)
    assert (peer_args.run_id, config) == ("own", None) and state == [is_organiser, False]


def test_organisers_own_monitor_may_change_what_it_stated(find_as_monitor, tmp_path):
    key = load_identity(tmp_path / "identity.key")
    config = RunConfig.sign(SETTINGS, key)
    (tmp_path / "run.yaml").write_text("run_id: tree\nlearning_rate: 0.02\n", encoding="utf-8")
    (_, run_args, _), own, *state, _ = find_as_monitor(config, "--run_config", str(tmp_path / "run.yaml"))
    assert run_args.learning_rate == 0.02 and not run_args.local_updates and own is None and state == [True, False]
    (_, run_args, _), own, *state, _ = find_as_monitor(config)
    assert run_args.learning_rate == 0.01 and run_args.local_updates and own is config and state == [False, False]


def test_monitor_without_checkpoints_needs_no_model(find_as_monitor, keys):
    for settings in ({signed_settings.TASK: "0" * 64}, {"from_pretrained": True, "model_name_or_path": None}):
        config = RunConfig.parse(signed(keys[0], {**SETTINGS, **settings}), id_of(keys[0]))
        with pytest.raises(UserError, match="ask "):
            find_as_monitor(config)
        assert find_as_monitor(config, "--no_store_checkpoints")[1] is config


def test_kept_settings_that_are_damaged_are_set_aside(find_as_monitor, keys, tmp_path):
    find_as_monitor(RunConfig.sign(SETTINGS, keys[0]))
    kept = json.loads((tmp_path / signed_settings.KEPT_FILE).read_text(encoding="utf-8"))
    altered = bytes.fromhex(kept["record"]).replace(b"0.01", b"0.09").hex()
    for content in ("", "[]", "{}", json.dumps({**kept, "record": altered}), json.dumps({**kept, "record": "80"})):
        (tmp_path / signed_settings.KEPT_FILE).write_text(content, encoding="utf-8")
        with pytest.raises(TemporaryError, match="none of"):
            find_as_monitor(SILENCE)


def test_trainer_without_initial_peers_is_the_organiser(keys, adopt, caplog):
    peer = SimpleNamespace(private_key=keys[0])
    words = ["--run_id", "tree", "--learning_rate", "0.01", "--dataset_url", "https://example.org/data.tar.gz"]
    line = parse(*words)
    config = RunConfigRelay.of_run(peer, TrainerOptions(*line.arguments, NOTHING)).config
    *_, taken, _ = adopt(config).arguments
    assert config.organiser == id_of(keys[0]) and taken.run_id == "tree"
    refuse_differences(config, line.arguments)
    line = parse(*words[:-1], "https://me:hunter2@example.org/data.tar.gz")
    assert RunConfigRelay.of_run(peer, TrainerOptions(*line.arguments, NOTHING)).config is None
    assert "Newcomers need the flags of this trainer" in caplog.text and "hunter2" not in caplog.text


@pytest.mark.parametrize(
    ("url", "is_public"),
    [
        ("https://example.org/data.tar.gz", True),
        ("https://example.org/data.tar.gz?dl=1&rlkey=x", True),
        ("https://me:hunter2@example.org/data.tar.gz", False),
        ("https://hunter2@example.org/data.tar.gz", False),
        ("https://example.org/data.tar.gz?X-Amz-Algorithm=a&X-Amz-Signature=hunter2", False),
        ("https://example.org/data.tar.gz?Expires=1&Signature=hunter2&Key-Pair-Id=x", False),
        ("https://example.org/data.tar.gz?se=x&sig=hunter2", False),
        ("https://example.org/data.tar.gz?access_token=hunter2", False),
    ],
)
def test_no_credentials_are_published(keys, url, is_public):
    for check in (partial(RunConfig.sign, private_key=keys[0]), check_safe):
        with contextlib.nullcontext() if is_public else pytest.raises(UserError, match="--dataset_url has a") as info:
            check({**SETTINGS, "dataset_url": url})
        assert is_public or ("hunter2" not in str(info.value) and str(info.value).isprintable())


@pytest.mark.parametrize("name", ["/etc/x", "../x", "a/b/c", "https://example.org/x", "data/tokenizer"])
def test_model_of_a_run_is_no_path(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("data/tokenizer").mkdir(parents=True)
    with pytest.raises(UserError, match="is not a name: refused"):
        check_safe({"model_name_or_path": name})
    check_safe({"model_name_or_path": "name/model"})


@pytest.mark.parametrize(
    ("name", "value", "fault"),
    [
        ("learning_rate", -1, "must be above 0"),
        ("optimizer", "sgd", "invalid choice"),
        ("total_steps", "x", "not a number"),
        ("page", "https://a/ [click](x)", "must be an address"),
        ("dataset_url", "file:///etc/passwd", "must be an http"),
        ("dataset_url", "http://127.0.0.1\\@8.8.8.8/x", "must be an http"),
        ("dataset_url", "http://127.0.0.1/\x7f", "must be an http"),
        ("averaging_timeout", 1e9, "must be at most 7200"),  # a trainer that hangs ends after this time
        *((name, math.inf, "must be at most") for name in ("weight_decay", "clamp_value", "max_grad_norm")),
    ],
)
def test_wrong_settings_are_named_as_those_of_the_run(capsys, name, value, fault):
    with pytest.raises(SystemExit) as exit_info:
        parse("--initial_peers", PUBLIC).with_settings({name: value})
    assert exit_info.value.code == 2
    assert re.search(f"the settings of the run: (argument )?--{name}.* {fault}", capsys.readouterr().err)


def test_data_that_is_there_needs_no_address(keys):
    config = RunConfig.sign({**SETTINGS, "dataset_url": "https://example.org/x", "matchmaking_time": 9.0}, keys[0])
    refuse_differences(config, parse().with_settings(SETTINGS))


@pytest.mark.parametrize(
    ("of_the_run", "own", "fault"),
    [
        ("one", "one", None),
        (None, None, None),
        ("one", "other", "is another version, SHA-256 .*: ask the organiser for the file, read it, and pass --task"),
        ("one", None, "--task is missing; run tree has the task with SHA-256"),
        (None, "one", "run tree trains a language model, without a task of its own: drop the flag"),
    ],
)
def test_all_peers_have_the_same_task(keys, tmp_path, adopt, of_the_run, own, fault):
    (tmp_path / "mine.py").write_text(own or "", encoding="utf-8")
    digest = {} if of_the_run is None else {signed_settings.TASK: hashlib.sha256(of_the_run.encode()).hexdigest()}
    task = [] if own is None else ["--task", str(tmp_path / "mine.py")]
    with contextlib.nullcontext() if fault is None else pytest.raises(UserError, match=fault):
        adopt(RunConfig.sign({**SETTINGS, **digest}, keys[0]), *task)


def test_signal_during_the_visit_ends_the_script_after_it():
    with StopSignal(grace=1e6) as stop:
        with pytest.raises(SystemExit) as exit_info, stop.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(stop.event.is_set, 10, "the signal")
        assert exit_info.value.code == 0
    with StopSignal(grace=1e6), pytest.raises(SystemExit):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)


def test_another_protocol_is_refused(keys, adopt):
    """Its settings may have names of which this version knows nothing."""
    record = signed(keys[0], {**SETTINGS, "lr_schedule": "cosine"}, protocol=PROTOCOL + 1)
    with pytest.raises(UserError, match=f"the run has protocol {PROTOCOL + 1}, this checkout {PROTOCOL}"):
        adopt(RunConfig.parse(record, id_of(keys[0])))


def test_each_flag_of_the_run_is_published_and_fits_into_a_record(keys):
    """The flags of these groups are equal on all peers, but for those that are named here."""
    line = ArgumentParser(MONITOR_ARGUMENTS, "test").parse(["--run_config", "configs/run.yaml"])
    everything = {name: getattr(args, name) for args in line.arguments for name in signed_settings.SETTINGS
                  if hasattr(args, name)}  # fmt: skip
    assert everything.keys() == set(signed_settings.SETTINGS)
    everything[signed_settings.TASK] = "0" * 64
    of_the_run = (Hyperparameters, ModelArguments, StepSettings)
    local = {"task", "tokenizer_path", "cache_dir"}
    flags = {option.name for dataclass_type in of_the_run for option in dataclasses.fields(dataclass_type)}
    assert (
        flags == (signed_settings.SETTINGS - find_settings([BaseTrainingArguments]) - {signed_settings.TASK}) | local
    )
    large = {"dataset_url": "https://example.org/" + "x" * 200, "model_name_or_path": "configs/albert-large-v2.json"}
    config = RunConfig.sign({**everything, **large}, keys[0])
    assert sum(map(len, config.record.values())) < 3000  # the subkey of 500 bytes comes on top


FIELDS = {"model_type": "albert"}


@pytest.mark.parametrize(
    ("fields", "fault"),
    [
        ({"hidden_act": "me/kernel"}, "'hidden_act' is 'me/kernel'"),
        ({"hidden_size": 10**7, "num_attention_heads": 1}, " GB; this machine has"),
        ({"hidden_size": 10**8}, "out of bounds"),
        ({"hidden_size": -(10**8)}, "out of bounds"),
        ({"hidden_size": -64}, "cannot be built"),
        ({"initializer_range": float("nan")}, "out of bounds"),
        ({"hidden_size": {"x": 1}}, "expected int"),
        ({"model_type": ["llama"]}, "supported are"),
        ({"num_hidden_groups": 200, "inner_group_num": 200, "num_hidden_layers": 1}, "more than 20000 modules"),
        ({"model_type": "llama", "num_hidden_layers": 10**5}, "'num_hidden_layers' is 100000"),
        ({"model_type": "qwen2_moe", "num_experts": 10**6, "num_hidden_layers": 1}, " GB; this machine has"),
        ({"model_type": "llama", "rope_parameters": {"rope_theta": float("nan")}}, "'rope_parameters' is"),
        ({"model_type": "llama", "num_hidden_layers": 1e5}, "'num_hidden_layers' is 100000"),
        ({"model_type": "gpt_neo", "attention_types": [[["global"], 10**6]]}, "'attention_types' is"),
        ({"model_type": "gpt2", "n_positions": 10**6}, "its position embeddings have 3,072 MB"),
        ({"model_type": "distilbert", "max_position_embeddings": 10**6, "sinusoidal_pos_embds": True}, "3,072 MB"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M" * 300}, "'hybrid_override_pattern' is"),
        ({"model_type": "gemma3", "vision_config": {"model_type": "timm_wrapper"}}, "'vision_config' is"),
        ({"model_type": "gemma3", "text_config": {"num_hidden_layers": 10**5}}, "'text_config' is"),
        ({"text_config": {"hidden_size": 64}}, "is not valid"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "me/code"}}, "'rope_parameters' is"),
        ({"model_type": "llama", "rope_parameters": {"me/code": 1}}, "'rope_parameters' is"),
        ({"model_type": "llama", "rope_parameters": {"rope_type": "no_such_type"}}, "cannot be built"),
        ({"model_type": "llama", "rope_parameters": {"factor": [[[[[1.0]]]]]}}, "'rope_parameters' is"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"] * 1000}, "'layer_types' is"),
        ({"eos_token_id": [10**8]}, "'eos_token_id' is"),
        ({"hidden_size": "64"}, "expected int"),
        ({"model_type": "t5"}, "a t5 model; supported are"),
        ({"hidden_size": 10**6, "num_attention_heads": 1}, " GB; this machine has"),
        ({"hidden_size": 7}, "cannot be built"),
        ({"hidden_act": "no_such_function"}, "cannot be built"),
    ],
)
def test_hostile_model_configurations_are_refused(fields, fault):
    with pytest.raises(UserError, match=re.escape(fault)) as error:
        check_size(read_config(json.dumps({**FIELDS, **fields})))
    assert "\n" not in str(error.value)


def test_model_of_a_run_that_could_not_be_trained_here_is_refused(monkeypatch):
    """Its weights fit, but their gradients and statistics do not: a volunteer's machine ran out of memory."""
    config = read_config(json.dumps(FIELDS))
    num_bytes = 4 * sum(weights.numel() for weights in build_without_weights(config).parameters())
    memory = SimpleNamespace(total=2 * num_bytes)
    monkeypatch.setattr("cotrain.models.model.psutil", SimpleNamespace(virtual_memory=lambda: memory))
    check_size(config)
    with pytest.raises(UserError, match="training the model takes"):
        check_size(config, is_foreign=True)
    memory.total = 5 * num_bytes
    check_size(config, is_foreign=True)


def test_fields_that_load_code_are_ignored():
    """Also by another name of theirs, or if a method or a name of a file has the same."""
    code = json.loads("""{"auto_map": {"AutoModel": "x--y.Z"}, "attn_implementation": "me/k",
       "_attn_implementation": "eager", "experts_implementation": "me/k", "quantization_config": {"quant_method": "x"},
       "_name_or_path": "me/x", "attribute_map": {"hidden": "_attn_implementation"}, "hidden": "me k", "dtype": "load",
       "name_or_path": "x", "to_dict": "x", "extra_files": ["x"], "transformers_weights": "x",
       "num_labels": 1000000000}""")
    for model_type in ("albert", "llama", "modernbert", "gemma3"):
        text = {"text_config": code} if model_type == "gemma3" else {}
        config = read_config(json.dumps({"model_type": model_type, **code, **text}))
        for part in (config, config.get_text_config()):
            assert not {"auto_map", "quantization_config", "transformers_weights", "extra_files"} & vars(part).keys()
            assert part._attn_implementation is None and part._experts_implementation is None
            assert part.dtype is None and part.name_or_path == "" and part.num_labels == 2
            assert "hidden" not in part.attribute_map and isinstance(part.to_dict(), dict)


MAMBA = {"model_type": "mamba2", "hidden_size": 64, "num_heads": 8, "head_dim": 16, "num_hidden_layers": 2}


@pytest.mark.parametrize(
    "fields",
    [
        {"model_type": "llama", "max_position_embeddings": 2**20, "rope_theta": 10**11},
        {**MAMBA, "time_step_limit": [0.0, math.inf]},
        {**MAMBA, "time_step_limit": [0.0, {"__float__": "Infinity"}]},  # as transformers saves it
        {"model_type": "gpt_neo", "attention_types": [[["global", "local"], 1]], "num_layers": 2},
        {"model_type": "opt", "prefix": "</s>", "task_specific_params": {"x": {"prefix": "translate: "}}},
        {"model_type": "albert", "license": "https://example.org/x", "model_max_length": 10**30, "x": {"<|a/b|>": 1}},
    ],
)
def test_what_costs_no_memory_is_accepted(fields, tmp_path):
    """A large number of positions, infinity, texts that no code reads."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(fields), encoding="utf-8")
    published = to_published_model(str(path))
    assert read_config(published).to_dict() == read_config(str(path)).to_dict()
    build_without_weights(read_config(published))


def test_configuration_that_is_too_long_for_a_name_stays_as_it_is():
    published = to_published_model(json.dumps({"model_type": "albert", "x": ["abc"] * 100}))
    assert len(published) > 300 and to_published_model(published) == published


def test_settings_are_stored_three_times_in_their_lifetime(keys, monkeypatch):
    """A trainer publishes them with each of its records, a monitor with each read of the trainers' records."""
    config, clock, stored = RunConfig.sign(SETTINGS, keys[0]), SimpleNamespace(now=0.0), []
    monkeypatch.setattr(relay, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(relay, "store_record", lambda *args: stored.append((clock.now, args[3], args[4])))
    sender = RunConfigRelay(SimpleNamespace(dht=None, public_key=b"key"), config, lifetime=600.0)
    for clock.now in map(float, range(0, 1200, 5)):
        if clock.now == 450.0:
            sender.config = RunConfig.sign({**SETTINGS, "page": "https://example.org"}, keys[0])
        sender.publish()
    assert [(now, lifetime) for now, _, lifetime in stored] == [
        (now, 600.0) for now in (0.0, 200.0, 400.0, 450.0, 650.0, 850.0, 1050.0)
    ]
    assert stored[3][1] == sender.config.record, "changed settings are published at once"
