"""The parameters of our transformer from its config alone: names, shapes, units and tp cuts.

A test holds this list equal to the module's own, for all named sizes; so theory can speak of a 1T
model without building it. D hidden, F feed-forward width, V vocabulary, S longest sequence.
"""

import functools
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from enum import Enum

from rayzero.config.model import Flavour, ModelConfig


class ParamKind(Enum):
    """What a parameter is for."""

    EMBEDDING = "embedding"
    """A table that is looked up; a tied one is the output layer's weight too."""
    MATRIX = "matrix"
    """The weight of a linear layer."""
    NORM = "norm"
    BIAS = "bias"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamShape:
    """One parameter of the whole model."""

    name: str
    shape: tuple[int, ...]
    kind: ParamKind
    unit: str = ""
    """The repeated block that holds it, such as blocks.3; empty for the rest of the model."""
    tp_dim: int | None = None
    """The tensor dim that tensor parallelism cuts; None where every rank keeps all."""
    heads: int | None = None
    """How many heads that dim holds, where fewer than tp mean that every rank keeps all."""

    @property
    def module(self) -> str:
        """Path of the module that owns it."""
        return self.name.rpartition(".")[0]

    @property
    def numel(self) -> int:
        """Elements of the full parameter."""
        return math.prod(self.shape)

    def is_cut(self, tp: int) -> bool:
        """Whether each of `tp` ranks holds a block."""
        return tp > 1 and self.tp_dim is not None and (self.heads is None or self.heads >= tp)

    def local_shape(self, tp: int) -> tuple[int, ...]:
        """Return the shape that one of `tp` ranks holds; a vocabulary may end in padding."""
        if not self.is_cut(tp):
            return self.shape
        return tuple(
            -(-size // tp) if dim == self.tp_dim else size for dim, size in enumerate(self.shape)
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """All parameters in the order of named_parameters(), a shared one once."""

    params: tuple[ParamShape, ...]

    @property
    def num_params(self) -> int:
        """Elements of the whole model."""
        return sum(p.numel for p in self.params)

    def num_local_params(self, tp: int) -> int:
        """Return the elements that one of `tp` ranks holds before any ZeRO stage."""
        return sum(math.prod(p.local_shape(tp)) for p in self.params)

    @property
    def units(self) -> tuple[str, ...]:
        """Names of the repeated blocks, in order."""
        return tuple(dict.fromkeys(p.unit for p in self.params if p.unit))


@functools.lru_cache(maxsize=64)
def shape_of(config: ModelConfig) -> ModelShape:
    """List the parameters of our transformer."""
    return ModelShape(params=tuple(_params(config)))


def _params(config: ModelConfig) -> Iterator[ParamShape]:
    vocab = (config.vocab_size, config.hidden)
    yield ParamShape(name="tokens.weight", shape=vocab, kind=ParamKind.EMBEDDING, tp_dim=0)
    if config.flavour is Flavour.GPT2:
        positions = (config.max_seq_len, config.hidden)
        yield ParamShape(name="positions.weight", shape=positions, kind=ParamKind.EMBEDDING)
    for index in range(config.num_layers):
        yield from _block(config, f"blocks.{index}")
    yield from _norm(config, "norm", unit="")
    if not config.tied_output:
        yield ParamShape(name="output.weight", shape=vocab, kind=ParamKind.MATRIX, tp_dim=0)


def _block(config: ModelConfig, unit: str) -> Iterator[ParamShape]:
    hidden, ffn, kv_width = config.hidden, config.ffn, config.kv_heads * config.head_dim
    is_gpt2 = config.flavour is Flavour.GPT2
    yield from _norm(config, f"{unit}.attention_norm", unit)
    if config.fused_qkv:
        yield from _column(config, f"{unit}.attention.qkv", unit, hidden + 2 * kv_width)
    else:
        yield from _column(config, f"{unit}.attention.q", unit, hidden)
        for name in ("k", "v"):
            for param in _column(config, f"{unit}.attention.{name}", unit, kv_width):
                yield replace(param, heads=config.kv_heads)
    yield from _row(config, f"{unit}.attention.o", unit, hidden)
    yield from _norm(config, f"{unit}.feed_forward_norm", unit)
    for name in ("up",) if is_gpt2 else ("gate", "up"):
        yield from _column(config, f"{unit}.feed_forward.{name}", unit, ffn)
    yield from _row(config, f"{unit}.feed_forward.down", unit, ffn)


def _column(config: ModelConfig, module: str, unit: str, width: int) -> Iterator[ParamShape]:
    """Linear from D to width whose outputs are cut: weight and bias by rows."""
    weight, shape = f"{module}.weight", (width, config.hidden)
    yield ParamShape(name=weight, shape=shape, kind=ParamKind.MATRIX, unit=unit, tp_dim=0)
    if config.flavour is Flavour.GPT2:
        bias = f"{module}.bias"
        yield ParamShape(name=bias, shape=(width,), kind=ParamKind.BIAS, unit=unit, tp_dim=0)


def _row(config: ModelConfig, module: str, unit: str, width: int) -> Iterator[ParamShape]:
    """Linear from width to D whose inputs are cut: the bias is added once and stays whole."""
    weight, shape = f"{module}.weight", (config.hidden, width)
    yield ParamShape(name=weight, shape=shape, kind=ParamKind.MATRIX, unit=unit, tp_dim=1)
    if config.flavour is Flavour.GPT2:
        bias = f"{module}.bias"
        yield ParamShape(name=bias, shape=(config.hidden,), kind=ParamKind.BIAS, unit=unit)


def _norm(config: ModelConfig, module: str, unit: str) -> Iterator[ParamShape]:
    shape, weight = (config.hidden,), f"{module}.weight"
    yield ParamShape(name=weight, shape=shape, kind=ParamKind.NORM, unit=unit)
    if config.flavour is Flavour.GPT2:
        yield ParamShape(name=f"{module}.bias", shape=shape, kind=ParamKind.BIAS, unit=unit)
