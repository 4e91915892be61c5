"""A cell's compute without any communication."""

import torch

from rayzero.baselines.compute_only import ComputeOnly
from rayzero.config.cell import CellConfig
from rayzero.dist.comm import Communicator
from rayzero.dist.dtypes import BY_NAME
from rayzero.train.build import optimizer_factory
from rayzero.train.peers.whole import Made, groups_of, whole_module


def make(config: CellConfig, comm: Communicator, device: torch.device) -> Made:
    """Build it and return it with its module."""
    module = whole_module(config, comm, device, config.precision.params)
    peer = ComputeOnly(
        module,
        groups_of(config),
        optimizer_factory(config.optimizer),
        rank=comm.rank("shard"),
        world=comm.size("shard"),
        master=BY_NAME[config.precision.master.value],
    )
    return peer, module
