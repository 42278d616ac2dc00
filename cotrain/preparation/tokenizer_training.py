"""Training of tokenizers. The same text gives the same tokenizer."""

import io
import itertools
import re
from collections.abc import Iterable

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from transformers import AlbertTokenizer, GPT2Tokenizer, PreTrainedTokenizerBase, RobertaTokenizer

from cotrain.common.errors import UserError, first_line
from cotrain.models.objectives import OBJECTIVES

# A vocabulary of 30,000 changes little beyond some ten million words, and training holds all of them in memory.
TRAINING_CHARS = 50_000_000
# Of different words, for sentencepiece: a million takes 20 s. 50 million characters of English have less, while a text
# without spaces has nothing else.
MAX_WORD_CHARS = 3_000_000
# Of a line for sentencepiece, whose time grows with the square: 8,000 words take 0.5 s, 16,000 2.7 s, a book hours
MAX_WORDS = 1000


def train_tokenizer(
    documents: Iterable[str], objective: str, vocab_size: int, max_seq_length: int
) -> PreTrainedTokenizerBase:
    """Train a tokenizer; raise UserError if its vocabulary cannot have exactly this size with this text."""
    if OBJECTIVES[objective].has_sentence_order:
        tokenizer = _train_sentencepiece(documents, vocab_size)
    else:  # byte-level BPE, which has no unknown tokens
        # GPT-2 has no padding token. A separate one is better than end of text, which the model must learn.
        empty = GPT2Tokenizer(pad_token="<|pad|>")
        if not OBJECTIVES[objective].is_causal:
            # In the order of RoBERTa's published vocabulary: its position ids require that <pad> is 1.
            empty = RobertaTokenizer(vocab={"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "<mask>": 4}, merges=[])
        tokenizer = empty.train_new_from_iterator(documents, vocab_size, show_progress=False)
    if len(tokenizer) != vocab_size:
        raise UserError(f"--vocab_size {vocab_size} does not fit this text: pass {len(tokenizer)}")
    tokenizer.model_max_length = max_seq_length
    return tokenizer


def _train_sentencepiece(documents: Iterable[str], vocab_size: int) -> AlbertTokenizer:
    """Train with sentencepiece, which is deterministic; UnigramTrainer of tokenizers is not."""
    # Normalize as AlbertTokenizer does: no upper case. Without accents, most languages lose letters or vowels.
    tokenizer = AlbertTokenizer(keep_accents=True)
    normalize = tokenizer.backend_tokenizer.normalizer.normalize_str
    model = io.BytesIO()
    sentences, words, size = [], set(), 0  # no generator: sentencepiece would turn Ctrl-C into a RuntimeError
    for line in itertools.chain.from_iterable(document.split("\n") for document in documents):
        # sentencepiece skips lines with tabs. AlbertTokenizer parses "<unk>" itself.
        found = normalize(line).replace(tokenizer.unk_token, " ").split()
        sentences += (" ".join(found[start : start + MAX_WORDS]) for start in range(0, len(found), MAX_WORDS))
        size += sum(len(word) for word in set(found) - words)
        words.update(found)
        if size > MAX_WORD_CHARS:
            print(f"The tokenizer is trained on {MAX_WORD_CHARS:,} characters of different words; this takes minutes")
            break
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            max_sentence_length=1_000_000,  # bytes
            model_writer=model,
            vocab_size=vocab_size,
            model_type="unigram",
            character_coverage=0.99995,  # as for ALBERT
            normalization_rule_name="identity",  # sentencepiece's own drops joiners and takes letters of Thai apart
            pad_id=0,  # ids of the special tokens in this order: <pad> <unk> [CLS] [SEP] [MASK]
            unk_id=1,
            bos_id=-1,
            eos_id=-1,
            control_symbols=["[CLS]", "[SEP]", "[MASK]"],
            num_threads=4,  # fixed, not the number of cores: it affects the rounding of sums
            minloglevel=2,  # errors only; they are raised as well
        )
    except RuntimeError as error:
        limit = re.search(r"(<=|vs) (\d+)", str(error))
        remedy = f"pass {limit[2]} or {'less' if limit[1] == '<=' else 'more'}" if limit else first_line(error)
        raise UserError(f"--vocab_size {vocab_size} does not fit this text: {remedy}") from error
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    return AlbertTokenizer(vocab=[(piece.piece, piece.score) for piece in proto.pieces], keep_accents=True)
