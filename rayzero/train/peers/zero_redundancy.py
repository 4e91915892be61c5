"""A cell's DistributedDataParallel with ZeroRedundancyOptimizer."""

import torch

from rayzero.baselines.zero_redundancy import ZeroRedundancy
from rayzero.config.cell import CellConfig
from rayzero.dist.comm import Communicator
from rayzero.train.build import optimizer_factory
from rayzero.train.peers.whole import Made, groups_of, whole_module


def make(config: CellConfig, comm: Communicator, device: torch.device) -> Made:
    """Build it and return it with its module."""
    module = whole_module(config, comm, device, config.precision.params)
    return ZeroRedundancy(module, groups_of(config), optimizer_factory(config.optimizer)), module
