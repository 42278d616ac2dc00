"""Command lines: older examples, invalid ones, and --help."""

import contextlib
import math
import subprocess
import sys
from dataclasses import fields

import pytest

import run_evaluator
import run_training_monitor
from arguments import TRAINER_ARGUMENTS, ProgressTrackerArguments
from cotrain.common.argument_parser import expand_home, parse_arguments
from cotrain.common.flags import ArgumentsError, endpoint_to_maddrs
from cotrain.options import TRAINER_OPTIONS
from invite import InvitationArguments, RevocationArguments
from run_local_demo import DemoArguments
from tests.support.processes import ROOT
from tokenize_wikitext103 import TokenizationArguments

PEER_ID = "QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"
PEER = f"/ip4/203.0.113.1/tcp/31337/p2p/{PEER_ID}"
FIXED = "--host_maddrs /ip4/0.0.0.0/tcp/31337"
SCRIPTS = {
    "run_trainer.py": TRAINER_ARGUMENTS,
    "run_custom_trainer.py": TRAINER_ARGUMENTS,
    "run_training_monitor.py": run_training_monitor.ARGUMENTS,
    "run_evaluator.py": run_evaluator.ARGUMENTS,
    "run_local_demo.py": (DemoArguments,),
    "invite.py": (InvitationArguments,),
    "invite.py revoke": (RevocationArguments,),
    "tokenize_wikitext103.py": (TokenizationArguments,),
}


def parse(script: str, command: str):
    return parse_arguments(SCRIPTS[script], "a script", command.split())


# The command lines of the documents of the older examples, with addresses instead of their placeholders.
CLIENT = f"""run_trainer.py --client_mode --initial_peers {PEER} --averaging_expiration 10 --statistics_expiration 120
--batch_size_lead 200 --per_device_train_batch_size 4 --gradient_accumulation_steps 1 --logging_first_step
--logging_steps 100 --output_dir ./outputs --overwrite_output_dir --logging_dir ./logs
--experiment_prefix albert-wikitext-v11 --seed 42"""
OLD_COMMANDS = f"""
tokenize_wikitext103.py
run_training_monitor.py --wandb_project YOUR_WANDB_PROJECT
run_training_monitor.py --dht_listen_on [::]:* --experiment_prefix my-albert-v1 --wandb_project Demo-run
run_training_monitor.py --listen_on [::]:1337
run_training_monitor.py --store_checkpoints --repo_url https://huggingface.co/me/my-albert --upload_interval 43200
run_trainer.py
run_trainer.py --initial_peers {PEER} --per_device_train_batch_size 4
run_trainer.py --initial_peers /dns4/x.tcp.ngrok.io/tcp/12345/p2p/{PEER_ID}
run_trainer.py --dataset_path ./path/to/unpacked/data --tokenizer ./path/to/tokenizer/config
run_trainer.py --model_name_or_path=bert-base-uncased
{CLIENT.replace(chr(10), " ")}
""".strip().splitlines()


@pytest.mark.parametrize("command", OLD_COMMANDS)
def test_command_lines_of_older_documents_parse(command):
    assert parse(*command.partition(" ")[::2])


OLD_CONFIG = "https://s3.amazonaws.com/models.huggingface.co/bert/albert-large-v2-config.json"
OTHER = PEER.replace(".1/", ".2/")


@pytest.mark.parametrize(
    ("script", "command", "expected"),
    [
        ("run_trainer.py", "--experiment_prefix=x --averaging_expiration 10", {"run_id": "x", "matchmaking_time": 10}),
        ("run_trainer.py", "--dht_listen_on [::]:7", {"host_maddrs": ["/ip4/0.0.0.0/tcp/7", "/ip6/::/tcp/7"]}),
        ("run_trainer.py", f"--model_config_path {OLD_CONFIG}", {"model_name_or_path": "albert-large-v2"}),
        ("run_trainer.py", "", {"gradient_compression": "float16", "state_compression": "float16"}),
        ("run_trainer.py", "--averaging_compression=blockwise8",
         {"gradient_compression": "blockwise8", "state_compression": "float16"}),
        ("run_trainer.py", f"--initial_peers {PEER},{PEER}", {"initial_peers": [PEER, PEER], "trusted_relays": []}),
        ("run_trainer.py", f"--use_auto_relay --initial_peers {PEER}", {"trusted_relays": [PEER]}),
        ("run_trainer.py", f"--use_auto_relay --initial_peers {PEER} --trusted_relays {OTHER}",
         {"trusted_relays": [OTHER]}),
        ("run_trainer.py", f"--dataset_url https://x.org/a --dataset_sha256 {'AB' * 32}",
         {"dataset_sha256": "ab" * 32}),
        ("run_trainer.py", f"--dataset_url https://x.org/a --dataset_head_sha256 {'AB' * 32}",
         {"dataset_head_sha256": "ab" * 32}),
        ("run_trainer.py", "", {"end_time": math.inf}),
        ("run_trainer.py", "--ends_at 2100-01-02T12:30", {"end_time": 4102576200.0}),  # in UTC
        ("run_trainer.py", "--ends_at 2100-01-02T12:30+02:00", {"end_time": 4102569000.0}),
        ("run_training_monitor.py", "--wandb_project x", {"report_to": "wandb"}),
        ("run_training_monitor.py", "--space_id https://huggingface.co/spaces/me/my-albert",
         {"report_to": "trackio", "space_id": "me/my-albert"}),
        ("run_training_monitor.py", "--repo_url https://huggingface.co/me/my-albert", {"repo_id": "me/my-albert"}),
        ("run_training_monitor.py", "--repo_url https://hf.co/me/my-albert.git", {"repo_id": "me/my-albert"}),
        ("run_training_monitor.py", "--repo_id me/my-albert/", {"repo_id": "me/my-albert"}),
        ("tokenize_wikitext103.py", "--tokenizer some/tokenizer", {"tokenizer": "some/tokenizer"}),
    ],
)  # fmt: skip
def test_values_that_a_command_leads_to(script, command, expected):
    arguments = parse(script, command)
    found = {name: getattr(args, name) for args in arguments for name in expected if hasattr(args, name)}
    assert found == expected


@pytest.mark.parametrize(
    "pasted",
    [
        f"'{PEER}',\n“{OTHER}”\n",
        f"--initial_peers [{PEER}]  {OTHER}",
        f"{PEER},{OTHER},",
        f"Join us - all of you: ({PEER}); {OTHER}.",
        f"initial_peers: {PEER.replace('/p2p/', '/p2p/' + chr(10))}\\ {OTHER}",
    ],
)
def test_addresses_may_be_pasted_with_what_is_around_them(pasted):
    arguments = parse_arguments(SCRIPTS["run_trainer.py"], "a script", ["--initial_peers", pasted])
    (found,) = (args.initial_peers for args in arguments if hasattr(args, "initial_peers"))
    assert found == [PEER, OTHER]


def test_each_old_flag_is_named_in_one_warning(capsys):
    parse("run_trainer.py", "--experiment_prefix=x --compression float16 --listen_on [::]:7 --logging_dir l")
    first, second, third, last = capsys.readouterr().err.splitlines()
    assert first == "warning: --experiment_prefix is now --run_id"
    assert second == "warning: --compression is now --gradient_compression"
    assert third == "warning: --listen_on is now --host_maddrs: /ip4/0.0.0.0/tcp/7 /ip6/::/tcp/7"
    assert last.startswith("warning: --logging_dir is ignored: ")


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        ("--evaluation_strategy steps --eval_steps 10", "is ignored: run_evaluator.py evaluates"),
        ("--report_to none --run_name x", "is ignored: the monitor draws"),
        ("--dataloader_pin_memory True", "is ignored: the trainer chooses"),
        ("--lr_scheduler_type cosine", "a flag of transformers' Trainer that has no counterpart here: leave it out"),
        ("--push_to_hub", "a flag of transformers' Trainer"),
        ("--max_steps 10", "pass --max_global_steps"),
    ],
)
def test_flags_of_transformers_are_explained(words, answer, capsys):
    with contextlib.nullcontext() if "ignored" in answer else pytest.raises(SystemExit):
        parse("run_trainer.py", words)
    assert answer in capsys.readouterr().err


@pytest.mark.parametrize("script", ["run_training_monitor.py", "run_evaluator.py"])
def test_flags_of_trainers_get_a_line_at_other_peers(script, capsys):
    parse(script, "--bandwidth 100 --client_mode --batch_size_lead=300 --run_id x")
    bandwidth, client_mode, lead = capsys.readouterr().err.splitlines()
    assert bandwidth == "warning: --bandwidth is ignored: only trainers take part in rounds"
    assert client_mode.startswith("warning: --client_mode is ignored: a monitor or evaluator works behind a firewall")
    assert "--tunnel ngrok or --announce_tunnel HOST:PORT" in client_mode and "--batch_size_lead" in lead
    _, _, collaboration, *_ = parse("run_trainer.py", "--bandwidth 100 --client_mode --batch_size_lead 300")
    assert (collaboration.bandwidth, collaboration.client_mode) == (100, True) and not capsys.readouterr().err


@pytest.mark.parametrize(
    ("endpoint", "maddrs"),
    [
        ("[::]:*", ["/ip4/0.0.0.0/tcp/0", "/ip6/::/tcp/0"]),
        ("0.0.0.0:1337", ["/ip4/0.0.0.0/tcp/1337"]),
        ("[::1]:7", ["/ip6/::1/tcp/7"]),
        ("example.org:80", ["/dns4/example.org/tcp/80"]),
    ],
)
def test_endpoints_become_multiaddresses(endpoint, maddrs):
    assert endpoint_to_maddrs("--dht_listen_on", endpoint) == maddrs


@pytest.mark.parametrize(
    ("script", "command", "culprit"),
    [
        ("run_trainer.py", "--initial_peers 18.224.82.24:31337", "/ip4/18.224.82.24/tcp/31337/p2p/PEER_ID"),
        ("run_trainer.py", "--initial_peers [::]:8081", "/ip4/203.0.113.1/tcp/31337/p2p/PEER_ID"),
        ("run_trainer.py", "--max_steps 100", "--max_global_steps"),
        ("run_trainer.py", "--nonsense", "--nonsense"),
        ("run_trainer.py", "--ends_at tomorrow", "2027-04-28T23:59"),
        ("run_trainer.py", "--ends_at 2020-04-28", "has ended at 2020-04-28"),
        ("run_trainer.py", "--learning_rat 1", "did you mean --learning_rate"),
        ("run_trainer.py", "--run_id a.b", "--run_id"),
        ("run_trainer.py", "--batch_size_lead 5000", "--batch_size_lead"),
        ("run_trainer.py", "--matchmaking_time 2", "--matchmaking_time"),
        ("run_trainer.py", "--warmup_steps 10 --total_steps 5", "--warmup_steps must be at most --total_steps 5"),
        ("run_trainer.py", "--learning_rate 0", "--learning_rate"),
        ("run_trainer.py", "--adam_beta1 1.0", "--adam_beta1"),
        ("run_trainer.py", "--fp16 --bf16", "--fp16"),
        ("run_trainer.py", "--averaging_compression UNIFORM_8BIT", "(choose from 'none', 'float16'"),
        ("run_trainer.py", "--no_delay_optimizer_step", "--no_delay_grad_averaging"),
        ("run_trainer.py", "--target_group_size 1", "--target_group_size"),
        ("run_trainer.py", "--host_maddrs /ip4/999.0.0.1/tcp/80", "999.0.0.1"),
        ("run_trainer.py", "--host_maddrs /ip4/0.0.0.0/tcp", "'tcp'"),
        ("run_trainer.py", "--announce_maddrs /ip4/203.0.113.1/tcp/0", "--announce_maddrs"),
        ("run_trainer.py", "--tunnel ngrok --client_mode", "--client_mode"),
        ("run_trainer.py", "--tunnel ngrok --announce_tunnel bore.pub:7", "--announce_tunnel"),
        ("run_trainer.py", "--tunnel ngrok --host_maddrs /ip4/0.0.0.0/udp/80/quic", "--host_maddrs"),
        ("run_trainer.py", "--announce_tunnel bore.pub:7", "--host_maddrs /ip4/0.0.0.0/tcp/PORT"),
        ("run_trainer.py", f"--announce_tunnel bore.pub {FIXED}", "'bore.pub' is not HOST:PORT"),
        ("run_trainer.py", f"--announce_tunnel bore.pub:0 {FIXED}", "the port that other peers dial"),
        ("run_trainer.py", f"--announce_tunnel 0.0.0.0:7 {FIXED}", "0.0.0.0"),
        ("run_trainer.py", f"--initial_peers /ip4/203.0.113.1/tcp/80/p2p/{PEER_ID}!", "--initial_peers"),
        ("run_trainer.py", "--initial_peers ", "--initial_peers is empty"),  # as of a variable that is not set
        ("run_trainer.py", f"--initial_peers {PEER[:-2]}", "Copy the whole address"),
        ("run_trainer.py", f"--initial_peers {PEER}/ip4", "'ip4'"),
        ("run_trainer.py", f"--initial_peers {PEER}{PEER}", "two addresses in one; put a space or a comma before"),
        ("run_trainer.py", f"--initial_peers {PEER[:-9]}\n{PEER[-9:]}", "Copy the whole address"),
        ("run_trainer.py", "--initial_peers /ip4/203.0.113.1/tcp/80", "PEER_ID"),
        ("run_trainer.py", f"--use_ipfs --initial_peers {PEER}", "--use_ipfs"),
        ("run_trainer.py", "--dataset_url ftp://example.org/data.tar.gz", "--dataset_url"),
        ("run_trainer.py", "--data_cache 2", "--data_cache must be a size such as 256MB or 2GB, got '2'"),
        ("run_trainer.py", "--dataset_url https://example.org:99999/data.tar.gz", "--dataset_url"),
        ("run_trainer.py", f"--dataset_sha256 {'0' * 64}", "--dataset_url"),
        ("run_trainer.py", f"--dataset_url https://example.org/data.tar.gz --dataset_sha256 {'0' * 63}", "64 hex"),
        ("run_trainer.py", "--dataset_url https://example.org/x --tokenizer_path d/t --dataset_path d", "each other"),
        ("run_trainer.py", f"--trusted_relays {PEER}", "--use_auto_relay"),
        ("run_trainer.py", "--use_auto_relay --trusted_relays /ip4/203.0.113.1/tcp/80", "--trusted_relays"),
        ("run_training_monitor.py", "--assist_in_averaging", "start run_trainer.py on this machine"),
        ("run_evaluator.py", "--invitation a --identity_path b", "--identity_path"),
        ("invite.py", "--username alice", "--output"),
        ("invite.py revoke", "--authority authority.key", "--username"),
        ("invite.py revoke", "--username alice --invitation alice.invitation", "either"),
        ("run_training_monitor.py", "--repo_id me/my--albert", "--repo_id"),
        ("run_training_monitor.py", "--repo_url https://gitlab.example/me/my-albert", "--repo_id"),
        ("run_training_monitor.py", "--repo_id me/my-albert --no_store_checkpoints", "--no_store_checkpoints"),
        ("run_training_monitor.py", "--wandb_project x --report_to trackio", "--wandb_project"),
        ("run_training_monitor.py", "--wandb_project team/x", "wandb allows no '/' in a name"),
        ("run_training_monitor.py", "--space_id my-albert", "--space_id"),
        ("run_training_monitor.py", "--space_id me/my-albert --report_to tensorboard", "--report_to tensorboard"),
        ("run_training_monitor.py", "--page javascript:alert(1)", "--page"),
        ("run_trainer.py", "--page https://example.org/\x1b[2J", "--page"),
        ("run_trainer.py", f"--page https://example.org/{'x' * 200}", "--page"),
        ("run_training_monitor.py", "--sample_text [MASK] --no_store_checkpoints", "--no_store_checkpoints"),
        ("run_local_demo.py", "--trainers 1", "--trainers"),
        ("tokenize_wikitext103.py", "--train_file /no/such/file", "/no/such/file"),
        ("tokenize_wikitext103.py", "--sample --train_file README.md", "--sample"),
        ("tokenize_wikitext103.py", "--max_seq_length 2", "--max_seq_length"),
        ("tokenize_wikitext103.py", "--archive data.zip", "--archive"),
        ("tokenize_wikitext103.py", "--validation_fraction 1", "--validation_fraction"),
    ],
)
def test_wrong_use_gets_one_line_that_names_the_culprit(script, command, culprit, capsys):
    with pytest.raises(SystemExit) as exit_info:
        parse_arguments(SCRIPTS[script], "a script", command.split(" "))
    assert exit_info.value.code == 2
    message = capsys.readouterr().err.strip()
    assert culprit in message and "error:" in message
    assert "\n" not in message


@pytest.mark.parametrize("word", [" --use_cpu", " ", "  \t"])
def test_backslash_that_does_not_continue_a_command_is_named(word, monkeypatch, capsys):
    """A blank after it, or the lines pasted as one: it was "'--use_cpu' is not a multiaddress"."""
    monkeypatch.setattr(sys, "argv", ["run_trainer.py", "--initial_peers", PEER, word])
    with pytest.raises(SystemExit):
        parse_arguments(SCRIPTS["run_trainer.py"], "a script")
    assert "a backslash must be the last character of its line" in capsys.readouterr().err


def test_batch_size_per_step_counts_the_devices_that_are_used():
    training, *_ = parse("run_trainer.py", "--per_device_train_batch_size 3 --gradient_accumulation_steps 5")
    assert [training.batch_size_per_step(devices) for devices in (0, 1, 2)] == [15, 15, 30]


def test_help_and_an_unknown_flag_import_nothing_heavy():
    """The flag took 4 CPU seconds, and 39 s on a busy machine."""
    scripts = sorted(path.name for path in ROOT.glob("*.py") if path.stat().st_mode & 0o100)
    code = (
        "import runpy, sys\n"
        "for script, flag in [(script, flag) for script in sys.argv[1:] for flag in ('--help', '--bogus')]:\n"
        "    sys.argv = [script, flag]\n"
        "    try: runpy.run_path(script, run_name='__main__')\n"
        "    except SystemExit as end: assert end.code == (0 if flag == '--help' else 2)\n"
        "print(sorted({'torch', 'hivemind', 'datasets', 'wandb', 'trackio', 'pandas'} & set(sys.modules)))"
    )
    command = [sys.executable, "-W", "ignore", "-c", code, *scripts]
    result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60, encoding="utf-8")
    assert result.stdout.strip().endswith("[]"), result.stdout[-200:] + result.stderr
    assert result.stdout.count("usage:") == len(scripts)
    for example in ("./run_trainer.py --initial_peers /ip4/", "./invite.py revoke --username alice"):
        assert example in result.stdout


def test_each_option_of_the_library_is_a_flag_with_help():
    """`join_run` takes the options, run_trainer.py the flags, which have their defaults and bounds."""
    for flags, options in zip(TRAINER_ARGUMENTS, TRAINER_OPTIONS, strict=True):
        assert issubclass(flags, options) and all(option.metadata.get("help") for option in fields(flags))
        types = {option.name: option.type for option in fields(flags)}
        assert {option.name: option.type for option in fields(options)}.items() <= types.items()
        assert [getattr(flags(), name) for name in types if hasattr(options(), name)] == [*vars(options()).values()]
    with pytest.raises(ArgumentsError, match="--min_refresh_period must be at most --max_refresh_period 30"):
        ProgressTrackerArguments(min_refresh_period=31.0)


@pytest.mark.parametrize(
    ("word", "expanded"),
    [
        ("~/runs", "/home/alice/runs"),
        ("--output_dir=~/runs", "/home/alice/runs"),
        ("--sample_text=a=~/b", "--sample_text=a=~/b"),
        ("a~/b", "a~/b"),
    ],
)
def test_home_folder_is_meant_where_a_shell_does_not_expand_it(word, expanded, monkeypatch):
    monkeypatch.setenv("HOME", "/home/alice")
    assert expand_home(word).removeprefix("--output_dir=") == expanded
