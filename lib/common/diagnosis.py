"""Messages of a peer: what each one means, and what to do about it.

`DIAGNOSES` has three uses: `python -m lib.common.diagnosis` writes it as the table "Messages" of
docs/troubleshooting.md; a warning or error in the log is followed by its action (`next_hint`); `diagnose` finds the
row for a line of a log. A row's wording is checked against the code by tests/common/test_diagnosis.py.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "troubleshooting.md"
BEGIN = "<!-- Written by python -m lib.common.diagnosis: edit the table in that file -->"
END = "<!-- End of the written part -->"
HINT = "What to do: "
MAX_CHARACTERS = 500  # of a message; a repr of an exception may have many more


@dataclass(frozen=True)
class Diagnosis:
    """A message that a peer logs or ends with.

    :param message: its fixed words, in the order in which they occur; … stands for anything
    :param meaning: what has happened, in Markdown
    :param action: what to do, in Markdown, with links relative to docs/
    :param example: the message as a peer prints it
    :param has_remedy: whether the message itself says what to do, so that the log needs no hint
    """

    message: str
    meaning: str
    action: str
    example: str
    has_remedy: bool = False

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        parts = filter(None, (part.strip() for part in self.message.lower().split("…")))
        return re.compile(".*?".join(map(re.escape, parts)))

    @property
    def advice(self) -> str:
        """The action as plain text: links become the names of the files."""
        return re.sub(r"\[([^]]*)\]\(([^)]*)\)", r"\1 (docs/\2)", self.action)

    def matches(self, text: str) -> bool:
        """Whether a text contains the message, in upper or lower case."""
        return self._pattern.search(text.lower()) is not None


DIAGNOSES = (
    # Start
    Diagnosis(
        message="… is not installed: pip install -r requirements-organiser.txt",
        meaning="the script or dashboard needs a package that volunteers do not install",
        action="run that command, or `make install-organiser`",
        example="wandb is not installed: pip install -r requirements-organiser.txt",
        has_remedy=True,
    ),
    Diagnosis(
        message="hivemind … is installed, … was tested",
        meaning="the software differs from the tested versions; peers may not understand each other",
        action="install the versions of `requirements.txt`, with `make install`; for other versions see "
        "[upgrading hivemind](upgrading-hivemind.md)",
        example="hivemind 1.1.13 is installed, 1.1.12 was tested. Rows of docs/upgrading-hivemind.md to check again: "
        "none",
    ),
    Diagnosis(
        message="unknown argument …",
        meaning="the flag belongs to another script or another version",
        action="`--help` lists the flags of the script",
        example="unknown argument '--batch_size', did you mean --batch_size_lead?",
        has_remedy=True,
    ),
    Diagnosis(
        message="--fp16 needs a GPU, and none is in use",
        meaning="torch sees no GPU, or `--use_cpu` is passed",
        action="check that `nvidia-smi` lists the GPU; without a GPU drop the flag",
        example="--fp16 needs a GPU, and none is in use; drop the flag (transformers would silently ignore it)",
        has_remedy=True,
    ),
    Diagnosis(
        message="… is in use by another peer; pass a different folder",
        meaning="two peers have the same `--output_dir`, or an earlier start of this peer is still running",
        action="pass a different `--output_dir` to each peer, or end the earlier process",
        example="--output_dir: 'outputs' is in use by another peer; pass a different folder for each peer",
        has_remedy=True,
    ),
    Diagnosis(
        message="Identity … is already taken by another peer",
        meaning="another running peer has a copy of this peer's `identity.key`",
        action="end the other peer, or pass a new file as `--identity_path`: the key is created",
        example="Identity from `outputs/identity.key` is already taken by another peer",
    ),
    Diagnosis(
        message="cannot listen on --host_maddrs",
        meaning="another program or an earlier start uses the port, or the IP address is not one of this machine",
        action="pass another port, or `/ip4/0.0.0.0/tcp/0` for any free port; behind a router, listen on `0.0.0.0` "
        "and pass the public address as `--announce_maddrs`",
        example="cannot listen on --host_maddrs /ip4/0.0.0.0/tcp/31337: port in use or not this machine's address",
    ),
    Diagnosis(
        message="the p2p daemon did not start",
        meaning="libp2p's daemon (`p2pd`), a program that is installed with hivemind, cannot run on this machine",
        action="use Linux, or Windows with WSL; check that disk and memory are not full and that programs may run in "
        "the folder of `.venv` (no `noexec`); then `make clean` and `make install`",
        example="the p2p daemon did not start: Failed to start p2pd daemon: [Errno 13] Permission denied",
    ),
    Diagnosis(
        message="no peer could be started within --bootstrap_timeout",
        meaning="the machine is slow",
        action="raise `--bootstrap_timeout`",
        example="no peer could be started within --bootstrap_timeout 60 seconds; raise it",
        has_remedy=True,
    ),
    Diagnosis(
        message="too many open files",
        meaning="the limit of the shell is too low",
        action="`ulimit -n 4096`, then start again",
        example="outputs/rounds.jsonl: too many open files: run `ulimit -n 4096` first",
    ),
    Diagnosis(
        message="the disk is full",
        meaning="checkpoints, data or logs do not fit on the disk",
        action="free some space; training continues meanwhile, and what is kept in memory is written later",
        example="Cannot write outputs/metrics.jsonl: outputs/metrics.jsonl: the disk is full: free some space or "
        "choose another folder. Keeping the steps until writing succeeds",
        has_remedy=True,
    ),
    Diagnosis(
        message="Could not save …. Training continues, keeping the previous checkpoint",
        meaning="the disk is full or the folder is not writable",
        action="free some space in `--output_dir`; the next checkpoint is tried as usual",
        example="Could not save a checkpoint: No space left on device. Training continues, keeping the previous "
        "checkpoint",
    ),
    Diagnosis(
        message="OutOfMemoryError",
        meaning="the memory of the GPU is full",
        action="lower `--per_device_train_batch_size` (and raise `--gradient_accumulation_steps`), or pass "
        "`--gradient_checkpointing`, see [Memory](gpus.md#memory)",
        example="OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB (--debug shows where)",
    ),
    # Addresses and connections
    Diagnosis(
        message="lacks the peer ID",
        meaning="addresses end in `/p2p/…` since hivemind 1.0; the `IP:PORT` of older tutorials is not enough",
        action="copy the whole address",
        example="--initial_peers: '203.0.113.1:31337' lacks the peer ID. Copy the whole address from the first lines "
        "that the peer prints: /ip4/203.0.113.1/tcp/31337/p2p/PEER_ID",
        has_remedy=True,
    ),
    Diagnosis(
        message="none of --initial_peers answers",
        meaning="the peer is not running, its address has changed, a firewall is in between, or the run needs an "
        "[invitation](trust.md#invitations)",
        action="copy the address again; open the port; pass `--invitation`",
        example="none of --initial_peers answers: /ip4/203.0.113.1/tcp/31337/p2p/QmVUecCSp9yW9fE14vhp7fjCTHiWyA7gDhZxZ"
        "k3B7RiXZG. Check that they run, that the address and peer ID are the ones they print now, that no firewall "
        "is in between, and that you pass the --invitation of the run if it needs one",
        has_remedy=True,
    ),
    Diagnosis(
        message="ask the organiser of the run for another --invitation",
        meaning="the [invitation](trust.md#invitations) has expired or was revoked, or belongs to another run",
        action="ask the organiser for another invitation, and start again with it",
        example="This peer's invitation has expired: ask the organiser of the run for another --invitation",
        has_remedy=True,
    ),
    Diagnosis(
        message="did not return this machine's IP address",
        meaning="the web service that `--use_google_dns` asks is down or blocked",
        action="pass the address yourself, as `--host_maddrs` and `--announce_maddrs`",
        example="--use_google_dns: https://api.ipify.org did not return this machine's IP address (timed out). Pass "
        "the address: --host_maddrs /ip4/0.0.0.0/tcp/PORT --announce_maddrs /ip4/YOUR_IP/tcp/PORT",
        has_remedy=True,
    ),
    Diagnosis(
        message="Peers outside this network need a public address",
        meaning="the peer has only local addresses",
        action="nothing if all peers are in one network; otherwise see "
        "[Tunnels](networking.md#tunnels-a-run-without-any-public-machine)",
        example="Peers outside this network need a public address: see --tunnel and --announce_tunnel",
        has_remedy=True,
    ),
    Diagnosis(
        message="can't access this node. Probably, libp2p has failed to bypass the firewall",
        meaning="another peer cannot connect to this machine, which is behind NAT or a firewall",
        action="open a port, or pass `--client_mode`, see [Behind a firewall](networking.md#behind-a-firewall)",
        example="ValidationError(\"Peer QmVUecCSp9yW9fE14vhp7fjCTHiWyA7gDhZxZk3B7RiXZG can't access this node. "
        'Probably, libp2p has failed to bypass the firewall")',
    ),
    Diagnosis(
        message="local time must be within … of others",
        meaning="the clock of this machine, or of the peer that it asked, is wrong; such peers do not average",
        action="turn on NTP, with `timedatectl set-ntp true`; in WSL, restart WSL after the machine has slept",
        example="ValidationError('local time must be within 3 seconds  of others(local: 1.00000, peer: 9.00000)')",
    ),
    Diagnosis(
        message="Nobody can join through the tunnel",
        meaning="the tunnel is down or leads elsewhere; or the router does not answer to its public address from "
        "inside",
        action="ngrok reconnects only after a short break: otherwise start the peer again and distribute the new "
        "address",
        example="Nobody can join through the tunnel bore.pub:31337 (connection refused): restart the tunnel",
        has_remedy=True,
    ),
    Diagnosis(
        message="Could not exchange progress with the other peers",
        meaning="the connection to the DHT is interrupted, or this machine is overloaded",
        action="nothing at first: it is tried again. If it continues, check the connection and start again",
        example="Could not exchange progress with the other peers (TimeoutError()); trying again",
    ),
    # Data and model
    Diagnosis(
        message="--dataset_path: there is no folder",
        meaning="the trainer has no prepared data",
        action="pass the organiser's `--dataset_url`, unpack the archive here, or prepare the data: see "
        "[data](data.md)",
        example="--dataset_path: there is no folder 'data/albert_tokenized_wikitext'; create the data with "
        "./tokenize_wikitext103.py, or download the organiser's with --dataset_url",
        has_remedy=True,
    ),
    Diagnosis(
        message="is not the one that the data was made with",
        meaning="dataset and tokenizer are from different archives",
        action="remove both folders and download the archive again",
        example="--tokenizer_path: this tokenizer (30000 tokens) is not the one that the data was made with "
        "(AlbertTokenizer, 2000 tokens); take both from the same archive",
        has_remedy=True,
    ),
    Diagnosis(
        message="cannot be downloaded (…)",
        meaning="the host of `--dataset_url` is down or slow",
        action="run the same command again; the download resumes",
        example="--dataset_url: https://example.org/data.tar.gz cannot be downloaded (timed out); try again later, "
        "the download resumes where it stopped",
        has_remedy=True,
    ),
    Diagnosis(
        message="has SHA-256 …, but … says …",
        meaning="the archive or its `.sha256` file was replaced, or the checksum is mistyped",
        action="ask the organiser",
        example="--dataset_url: https://example.org/data.tar.gz has SHA-256 0123, but --dataset_sha256 or the .sha256 "
        "file beside it says 4567; ask the organiser which is right",
        has_remedy=True,
    ),
    Diagnosis(
        message="is below …, the samples of one local step",
        meaning="the target batch is smaller than one local step",
        action="raise `--target_batch_size`, or lower `--per_device_train_batch_size` or "
        "`--gradient_accumulation_steps`",
        example="--target_batch_size 16 (less --batch_size_lead) is below 32, the samples of one local step "
        "(--per_device_train_batch_size x devices x --gradient_accumulation_steps)",
    ),
    Diagnosis(
        message="here and … in run …: pass --",
        meaning="the flag differs from what the organiser of the run has stated",
        action="drop the flag, with `--run_id`: the trainer takes [the settings of the "
        "run](running.md#the-settings-of-the-run)",
        example="--learning_rate is 0.02 here and 0.01 in run my-albert: pass --learning_rate 0.01, or pass "
        "--initial_peers alone to take all settings from the run",
        has_remedy=True,
    ),
    Diagnosis(
        message="this checkout …: … is older than …",
        meaning="the organiser uses another version of these scripts",
        action="update to the version that the organiser uses",
        example="the run has protocol 4, this checkout 3: this checkout is older than the run; use the version of "
        "this project that the organiser uses",
        has_remedy=True,
    ),
    Diagnosis(
        message="this run's --dataset_url leads to …, which is not on the internet",
        meaning="the settings of the run name an address in your own network",
        action="tell the organiser; if you trust it, pass all flags of the run yourself",
        example="this run's --dataset_url leads to 192.168.1.7, which is not on the internet: refused; if you trust "
        "it, pass the --dataset_url yourself, with --run_id and the other flags of the run",
        has_remedy=True,
    ),
    Diagnosis(
        message="no peer has the settings that organiser … stated",
        meaning="no trainer of the run is reachable, and the monitor is away",
        action="wait; `run_forever.py` tries again",
        example="no peer has the settings that organiser QmVUecCSp9yW9fE14vhp7fjCTHiWyA7gDhZxZk3B7RiXZG stated; is a "
        "trainer running?",
    ),
    # Groups and rounds
    Diagnosis(
        message="All … trainers are in client mode",
        meaning="nobody can download the training state from them, and without an auxiliary peer they cannot average",
        action="make one trainer reachable, see [Behind a firewall](networking.md#behind-a-firewall)",
        example="All 2 trainers are in client mode: nobody can download the training state from them, and without an "
        "auxiliary peer they cannot average with each other. Start one without --client_mode on a machine that other "
        "peers can reach, or with --tunnel or --announce_tunnel",
        has_remedy=True,
    ),
    Diagnosis(
        message="A trainer of this run has protocol …, this trainer has …",
        meaning="the trainers have different versions of these scripts",
        action="update the older one to the version that the organiser names",
        example="A trainer of this run has protocol 3, this trainer has 4: they do not average with each other. "
        "Update the older one",
        has_remedy=True,
    ),
    Diagnosis(
        message="--local_updates, this trainer …: they do not average with each other",
        meaning="the trainers have different flags",
        action="pass the organiser's flags: [those of the table](running.md#trainers) are the same on every peer",
        example="A trainer of this run runs with --local_updates, this trainer without: they do not average with each "
        "other. Pass the same flag to all peers",
        has_remedy=True,
    ),
    Diagnosis(
        message="No group for step … in time",
        meaning="this trainer could not average with the others; `missed` in `rounds.jsonl` gives the reason: peers "
        "could not be reached, or were late",
        action="nothing now and then; at one step in four or more, see [Behind a "
        "firewall](networking.md#behind-a-firewall); for late peers raise `--matchmaking_time`",
        example="No group for step #39 in time: proceeding with local gradients",
    ),
    Diagnosis(
        message="Averaging: received …% results",
        meaning="a peer of the group could not be reached or was cut off",
        action="nothing now and then; otherwise see [Relays](networking.md#relays), or raise `--averaging_timeout`",
        example="Averaging: received 60.7% results",
    ),
    Diagnosis(
        message="The round of step … was partial",
        meaning="a peer of the group could not be reached or was cut off; the trainer used what it received",
        action="nothing now and then; otherwise see [Relays](networking.md#relays), or raise `--averaging_timeout`",
        example="The round of step #39 was partial: received 61% of it",
    ),
    Diagnosis(
        message="The round of step … failed",
        meaning="a peer left during the round, or the connection to it broke",
        action="nothing now and then: the round is repeated; otherwise raise `--averaging_timeout`, or set "
        "`--bandwidth` to what the connection has",
        example="The round of step #39 failed: Unable to run All-Reduce",
    ),
    Diagnosis(
        message="Missed the round of step … as well",
        meaning="this trainer came too late for two rounds in a row, so its oldest samples do not count",
        action="nothing after a pause of the machine; otherwise shorten a local step: lower "
        "`--gradient_accumulation_steps` or `--per_device_train_batch_size`",
        example="Missed the round of step #41 as well: dropped 96 samples that are too old",
    ),
    Diagnosis(
        message="sent …: not averaging with it for … minutes",
        meaning="the peer sent NaN, Inf or values out of bounds, and is "
        "[banned](trust.md#what-is-checked-in-every-run)",
        action="nothing for one peer; if many are banned, tell the organiser: the run may be diverging",
        example="QmVUecCSp9yW9fE14vhp7fjCTHiWyA7gDhZxZk3B7RiXZG sent values that are not finite: not averaging with "
        "it for 10 minutes",
    ),
    Diagnosis(
        message="Dropped a gradient that is not finite",
        meaning="the gradient of this trainer has NaN or Inf; it was not counted and does not reach other peers",
        action="nothing now and then; often: pass `--bf16` or `--fp32`, and tell the organiser, who can lower "
        "`--learning_rate`",
        example="Dropped a gradient that is not finite (1 so far)",
    ),
    Diagnosis(
        message="The parameters are not finite",
        meaning="the model has NaN or Inf; the trainer returns to the state of other peers or to its backup",
        action="nothing the first time; again: lower `--learning_rate` or `--max_grad_norm`, on all peers",
        example="The parameters are not finite",
    ),
    # Training state
    Diagnosis(
        message="trainers of this run are at step … or later, but no state could be downloaded",
        meaning="this trainer came late, and the trainers that have the state cannot be reached or are too slow",
        action="start again; on a slow connection raise `--load_state_timeout`; if all trainers are in client mode, "
        "one must become [reachable](networking.md#behind-a-firewall)",
        example="3 trainers of this run are at step #40 or later, but no state could be downloaded within "
        "--load_state_timeout 600 seconds. Check that they are reachable from this machine and use the same model and "
        "optimizer",
    ),
    Diagnosis(
        message="One trainer reports a later step, but its state cannot be downloaded",
        meaning="that trainer is in client mode, has just left, or lies; this trainer starts without its state",
        action="nothing in a new run; otherwise start again when another trainer or the monitor is running",
        example="One trainer reports a later step, but its state cannot be downloaded: starting without it",
    ),
    Diagnosis(
        message="Could not reach …, which offers a state",
        meaning="that peer has left, or does not accept connections",
        action="nothing: the next donor is asked",
        example="Could not reach QmVUecCSp9yW9fE14vhp7fjCTHiWyA7gDhZxZk3B7RiXZG, which offers a state",
    ),
    Diagnosis(
        message="Could not download the state from …",
        meaning="that peer has left, or the connection broke",
        action="nothing: the next donor is asked, and all donors up to twice more",
        example="Could not download the state from QmVUecCSp9yW9fE14vhp7fjCTHiWyA7gDhZxZk3B7RiXZG: TimeoutError()",
    ),
    Diagnosis(
        message="Refused the state that … offers",
        meaning="that peer trains another model, or its state is broken",
        action="nothing if the next donor's is accepted; if all are refused, compare the model flags and "
        "`--optimizer` with the organiser's",
        example="Refused the state that QmVUecCSp9yW9fE14vhp7fjCTHiWyA7gDhZxZk3B7RiXZG offers: its parameters have "
        "other shapes (another model, or an incomplete state)",
    ),
    Diagnosis(
        message="Ignoring … peers that claim step …",
        meaning="they report a later step, but nobody offers the state of that step",
        action="nothing if others average with this trainer; otherwise make one trainer "
        "[reachable](networking.md#behind-a-firewall)",
        example="Ignoring 2 peers that claim step #50: no peer offers a state of that step",
    ),
    Diagnosis(
        message="No trainer offers …; trying again",
        meaning="no trainer has completed a step yet, or all are in client mode or have left",
        action="nothing before the first steps; later, make one trainer [reachable](networking.md#behind-a-firewall)",
        example="No trainer offers the state of step #5 or later yet; trying again",
    ),
    Diagnosis(
        message="No monitor has saved step … yet: leaving anyway",
        meaning="the run is complete, but no monitor has a checkpoint of the last step",
        action="keep the newest checkpoint in `--output_dir`, and tell the organiser",
        example="No monitor has saved step #1000 yet: leaving anyway",
    ),
    Diagnosis(
        message="Refused records: …",
        meaning="the monitor has ignored reports that are malformed or impossible; they change nothing",
        action="nothing, unless a trainer is missing from the counts: it may have another version of these scripts",
        example="Refused records: 2 x not a number",
    ),
    # Unexpected ends
    Diagnosis(
        message="The … process has died",
        meaning="the kernel has ended a part of this peer, mostly for lack of memory (`dmesg` shows it)",
        action="close other programs, lower `--per_device_train_batch_size` or `--dataloader_num_workers`, and start "
        "again; [run_forever.py](running.md#keep-it-running) does that by itself",
        example="The DHT process has died (out of memory?); start again to rejoin",
        has_remedy=True,
    ),
    Diagnosis(
        message="…: ending now",
        meaning="the peer was asked to stop, and a round or a download took longer than the time for that",
        action="nothing: the checkpoints are complete, and the next start resumes from the newest",
        example="Still busy 12 seconds after the signal: ending now",
    ),
    Diagnosis(
        message="it was ended by …",
        meaning="`run_forever.py` reports that its command was killed; `SIGKILL` is mostly the kernel's, for lack of "
        "memory",
        action="nothing now and then: it is started again; otherwise close other programs, or lower "
        "`--per_device_train_batch_size` or `--dataloader_num_workers`",
        example="it was ended by SIGKILL",
    ),
    Diagnosis(
        message="it hangs: nothing was done for … seconds",
        meaning="`run_forever.py` has ended a peer that did not work any more, and starts it again",
        action="nothing now and then; otherwise run the command with `--debug` and send the log to the organiser",
        example="it hangs: nothing was done for 1260 seconds",
    ),
    Diagnosis(
        message="starting it again does not cure this",
        meaning="`run_forever.py` gives up; the line before says what is wrong",
        action="correct it and start again",
        example="it ended with exit code 1: starting it again does not cure this",
    ),
)


def diagnose(text: str) -> Diagnosis | None:
    """Return what is known about a message or a line of a log; None if nothing is."""
    text = " ".join(text[:MAX_CHARACTERS].split())
    return next((row for row in DIAGNOSES if row.matches(text)), None)


_hinted: set[str] = set()  # messages whose hint this process has given


def next_hint(text: str) -> str | None:
    """Return "What to do: ..." for a message; None if nothing is known, the message says it, or it was said before."""
    row = diagnose(text)
    if row is None or row.has_remedy or row.message in _hinted:
        return None
    _hinted.add(row.message)
    return f"{HINT}{row.advice}"


def render_table() -> str:
    """Return the table of docs/troubleshooting.md, in Markdown."""
    rows = [f"| `{row.message}` | {row.meaning} | {row.action} |" for row in DIAGNOSES]
    return "\n".join(["| message | meaning | what to do |", "|---|---|---|", *rows])


def render_page(page: str) -> str:
    """Return docs/troubleshooting.md with the current table."""
    before, rest = page.split(BEGIN)
    after = rest.split(END)[1]
    return f"{before}{BEGIN}\n\n{render_table()}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(render_page(PAGE.read_text()))
