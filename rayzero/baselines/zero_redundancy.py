"""torch's ZeroRedundancyOptimizer under DDP: ZeRO stage 1 by whole parameters, no fp32 master."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer

from rayzero.baselines.ddp import Ddp
from rayzero.baselines.peer import OptimizerFactory


class ZeroRedundancy(Ddp):
    """DDP's gradients, with each whole parameter's optimizer state on one rank."""

    def _make_optimizer(
        self, groups: list[dict[str, Any]], factory: OptimizerFactory
    ) -> torch.optim.Optimizer:
        assert isinstance(factory, functools.partial), "it takes a class and its keywords apart"
        kind: Any = factory.func
        return ZeroRedundancyOptimizer(
            [group for group in groups if group["params"]],
            optimizer_class=kind,
            process_group=dist.group.WORLD,
            **factory.keywords,
        )

    @property
    def _stepping(self) -> torch.optim.Optimizer:
        sharded: Any = self.optimizer
        own: torch.optim.Optimizer = sharded.optim
        return own
