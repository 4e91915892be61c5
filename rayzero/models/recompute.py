"""Activation checkpointing: run a function forward, and once more during backward."""

from collections.abc import Callable

from torch import Tensor
from torch.utils.checkpoint import checkpoint


def recomputed(function: Callable[..., Tensor], *args: Tensor | None, draws: bool) -> Tensor:
    """Call the function, keep its inputs alone, and run it again when backward needs the rest.

    draws: it takes random numbers, the same ones again in backward.
    """
    result: Tensor = checkpoint(function, *args, use_reentrant=False, preserve_rng_state=draws)
    return result
