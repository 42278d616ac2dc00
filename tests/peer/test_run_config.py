"""Tests of the settings that an organiser publishes, without peers."""

import json
import os
import signal
import time

import pytest
from hivemind.dht.crypto import RSASignatureValidator
from hivemind.utils.crypto import RSAPrivateKey

from arguments import TRAINER_ARGUMENTS
from lib.averaging.rounds import PROTOCOL
from lib.common.argument_parser import ArgumentParser
from lib.common.errors import UserError
from lib.common.processes import StopSignal
from lib.peer import run_config
from lib.peer.invitations import peer_id_of
from lib.peer.run_config import RunConfig, RunConfigError, check_protocol, choose, refuse_differences
from run_training_monitor import ARGUMENTS as MONITOR_ARGUMENTS
from tests.support.peers import wait_until

SETTINGS = {"run_id": "tree", "learning_rate": 0.01, "local_updates": True, "gradient_compression": "uniform8"}
LOOPBACK = "/ip4/127.0.0.1/tcp/1/p2p/QmRgnx8Tgb2B3b9i7XfeAVDiD4z7hNrmXEUWgSAFZYVGVV"
PUBLIC, PRIVATE = LOOPBACK.replace("127.0.0.1", "8.8.4.4"), LOOPBACK.replace("127.0.0.1", "192.168.1.2")


@pytest.fixture(scope="module")
def keys() -> list[RSAPrivateKey]:
    return [RSAPrivateKey() for _ in range(3)]


def id_of(key: RSAPrivateKey):
    return peer_id_of(key.get_public_key())


def published(config: RunConfig, publisher: RSAPrivateKey) -> dict[bytes, object]:
    return {RSASignatureValidator(publisher).local_public_key: config.record}


def parse(*words: str):
    return ArgumentParser(TRAINER_ARGUMENTS, "test").parse_line(words)


def test_signed_settings_are_read_as_they_were_stated(keys):
    config = RunConfig.parse(RunConfig.sign({**SETTINGS, "output_dir": "x", "refresh_period": 3}, keys[0]).record)
    assert config.settings == SETTINGS and config.protocol == PROTOCOL and config.organiser == id_of(keys[0])


def test_a_model_in_a_file_is_not_published(keys):
    for path in ("../config.json", "/etc/passwd", "my models/x", "~/config.json"):
        assert RunConfig.sign({**SETTINGS, "model_name_or_path": path}, keys[0]).settings["model_name_or_path"] is None
    for name in ("albert-tiny", "name/model.v2"):
        assert RunConfig.sign({**SETTINGS, "model_name_or_path": name}, keys[0]).settings["model_name_or_path"] == name


def test_altered_settings_are_refused(keys):
    record = RunConfig.sign(SETTINGS, keys[0]).record
    for change in (
        {"text": record["text"].replace("0.01", "0.02")},
        {"public_key": keys[1].get_public_key().to_bytes()},
        {"signature": b"x"},
        {"signature": None},
    ):
        with pytest.raises(RunConfigError):
            RunConfig.parse({**record, **change})
    for record in (None, [], {}, {"text": 1}, b"\xc1"):
        with pytest.raises(RunConfigError):
            RunConfig.parse(record)


@pytest.mark.parametrize(
    "settings",
    [
        {"learning_rate": 1.0},  # no run ID
        {**SETTINGS, "output_dir": "/tmp"},
        {**SETTINGS, "initial_peers": LOOPBACK},
        {**SETTINGS, "dataset_url": "--debug"},
        {**SETTINGS, "dataset_url": "http://a\nb"},
        {**SETTINGS, "optimizer": ["lamb", "--debug"]},
        {**SETTINGS, "optimizer": {"a": 1}},
        [],
    ],
)
def test_signed_text_with_anything_but_settings_is_refused(keys, settings):
    text = json.dumps({"protocol": PROTOCOL, "time": 0.0, "settings": settings})
    public_key = keys[0].get_public_key().to_bytes()
    with pytest.raises(RunConfigError):
        RunConfig.parse({"text": text, "public_key": public_key, "signature": keys[0].sign(text.encode())})


def test_the_organisers_peer_id_is_believed_before_what_a_trainer_relays(keys):
    organiser, trainer, stranger = keys
    true, false = RunConfig.sign(SETTINGS, organiser), RunConfig.sign({**SETTINGS, "learning_rate": 9.0}, stranger)
    records = published(true, trainer) | published(false, stranger)
    assert choose(records, {id_of(organiser)}) == (true, id_of(trainer))
    assert choose(records, {id_of(trainer)}) == (true, id_of(trainer))
    assert choose(records, set()) is None
    # A trainer that is asked may vouch for another organiser, but not against the one whose address is given.
    records = published(true, organiser) | published(false, trainer)
    assert choose(records, {id_of(organiser), id_of(trainer)})[0] == true
    assert choose(records, {id_of(trainer)})[0] == false


def test_the_newest_settings_of_an_organiser_are_believed(keys, monkeypatch):
    monkeypatch.setattr(run_config.time, "time", lambda: 1.0)
    old = RunConfig.sign({**SETTINGS, "learning_rate": 9.0}, keys[0])
    monkeypatch.setattr(run_config.time, "time", lambda: 2.0)
    new = RunConfig.sign(SETTINGS, keys[0])
    records = published(old, keys[1]) | published(new, keys[0])
    assert choose(records, {id_of(keys[0]), id_of(keys[1])})[0] == new


def test_a_damaged_record_hides_no_other(keys):
    good = RunConfig.sign(SETTINGS, keys[0])
    records = {b"no owner": good.record, b"[owner:x]": good.record, "text": 1} | published(good, keys[1])
    assert choose(records, {id_of(keys[1])})[0] == good


@pytest.mark.parametrize(
    ("host", "initial_peer", "is_safe"),
    [
        ("203.0.113.7", PUBLIC, False),  # reserved for documentation
        ("8.8.8.8", PUBLIC, True),
        ("127.0.0.1", PUBLIC, False),
        ("127.0.0.1", PRIVATE, False),
        ("127.0.0.1", LOOPBACK, True),
        ("192.168.1.7", PUBLIC, False),
        ("192.168.1.7", PRIVATE, True),
        ("10.0.0.7", LOOPBACK, True),
        ("169.254.169.254", PRIVATE, False),
        ("[::1]", PUBLIC, False),
        ("[::ffff:127.0.0.1]", PUBLIC, False),
        ("localhost", PUBLIC, False),
    ],
)
def test_data_is_not_fetched_from_a_private_network_of_the_volunteer(keys, host, initial_peer, is_safe):
    config = RunConfig.sign({**SETTINGS, "dataset_url": f"http://{host}/data.tar.gz"}, keys[0])
    if is_safe:
        config.check_safe([initial_peer])
    else:
        with pytest.raises(UserError, match="not on the internet"):
            config.check_safe([initial_peer])


@pytest.mark.parametrize("setting", [{"dataset_url": "file:///etc/passwd"}, {"model_name_or_path": "/etc/x"}])
def test_other_addresses_and_paths_are_refused(keys, setting):
    text = json.dumps({"protocol": PROTOCOL, "time": 0.0, "settings": {**SETTINGS, **setting}})
    public_key = keys[0].get_public_key().to_bytes()
    config = RunConfig.parse({"text": text, "public_key": public_key, "signature": keys[0].sign(text.encode())})
    with pytest.raises((UserError, ValueError)):
        config.check_safe([PUBLIC])


def test_settings_become_checked_arguments():
    line = parse("--initial_peers", PUBLIC, "--seed", "7")
    assert line.stated == {"initial_peers", "seed"}
    training_args, _, collaboration_args, *_ = line.with_settings(SETTINGS)
    assert (training_args.learning_rate, training_args.local_updates, training_args.seed) == (0.01, True, 7)
    assert (collaboration_args.run_id, collaboration_args.gradient_compression) == ("tree", "uniform8")
    assert collaboration_args.initial_peers == [PUBLIC]


@pytest.mark.parametrize("setting", [{"learning_rate": -1}, {"optimizer": "sgd"}, {"total_steps": "x"}])
def test_wrong_settings_are_named_as_those_of_the_run(capsys, setting):
    with pytest.raises(SystemExit) as exit_info:
        parse("--initial_peers", PUBLIC).with_settings(setting)
    assert exit_info.value.code == 2
    assert (
        f"the settings of the run: {'argument ' if 'learning_rate' not in setting else ''}--"
        in capsys.readouterr().err
    )


def test_a_flag_that_differs_is_refused_with_both_values(keys):
    config = RunConfig.sign({**SETTINGS, "dataset_url": "https://example.org/x", "matchmaking_time": 9.0}, keys[0])
    refuse_differences(
        config, parse("--run_id", "tree").with_settings(SETTINGS)
    )  # data that is there needs no address
    with pytest.raises(UserError, match=r"--learning_rate is 0\.02 here and 0\.01 in run tree"):
        refuse_differences(config, parse("--run_id", "tree", "--learning_rate", "0.02").arguments)


def test_page_is_adopted_and_may_differ(keys, capsys):
    page = "https://huggingface.co/spaces/me/my-albert"
    config = RunConfig.sign({**SETTINGS, "page": page}, keys[0])
    (args,) = [args for args in parse("--run_id", "tree").with_settings(config.settings) if hasattr(args, "page")]
    assert args.page == page
    refuse_differences(config, parse("--run_id", "tree", "--page", "http://localhost:7860").with_settings(SETTINGS))
    with pytest.raises(SystemExit):
        parse("--run_id", "tree").with_settings({"page": "https://example.org/ [click](x)"})
    assert "the settings of the run: --page must be an address" in capsys.readouterr().err


def test_signal_during_the_visit_ends_the_script_after_it():
    with StopSignal(grace=1e6) as stop:
        with pytest.raises(SystemExit) as exit_info, stop.deferred():
            os.kill(os.getpid(), signal.SIGTERM)
            wait_until(stop.event.is_set, 10, "the signal")
        assert exit_info.value.code == 0
        stop._requested = False
        with pytest.raises(SystemExit):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(10)


def test_another_protocol_is_refused(keys):
    config = RunConfig.sign(SETTINGS, keys[0])
    check_protocol(config)
    with pytest.raises(UserError, match="this checkout is older"):
        check_protocol(RunConfig(config.settings, PROTOCOL + 1, config.organiser, 0.0, {}))


def test_file_of_settings(tmp_path, capsys):
    path = tmp_path / "run.yaml"
    path.write_text("run_id: tree\nlocal_updates: true\nlearning_rate: 0.5\n")
    parser = ArgumentParser(MONITOR_ARGUMENTS, "test")
    line = parser.parse_line(["--run_config", str(path), "--learning_rate", "0.25"])
    assert line.values["run_id"] == "tree" and line.values["local_updates"] is True
    assert line.values["learning_rate"] == 0.25, "the command line has the last word"
    for content in ("run_id", "- a", "no_such_flag: 1", "run_id: {a: 1}", "run_id: -x", "a: [", "run_id:"):
        path.write_text(content)
        with pytest.raises(SystemExit):
            parser.parse_line(["--run_config", str(path)])
        error = capsys.readouterr().err
        assert "--run_config" in error and error.count("\n") == 1, error
    with pytest.raises(SystemExit):
        parser.parse_line(["--run_config", str(tmp_path / "none.yaml")])
    assert "none.yaml" in capsys.readouterr().err


def test_example_file_is_valid_and_fits_into_a_record(keys):
    line = ArgumentParser(MONITOR_ARGUMENTS, "test").parse_line(["--run_config", "configs/run.yaml"])
    everything = {name: getattr(args, name) for args in line.arguments for name in run_config.SETTINGS
                  if hasattr(args, name)}  # fmt: skip
    assert everything.keys() == set(run_config.SETTINGS)
    config = RunConfig.sign({**everything, "dataset_url": "https://example.org/" + "x" * 200}, keys[0])
    assert sum(map(len, config.record.values())) < 3500
