"""From changes of storages to a timeline: one point for each visit of a unit, at its highest."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from rayzero.dist.storage_trace import StorageTrace
from rayzero.engine import ZeroEngine
from rayzero.records import Kind, MemoryPoint, Phase, Where
from rayzero.train.module_watch import ModuleWatch

ACTIVATIONS, ELSEWHERE = "", "elsewhere"


class Place(NamedTuple):
    """Where in the step: the phase, and the unit at work."""

    phase: Phase
    unit: str


def trace_step(
    engine: ZeroEngine, watch: ModuleWatch, step: Callable[[], object]
) -> tuple[MemoryPoint, ...]:
    """Run one step of an engine, with values or without, and return its timeline."""

    def where() -> Place:
        phase = engine.ledger.phase
        is_in_module = phase in (Phase.FORWARD, Phase.BACKWARD)
        return Place(phase, watch.unit if is_in_module else "")

    held = engine.held_by_kind()
    with StorageTrace([tensor for _, _, tensor in held], where) as trace:
        step()
    return timeline_of(trace, held)


def timeline_of(
    trace: StorageTrace[Place], held: Sequence[tuple[Kind, Where, torch.Tensor]]
) -> tuple[MemoryPoint, ...]:
    """Name what the engine holds on the device, and keep the highest moment of each visit."""
    numbers = trace.numbers_of([tensor for _, _, tensor in held])
    names = {
        number: kind.value if where is Where.DEVICE else ELSEWHERE
        for number, (kind, where, _) in zip(numbers, held, strict=True)
    }
    now: dict[str, int] = defaultdict(int)
    for storage, num_bytes in trace.at_start.items():
        name = names.get(storage, ACTIVATIONS)
        now[name] += 0 if name == ELSEWHERE else num_bytes
    points: list[MemoryPoint] = []
    place: Place | None = None
    for change in trace.changes:
        name = names.get(change.storage, ACTIVATIONS)
        if name == ELSEWHERE:
            continue
        now[name] += change.delta_bytes
        if change.place != place or sum(now.values()) > points[-1].total_bytes:
            if change.place == place:
                points.pop()
            place = change.place
            points.append(_point(place, now))
    return tuple(points)


def _point(place: Place, now: dict[str, int]) -> MemoryPoint:
    kinds = {name: n for name, n in now.items() if n and name != ACTIVATIONS}
    return MemoryPoint(
        phase=place.phase,
        unit=place.unit,
        bytes_by_kind=kinds,
        activations_bytes=now[ACTIVATIONS],
    )
