"""Registry of objectives: all its names exist, and no other file names objectives."""

import ast
from pathlib import Path

import pytest
import transformers

from lib.common.cli import parse_arguments
from lib.common.objectives import OBJECTIVES
from lib.data.packing import SCHEMAS
from tests.support.peers import ROOT
from tokenize_wikitext103 import TokenizationArguments


@pytest.mark.parametrize("objective", OBJECTIVES.values(), ids=OBJECTIVES.keys())
def test_names_exist(objective):
    assert hasattr(transformers, objective.model_class)
    assert all(hasattr(transformers.PreTrainedTokenizerBase(), f"{name}_token") for name in objective.required_tokens)
    assert set(objective.model_types) <= set(transformers.CONFIG_MAPPING)
    assert tuple(SCHEMAS[objective.name].names) == objective.columns
    (args,) = parse_arguments([TokenizationArguments], "-", ["--objective", objective.name])
    assert (args.objective, args.tokenizer_type) == (objective.name, objective.tokenizer_type)


def test_only_the_registry_names_objectives():
    def names(path: Path) -> set[str]:
        constants = {node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)}
        return constants & OBJECTIVES.keys()

    files = [*ROOT.glob("*.py"), *(ROOT / "lib").rglob("*.py"), *(ROOT / "deploy").rglob("*.py")]
    assert [str(path.relative_to(ROOT)) for path in files if names(path)] == ["lib/common/objectives.py"]
