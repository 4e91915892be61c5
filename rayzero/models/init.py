"""Initial weights by name and seed: any rank draws the elements it holds, and no others.

A parameter is drawn in chunks of its flattened elements, each from a generator of its own seeded by
(seed, name, chunk). So weights are equal for every number of ranks, stage and tp, and a model that
fits nowhere still has a definite value at every element.

[Note: numpy draws] torch's normal generator gives other bits on CPUs with and without AVX2; numpy's
is built on integers and a table, so ranks on unlike machines agree.
"""

import functools
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import Tensor, nn

from rayzero.config.model import ModelConfig
from rayzero.models.transformer import Transformer

CHUNK_ELEMENTS = 1 << 16
BASE_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Elements are normal around zero with this std; where std is 0 they are all `value`."""

    std: float = 0.0
    value: float = 0.0


def rules_of(config: ModelConfig) -> tuple[tuple[str, Rule], ...]:
    """Return (name pattern, rule) pairs, the first match counts (Radford et al. 2019, GPT-2).

    The projections that end on the residual stream are drawn narrower, so that its variance does
    not grow with the number of blocks.
    """
    residual = Rule(std=BASE_STD / math.sqrt(2 * config.num_layers))
    return (
        ("*.bias", Rule(value=0.0)),
        ("*norm.weight", Rule(value=1.0)),
        ("*.attention.o.weight", residual),
        ("*.feed_forward.down.weight", residual),
        ("*", Rule(std=BASE_STD)),
    )


def draw(name: str, numel: int, start: int, stop: int, *, seed: int, rule: Rule) -> Tensor:
    """Return elements [start, stop) of a flattened parameter, in fp32 on the CPU."""
    assert 0 <= start <= stop <= numel, f"[{start}, {stop}) is not inside {name}'s {numel} elements"
    if rule.std == 0.0:
        return torch.full((stop - start,), rule.value, dtype=torch.float32, device="cpu")
    result = np.empty(stop - start, dtype=np.float32)
    for chunk in range(start // CHUNK_ELEMENTS, -(-stop // CHUNK_ELEMENTS)):
        first = chunk * CHUNK_ELEMENTS
        low, high = max(start, first), min(stop, first + CHUNK_ELEMENTS)
        # Elements come one after another: those before `low` must be drawn, those after need not.
        normal = _generator(seed, name, chunk).standard_normal(high - first, dtype=np.float32)
        np.multiply(
            normal[low - first :], np.float32(rule.std), out=result[low - start : high - start]
        )
    return torch.from_numpy(result)


def _generator(seed: int, name: str, chunk: int) -> np.random.Generator:
    digest = hashlib.blake2b(f"{seed}/{name}/{chunk}".encode(), digest_size=16).digest()
    return np.random.Generator(np.random.SFC64(int.from_bytes(digest, "little")))


class Initializer:
    """The initial value of every element of every parameter of our transformer."""

    def __init__(self, config: ModelConfig, seed: int) -> None:
        self._config = config
        self._rules = rules_of(config)
        self._seed = seed

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the full shape, before any cut by tp."""
        return tuple(self._shapes[name])

    def __call__(self, name: str, start: int, stop: int) -> Tensor:
        """Return elements [start, stop) of the full flattened parameter, in fp32 on the CPU."""
        rule = next(rule for pattern, rule in self._rules if fnmatchcase(name, pattern))
        return draw(name, self._shapes[name].numel(), start, stop, seed=self._seed, rule=rule)

    @functools.cached_property
    def _shapes(self) -> Mapping[str, torch.Size]:
        """Of a model of its own: a dry run, which draws nothing, saves building it."""
        with torch.device("meta"):
            parameters = dict(Transformer(self._config).named_parameters())
        return {name: parameter.shape for name, parameter in parameters.items()}


def materialize(
    module: nn.Module, initializer: Initializer, *, device: torch.device, dtype: torch.dtype
) -> None:
    """Give a whole module on meta its values in one process; shared parameters stay shared."""
    real: dict[nn.Parameter, nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        values = initializer(name, 0, parameter.numel()).view(parameter.shape)
        real[parameter] = nn.Parameter(values.to(device, dtype))
    for owner in module.modules():
        for key, parameter in owner.named_parameters(recurse=False, remove_duplicate=False):
            setattr(owner, key, real[parameter])
