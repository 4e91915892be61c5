"""Which rank writes what, and where it lies: worked out from the layout, without a message.

A rank's file holds, first what is on disk, then what is in memory, kind by kind and flat by flat
one run of its own shard as it lies there:

    own shard of a flat      | equal on all tp ranks | split by tp | padding |
    written by tp rank 0      -------------------------------------
    by the other tp ranks                              ------------

So many small parameters cost no more than a large one. The index names every box of every parameter
in these runs, as torch.distributed.checkpoint will ask for them.
"""

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from rayzero.engine.assembly import Assembly
from rayzero.engine.flats import Flat
from rayzero.engine.state.contents import (
    WEIGHTS,
    flat_tensors,
    is_on_disk,
    key_of,
    name_in,
    shard_axis,
    specs_of,
)
from rayzero.engine.state.manifest import Chunk, Stored
from rayzero.engine.whole import buffers_of
from rayzero.layout.boxes import Sizes, boxes_of, whole_offsets, whole_shape, without_padding
from rayzero.layout.spec import FlatLayout, ParamSpec, Span

Identity = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Elements that a rank writes one after another; on_disk: the flat to bring beforehand."""

    tensor: torch.Tensor
    on_disk: Flat | None
    kind: str = WEIGHTS


@dataclass(frozen=True, slots=True, kw_only=True)
class Index:
    """Named tensors with their places, and the bytes of each rank's file."""

    tensors: dict[str, Stored]
    sizes: dict[int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What this rank writes, in order, and on the first rank the index of all files."""

    identity: Identity
    runs: tuple[Run, ...]
    num_bytes: int
    index: Index | None

    @property
    def in_memory(self) -> list[torch.Tensor]:
        """What is not on disk; it comes last."""
        return [run.tensor for run in self.runs if run.on_disk is None]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedBox:
    """A box of a parameter; first: where it begins, in elements of the run that holds it."""

    name: str
    offsets: Sizes
    sizes: Sizes
    first: int


class Planner:
    """Plans saves of one engine; as long as no tensor comes or goes the plan stays the same."""

    def __init__(self, parts: Assembly) -> None:
        self._parts = parts
        self._plan: Plan | None = None

    def forget(self) -> None:
        """Let go of the tensors that the last save wrote."""
        self._plan = None

    def plan(self) -> Plan:
        """Return what this rank writes."""
        identity = _identity(self._parts)
        if self._plan is None or self._plan.identity != identity:
            runs = tuple(_own_runs(self._parts))
            self._plan = Plan(
                identity=identity,
                runs=runs,
                num_bytes=sum(run.tensor.numel() * run.tensor.itemsize for run in runs),
                index=index_of(self._parts) if self._parts.comm.is_first else None,
            )
        return self._plan


def brought(parts: Assembly, plan: Plan) -> Iterator[torch.Tensor]:
    """Yield a plan's tensors on disk, which share buffers and are read when asked for."""
    current: Flat | None = None
    for run in plan.runs:
        if run.on_disk is None:
            continue
        if run.kind == WEIGHTS:
            run.on_disk.fetch()
        elif run.on_disk is not current:
            current = run.on_disk
            parts.optimizer.bring(current)
        yield run.tensor


def index_of(parts: Assembly) -> Index:
    """Say what lies where in the files of all ranks."""
    tp = parts.comm.size("tp")
    chunks: dict[str, list[Chunk]] = defaultdict(list)
    dtypes: dict[str, torch.dtype] = {}
    shapes = {name: whole_shape(spec) for name, spec in specs_of(parts).items()}
    sizes: dict[int, int] = defaultdict(int)
    boxes: dict[tuple[int, int], list[NamedBox]] = {}
    for kind, flat, tensor in flat_tensors(parts):
        for rank in range(flat.layout.shards * tp):
            place = (flat.layout.index, rank)
            if place not in boxes:
                boxes[place] = _boxes_in_run(flat.layout, rank // tp, rank % tp)
            for box in boxes[place]:
                key = key_of(kind, box.name)
                start = sizes[rank] + box.first * tensor.itemsize
                dtypes[key] = tensor.dtype
                chunks[key].append(
                    Chunk(offsets=box.offsets, sizes=box.sizes, rank=rank, start=start)
                )
            written = written_span(flat.layout, rank // tp, rank % tp)
            sizes[rank] += written.elements * tensor.itemsize
    for name, buffer in buffers_of(parts.module).items():
        key, shape = key_of(WEIGHTS, name), tuple(buffer.shape)
        shapes[name], dtypes[key] = shape, buffer.dtype
        whole = Chunk(offsets=(0,) * len(shape), sizes=shape, rank=0, start=sizes[0])
        chunks[key] = [whole]
        sizes[0] += buffer.numel() * buffer.itemsize
    return Index(
        tensors={
            key: Stored(
                dtype=str(dtypes[key]).removeprefix("torch."),
                shape=shapes[name_in(key)],
                chunks=tuple(found),
            )
            for key, found in chunks.items()
        },
        sizes=dict(sizes),
    )


def written_span(layout: FlatLayout, shard: int, tp: int) -> Span:
    """Return what a rank writes of a shard, in elements of the shard."""
    own = layout.shard(shard)
    start = 0 if tp == 0 else min(layout.first_tp, layout.numel)
    common = Span(start=start, stop=layout.numel).overlap(own)
    return Span(start=common.start - own.start, stop=common.stop - own.start)


def _own_runs(parts: Assembly) -> Iterator[Run]:
    comm = parts.comm
    for kind, flat, tensor in flat_tensors(parts):
        if comm.rank("replicate") and shard_axis(parts, flat) == "shard":
            continue
        own = flat.own(tensor) if tensor.numel() == flat.layout.padded else tensor
        span = written_span(flat.layout, flat.shard_index, comm.rank("tp"))
        on_disk = flat if is_on_disk(parts, kind, flat) else None
        if span.elements:
            yield Run(tensor=own[span.start : span.stop], on_disk=on_disk, kind=kind)
    if comm.is_first:
        for buffer in buffers_of(parts.module).values():
            yield Run(tensor=buffer.detach(), on_disk=None)


def _boxes_in_run(layout: FlatLayout, shard: int, tp: int) -> list[NamedBox]:
    """Name the boxes that a rank's run of one shard is made of."""
    start = written_span(layout, shard, tp).start
    found = []
    for piece in layout.pieces(shard):
        if tp and piece.spec.tp is None:
            continue
        spec = _on_tp_rank(piece.spec, tp)
        for box in boxes_of(spec.shape, without_padding(spec, piece.in_param)):
            first = piece.in_shard.start - start + box.run.start - piece.in_param.start
            offsets = whole_offsets(spec, box.offsets)
            found.append(NamedBox(name=spec.name, offsets=offsets, sizes=box.sizes, first=first))
    return found


def _on_tp_rank(spec: ParamSpec, tp: int) -> ParamSpec:
    return spec if spec.tp is None else replace(spec, tp=replace(spec.tp, index=tp))


def _identity(parts: Assembly) -> Identity:
    """Return what tells whether tensors have come, gone or moved since a plan was made."""
    flats = [(kind, f.layout.index, tensor.data_ptr()) for kind, f, tensor in flat_tensors(parts)]
    buffers = [(name, 0, buffer.data_ptr()) for name, buffer in buffers_of(parts.module).items()]
    return (*flats, *buffers)
