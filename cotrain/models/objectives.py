"""Training objectives: what data preparation and the builders of models need to know of each.

transformers' tables say which model types an objective trains. A new objective also needs packing of its samples
(cotrain/preparation/packing.py) and a task (cotrain/tasks/text.py), which the properties below select.
"""

from dataclasses import dataclass

SPLITS = ("train", "validation")  # of the prepared data


@dataclass(frozen=True)
class Objective:
    """A training objective.

    :param description: text for the model card and --help
    :param columns: columns of the prepared data, in this order; their types are in cotrain/data/schemas.py
    :param model_classes: model type -> transformers' class that trains it and loads its checkpoints; or the name of
        such a table in transformers.models.auto.modeling_auto, whose import takes seconds
    :param is_causal: whether the model predicts each next token, instead of masked tokens
    :param has_sentence_order: whether the model also predicts if two segments are swapped
    :param has_answers: whether the text is conversations, of which the model learns the answers
    """

    description: str
    columns: tuple[str, ...]
    model_classes: str | dict[str, str]
    is_causal: bool = False
    has_sentence_order: bool = False
    has_answers: bool = False


OBJECTIVES = {  # the first that trains a model type is its default
    "mlm_sop": Objective(
        description="masked language modelling and sentence order",
        columns=("input_ids", "token_type_ids", "attention_mask", "special_tokens_mask", "sentence_order_label"),
        model_classes={"albert": "AlbertForPreTraining"},
        has_sentence_order=True,
    ),
    "mlm": Objective(
        description="masked language modelling",
        columns=("input_ids", "attention_mask", "special_tokens_mask"),
        model_classes="MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    ),
    "clm": Objective(
        description="causal language modelling",
        columns=("input_ids", "attention_mask"),
        model_classes="MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        is_causal=True,
    ),
    "chat": Objective(
        description="answers in conversations",
        columns=("input_ids", "answer_mask", "start_mask"),
        model_classes="MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        is_causal=True,
        has_answers=True,
    ),
}
DEFAULT_OBJECTIVE = "mlm_sop"
