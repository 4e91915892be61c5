"""The values a flat starts with: the module's own (rank 0's), or drawn where it is on meta."""

import copy
import typing
import zlib
from collections.abc import Callable

import torch
from torch import nn

from rayzero.dist.comm import Communicator
from rayzero.dist.dtypes import BY_NAME
from rayzero.engine.flats import Flat
from rayzero.errors import ConfigError
from rayzero.layout.spec import ParamSpec, Span

Initializer = Callable[[ParamSpec, Span], torch.Tensor]
"""Values of elements [start, stop) of the flattened local parameter, 1-d."""


class Original:
    """A module's parameters and their values before an engine takes it over."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.values = {name: p.detach() for name, p in module.named_parameters()}
        """By the first name of each parameter."""
        self._classes = {p: type(p) for p in module.parameters()}
        self._slots = [
            (owner._parameters, key, parameter)
            for owner in module.modules()
            for key, parameter in owner._parameters.items()
            if parameter is not None
        ]

    def give_back(self) -> None:
        """Let the module have them again."""
        for parameters, key, parameter in self._slots:
            parameters[key] = parameter
        for parameter, its_class in self._classes.items():
            parameter.__class__ = its_class
        for name, parameter in self.module.named_parameters():
            parameter.data = self.values[name]


class Values:
    """Starting values by parameter name; each flat asks for its own."""

    def __init__(
        self,
        original: Original,
        *,
        comm: Communicator,
        initialize: Initializer | None,
        seed: int,
    ) -> None:
        self._module = original.module
        self._given = original.values
        self._comm = comm
        self._initialize = initialize
        self._seed = seed

    def of_span(self, flat: Flat, span: Span) -> torch.Tensor:
        """Return elements [start, stop) of a flat in master precision, equal on all data ranks."""
        device = flat.shard.device
        if self._drawn(flat):
            return self._draw(flat, span).to(device)
        buffer = torch.zeros(flat.layout.padded, dtype=BY_NAME[flat.dtypes.master], device=device)
        for slot, view in zip(flat.layout.slots, flat.views_of(buffer), strict=True):
            view.copy_(self._value(slot.spec.name))
        for axis in ("shard", "replicate"):
            self._comm.broadcast(buffer, axis=axis, unit=flat.layout.name)
        replicated = buffer[: flat.layout.first_tp]
        self._comm.broadcast(replicated, axis="tp", unit=flat.layout.name)
        return buffer[span.start : span.stop].clone()

    def _drawn(self, flat: Flat) -> bool:
        on_meta = any(self._given[s.spec.name].is_meta for s in flat.layout.slots)
        return on_meta and self._initialize is not None

    def _draw(self, flat: Flat, span: Span) -> torch.Tensor:
        assert self._initialize is not None
        values = torch.zeros(span.elements, dtype=BY_NAME[flat.dtypes.master])
        for slot in flat.layout.slots:
            common = slot.span.overlap(span)
            if common.elements:
                inside = Span(
                    start=common.start - slot.span.start, stop=common.stop - slot.span.start
                )
                drawn = self._initialize(slot.spec, inside)
                values[common.start - span.start : common.stop - span.start].copy_(drawn)
        return values

    def _value(self, name: str) -> torch.Tensor:
        given = self._given[name]
        if not given.is_meta:
            return given
        owner, _, leaf = name.rpartition(".")
        return dict(self._reset(owner).named_parameters(recurse=False))[leaf].detach()

    def _reset(self, name: str) -> nn.Module:
        """Build one leaf module off meta and let it draw its own values, the same on every rank."""
        owner = self._module.get_submodule(name)
        if not hasattr(owner, "reset_parameters"):
            raise ConfigError(
                f"module {name!r} ({type(owner).__name__}) is on meta and has no "
                "reset_parameters(); give ZeroEngine initialize=, or build it with values"
            )
        leaf = copy.copy(owner)
        leaf._parameters = {
            k: None if p is None else nn.Parameter(torch.empty(p.shape, dtype=p.dtype))
            for k, p in owner._parameters.items()
        }
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._seed * 2**32 + zlib.crc32(name.encode()))
            typing.cast(Callable[[], None], leaf.reset_parameters)()
        return leaf


def off_meta(module: nn.Module, device: torch.device) -> None:
    """Put a parameter without values in the place of each parameter on meta.

    A parameter that several modules share stays shared.
    """
    replaced = {
        id(p): nn.Parameter(
            torch.zeros((), dtype=p.dtype, device=device).expand(p.shape),
            requires_grad=p.requires_grad,
        )
        for p in module.parameters()
        if p.is_meta
    }
    for owner in module.modules():
        for key, parameter in owner._parameters.items():
            if parameter is not None and id(parameter) in replaced:
                owner._parameters[key] = replaced[id(parameter)]


def settle_buffers(module: nn.Module, comm: Communicator, device: torch.device) -> None:
    """Bring buffers to the device and give all data ranks rank 0's values; dtypes stay."""
    for name, buffer in module.named_buffers():
        if buffer.is_meta:
            raise ConfigError(
                f"buffer {name!r} is on meta and has no values; build buffers outside "
                "torch.device('meta'), they are never sharded"
            )
        values = buffer.detach().to(device).contiguous()
        # As bytes: gloo does not carry every dtype a buffer may have.
        raw = values.reshape(-1).view(torch.uint8)
        for axis in ("shard", "replicate"):
            comm.broadcast(raw, axis=axis, unit=name)
        buffer.data = values
