"""Builders of the configuration and the model.

Trainers, monitors and evaluators must all use these builders: peers can exchange training states only between equal
models.
"""

import contextlib
import itertools
import logging
import math
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
import transformers
from torch.nn.modules.module import register_module_module_registration_hook
from transformers import AutoConfig, PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import cached_file
from transformers.utils.logging import disable_progress_bar

from cotrain.common.errors import UserError, first_line
from cotrain.common.run_folder import ADAPTERS
from cotrain.common.seeds import derive_seed
from cotrain.models.config import CONFIGS, find_model_classes, is_inline, is_published_name, read_fields
from cotrain.models.hub import ADAPTED, build_hub_options, fetch_files
from cotrain.models.objectives import OBJECTIVES
from cotrain.models.vocabulary import vocabulary_size
from cotrain.options import Adopted, ModelOptions
from cotrain.settings import BASE_FOLDER

logger = logging.getLogger(__name__)
# transformers warns of a configuration's own special tokens, before those of the tokenizer are set.
logging.getLogger("transformers.configuration_utils").addFilter(lambda record: "_token_id must" not in str(record.msg))
disable_progress_bar()  # reading and writing weights takes only a second

MAX_MODULES = 20_000  # of torch in a model; 256 layers of MobileBERT have 16,000, and take 3 seconds to build
MAX_POSITION_WEIGHTS = 2**26  # in an embedding of positions, 268 MB; GPT-3's has 25 million


def read_config(name: str, flag: str = "--model_name_or_path", **hub_options) -> PretrainedConfig:
    """Read a model configuration; arguments and errors as for `read_fields`."""
    fields = read_fields(name, flag, **hub_options)
    try:
        config = AutoConfig.for_model(**fields)
        config.get_text_config().to_dict()  # fails if it is no part of this type
        return config
    except Exception as error:
        raise UserError(f"{flag}: the model configuration is not valid: {' '.join(str(error).split())}") from None


def load_config(args: ModelOptions, adopted: Adopted, tokenizer: PreTrainedTokenizerBase) -> PretrainedConfig:
    """Load the model configuration and set the tokenizer's vocabulary size and special tokens in it.

    :raises UserError: if there is no configuration at `args.model_name_or_path`, the run has named a path, the model
        family is not supported, pretrained weights have a smaller vocabulary than the tokenizer, or the weights do not
        fit into memory
    """
    name = args.model_name_or_path
    is_read = not is_inline(name) and (args.from_pretrained or not is_published_name(name))
    is_foreign, hub_options = "model_name_or_path" in adopted.names, build_hub_options(args, adopted)
    is_from_run = is_foreign and name != BASE_FOLDER
    if is_from_run and is_read and Path(name).exists():  # the run's data may have created it
        raise UserError(f"this run's --model_name_or_path '{name}' is a path on this machine: refused")
    if is_read and args.from_pretrained and Path(name, ADAPTERS).is_file():  # peft would replace them
        raise UserError(ADAPTED.format(name))
    source, is_here = name, is_inline(name) or Path(name).exists() or (CONFIGS / f"{name}.json").is_file()
    if is_from_run and not is_here:
        source = str(fetch_files(name, is_foreign=True, has_weights=False, **hub_options))
    config = read_config(source, has_weights=args.from_pretrained, **hub_options)
    if args.lora_rank is not None and not Path(name).exists():  # all that is read of the repository is of one commit
        with contextlib.suppress(OSError):  # a built-in name, and no Hub
            args.model_revision = Path(cached_file(name, "config.json", **hub_options)).parent.name
    text, size = config.get_text_config(), vocabulary_size(tokenizer)
    stated = getattr(text, "vocab_size", size)
    if args.from_pretrained and stated < size:  # a larger one is common: models round it up
        what = f"the model at '{name}' has a vocabulary of {stated}, the tokenizer of {size}"
        remedy = f"prepare the data with the model's own, ./tokenize_wikitext103.py --tokenizer {name}"
        raise UserError(f"--from_pretrained: {what}: {remedy}")
    if not args.from_pretrained:
        if stated != size:
            logger.info(f"The model has a vocabulary of {size} tokens, the tokenizer's, instead of {stated}")
        text.vocab_size = size
    for part in (config, text):  # often the same
        set_special_tokens(part, tokenizer)
    set_objective(config, tokenizer)
    check_size(config, is_foreign, args.lora_rank is not None)
    return config


def set_special_tokens(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set each special token that a configuration has, by the tokenizer. One that is no token of it is removed."""
    size = vocabulary_size(tokenizer)
    for key in {"pad_token_id", "bos_token_id", "eos_token_id", *(k for k in vars(config) if k.endswith("_token_id"))}:
        token = getattr(tokenizer, key, getattr(config, key, None))
        try:
            setattr(config, key, token if isinstance(token, int) and 0 <= token < size else None)
        except Exception:  # some classes need one
            setattr(config, key, tokenizer.eos_token_id or 0)


def set_objective(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase) -> None:
    """Set the class that trains the model: the objective that the tokenizer's data was prepared for decides.

    tokenize_wikitext103.py states it in the tokenizer's configuration, the only part of the data that a monitor has.
    """
    classes = find_model_classes(config.model_type)
    objective = next((x for x in classes if x == tokenizer.init_kwargs.get("objective")), next(iter(classes)))
    config.architectures = [classes[objective]]
    if len(set(classes.values())) > 1 and OBJECTIVES[objective].is_causal:
        config.is_decoder = True  # BERT and its like attend to later tokens otherwise


def build_without_weights(config: PretrainedConfig) -> PreTrainedModel:
    """Build the model on the meta device, where its tensors take no memory.

    :raises UserError: if it cannot be built
    """
    numbers = itertools.count(1)

    def check_module(_parent: torch.nn.Module, name: str, module: torch.nn.Module | None) -> None:
        if next(numbers) > MAX_MODULES:
            raise ValueError(f"it has more than {MAX_MODULES} modules")
        # Before it computes them: DistilBERT does, one by one, if they are sinusoidal.
        is_position = isinstance(module, torch.nn.Embedding) and ("pos" in name or name == "wpe")
        if is_position and (size := module.weight.numel()) > MAX_POSITION_WEIGHTS:
            raise ValueError(f"its position embeddings have {4e-6 * size:,.0f} MB")

    hook = register_module_module_registration_hook(check_module)
    try:
        with torch.device("meta"):
            return get_model_class(config)(config)
    except Exception as error:
        raise UserError(f"--model_name_or_path: the model cannot be built: {first_line(error):.200}") from None
    finally:
        hook.remove()


def check_size(config: PretrainedConfig, is_foreign: bool = False, is_frozen: bool = False) -> None:
    """Build the model without weights first: a stranger may have chosen it.

    :param is_foreign: whether the run has chosen it: training, with gradients and two statistics, must fit as well
    :param is_frozen: whether only adapters are trained: a monitor lacks the weights, a GPU has them, a CPU maps a file
    :raises UserError: if it cannot be built, or the weights alone exceed this machine's memory
    """
    model = build_without_weights(config)
    numel = sum(tensor.numel() for tensor in itertools.chain(model.parameters(), model.buffers()))
    needed, what = (16e-9 * numel, "training") if is_foreign else (4e-9 * numel, "the weights of")
    if not is_frozen and needed > (memory := 1e-9 * psutil.virtual_memory().total):
        raise UserError(f"{what} the model takes {needed:.0f} GB; this machine has {memory:.0f} GB of memory")


def max_tokens(config: PretrainedConfig) -> float:
    """Return the length of the longest sequence that a model takes; infinity if nothing bounds it."""
    length = getattr(config.get_text_config(), "max_position_embeddings", None) or -1
    lengths = [length if length > 0 else math.inf]  # XLNet's is -1
    for name, module in build_without_weights(config).named_modules():
        if isinstance(module, torch.nn.Embedding) and "position" in name.rpartition(".")[2]:
            # RoBERTa's positions begin after that of the padding.
            lengths.append(module.num_embeddings - (0 if module.padding_idx is None else module.padding_idx + 1))
    return min(lengths)


def get_objective(config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase | None = None) -> str:
    """Return the name of the model's objective, see cotrain/models/objectives.py.

    :param tokenizer: states which of several objectives with the same class it is: "clm" or "chat"
    """
    classes = find_model_classes(config.model_type)
    names = [name for name, model in classes.items() if [model] == config.architectures] or list(classes)
    stated = None if tokenizer is None else tokenizer.init_kwargs.get("objective")
    return stated if stated in names else names[0]


def get_model_class(config: PretrainedConfig) -> type:
    """Return the transformers class that trains the model and loads its checkpoints."""
    return getattr(transformers, find_model_classes(config.model_type)[get_objective(config)])


def initialize_model(config: PretrainedConfig) -> PreTrainedModel:
    """Build a model with random weights, whose loss is a mean over the batch; UserError if it does not take text."""
    return try_model(get_model_class(config)(config).to(torch.float32))


@torch.no_grad()
def try_model(model: PreTrainedModel) -> PreTrainedModel:
    """Return a model that takes samples, and as a causal one predicts the next token: a decoder of BART has its own.

    :raises UserError: if it does not
    """
    tokens = torch.ones(1, 8, dtype=torch.long, device=model.device)
    labels = tokens.masked_fill(torch.arange(8, device=model.device) > 0, -100)  # no token comes before the first
    model.loss_type = model.loss_type or "ForCausalLM"  # as transformers chooses, with a warning
    try:
        loss = model.eval()(input_ids=tokens, attention_mask=tokens, labels=labels).loss
    except Exception as error:
        raise UserError(f"--model_name_or_path: the model takes no text ({first_line(error):.200})") from None
    if OBJECTIVES[get_objective(model.config)].is_causal and loss > 0:
        raise UserError("--model_name_or_path: the model does not predict the next token; choose another")
    return model.train()


@contextlib.contextmanager
def seeded_by(run_id: str) -> Iterator[None]:
    """Seed the initial weights by the run ID alone, so that they are equal on all peers."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(derive_seed("initial weights", run_id))
        yield
