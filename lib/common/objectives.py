"""The objectives that a model can be trained for, and all that depends on which it is.

A new model family with one of these objectives is an entry in its `model_types`. A new objective also needs a way to
pack its samples (lib/data/packing.py) and to evaluate it (lib/monitoring/evaluation.py), chosen by its properties.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Objective:
    """What a model learns to predict.

    :param name: the value of --objective
    :param description: words for the model card
    :param short_description: words for --help
    :param columns: of the prepared data, in this order; their types are in lib/data/packing.py
    :param model_types: the families of transformers that are trained for it
    :param model_class: the class of transformers that trains them and loads their checkpoints
    :param required_tokens: special tokens that a tokenizer must have, by its attribute without "_token"
    :param tokenizer_type: what --train_tokenizer trains by default
    :param pipeline_tag: the Hub's name of the task
    :param is_causal: each token predicts the next one; else masked tokens are predicted
    :param has_sentence_order: also predicts whether two segments are swapped
    """

    name: str
    description: str
    short_description: str
    columns: tuple[str, ...]
    model_types: tuple[str, ...]
    model_class: str
    required_tokens: tuple[str, ...]
    tokenizer_type: str
    pipeline_tag: str
    is_causal: bool = False
    has_sentence_order: bool = False


_ALL = (
    Objective(
        name="mlm_sop",
        description="masked language modelling and sentence order",
        short_description="masked LM and sentence order: ALBERT",
        columns=("input_ids", "token_type_ids", "attention_mask", "special_tokens_mask", "sentence_order_label"),
        model_types=("albert",),
        model_class="AlbertForPreTraining",
        required_tokens=("cls", "sep", "pad", "mask"),
        tokenizer_type="sentencepiece",
        pipeline_tag="fill-mask",
        has_sentence_order=True,
    ),
    Objective(
        name="mlm",
        description="masked language modelling",
        short_description="masked LM: BERT, RoBERTa, DistilBERT",
        columns=("input_ids", "attention_mask", "special_tokens_mask"),
        model_types=("bert", "roberta", "distilbert"),
        model_class="AutoModelForMaskedLM",
        required_tokens=("cls", "sep", "pad", "mask"),
        tokenizer_type="wordpiece",
        pipeline_tag="fill-mask",
    ),
    Objective(
        name="clm",
        description="causal language modelling",
        short_description="causal LM: GPT-2",
        columns=("input_ids", "attention_mask"),
        model_types=("gpt2",),
        model_class="AutoModelForCausalLM",
        required_tokens=("eos",),
        tokenizer_type="bpe",
        pipeline_tag="text-generation",
        is_causal=True,
    ),
)

OBJECTIVES = {objective.name: objective for objective in _ALL}
DEFAULT_OBJECTIVE = "mlm_sop"
# model type -> name of the objective that its data must have been prepared for
OBJECTIVE_OF_MODEL = {model_type: objective.name for objective in _ALL for model_type in objective.model_types}
