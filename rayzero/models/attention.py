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
        self.queries_per_head = config.num_heads // config.kv_heads
        kv_width = config.kv_heads * config.head_dim
        if config.fused_qkv:
            self.qkv = nn.Linear(config.hidden, config.hidden + 2 * kv_width, bias=bias)
        else:
            self.q = nn.Linear(config.hidden, config.hidden, bias=bias)
            self.k = nn.Linear(config.hidden, kv_width, bias=bias)
            self.v = nn.Linear(config.hidden, kv_width, bias=bias)
        self.is_fused = config.fused_qkv
        self.core = AttentionCore(config.dropout)
        self.o = nn.Linear(config.hidden, config.hidden, bias=bias)

    def forward(self, x_BTD: Tensor, angles_TR: Tensor | None = None) -> Tensor:
        """Return the residual's update; angles turn queries and keys (rotary), None leaves them."""
        q_BTHK, k_BTGK, v_BTGK = self._fused(x_BTD) if self.is_fused else self._separate(x_BTD)
        if angles_TR is not None:
            q_BTHK, k_BTGK = rotate(q_BTHK, angles_TR), rotate(k_BTGK, angles_TR)
        if self.recompute_core:
            draws = self.core.p > 0.0
            y_BTHK = recomputed(self.core, q_BTHK, k_BTGK, v_BTGK, draws=draws)
        else:
            y_BTHK = self.core(q_BTHK, k_BTGK, v_BTGK)
        update_BTD: Tensor = self.o(y_BTHK.flatten(-2))
        return update_BTD

    def _separate(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        projections = (self.q, self.k, self.v)
        return tuple(linear(x_BTD).unflatten(-1, (-1, self.head_dim)) for linear in projections)

    def _fused(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """Rows of the weight: the queries of key head 0, key head 0, value head 0, and so on."""
        queries = self.queries_per_head
        heads_BTGXK = self.qkv(x_BTD).unflatten(-1, (-1, queries + 2, self.head_dim))
        q_BTGXK, k_BTG1K, v_BTG1K = heads_BTGXK.split((queries, 1, 1), dim=-2)
        return q_BTGXK.flatten(-3, -2), k_BTG1K.squeeze(-2), v_BTG1K.squeeze(-2)


class AttentionCore(nn.Module):
    """softmax(q k / sqrt(K)) v over each token and those before it, with dropout of the softmax."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.p = dropout

    def forward(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor) -> Tensor:
        """Return y_BTHK."""
        y_BHTK = F.scaled_dot_product_attention(
            q_BTHK.transpose(1, 2),
            k_BTGK.transpose(1, 2),
            v_BTGK.transpose(1, 2),
            dropout_p=self.p if self.training else 0.0,
            is_causal=True,
            enable_gqa=q_BTHK.shape[2] != k_BTGK.shape[2],
        )
        return y_BHTK.transpose(1, 2)
