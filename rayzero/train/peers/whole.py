"""What peers start from: the same module, weights and param groups as our own engine."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn

from rayzero.baselines.peer import Peer
from rayzero.config.cell import CellConfig
from rayzero.config.precision import Dtype
from rayzero.dist.comm import Communicator
from rayzero.dist.dtypes import BY_NAME
from rayzero.errors import ConfigError
from rayzero.models.init import Initializer, materialize
from rayzero.models.transformer import Transformer
from rayzero.records import Phase
from rayzero.train.build import decay_groups
from rayzero.train.factory import build_model

Made = tuple[Peer, nn.Module]


def module_on_meta(config: CellConfig) -> nn.Module:
    """Return our transformer without values."""
    with torch.device("meta"):
        return Transformer(config.model)


def whole_module(
    config: CellConfig, comm: Communicator, device: torch.device, dtype: Dtype
) -> nn.Module:
    """Give each rank all weights: our transformer's by name and seed, else those of rank 0."""
    if config.model.factory is None:
        module = module_on_meta(config)
        initializer = Initializer(config.model, config.run.seed)
        materialize(module, initializer, device=device, dtype=BY_NAME[dtype.value])
        return module
    module = build_model(config.model)
    if any(parameter.is_meta for parameter in module.parameters()):
        raise ConfigError(
            f"model.factory={config.model.factory} returned a module on meta, which "
            f"engine={config.engine.name.value} cannot fill; build it with values"
        )
    module.to(device, BY_NAME[dtype.value])
    with comm.ledger.during(Phase.SETUP), torch.no_grad():
        for name, tensor in module.state_dict().items():
            comm.broadcast(tensor, axis="shard", unit=name)
    return module


def groups_of(
    config: CellConfig,
) -> Callable[[Iterable[tuple[str, nn.Parameter]]], list[dict[str, Any]]]:
    """Return what sorts named parameters into param groups."""
    return partial(decay_groups, config.optimizer.weight_decay)
