"""A decoder-only transformer: GPT-2 flavour or Llama flavour, by its config.

B batch, T tokens, D hidden, V vocabulary, R rotary pairs.
"""

import torch
from torch import Tensor, nn

from rayzero.config.model import Checkpointing, Flavour, ModelConfig
from rayzero.models.attention import Attention
from rayzero.models.feed_forward import FeedForward, GatedFeedForward
from rayzero.models.loss import CrossEntropy
from rayzero.models.recompute import recomputed
from rayzero.models.rotary import angles

NORM_EPS = 1e-5


class Transformer(nn.Module):
    """Token embedding, blocks, norm, output layer and loss."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.is_rotary = config.flavour is Flavour.LLAMA
        self.recompute_blocks = config.checkpointing is Checkpointing.FULL
        self.tokens = nn.Embedding(config.vocab_size, config.hidden)
        if not self.is_rotary:
            self.positions = nn.Embedding(config.max_seq_len, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = build_norm(config)
        self.output = nn.Linear(config.hidden, config.vocab_size, bias=False)
        if config.tied_output:
            self.output.weight = self.tokens.weight
        self.dropout = nn.Dropout(config.dropout)
        self.loss = CrossEntropy(config.label_smoothing)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor | None = None) -> Tensor:
        """Return the mean loss per token if there are targets, else logits_BTV."""
        num_tokens, device = tokens_BT.shape[1], tokens_BT.device
        x_BTD, angles_TR = self.tokens(tokens_BT), None
        if self.is_rotary:
            angles_TR = angles(num_tokens, self.head_dim, device)
        else:
            x_BTD = x_BTD + self.positions(torch.arange(num_tokens, device=device))
        x_BTD = self.dropout(x_BTD)
        for block in self.blocks:
            if self.recompute_blocks:
                x_BTD = recomputed(block, x_BTD, angles_TR, draws=self.dropout.p > 0.0)
            else:
                x_BTD = block(x_BTD, angles_TR)
        logits_BTV: Tensor = self.output(self.norm(x_BTD))
        if targets_BT is None:
            return logits_BTV
        loss: Tensor = self.loss(logits_BTV, targets_BT)
        return loss


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        is_gpt2 = config.flavour is Flavour.GPT2
        self.attention_norm = build_norm(config)
        self.attention = Attention(config)
        self.feed_forward_norm = build_norm(config)
        self.feed_forward = FeedForward(config) if is_gpt2 else GatedFeedForward(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor, angles_TR: Tensor | None = None) -> Tensor:
        """Return the residual stream after this block."""
        x_BTD = x_BTD + self.dropout(self.attention(self.attention_norm(x_BTD), angles_TR))
        update_BTD: Tensor = self.dropout(self.feed_forward(self.feed_forward_norm(x_BTD)))
        return x_BTD + update_BTD


def build_norm(config: ModelConfig) -> nn.Module:
    """Return LayerNorm (GPT-2) or RMSNorm (Llama) over the residual stream."""
    if config.flavour is Flavour.GPT2:
        return nn.LayerNorm(config.hidden, eps=NORM_EPS)
    return nn.RMSNorm(config.hidden, eps=NORM_EPS)
