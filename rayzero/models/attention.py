"""Causal self-attention with grouped queries.

B batch, T tokens, D hidden, H query heads, G key and value heads, K head dim. H and G are read off
the width of the projections, so a tensor-parallel rank that holds some of the heads runs this code.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from rayzero.config.model import Checkpointing, Flavour, ModelConfig
from rayzero.models.recompute import recomputed
from rayzero.models.rotary import rotate


class Attention(nn.Module):
    """Project to queries, keys and values, attend to earlier tokens, project back."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        bias = config.flavour is Flavour.GPT2
        self.head_dim = config.head_dim
        self.recompute_core = config.checkpointing is Checkpointing.SELECTIVE
        kv_width = config.kv_heads * config.head_dim
        self.q = nn.Linear(config.hidden, config.hidden, bias=bias)
        self.k = nn.Linear(config.hidden, kv_width, bias=bias)
        self.v = nn.Linear(config.hidden, kv_width, bias=bias)
        self.o = nn.Linear(config.hidden, config.hidden, bias=bias)

    def forward(self, x_BTD: Tensor, angles_TR: Tensor | None = None) -> Tensor:
        """Return the residual's update; angles turn queries and keys (rotary), None leaves them."""
        q_BTHK = self.q(x_BTD).unflatten(-1, (-1, self.head_dim))
        k_BTGK = self.k(x_BTD).unflatten(-1, (-1, self.head_dim))
        v_BTGK = self.v(x_BTD).unflatten(-1, (-1, self.head_dim))
        if angles_TR is not None:
            q_BTHK, k_BTGK = rotate(q_BTHK, angles_TR), rotate(k_BTGK, angles_TR)
        if self.recompute_core:
            y_BTHK = recomputed(attend, q_BTHK, k_BTGK, v_BTGK)
        else:
            y_BTHK = attend(q_BTHK, k_BTGK, v_BTGK)
        update_BTD: Tensor = self.o(y_BTHK.flatten(-2))
        return update_BTD


def attend(q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor) -> Tensor:
    """Return softmax(q k / sqrt(K)) v over each token and those before it."""
    y_BHTK = F.scaled_dot_product_attention(
        q_BTHK.transpose(1, 2),
        k_BTGK.transpose(1, 2),
        v_BTGK.transpose(1, 2),
        is_causal=True,
        enable_gqa=q_BTHK.shape[2] != k_BTGK.shape[2],
    )
    return y_BHTK.transpose(1, 2)
