"""The global gradient norm: each element once, over shards and tp, and the factor that clips it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rayzero.dist.comm import Communicator
from rayzero.dist.fake import is_without_values
from rayzero.engine.flats import Flat
from rayzero.errors import EngineError

CACHED_ELEMENTS = 1 << 16
"""Half a MiB of fp64, which stays in a core's cache."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """What the data ranks know together when a window ends.

    grad_norm: of the averaged gradient, a scalar tensor. weight: sum over calls of the mean weight
    over ranks. late: some rank still has gradients to reduce.
    """

    grad_norm: torch.Tensor
    norm: float
    """Its value on the host."""
    weight: float
    finite: bool
    late: bool
    flags: list[bool]
    """This rank's own."""


def square_sums(
    flats: Sequence[Flat], gradients: Sequence[torch.Tensor], device: torch.device
) -> torch.Tensor:
    """Return [replicated, tp-split] sums of squares in fp64 over own shards of gradients.

    A gradient that is whole (stage 0) counts its own shard only, so that the sums over the shard
    axis are the same numbers at every stage.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=device)
    for flat, gradient in zip(flats, gradients, strict=True):
        own = flat.own(gradient) if gradient.numel() == flat.layout.padded else gradient
        start = flat.layout.shard(flat.shard_index).start
        split = min(max(flat.layout.first_tp - start, 0), own.numel())
        for which, part in ((0, own[:split]), (1, own[split:])):
            if part.numel():
                sums[which] += _square_sum(part)
    return sums


def _square_sum(values: torch.Tensor) -> torch.Tensor:
    """Sum the squares in fp64; torch widens one by one on CPU, six times slower than this."""
    if values.is_cuda or is_without_values(values):
        norm: torch.Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
        return norm.square()
    total = torch.zeros((), dtype=torch.float64, device=values.device)
    wide = torch.empty(
        min(CACHED_ELEMENTS, values.numel()), dtype=torch.float64, device=values.device
    )
    for piece in torch.split(values, CACHED_ELEMENTS):
        widened = wide[: piece.numel()]
        widened.copy_(piece)
        total += torch.dot(widened, widened)
    return total


def agree(
    comm: Communicator,
    sums: torch.Tensor,
    *,
    axis: str,
    weight: float,
    loss_scale: float,
    counts: tuple[int, int, int],
    norm_dtype: torch.dtype,
    flags: torch.Tensor,
) -> Window:
    """Exchange what ranks know of the window: norm parts, weight, (backwards, reductions, late).

    Norm parts are summed over shard and tp (what tp replicates, once), in rank order and fp64. The
    norm is rounded to norm_dtype: at fp32 the cut into buckets then moves no bit of it. flags of
    this rank alone are read with the rest, so that the device is waited for once.
    """
    told = torch.tensor([weight, *counts], dtype=torch.float64, device=sums.device)
    rows = comm.exchange(torch.cat([sums, told]), axis=axis, unit="window")
    square = rows[:, :2].sum(0)
    if axis == "shard":
        # Replicas hold the same averaged shards: their squares are not summed, only what they did.
        rows = comm.exchange(rows.flatten(), axis="replicate", unit="window").view(
            -1, rows.shape[1]
        )
    if comm.size("tp") > 1:
        over_tp = comm.exchange(square, axis="tp", unit="window")
        square = torch.stack([over_tp[0, 0], over_tp[:, 1].sum()])
    total = rows[:, 2].mean()
    norm = (square.sum().sqrt() / (total * loss_scale)).to(norm_dtype)
    values = [rows[:, 2:].reshape(-1), norm.double().reshape(1), flags.double()]
    known, ranks = comm.read(torch.cat(values)), rows.shape[0]
    norm_value = known[4 * ranks]
    table = [known[r * 4 : r * 4 + 4] for r in range(ranks)]
    _check_alike([row[1] for row in table], [row[2] for row in table])
    return Window(
        grad_norm=norm,
        weight=sum(row[0] for row in table) / ranks,
        norm=norm_value,
        finite=math.isfinite(norm_value),
        late=not comm.is_fake and any(row[3] for row in table),
        flags=[not comm.is_fake and flag != 0.0 for flag in known[4 * ranks + 1 :]],
    )


def _check_alike(num_backwards: list[float], num_reductions: list[float]) -> None:
    if len({*num_backwards}) > 1 or len({*num_reductions}) > 1:
        raise EngineError(
            "ranks called backward differently in this window: backwards by rank "
            f"{[int(n) for n in num_backwards]}, of them last=True "
            f"{[int(n) for n in num_reductions]}; all ranks must call it alike"
        )


def clip_factor(grad_norm: torch.Tensor, max_norm: float | None) -> torch.Tensor:
    """Return min(1, max_norm / grad_norm) as a scalar tensor, 1 where nothing clips."""
    if max_norm is None:
        return torch.ones_like(grad_norm)
    return torch.clamp(max_norm / grad_norm, max=1.0)
