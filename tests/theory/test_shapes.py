"""Theory's list of parameters is the module's own, for every named size."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml

from rayzero.config.build import build, defaults
from rayzero.config.model import Flavour, ModelConfig
from rayzero.models.transformer import Transformer
from rayzero.theory.shapes import ParamKind, shape_of

FOLDER = Path(__file__).parents[2] / "conf" / "model"
OTHERS = {"factory", "hf"}
"""Options that build somebody else's module."""
SIZES = sorted(f.stem for f in FOLDER.glob("*.yaml") if f.stem not in OTHERS)


def named(size: str) -> ModelConfig:
    """Return the model group that conf/model/SIZE.yaml states."""
    model = {**defaults()["model"], **yaml.safe_load((FOLDER / f"{size}.yaml").read_text())}
    return build({"model": model}).model


def found_in_module(config: ModelConfig) -> list[tuple[str, tuple[int, ...]]]:
    """List (name, shape) of the real module's parameters."""
    with torch.device("meta"):
        module = Transformer(config)
    return [(name, tuple(p.shape)) for name, p in module.named_parameters()]


@pytest.mark.parametrize("size", SIZES)
def test_names_shapes_and_order_are_those_of_the_module(size: str) -> None:
    config = named(size)
    listed = [(p.name, p.shape) for p in shape_of(config).params]
    assert listed == found_in_module(config)


@pytest.mark.parametrize("flavour", Flavour)
@pytest.mark.parametrize("tied", [True, False])
def test_both_flavours_tied_and_untied(flavour: Flavour, tied: bool) -> None:
    config = ModelConfig(flavour=flavour, tied_output=tied, num_kv_heads=2, num_layers=3)
    listed = [(p.name, p.shape) for p in shape_of(config).params]
    assert listed == found_in_module(config)


@pytest.mark.parametrize("size", SIZES)
def test_every_file_is_called_what_it_names(size: str) -> None:
    assert named(size).name == size


def test_units_are_the_repeated_blocks() -> None:
    config = replace(ModelConfig(), num_layers=11)
    shape = shape_of(config)
    assert shape.units == tuple(f"blocks.{i}" for i in range(11))
    for param in shape.params:
        assert param.name.startswith(f"{param.unit}.") if param.unit else "blocks" not in param.name


def test_kinds_are_those_of_the_modules() -> None:
    module = Transformer(replace(ModelConfig(), tied_output=False))
    for param in shape_of(replace(ModelConfig(), tied_output=False)).params:
        owner = module.get_submodule(param.module)
        kind = {
            torch.nn.Embedding: ParamKind.EMBEDDING,
            torch.nn.Linear: ParamKind.MATRIX,
            torch.nn.LayerNorm: ParamKind.NORM,
        }[type(owner)]
        assert param.kind is (ParamKind.BIAS if param.name.endswith("bias") else kind)
