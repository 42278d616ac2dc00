"""Batches of text."""

import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from cotrain.tasks.text import ensure_prediction


def test_batch_of_masked_text_has_something_to_predict():
    """Of a short sample alone no token was selected, one time in five, and its loss was NaN."""
    words = WordLevel({"[PAD]": 0, "[MASK]": 1, "[CLS]": 2, "a": 3, "b": 4}, unk_token="a")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), pad_token="[PAD]", mask_token="[MASK]", cls_token="[CLS]"
    )
    for seed in range(20):
        torch.manual_seed(seed)
        original = torch.tensor([[2, 3, 4, 0], [2, 4, 0, 0]])
        batch = {"input_ids": original.clone(), "labels": torch.full_like(original, -100)}
        ensure_prediction(batch, tokenizer)
        [place] = map(tuple, (batch["labels"] != -100).nonzero().tolist())
        assert original[place] == batch["labels"][place] >= 3 and batch["input_ids"][place] == 1
        before = {name: tensor.clone() for name, tensor in batch.items()}
        ensure_prediction(batch, tokenizer)
        assert all(batch[name].equal(tensor) for name, tensor in before.items()), "there is one already"
    nothing = {"input_ids": torch.tensor([[2, 0]]), "labels": torch.tensor([[-100, -100]])}
    ensure_prediction(nothing, tokenizer)
    assert nothing["labels"].tolist() == [[-100, -100]]
