"""Pages, notebooks and services, and the lists of requirements: scripts accept all command lines, all names exist."""

import importlib
import json
import re
import shlex
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest
from transformers.hf_argparser import HfArgumentParser

from arguments import TRAINER_ARGUMENTS
from cotrain.common.errors import ORGANISER_MODULES
from cotrain.peer.signed_settings import COMMON_SETTINGS
from tests.support.messages import is_printed
from tests.support.processes import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "cotrain/common/messages.md")),
    *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "deploy").glob("*.ipynb")), ROOT / "deploy/trainer.service",
    ROOT / "deploy/user_data.sh",
]  # fmt: skip
# Variables in the forms of notebooks that are flags -> the script that gets them
SCRIPTS_OF_FORMS = {"FLAGS": "run_trainer.py", "MONITOR_FLAGS": "run_training_monitor.py",
                    "SETTINGS": "run_training_monitor.py"}  # fmt: skip
MODULES = {path.name: path.stem for path in ROOT.glob("*.py") if "def main" in path.read_text(encoding="utf-8")}
PEER_ID = "QmVUecCSp9yW9fE14vhp7fjCTHiWyA7gDhZxZk3B7RiXZG"
ADDRESS = f"/ip4/203.0.113.1/tcp/31337/p2p/{PEER_ID}"
PLACEHOLDERS = [
    (r"\b(ADDRESS(_OF_[AB])?|FIRST|SECOND)\b", ADDRESS),
    (r"(?<=--initial_peers )…", ADDRESS),
    (r"(?<=/p2p/)(Qm\w*…|XXXX|PEER_ID)", PEER_ID),
    (r"(?<=--dataset_sha256 )\w*…", "0" * 64),
    (r"BATCH_SIZE_FOR_YOUR_GPU", "4"),
    (r"HOST:PORT", "example.org:31337"),
    (r"PUBLIC_IP", "203.0.113.1"),
    (r"(?<= )…", ""),  # more flags
]
# Of other programs
FLAGS_OF_OTHERS = {"--from", "--pids-limit", "--profile", "--shm-size", "--repo-type", "--folder",
                   "--directory", "--to", "--local-dir", "--project", "--require-hashes", "--gpus",
                   "--instance-id", "--network", "--output", "--init", "--stop-timeout", "--quiet", "--depth", "--now",
                   "--disable-pip-version-check"}  # fmt: skip
# Files of the repository, not files that the scripts write.
FILE = re.compile(
    r"[\w./-]+\.(py|ipynb|sh|md)|requirements[\w-]*\.txt|(cotrain|configs|docs|deploy|tests|benchmarks)/[\w./-]*"
)


def read_page(page: Path) -> str:
    """Return the text of a page; of a notebook as Markdown, of a service or script as a block of commands."""
    if page.suffix == ".ipynb":
        cells = json.loads(page.read_text(encoding="utf-8"))["cells"]
        texts = {id(cell): "".join(cell["source"]) for cell in cells}
        return "\n\n".join(
            f"```python\n{text}\n```" if cell["cell_type"] == "code" else text
            for cell, text in zip(cells, texts.values(), strict=True)
        )
    if page.suffix != ".md":
        return f"```bash\n{re.sub(r'(?m)^ExecStart=.*python ', '', page.read_text(encoding='utf-8'))}\n```"
    return page.read_text(encoding="utf-8")


def read_code_blocks(page: Path, language: str) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", read_page(page), re.MULTILINE | re.DOTALL)
    return [content for name, content in blocks if name == language]


def read_inline_code(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```", "", read_page(page), flags=re.MULTILINE | re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


def read_commands(page: Path) -> Iterator[str]:
    """Yield the command lines of a page, in blocks and in the text, with values for their placeholders."""
    lines = [line for block in read_code_blocks(page, "bash") for line in block.replace("\\\n", " ").splitlines()]
    for block in read_code_blocks(page, "python"):  # of a notebook: flags in its form
        for name, words in re.findall(r'^([A-Z_]+) = "(--[^"]*)"', block, re.MULTILINE):
            lines.append(f"{SCRIPTS_OF_FORMS[name]} {words}")
    for line in [*lines, *read_inline_code(page)]:
        for pattern, value in PLACEHOLDERS:
            line = re.sub(pattern, value, line)
        yield line


def read_script_calls() -> Iterator[tuple[str, str, list[str]]]:
    """Yield page, script and arguments of each script call. A script's name alone is not a call."""
    for page in PAGES:
        for line in read_commands(page):
            line = line.removeprefix("until ").removesuffix("; do")
            match = re.match(r"(?:\./|python -m )?(?P<script>[\w.]+)(?P<arguments>.*)", line)
            if match and match["script"] in MODULES and (line.startswith("./") or match["arguments"]):
                yield page.name, match["script"], shlex.split(match["arguments"], comments=True)


class Parsed(BaseException):
    """Ends a script after its command line parser. A BaseException, since the script would handle an Exception."""


@pytest.fixture
def parse(tmp_path, monkeypatch):
    """Return a function that lets a script parse a command line, in whichever module, and returns all its flags."""
    parse_as_before, flags = HfArgumentParser.parse_args_into_dataclasses, set()

    def parse(parser: HfArgumentParser, args=None, **_options):
        flags.update(option for action in parser._actions for option in action.option_strings)
        *_, unknown = parse_as_before(parser, args, return_remaining_strings=True)
        raise Parsed(unknown)

    def parse_command(script: str, *arguments: str) -> set[str]:
        monkeypatch.setattr(sys, "argv", [script, *arguments])
        with pytest.raises(Parsed) as parsed:
            importlib.import_module(MODULES[script]).main()
        assert parsed.value.args == ([],), "unknown flags"
        return flags

    monkeypatch.setattr(HfArgumentParser, "parse_args_into_dataclasses", parse)
    monkeypatch.chdir(tmp_path)
    Path("src").mkdir()
    invitations = ("monitor.invitation", "alice.invitation")
    for name in ("my_text.txt", "corpus.txt", "src/program.py", "chats.jsonl", "conversations.jsonl"):
        Path(name).touch()
    for name in invitations:
        Path(name).write_text('{"token": ""}', encoding="utf-8")
    for name in ("configs", "examples"):
        Path(name).symlink_to(ROOT / name)
    return parse_command


def test_scripts_take_the_command_lines_and_flags(parse):
    calls = list(read_script_calls())
    assert {script for _, script, _ in calls} == set(MODULES)
    for page, script, arguments in calls:
        try:
            flags = parse(script, *arguments)
        except (AssertionError, ValueError, SystemExit) as error:
            raise AssertionError(f"{page}: {script} {shlex.join(arguments)}") from error
    for page in PAGES:
        named = set(re.findall(r"(?<![\w-])--[a-z][\w-]*", read_page(page)))
        if page.suffix == ".sh":  # most of its flags are other programs', which have no underscore
            named = {name for name in named if "_" in name}
        assert named <= flags | FLAGS_OF_OTHERS, (page, named - flags)


def test_further_monitors_are_given_no_settings_of_the_run():
    """They take these from the run; what else is stated would be refused, or would state another run."""
    joining = [(page, arguments) for page, script, arguments in read_script_calls()
               if script == "run_training_monitor.py" and "--initial_peers" in arguments]  # fmt: skip
    assert {page for page, _ in joining} >= {"running.md", "networking.md", "cloud.md", "deploy_on_aws.ipynb",
                                             "host_collaboration.ipynb"}  # fmt: skip
    for page, arguments in joining:
        assert not {f"--{name}" for name in COMMON_SETTINGS} & set(arguments), (page, arguments)


def test_targets_and_files_exist():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for page in PAGES:
        code = read_inline_code(page)
        commands = [*"\n".join(read_code_blocks(page, "bash")).splitlines(), *code]
        named = {target for line in commands for target in re.findall(r"^make ([a-z-]+)", line)}
        assert named <= targets, (page, named - targets)
        words = {word.removeprefix("./") for text in code for word in text.split()}
        words.discard("multiprocessing/synchronize.py")  # of Python
        missing = {word for word in words if FILE.fullmatch(word) and not (ROOT / word).exists()}
        assert not missing, (page, missing)


def anchors_of(page: Path) -> set[str]:
    headings = re.findall(
        r"^#+ (.+)$", page.read_text(encoding="utf-8", errors="replace"), re.MULTILINE
    )  # or a picture
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_lead_somewhere():
    others = (ROOT / name for name in ("CHANGELOG.md", "benchmarks/RESULTS.md", "peerstep/README.md"))
    for page in [*(page for page in PAGES if page.suffix != ".sh"), *others]:
        for link in re.findall(r"\]\((?!https?://)([^)]+)\)", read_page(page)):
            path, _, anchor = link.partition("#")
            target = (page.parent / path) if path else page
            assert target.exists(), (page, link)
            assert not anchor or anchor in anchors_of(target), (page, link)


def test_pages_that_code_names_exist():
    """Docstrings, help texts and messages name pages by their path, with an anchor or without."""
    files = [path for path in ROOT.glob("*") if path.suffix in (".py", "") and path.is_file()]
    for folder in ("cotrain", "peerstep", "tests", "benchmarks", "configs", "deploy", "examples"):
        files += [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml", ".sh", ".service")]
    named = [
        (path, page, anchor)
        for path in files
        for page, anchor in re.findall(r"\b(docs/[\w-]+\.md)(?:#([\w-]+))?", path.read_text(encoding="utf-8"))
    ]
    assert len(named) > 20
    for path, page, anchor in named:
        assert (ROOT / page).exists() and (not anchor or anchor in anchors_of(ROOT / page)), (path, page, anchor)


def read_table(page: str, heading: str) -> list[str]:
    """Return the first cells of the tables of a page whose first column has this heading."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    tables = re.findall(rf"^\| {heading}[^|]*\|.*\n\|[-|]+\n((?:\|.*\n)+)", text, re.MULTILINE)
    return [re.match(r"\| (.*?) \|", row)[1].strip("`") for table in tables for row in table.splitlines()]


def test_log_lines_of_the_guides_are_printed_and_the_python_example_runs():
    lines = read_table("troubleshooting.md", "line")
    missing = [line for line in lines if not is_printed(line)]
    assert len(lines) > 20 and not missing, missing
    guide = (ROOT / "docs" / "agent-guide.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"```python\n(.*?)```", guide, re.DOTALL)
    names: dict = {}
    exec(example, names)
    assert names["row"] is not None


def test_each_list_of_requirements_builds_on_the_one_before():
    trainer, organiser, dev = (
        re.findall(
            r"^[^#\s].*?(?= *#| *$)", (ROOT / f"requirements{name}.txt").read_text(encoding="utf-8"), re.MULTILINE
        )
        for name in ("", "-organiser", "-dev")
    )
    assert (organiser[0], dev[0]) == ("-r requirements.txt", "-r requirements-organiser.txt")
    assert {line.split("==")[0] for line in organiser[1:]} == ORGANISER_MODULES
    assert not {line.split("==")[0] for line in trainer} & ORGANISER_MODULES
    locked = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    (other,) = (line for line in trainer if f"{line.replace('_', '-')} \\\n" not in locked)
    assert other.startswith("torch=="), "`make lock` writes it"


def test_pages_state_the_defaults_of_flags():
    """A number in brackets behind a flag, as in `--average_state_every` (8), is its default."""
    defaults = {option.name: option.default for arguments in TRAINER_ARGUMENTS for option in fields(arguments)}
    stated = [
        (page.name, name, float(number.replace(",", "")))
        for page in PAGES
        for name, number in re.findall(r"`--(\w+)` \((\d[\d,.]*)\)", read_page(page))
    ]
    assert len(stated) >= 8
    assert not [(page, name, number) for page, name, number in stated if defaults[name] != number]


@pytest.mark.parametrize(
    "pattern",
    [
        r"Python (3\.\d+) to 3\.\d+",
        r"Python 3\.\d+ to (3\.\d+)",
        r"hivemind (1\.\d+\.\d+)",
        r"lines there, some ([\d,]+) here|and has ([\d,]+): those",  # of the product
    ],
)
def test_pages_agree_on_a_number(pattern):
    found = {
        next(filter(None, match if isinstance(match, tuple) else (match,)))
        for page in (*PAGES, ROOT / "CONTRIBUTING.md")
        for match in re.findall(pattern, read_page(page))
    }
    assert len(found) == 1, found
