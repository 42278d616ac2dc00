"""Training of tokenizers. The same text gives the same tokenizer."""

import io
import json
from collections.abc import Iterable

import sentencepiece
from sentencepiece import sentencepiece_model_pb2
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import AlbertTokenizer, GPT2Tokenizer, PreTrainedTokenizerBase, RobertaTokenizer

from cotrain.common.errors import UserError
from cotrain.models.objectives import OBJECTIVES

# A vocabulary of 30,000 changes little beyond some ten million words, and training holds all of them in memory.
TRAINING_CHARS = 50_000_000


def train_tokenizer(
    documents: Iterable[str], objective: str, vocab_size: int, max_seq_length: int
) -> PreTrainedTokenizerBase:
    """Train a tokenizer; raise UserError if its vocabulary cannot have exactly this size with this text."""
    if OBJECTIVES[objective].has_sentence_order:
        tokenizer = _train_sentencepiece(documents, vocab_size)
    else:
        tokenizer = _train_bpe(documents, vocab_size, OBJECTIVES[objective].is_causal)
    if len(tokenizer) != vocab_size:
        raise UserError(f"--vocab_size {vocab_size} does not fit this text: pass {len(tokenizer)}")
    tokenizer.model_max_length = max_seq_length
    return tokenizer


def _train_sentencepiece(documents: Iterable[str], vocab_size: int) -> AlbertTokenizer:
    """Train with sentencepiece, which is deterministic; UnigramTrainer of tokenizers is not."""
    # Normalize as AlbertTokenizer does: no upper case, no accents.
    tokenizer = AlbertTokenizer()
    normalize = tokenizer.backend_tokenizer.normalizer.normalize_str
    model = io.BytesIO()
    sentences = [  # not a generator: sentencepiece would turn its KeyboardInterrupt into a RuntimeError
        # sentencepiece skips lines with tabs, and lines that are too long. AlbertTokenizer parses "<unk>" itself.
        " ".join(normalize(line).replace(tokenizer.unk_token, " ").split())
        for document in documents
        for line in document.split("\n")
    ]
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sentences),
            max_sentence_length=1_000_000,  # bytes
            model_writer=model,
            vocab_size=vocab_size,
            model_type="unigram",
            character_coverage=0.99995,  # as for ALBERT
            pad_id=0,  # ids of the special tokens in this order: <pad> <unk> [CLS] [SEP] [MASK]
            unk_id=1,
            bos_id=-1,
            eos_id=-1,
            control_symbols=["[CLS]", "[SEP]", "[MASK]"],
            num_threads=4,  # fixed, not the number of cores: it affects the rounding of sums
            minloglevel=2,  # errors only; they are raised as well
        )
    except RuntimeError as error:
        raise UserError(f"--vocab_size {vocab_size}: sentencepiece cannot train on this text ({error})") from error
    proto = sentencepiece_model_pb2.ModelProto.FromString(model.getvalue())
    return AlbertTokenizer(
        vocab=[(piece.piece, piece.score) for piece in proto.pieces],
        _spm_precompiled_charsmap=proto.normalizer_spec.precompiled_charsmap,
    )


def _train_bpe(documents: Iterable[str], vocab_size: int, is_causal: bool) -> GPT2Tokenizer | RobertaTokenizer:
    """Train byte-level BPE, which has no unknown tokens."""
    # GPT-2 has no padding token. A separate one is better than end of text, which the model must learn.
    # RoBERTa's tokens are in the order of its published vocabulary: its position ids require that <pad> is 1.
    special_tokens = ["<|endoftext|>", "<|pad|>"] if is_causal else ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(documents, trainer)
    merges = [tuple(merge) for merge in json.loads(backend.to_str())["model"]["merges"]]
    if is_causal:
        return GPT2Tokenizer(vocab=backend.get_vocab(), merges=merges, pad_token="<|pad|>")
    return RobertaTokenizer(vocab=backend.get_vocab(), merges=merges)
