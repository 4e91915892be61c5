"""A cell's DeepSpeed engine."""

import torch

from rayzero.baselines.deepspeed import DeepSpeed, DeepSpeedOptions
from rayzero.config.cell import CellConfig
from rayzero.config.precision import Dtype
from rayzero.dist.comm import Communicator
from rayzero.train.build import optimizer_factory
from rayzero.train.peers.whole import Made, groups_of, whole_module


def make(config: CellConfig, comm: Communicator, device: torch.device) -> Made:
    """Build it and return it with its module."""
    module = whole_module(config, comm, device, Dtype.FP32)
    options = DeepSpeedOptions(
        stage=config.zero.stage,
        accumulation=config.batching(comm.size("shard")).accumulation,
        max_grad_norm=config.optimizer.max_grad_norm,
        params=config.precision.params.value,
        reduce=config.precision.reduce.value,
        accumulate=config.precision.accumulate.value,
    )
    factory = optimizer_factory(config.optimizer)
    peer = DeepSpeed(module, groups_of(config), factory, options=options, device=device)
    return peer, module
