"""The names that configs, layouts and ledgers use for torch's dtypes."""

import torch

BY_NAME = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
}
NAMES = {dtype: name for name, dtype in BY_NAME.items()}


def name_of(dtype: torch.dtype) -> str:
    """Return the short name of a dtype, such as bf16, or torch's own for one without."""
    return NAMES.get(dtype, str(dtype).removeprefix("torch."))
