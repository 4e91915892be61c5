"""What a rank keeps beside the engine's state: plain values, read back without running code."""

import io
from typing import Any

import torch

from rayzero.errors import CheckpointError


def pack_extra(extra: Any) -> bytes:
    """Return extra as bytes; raise CheckpointError for what only code could bring back."""
    buffer = io.BytesIO()
    try:
        torch.save(extra, buffer)
        unpack_extra(buffer.getvalue())
    except Exception as error:
        raise CheckpointError(
            f"extra cannot be saved ({error}); it may hold tensors, numbers, strings, and lists, "
            "tuples and dicts of them"
        ) from error
    return buffer.getvalue()


def unpack_extra(raw: bytes) -> Any:
    """Return what pack_extra packed."""
    return torch.load(io.BytesIO(raw), weights_only=True)
