"""Cut parameters into flats: by buckets where parameters stay whole, by units at stage 3."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from rayzero.layout.spec import FlatLayout, ParamSpec, Slot, Span

SMALLEST_BUCKET = 1 << 15
LARGEST_BUCKET = 1 << 22
"""Elements. 16 MiB of fp32 is where gloo and NCCL reach most of their bandwidth."""

Key = tuple[str, str, int, bool]


def plan_buckets(
    specs: Sequence[ParamSpec], *, shards: int, bucket_elements: int | None
) -> tuple[FlatLayout, ...]:
    """Fill flats of at most bucket_elements, last parameter first, as backward produces gradients.

    None is a quarter of the model, between SMALLEST_BUCKET and LARGEST_BUCKET: large enough for the
    wire, and small beside what stage 2 saves.

    A parameter larger than a bucket gets a flat of its own. Flats are numbered by their first
    (that is, last registered) parameter, so that index order is about the order of arrival.
    """
    limit = default_bucket(specs) if bucket_elements is None else bucket_elements
    open_flats: dict[Key, list[ParamSpec]] = {}
    room: dict[Key, int] = {}
    order: list[list[ParamSpec]] = []
    for spec in (replace(s, unit="") for s in reversed(specs)):
        key, numel = _key(spec), spec.numel
        if key not in open_flats or numel > room[key]:
            open_flats[key], room[key] = [], limit
            order.append(open_flats[key])
        open_flats[key].append(spec)
        room[key] -= numel
    return _number(order, shards)


def default_bucket(specs: Sequence[ParamSpec]) -> int:
    """Return the elements of a bucket where the user names none."""
    quarter = -(-_numel(specs) // 4)
    return min(max(quarter, SMALLEST_BUCKET), LARGEST_BUCKET)


def plan_units(
    specs: Sequence[ParamSpec], *, shards: int, persistence_elements: int = 0
) -> tuple[FlatLayout, ...]:
    """Make the flats of each unit, last unit first, as backward finishes them.

    Parameters of at most persistence_elements form flats of their own, which stay whole; they come
    last in order, since every unit adds gradients to them.
    """
    flats: dict[Key, list[ParamSpec]] = {}
    small: dict[Key, list[ParamSpec]] = {}
    for spec in reversed(specs):
        if spec.numel <= persistence_elements:
            small.setdefault(_key(replace(spec, unit="")), []).insert(0, replace(spec, unit=""))
        else:
            flats.setdefault(_key(spec), []).insert(0, spec)
    sharded = _number(flats.values(), shards)
    persistent = _number(small.values(), shards)
    moved = [replace(f, index=f.index + len(sharded), persistent=True) for f in persistent]
    return (*sharded, *moved)


def offloaded(flats: Sequence[FlatLayout], place: str, fraction: float) -> set[int]:
    """Choose the flats whose states leave the device: the first ones that fit in the fraction."""
    if place == "none":
        return set()
    limit = fraction * sum(flat.padded for flat in flats)
    chosen, total = set(), 0
    for flat in flats:
        if total + flat.padded <= limit:
            chosen.add(flat.index)
            total += flat.padded
    return chosen


def _key(spec: ParamSpec) -> Key:
    return (spec.unit, spec.dtype, spec.group, spec.trained)


def _numel(specs: Iterable[ParamSpec]) -> int:
    return sum(s.numel for s in specs)


def _number(groups: Iterable[Sequence[ParamSpec]], shards: int) -> tuple[FlatLayout, ...]:
    return tuple(_flat(index, group, shards) for index, group in enumerate(groups))


def _flat(index: int, specs: Sequence[ParamSpec], shards: int) -> FlatLayout:
    ordered = sorted(specs, key=lambda s: s.tp is not None)
    slots, start = [], 0
    for spec in ordered:
        slots.append(Slot(spec=spec, span=Span(start=start, stop=start + spec.numel)))
        start += spec.numel
    first = specs[0]
    return FlatLayout(
        index=index,
        unit=first.unit,
        dtype=first.dtype,
        group=first.group,
        trained=first.trained,
        slots=tuple(slots),
        shards=shards,
    )
