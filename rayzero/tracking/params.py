"""From a nested config to flat MLflow parameters: dotted keys, long values cut with a hash."""

import hashlib
import json
import posixpath
import re
from collections.abc import Iterator, Mapping

MAX_VALUE_CHARS = 500
MAX_KEY_CHARS = 250
_NOT_ALLOWED_IN_KEY = re.compile(r"[^\w\-. /:]", re.ASCII)


def flat_params(config: Mapping[str, object]) -> dict[str, str]:
    """Flatten to `group.key: text`; every key and value is one that MLflow takes."""
    params: dict[str, str] = {}
    for key, value in _leaves(config, ""):
        name = param_key(key)
        if name in params:
            name = _with_hash(name, key, MAX_KEY_CHARS)
        params[name] = shortened(value, MAX_VALUE_CHARS)
    return params


def param_key(key: str) -> str:
    """Replace what MLflow refuses in a key; a key that had to change carries its hash."""
    clean = _NOT_ALLOWED_IN_KEY.sub("_", key)
    if posixpath.normpath(clean) != clean or clean.startswith(("/", "..")) or clean == ".":
        clean = "_" + clean.replace("/", "_")
    if len(clean) > MAX_KEY_CHARS or clean != key:
        clean = _with_hash(clean, key, MAX_KEY_CHARS)
    return clean


def shortened(text: str, limit: int) -> str:
    """Cut a long text to `limit` characters; its end is the hash of the whole."""
    return text if len(text) <= limit else _with_hash(text, text, limit)


def _with_hash(text: str, whole: str, limit: int) -> str:
    digest = hashlib.sha256(whole.encode("utf-8", "surrogatepass")).hexdigest()[:12]
    return f"{text[: limit - len(digest) - 5]}...__{digest}"


def _leaves(value: object, prefix: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and value:
        for key, inner in value.items():
            yield from _leaves(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value if isinstance(value, str) else json.dumps(value, default=str)
