"""Random numbers of a rank's own, inside modules that work on a part that the other ranks lack.

[Note: two streams of random numbers]
All ranks of a tp group draw from torch's generator in step, so a dropout on what they all hold has
one mask. A module that works on this rank's heads or tokens takes one number of that stream, alike
on all ranks, and runs from a seed made of it and the rank; then the stream goes on. So the streams
stay alike whatever the module draws, and a recomputation, which torch starts from the same state,
draws the same masks again. (Megatron-LM keeps two generators: core/tensor_parallel/random.py.)
"""

import hashlib
from typing import Any

import torch
from torch import nn

from rayzero.dist.comm import Communicator
from rayzero.parallel.region import AXIS


class OwnMasks:
    """Gives modules random numbers that no other rank of the tp group draws."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm

    def attach(self, module: nn.Module) -> None:
        """Let the module draw on its own; a dry run has no values, so nothing to draw."""
        if not self._comm.is_fake:
            visit = Visit(self._comm.rank(AXIS), self._comm.device_type)
            module.register_forward_pre_hook(visit.begin)
            module.register_forward_hook(visit.end, always_call=True)


class Visit:
    """One module's forwards."""

    def __init__(self, rank: int, device_type: str) -> None:
        self._rank = rank
        self._has_cuda = device_type == "cuda"
        self._states: list[torch.Tensor] = []

    def begin(self, module: nn.Module, _: Any) -> None:
        """Leave the common stream where it is after one draw."""
        if module.training and getattr(module, "p", None) != 0.0:
            drawn = int(torch.randint(2**62, ()).item())
            self._states = [torch.get_rng_state()]
            if self._has_cuda:
                self._states.append(torch.cuda.get_rng_state())
            digest = hashlib.blake2b(f"{drawn}/{self._rank}".encode(), digest_size=8).digest()
            torch.manual_seed(int.from_bytes(digest, "little"))

    def end(self, *_: Any) -> None:
        """Go on in the common stream; also after recomputation has ended inside the module."""
        if self._states:
            torch.set_rng_state(self._states[0])
            if self._has_cuda:
                torch.cuda.set_rng_state(self._states[1])
        self._states = []
