"""Matrix products that take their time, and no core: other work on the machine changes nothing."""

import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

COMPUTE_S = 0.02


class BusyMatmul(TorchDispatchMode):
    """Inside the block each matrix product takes COMPUTE_S more."""

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.mm.default:
            time.sleep(COMPUTE_S)
        return func(*args, **(kwargs or {}))
