"""Between plain nested dicts (Hydra, JSON) and the frozen config: strict in both directions."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from enum import Enum

from rayzero.config.cell import CellConfig, CellGroups
from rayzero.errors import ConfigError

Plain = dict[str, object]


def to_plain(value: object) -> object:
    """Turn a config (or a part of it) into dicts, lists, strings and numbers."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, Mapping):
        return {str(k): to_plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(v) for v in value]
    return value


def defaults() -> Plain:
    """Return all defaults as nested plain values."""
    plain = to_plain(CellConfig())
    assert isinstance(plain, dict)
    return plain


def build(plain: Mapping[str, object]) -> CellConfig:
    """Build the frozen config; a ConfigError names the unknown key, wrong type or value."""
    built = _build(CellConfig, plain, "")
    assert isinstance(built, CellConfig)
    return built


def build_groups(plain: Mapping[str, object]) -> CellGroups:
    """Build the groups without the checks across them: what the row of an impossible cell shows."""
    built = _build(CellGroups, plain, "")
    assert isinstance(built, CellGroups)
    return built


def _build(kind: type, plain: Mapping[str, object], prefix: str) -> object:
    hints = typing.get_type_hints(kind)
    names = [f.name for f in dataclasses.fields(kind)]
    for key in plain:
        if key not in names:
            close = difflib.get_close_matches(str(key), names, n=1)
            hint = f"did you mean {prefix}{close[0]}? " if close else ""
            raise ConfigError(f"unknown key {prefix}{key}; {hint}known here: {', '.join(names)}")
    values = {key: _convert(hints[key], value, f"{prefix}{key}") for key, value in plain.items()}
    return kind(**values)


def _convert(hint: typing.Any, value: object, key: str) -> object:
    origin = typing.get_origin(hint)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        inner = [a for a in typing.get_args(hint) if a is not type(None)]
        return _convert(inner[0], value, key)
    if dataclasses.is_dataclass(hint):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{key}={value!r} must be a group of keys")
        return _build(typing.cast(type, hint), value, f"{key}.")
    if isinstance(hint, type) and issubclass(hint, Enum):
        return _enum(hint, value, key)
    if origin is dict:
        return _mapping(hint, value, key)
    if origin is list:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{key}={value!r} must be a list")
        (item,) = typing.get_args(hint)
        return [_convert(item, v, f"{key}[{i}]") for i, v in enumerate(value)]
    return _scalar(hint, value, key)


def _enum(hint: type[Enum], value: object, key: str) -> Enum:
    for member in hint:
        if value is member or value == member.value or str(value) == member.value:
            return member
    allowed = ", ".join(str(m.value) for m in hint)
    raise ConfigError(f"{key}={value!r} is unknown; allowed: {allowed}")


def _mapping(hint: typing.Any, value: object, key: str) -> dict[str, object]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{key}={value!r} must be a mapping")
    _, item = typing.get_args(hint)
    return {
        str(k): v if item is object else _convert(item, v, f"{key}.{k}") for k, v in value.items()
    }


def _scalar(hint: typing.Any, value: object, key: str) -> object:
    if hint is object:
        return value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is str and isinstance(value, int | float) and not isinstance(value, bool):
        return str(value)
    if type(value) is not hint:
        raise ConfigError(
            f"{key}={value!r} is {type(value).__name__}, expected {hint.__name__}"
            + (" (write null for none)" if value is None else "")
        )
    return value
