"""Published configurations: the model is the one that transformers builds of them, also after a run has published it.

`published_configs.json` has what the repositories state, as copied by aiconfigurator (NVIDIA) and tt-metal
(Tenstorrent) or, for older models, written down. Versions and types of tensors are left out, and parts for images and
sound of the types that are trained on text alone.
"""

import json
from pathlib import Path

import pytest
import torch
import transformers
from transformers import AutoConfig

from cotrain.models.config import find_model_classes, to_published_model
from cotrain.models.model import build_without_weights, max_tokens, read_config

PUBLISHED = json.loads((Path(__file__).parent / "published_configs.json").read_text(encoding="utf-8"))
# head_dim that is not declared, one of 8 layers of mixed kinds, a number above a million, "</s>", nested lists
SHORT = ("Qwen/Qwen3-30B-A3B-FP8", "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16", "state-spaces/mamba-130m-hf",
         "meta-llama/Llama-4-Scout-17B-16E-Instruct", "facebook/opt-350m", "EleutherAI/gpt-neo-125m",
         "mistralai/Mistral-7B-Instruct-v0.3", "facebook/bart-base", "databricks/dbrx-base")  # fmt: skip
LONG = [pytest.param(name, marks=pytest.mark.long) for name in PUBLISHED if name not in SHORT]
TOO_LONG = {name for name in PUBLISHED if "GLM-5.2" in name or "emma-4" in name}
PARAMETERS = {  # as published
    "Qwen/Qwen3-30B-A3B-FP8": 30_532_122_624, "EleutherAI/gpt-neo-125m": 125_198_592, "facebook/opt-350m": 331_196_416,
    "state-spaces/mamba-130m-hf": 129_135_360, "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
}  # fmt: skip


def shapes(model: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}


def build_by_transformers(fields: dict) -> torch.nn.Module:
    objective = next(iter(find_model_classes(fields["model_type"])))
    kind = {"mlm_sop": "PreTraining", "mlm": "MaskedLM", "clm": "CausalLM"}[objective]
    config = AutoConfig.for_model(**{key: fields[key] for key in fields.keys() - {"auto_map", "quantization_config"}})
    with torch.device("meta"):
        return getattr(transformers, f"AutoModelFor{kind}").from_config(config)


@pytest.mark.parametrize("name", [*SHORT, *LONG])
def test_model_is_that_of_transformers(name, tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(PUBLISHED[name]), encoding="utf-8")
    expected = shapes(build_by_transformers(PUBLISHED[name]))
    published = to_published_model(str(path))
    for source in (str(path), published):
        config = read_config(source)
        model = build_without_weights(config)
        assert shapes(model) == expected
        assert max_tokens(config) > 0
    assert model.num_parameters() == PARAMETERS.get(name, model.num_parameters())
    assert read_config(published).to_dict() == read_config(str(path)).to_dict()
    assert published.isprintable() and (len(published) < 1800) != (name in TOO_LONG), "for the settings of a run"
    assert to_published_model(published) == published
