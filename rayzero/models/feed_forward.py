"""Feed-forward parts: two linears with GELU (GPT-2), or the gated SwiGLU (Llama).

B batch, T tokens, D hidden, F feed-forward width.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from rayzero.config.model import ModelConfig


class FeedForward(nn.Module):
    """down(gelu(up(x))), with biases."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, config.ffn)
        self.down = nn.Linear(config.ffn, config.hidden)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the residual's update."""
        h_BTF = F.gelu(self.up(x_BTD), approximate="tanh")
        update_BTD: Tensor = self.down(h_BTF)
        return update_BTD


class GatedFeedForward(nn.Module):
    """down(silu(gate(x)) * up(x)), without biases (Shazeer, arXiv:2002.05202)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.gate = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return the residual's update."""
        h_BTF = F.silu(self.gate(x_BTD)) * self.up(x_BTD)
        update_BTD: Tensor = self.down(h_BTF)
        return update_BTD
