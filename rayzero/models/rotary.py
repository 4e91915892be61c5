"""Rotary position embedding (Su et al., arXiv:2104.09864): turn pairs of elements by position.

T tokens, H heads, K head dim, R = K/2 pairs. Element i is paired with element i + K/2.
"""

import torch
from torch import Tensor

BASE = 10_000.0
"""Wavelengths go from 2 pi to 2 pi BASE tokens."""


def angles(num_tokens: int, head_dim: int, device: torch.device) -> Tensor:
    """Return angles_TR in fp32: position t turns pair r by t / BASE^(r/R).

    Computed at each forward, not kept in a buffer: casting a module to bf16 would round it.
    """
    num_pairs = head_dim // 2
    exponents_R = torch.arange(num_pairs, device=device, dtype=torch.float32) / num_pairs
    positions_T = torch.arange(num_tokens, device=device, dtype=torch.float32)
    return torch.outer(positions_T, BASE**-exponents_R)


def rotate(x_BTHK: Tensor, angles_TR: Tensor) -> Tensor:
    """Turn each pair of elements by its angle."""
    cos_T1R = angles_TR.cos().to(x_BTHK.dtype).unsqueeze(1)
    sin_T1R = angles_TR.sin().to(x_BTHK.dtype).unsqueeze(1)
    a_BTHR, b_BTHR = x_BTHK.chunk(2, dim=-1)
    return torch.cat(
        (a_BTHR * cos_T1R - b_BTHR * sin_T1R, b_BTHR * cos_T1R + a_BTHR * sin_T1R), dim=-1
    )
