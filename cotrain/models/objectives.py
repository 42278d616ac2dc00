"""Training objectives: what data preparation and the builders of models need to know of each.

To add a model family to an objective, add it to `model_types`. A new objective also needs packing of its samples
(cotrain/data/packing.py) and a task (cotrain/tasks/text.py), which the properties below select.
"""

from dataclasses import dataclass

SPLITS = ("train", "validation")  # of the prepared data


@dataclass(frozen=True)
class Objective:
    """A training objective.

    :param description: text for the model card and --help
    :param columns: columns of the prepared data, in this order; their types are in cotrain/data/packing.py
    :param model_types: transformers' model types that are trained with this objective
    :param model_class: transformers' class that trains these models and loads their checkpoints
    :param tokenizer_type: default type of tokenizer for --train_tokenizer
    :param is_causal: whether the model predicts each next token, instead of masked tokens
    :param has_sentence_order: whether the model also predicts if two segments are swapped
    """

    name: str
    description: str
    columns: tuple[str, ...]
    model_types: tuple[str, ...]
    model_class: str
    tokenizer_type: str
    is_causal: bool = False
    has_sentence_order: bool = False


_ALL = (
    Objective(
        name="mlm_sop",
        description="masked language modelling and sentence order",
        columns=("input_ids", "token_type_ids", "attention_mask", "special_tokens_mask", "sentence_order_label"),
        model_types=("albert",),
        model_class="AlbertForPreTraining",
        tokenizer_type="sentencepiece",
        has_sentence_order=True,
    ),
    Objective(
        name="mlm",
        description="masked language modelling",
        columns=("input_ids", "attention_mask", "special_tokens_mask"),
        model_types=("bert", "roberta", "distilbert"),
        model_class="AutoModelForMaskedLM",
        tokenizer_type="wordpiece",
    ),
    Objective(
        name="clm",
        description="causal language modelling",
        columns=("input_ids", "attention_mask"),
        model_types=("gpt2",),
        model_class="AutoModelForCausalLM",
        tokenizer_type="bpe",
        is_causal=True,
    ),
)

OBJECTIVES = {objective.name: objective for objective in _ALL}
DEFAULT_OBJECTIVE = "mlm_sop"
# Model type -> name of the objective that the data must be prepared for
OBJECTIVE_OF_MODEL = {model_type: objective.name for objective in _ALL for model_type in objective.model_types}
