"""A parameter whose values are elsewhere: it tells shape, dtype and device, and refuses all else.

Sharding changes a parameter's class, not its identity: optimizers of users, ties and references
keep pointing at the same object, and the values come back into it before its module runs.
"""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from rayzero.errors import ShardedParameterError

_READ = (
    "shape dtype device layout ndim grad requires_grad is_leaf is_cuda is_meta is_sparse grad_fn"
)
_WRITTEN = "grad requires_grad"
_CALLED = (
    "size dim numel nelement element_size is_floating_point is_complex requires_grad_ __len__ "
    "__hash__ register_hook register_post_accumulate_grad_hook untyped_storage"
)
_METADATA: frozenset[Any] = frozenset(
    [inspect.getattr_static(torch.Tensor, name).__get__ for name in _READ.split()]
    + [inspect.getattr_static(torch.Tensor, name).__set__ for name in _WRITTEN.split()]
    + [getattr(torch.Tensor, name) for name in _CALLED.split()]
)


def sharded_class(base: type[nn.Parameter], name: str) -> type[nn.Parameter]:
    """Make the class that parameter `name` has while it is sharded."""

    def refuse(
        cls: type, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in _METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        operation = getattr(func, "__name__", str(func))
        raise ShardedParameterError(
            f"parameter {name!r} is sharded over the ranks and was used in {operation!r} outside "
            "the forward of its unit. Use it inside the module that owns it, name that module's "
            "parent in zero.units, wrap the code in `with engine.gathered(module):`, or read "
            "weights with engine.full_state_dict()"
        )

    def represent(self: nn.Parameter) -> str:
        return f"<sharded parameter {name!r} {tuple(self.shape)} {self.dtype}>"

    members = {"__torch_function__": classmethod(refuse), "__repr__": represent}
    return type(f"Sharded{base.__name__}", (base,), members)
