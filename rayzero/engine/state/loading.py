"""From a source to an engine: match names, read this rank's part, bring it where the engine reads.

[Note: master first] What the optimizer updates (the master where there is one, else the parameters)
is loaded from the most precise values there are: the source's master if it has one, else its
weights. Parameters are then rounded from the master, as every step does.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner

from rayzero.dist.dtypes import name_of
from rayzero.engine.assembly import Assembly
from rayzero.engine.disk_states import MASTER
from rayzero.engine.flats import Flat
from rayzero.engine.loss_scale import LossScale
from rayzero.engine.state.agreement import notify, together
from rayzero.engine.state.contents import (
    MOMENTS,
    WEIGHTS,
    Scalar,
    aliases_of,
    groups_of,
    key_of,
    on_disk,
    shard_axis,
    specs_of,
)
from rayzero.engine.state.manifest import dtype_named
from rayzero.engine.state.source import Source, open_source
from rayzero.engine.state.spans import Spans, add_piece, add_whole, pieces_of
from rayzero.engine.whole import buffers_of
from rayzero.errors import CheckpointError
from rayzero.layout.boxes import Sizes, whole_shape


@dataclass(slots=True, kw_only=True)
class Match:
    """Which saved name each of the engine's takes its values from, and what does not fit."""

    saved: dict[str, str]
    moments: tuple[str, ...]
    """Keys of moments to load; none where the optimizer starts anew."""
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    unlike: list[str] = field(default_factory=list)
    """Names whose saved shape is another."""
    other: list[str] = field(default_factory=list)
    """What else a strict load refuses."""


def opened(path: Path, rank: int) -> tuple[Source, Any]:
    """Open what is loaded from; return it with what this rank had asked to keep."""
    source = open_source(path)
    return source, source.extra(rank)


def match_names(parts: Assembly, source: Source) -> Match:
    """Hold the engine's names and shapes against the source's."""
    prefix = f"{WEIGHTS}/"
    found = {k.removeprefix(prefix): s for k, s in source.tensors.items() if k.startswith(prefix)}
    names = _names_for(parts, source)
    match = Match(saved={}, moments=_moment_keys(parts, source))
    for name, shape in sorted(_wanted(parts).items()):
        saved = next((n for n in names[name] if n in found), None)
        if saved is None:
            match.missing.append(name)
        elif found[saved].shape != shape:
            match.unlike.append(f"{name}: saved {list(found[saved].shape)}, here {list(shape)}")
        else:
            match.saved[name] = saved
    ties = aliases_of(parts.module)
    for name in sorted(found.keys() - match.saved.values()):
        match.unexpected.append(f"{name} (tied to {ties[name]} here)" if name in ties else name)
    _match_optimizer(parts, source, match)
    return match


def check_match(match: Match, source: Source, *, strict: bool) -> None:
    """Raise CheckpointError that lists what does not fit; strict=False allows all but shapes."""
    listed = {"other shapes": match.unlike}
    if strict:
        listed = {
            "missing in it": match.missing,
            "unexpected in it": match.unexpected,
            **listed,
            "optimizer": match.other,
        }
    said = [f"{what}: {_first_of(names)}" for what, names in listed.items() if names]
    if said:
        way_out = "; strict=False loads what fits" if strict and not match.unlike else ""
        raise CheckpointError(
            f"{source.folder} does not fit the engine. {'. '.join(said)}{way_out}"
        )


def read_into(parts: Assembly, source: Source, match: Match) -> None:
    """Read this rank's part. Where that fails the trained weights become NaN: they are no one's."""
    away = {flat.layout.index for flat in on_disk(parts).values()}
    present = [flat for flat in parts.flats if flat.layout.index not in away]
    # What is loaded into the buffer that flats share is loaded alone.
    alone = [flat for flat in present if flat.file is not None and not flat.layout.trained]
    targets = _targets(parts, [f for f in present if f not in alone], source, match)
    for name, buffer in buffers_of(parts.module).items():
        if name in match.saved:
            add_whole(targets, key_of(WEIGHTS, match.saved[name]), buffer)
    try:
        _read_together(parts, targets, source)
        for flat in alone:
            flat.fetch()
            _read_together(parts, _targets(parts, [flat], source, match), source)
            flat.store()
        for flat in parts.optimizer.staged():
            _read_together(parts, _targets(parts, [flat], source, match), source)
            _round_from_master(parts, flat)
    except CheckpointError:
        for flat in parts.trained:
            parts.optimizer.target(flat).data.fill_(float("nan"))
            parts.stage.part(flat).fill_(float("nan"))
            flat.store()
        _publish(parts)
        raise
    for flat in present:
        if flat.layout.trained:
            _round_from_master(parts, flat)
    _publish(parts)


def _round_from_master(parts: Assembly, flat: Flat) -> None:
    if parts.optimizer.has_copy(flat):
        parts.stage.part(flat).copy_(parts.optimizer.target(flat).data)
        flat.store()


def restore_settings(parts: Assembly, source: Source, match: Match, loss_scale: LossScale) -> None:
    """Take over counters, param groups and loss scale."""
    manifest = source.manifest
    optimizer = parts.optimizer.torch_optimizer
    if not match.moments:
        parts.optimizer.forget_state()
    if manifest is None or manifest.optimizer != type(optimizer).__name__:
        return
    counters = manifest.counters_by_name()
    for flat in parts.trained:
        saved = [match.saved.get(slot.spec.name) for slot in flat.layout.slots]
        known = [counters[name] for name in saved if name in counters]
        target = parts.optimizer.target(flat)
        for key, scalar in (known[0] if known else {}).items():
            optimizer.state[target][key] = _number(parts, flat, scalar)
    by_name = {name: g.settings for g in manifest.groups for name in g.names}
    for group, named in zip(optimizer.param_groups, groups_of(parts), strict=True):
        for key, value in next((by_name[n] for n in named.names if n in by_name), {}).items():
            group[key] = _like(group.get(key), value)
    loss_scale.restore(manifest.loss_scale)


def tell_conversions(parts: Assembly, source: Source, match: Match) -> None:
    """Say once which dtypes are not those of the engine, and what starts anew."""
    changes: Counter[tuple[str, str]] = Counter()
    for flat in parts.flats:
        for slot in flat.layout.slots:
            saved = match.saved.get(slot.spec.name)
            if saved is not None:
                dtype = name_of(source.tensors[key_of(WEIGHTS, saved)].torch_dtype)
                changes[dtype, flat.dtypes.params] += 1
    said = [
        f"{count} parameters saved in {old} are {new} here"
        for (old, new), count in changes.items()
        if old != new
    ]
    if source.manifest is None:
        said.append("it holds weights only, so the optimizer starts anew")
    if said:
        notify(parts.comm, f"{source.folder}: {'; '.join(said)}")


def _wanted(parts: Assembly) -> dict[str, Sizes]:
    """Return whole shapes of all parameters and buffers that have elements."""
    shapes = {name: whole_shape(spec) for name, spec in specs_of(parts).items()}
    shapes |= {name: tuple(buffer.shape) for name, buffer in buffers_of(parts.module).items()}
    return {name: shape for name, shape in shapes.items() if 0 not in shape}


def _names_for(parts: Assembly, source: Source) -> dict[str, list[str]]:
    """List under which names the value of each of the engine's may be saved."""
    names = {name: [name] for name in _wanted(parts)}
    saved_ties = source.manifest.tied if source.manifest is not None else {}
    for alias, name in aliases_of(parts.module).items():
        names.get(name, []).append(alias)
    for known in names.values():
        # One saved value may not become two parameters: what was tied there must be tied here.
        first = [saved_ties[name] for name in known if name in saved_ties]
        known += [name for name in first if name not in names]
    return names


def _moment_keys(parts: Assembly, source: Source) -> tuple[str, ...]:
    manifest = source.manifest
    if manifest is None or manifest.optimizer != type(parts.optimizer.torch_optimizer).__name__:
        return ()
    keys = (key.split("/", 2) for key in source.tensors)
    return tuple(dict.fromkeys(words[1] for words in keys if words[0] == MOMENTS))


def _match_optimizer(parts: Assembly, source: Source, match: Match) -> None:
    manifest = source.manifest
    if manifest is None:
        return
    here = type(parts.optimizer.torch_optimizer).__name__
    if manifest.optimizer != here:
        match.other.append(f"saved by {manifest.optimizer}, the engine has {here}")
        return
    group_of = {name: i for i, g in enumerate(manifest.groups) for name in g.names}
    for group in groups_of(parts):
        if len({group_of[name] for name in group.names if name in group_of}) > 1:
            match.other.append(f"{_first_of(group.names)} were in several param groups")
    counters = manifest.counters_by_name()
    for flat in parts.trained:
        names = [s.spec.name for s in flat.layout.slots if s.spec.name in match.saved]
        for key in match.moments:
            match.other += [
                f"no {key} of {name}" for name in names if _moment(match, source, key, name) is None
            ]
        saved = [counters.get(match.saved[name]) for name in names]
        if any(numbers != saved[0] for numbers in saved):
            match.other.append(f"{_first_of(names)} were stepped differently often")


def _moment(match: Match, source: Source, key: str, name: str) -> str | None:
    """Return the key of a saved moment, None where there is none."""
    found = key_of(f"{MOMENTS}/{key}", match.saved[name])
    return found if found in source.tensors else None


def _read_together(parts: Assembly, targets: dict[str, Spans], source: Source) -> None:
    """Have DCP plan which saved boxes fill this rank's, and read; fail on all ranks or none."""
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)

    def read() -> None:
        planner.set_up_planner(dict(targets), source.reader.metadata, is_coordinator=False)
        source.reader.read(planner.create_local_plan(), planner)

    together(parts.comm, read)


def _targets(
    parts: Assembly, flats: Sequence[Flat], source: Source, match: Match
) -> dict[str, Spans]:
    """Describe this rank's tensors of flats under the keys that they are loaded from."""
    targets: dict[str, Spans] = {}
    for flat in flats:
        trained = flat.layout.trained
        tensor = parts.optimizer.target(flat).data if trained else flat.shard
        moments = _moment_tensors(parts, flat, match) if trained else {}
        for piece in pieces_of(flat, tensor):
            name = match.saved.get(piece.spec.name)
            if name is None:
                continue
            master = key_of(MASTER, name)
            key = master if master in source.tensors else key_of(WEIGHTS, name)
            add_piece(targets, key, piece, tensor)
            for kind, moment in moments.items():
                found = _moment(match, source, kind, piece.spec.name)
                if found is not None:
                    add_piece(targets, found, piece, moment)
    return targets


def _moment_tensors(parts: Assembly, flat: Flat, match: Match) -> dict[str, torch.Tensor]:
    """Return the optimizer's moments of a flat; what has none yet gets zeros."""
    target = parts.optimizer.target(flat)
    state = parts.optimizer.torch_optimizer.state
    moments = {}
    for key in match.moments:
        if key not in state[target]:
            state[target][key] = torch.zeros_like(target.data)
        moments[key] = state[target][key]
    return moments


def _publish(parts: Assembly) -> None:
    """Bring loaded shards to where the next forward reads them."""
    parts.stage.publish()
    for flat in parts.frozen:
        if not flat.sharded:
            axis = shard_axis(parts, flat)
            parts.comm.all_gather(flat.whole, axis=axis, unit=flat.layout.name).wait()


def _number(parts: Assembly, flat: Flat, scalar: Scalar) -> torch.Tensor | float:
    """Return one number of the optimizer's state as torch would have made it."""
    if scalar.dtype in ("int", "float"):
        return int(scalar.value) if scalar.dtype == "int" else scalar.value
    group = parts.optimizer.torch_optimizer.param_groups[flat.layout.group]
    on_device = group.get("fused") or group.get("capturable")
    device = parts.optimizer.target(flat).device if on_device else torch.device("cpu")
    return torch.tensor(scalar.value, dtype=dtype_named(scalar.dtype), device=device)


def _like(old: Any, value: Any) -> Any:
    """Return a plain value as the kind that it replaces."""
    if isinstance(old, torch.Tensor):
        return old.fill_(value)
    return tuple(value) if isinstance(old, tuple) and isinstance(value, list) else value


def _first_of(names: list[str] | tuple[str, ...], most: int = 12) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
