"""The longest sequence that a model takes."""

import pytest
from transformers import AlbertConfig, RobertaConfig

from lib.common.errors import UserError
from lib.data.loading import check_sequence_length


@pytest.mark.parametrize(
    "config", [AlbertConfig(max_position_embeddings=64), RobertaConfig(max_position_embeddings=66)]
)
def test_sequence_has_as_many_tokens_as_the_model_has_positions(config):
    """RoBERTa's positions begin after that of the padding, which is 1."""
    check_sequence_length(config, 64)
    with pytest.raises(UserError, match="65 tokens, but the model has 64 positions"):
        check_sequence_length(config, 65)
