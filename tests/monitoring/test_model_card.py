"""The model card: metadata, rendered page, and escaping of untrusted names."""

import shlex
from pathlib import Path
from xml.etree import ElementTree

import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt
from transformers import AutoConfig, AutoTokenizer

from arguments import TRAINER_ARGUMENTS
from cotrain.common.argument_parser import parse_arguments
from cotrain.monitoring.aggregation import StepReport
from cotrain.monitoring.contributors import Contributors
from cotrain.monitoring.model_card import CardMetadata, build_card
from tests.support.dht_records import peer_step
from tests.support.fakes import make_text_task
from tests.support.models import build_model
from tests.support.peers import TINY_CONFIGS

PEER_ID = "QmVUecCSp9yW9fE14vhp7fjCTHiWyA7gDhZxZk3B7RiXZG"
CONFIGS = {name: AutoConfig.for_model(**tiny, vocab_size=500) for name, tiny in TINY_CONFIGS.items()}
METADATA = CardMetadata("me/model", "my run", make_text_task(CONFIGS["albert"]), "apache-2.0", "en")
HOSTILE_NAMES = [
    "<script>alert(1)</script>",
    "<img src=x onerror=alert(1)>",
    "[click](javascript:alert(1))",
    "![](http://evil.example/x.png)",
    "a | b | c",
    "x |\n|---|\n# heading",
    "`code` **bold** _it_ ~~no~~ $x$",
    "&lt;b&gt; &amp;",
    "\\| \\<b>",
    "http://evil.example www.evil.example me@evil.example @someone #1",
    "</td></tr></table><h1>x",
    "---\nlicense: evil\n---",
    "{{ token }} {% raw %}",
    "Zoë Ångström 張三 😀",
]


def contributed(folder: Path, names: list[str]) -> Contributors:
    contributors = Contributors(folder, "run")
    contributors.record_names({b"%d" % number: name for number, name in enumerate(names)})
    steps = tuple(peer_step(b"%d" % number, 1, 1000 - number) for number in range(len(names)))
    contributors.add(StepReport(1, 1.0, 1, 1, 1.0, 1, 1, 0.0, steps))
    return contributors


def render(card: ModelCard) -> ElementTree.Element:
    """Return the rendered card, which is valid XML unless a name gets through unescaped."""
    markdown = MarkdownIt("commonmark", {"html": True, "xhtmlOut": True}).enable(["table", "strikethrough"])
    return ElementTree.fromstring(f"<body>{markdown.render(card.text)}</body>")


def test_card_is_read_back_as_the_hub_reads_it(tmp_path):
    build_card(METADATA, 12_345, None, contributed(tmp_path, ["x"] * 150), []).save(tmp_path / "README.md")
    card = ModelCard.load(tmp_path / "README.md")
    assert card.data.to_dict() == {
        "library_name": "transformers", "pipeline_tag": "fill-mask", "language": "en", "license": "apache-2.0",
        "tags": ["hivemind", "collaborative-training", "albert"],
    }  # fmt: skip
    assert "step 12,345" in card.text and "my run" in card.text
    assert card.text.count("| x |") == 100 and "150 contributors; the first 100 are" in card.text
    assert "--initial_peers" not in card.text, "nobody can join through an address that is good on one machine"


def test_names_of_strangers_are_text_whatever_they_are(tmp_path):
    contributors = contributed(tmp_path, HOSTILE_NAMES)
    peers, curves = ["/ip4/1.1.1.1/tcp/1/p2p/Qm"], "https://huggingface.co/spaces/me/my_albert?x=1"
    card = build_card(METADATA, 1, 9.0, contributors, peers, curves)
    page = render(card)
    cells = ["".join(cell.itertext()) for cell in page.iter("td")]
    assert cells[1::5] == [leader.name for leader in contributors.leaders[:100]]
    assert "The training loss at this step was 9.0000." in card.text
    tags = {element.tag for element in page.iter()} - {"body"}
    assert tags == {"h1", "h2", "p", "b", "a", "table", "thead", "tbody", "tr", "th", "td", "pre", "code"}
    links = [element.get("href") for element in page.iter("a")]
    assert links == ["https://github.com/learning-at-home/hivemind", curves]
    assert card.data.license == "apache-2.0"
    table = card.text.split("## Contributors")[1].split("## How")[0]
    assert not any(text in table for text in ("://", "www.", "@", "<", "`", "$", "{{")), "nothing that links by itself"


def test_join_command_needs_the_addresses_only(tmp_path):
    metadata = CardMetadata("me/model", "my <i>run</i>; rm -rf", make_text_task(CONFIGS["albert"]))
    peers = [f"/ip4/1.1.1.1/tcp/1/p2p/{PEER_ID}", f"/dns4/x.org/tcp/2/p2p/{PEER_ID}"]
    card = build_card(metadata, 1, None, Contributors(tmp_path, "run"), peers)
    assert render(card).find(".//i") is None
    script, *words = shlex.split(card.text.split("```bash\n")[1].split("\n```")[0])
    arguments = parse_arguments(TRAINER_ARGUMENTS, "-", words)
    assert script == "./run_trainer.py" and arguments[2].initial_peers == peers


@pytest.mark.parametrize("model_type", ["albert", "bert", "gpt2"])
def test_snippet_loads_the_model(tmp_path, data, model_type):
    model = build_model(CONFIGS[model_type], "run")
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(data / "tokenizer").save_pretrained(tmp_path)
    metadata = CardMetadata("me/model", "run", make_text_task(CONFIGS[model_type]))
    card = build_card(metadata, 1, None, Contributors(tmp_path, "run"), [])
    assert "license" not in card.data.to_dict() and "language" not in card.data.to_dict(), "none is given"
    assert card.data.pipeline_tag == ("text-generation" if model_type == "gpt2" else "fill-mask")
    namespace: dict = {}
    exec(card.text.split("```python\n")[1].split("```")[0].replace("me/model", str(tmp_path)), namespace)
    assert type(namespace["model"]) is type(model) and len(namespace["tokenizer"]) == 500
    for name, tensor in namespace["model"].state_dict().items():
        assert tensor.equal(model.state_dict()[name]), name
