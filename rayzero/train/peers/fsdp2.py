"""A cell's FSDP2: each repeated block is gathered as one, the root takes the rest."""

import torch
from torch import nn

from rayzero.baselines.fsdp2 import Fsdp2, Sharding
from rayzero.config.cell import CellConfig
from rayzero.dist.comm import Communicator
from rayzero.dist.dtypes import BY_NAME
from rayzero.dist.mesh import default_mesh
from rayzero.models.init import Initializer
from rayzero.train.build import optimizer_factory
from rayzero.train.peers.whole import Made, groups_of, module_on_meta, whole_module


def make(config: CellConfig, comm: Communicator, device: torch.device) -> Made:
    """Build it and return it with its module."""
    precision, draw = config.precision, None
    if config.model.factory is None:
        module, draw = module_on_meta(config), Initializer(config.model, config.run.seed)
    else:
        module = whole_module(config, comm, device, precision.master)
    sharding = Sharding(
        mesh=default_mesh(device.type),
        blocks=config.zero.units or repeated_blocks(module),
        keep_whole=config.zero.stage == 2,
        params=BY_NAME[precision.params.value],
        reduce=BY_NAME[precision.reduce.value],
        master=BY_NAME[precision.master.value],
    )
    factory = optimizer_factory(config.optimizer)
    return Fsdp2(module, groups_of(config), factory, sharding=sharding, draw=draw), module


def repeated_blocks(module: nn.Module) -> list[str]:
    """Name the children of outermost module lists.

    Layers beside them stay with the root, as FSDP2 asks for parameters that several layers share.
    """
    lists = [name for name, part in module.named_modules() if isinstance(part, nn.ModuleList)]
    outermost = [name for name in lists if not any(name.startswith(f"{o}.") for o in lists)]
    return [
        f"{name}.{k}" for name in outermost for k, _ in module.get_submodule(name).named_children()
    ]
