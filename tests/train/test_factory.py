"""A user's own model and data: the documented examples run, mistakes get a helpful message."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn

from rayzero.config.data import DataConfig, DataKind
from rayzero.config.model import ModelConfig
from rayzero.errors import ConfigError
from rayzero.train.data import load_data
from rayzero.train.factory import build_model

DOCUMENT = Path(__file__).parents[2] / "docs" / "your_model.md"


@pytest.fixture
def examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Write the document's Python blocks to files that can be imported; return them by name."""
    blocks = re.findall(r"```python\n# (\w+)\.py\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    for name, text in blocks:
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    return dict(blocks)


def test_the_documented_model_and_data_train_together(examples: dict[str, str]) -> None:
    torch.manual_seed(0)
    model = build_model(ModelConfig(factory="my_model:build", factory_args={"width": 32}))
    data = load_data(DataConfig(kind=DataKind.FACTORY, factory="my_data:build"), vocab_size=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    start = model(*data.validation(range(64))).item()
    for step in range(60):
        model(*data.batch(step, range(32))).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert model(*data.validation(range(64))).item() < 0.8 * start


def test_the_documented_data_gives_every_cut_the_same_batch(examples: dict[str, str]) -> None:
    data = load_data(DataConfig(kind=DataKind.FACTORY, factory="my_data:build"), vocab_size=1)
    whole, _ = data.batch(3, range(6))
    halves = [data.batch(3, range(3))[0], data.batch(3, range(3, 6))[0]]
    assert torch.equal(torch.cat(halves), whole)


def test_the_documented_examples_are_short(examples: dict[str, str]) -> None:
    assert set(examples) == {"my_model", "my_data"}
    assert all(len(text.splitlines()) <= 20 for text in examples.values())


@pytest.mark.parametrize(
    ("factory", "args", "words"),
    [
        ("no_such_package:build", {}, ["no module named 'no_such_package'", "PYTHONPATH"]),
        ("my_model:bild", {}, ["did you mean my_model:build?"]),
        ("my_model:torch", {}, ["a module called 'torch'"]),
        ("my_model:build", {"with": 3}, ["model.factory_args={'with': 3}", "(width=16)"]),
        ("my_data:build", {}, ["returned Sines", "torch.nn.Module"]),
        ("my_model", {}, ["package.module:function"]),
    ],
)
def test_a_mistake_in_the_model_factory_says_what_is_wrong(
    examples: dict[str, str], factory: str, args: dict[str, object], words: list[str]
) -> None:
    with pytest.raises(ConfigError, match=r"model\.factory") as caught:
        build_model(ModelConfig(factory=factory, factory_args=args))
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_data_without_the_three_names_is_refused(examples: dict[str, str]) -> None:
    config = DataConfig(kind=DataKind.FACTORY, factory="my_model:build")
    with pytest.raises(ConfigError, match="without fingerprint, batch, validation"):
        load_data(config, vocab_size=1)


def test_an_error_inside_a_factory_is_the_users_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "raising.py").write_text("def build():\n    raise KeyError('mine')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(KeyError, match="mine"):
        build_model(ModelConfig(factory="raising:build"))


def test_a_plain_module_class_is_a_factory() -> None:
    config = ModelConfig(
        factory="torch.nn:Linear", factory_args={"in_features": 2, "out_features": 3}
    )
    assert isinstance(build_model(config), nn.Linear)
