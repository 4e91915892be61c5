"""Parameters and floating point operations of our transformer.

A multiply and an add are two operations. Matrix products alone are counted, and attention without
a discount for the causal mask, as in Narayanan et al. (arXiv:2104.04473, appendix) and Korthikanti
et al. (arXiv:2205.05198, appendix A), so that figures compare with published ones. Backward costs
twice the forward. *Model* operations are what training needs; *hardware* operations add what
activation checkpointing computes again, by convention the whole of it: torch leaves out the last
product of what it recomputes, and a fused attention kernel recomputes scores of its own accord.

[Note: selective recompute] Korthikanti's eq. 8 prints 72 B L s h^2 (1 + s/(3h) + ...): all three
passes of the attention core charged again. Only its forward is computed again, a fourth pass, so
s/(3h) becomes s/(4.5h) here.
"""

from dataclasses import dataclass

from rayzero.config.model import Checkpointing, Flavour, ModelConfig
from rayzero.theory.shapes import shape_of

PASSES = 3
"""Forward once, backward twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Flops:
    """Operations of one training step, or of whatever number of tokens was asked for."""

    model: int
    hardware: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardFlops:
    """Operations of one token's forward pass, by part of the model, all layers together."""

    projections: int
    """Attention's and feed-forward's linear layers."""
    attention_core: int
    """Scores and the sum of values."""
    logits: int


def num_params(config: ModelConfig) -> int:
    """Count the parameters, tied ones once."""
    return shape_of(config).num_params


def forward_flops(config: ModelConfig, *, seq_len: int) -> ForwardFlops:
    """Count one token's forward pass in a sequence of seq_len tokens."""
    hidden, kv_width = config.hidden, config.kv_heads * config.head_dim
    attention_weights = 2 * hidden * hidden + 2 * hidden * kv_width
    num_ffn_matrices = 2 if config.flavour is Flavour.GPT2 else 3
    layer_weights = attention_weights + num_ffn_matrices * hidden * config.ffn
    return ForwardFlops(
        projections=2 * config.num_layers * layer_weights,
        attention_core=4 * config.num_layers * seq_len * hidden,
        logits=2 * hidden * config.vocab_size,
    )


def training_flops(config: ModelConfig, *, seq_len: int, num_tokens: int) -> Flops:
    """Count forward and backward over num_tokens tokens in sequences of seq_len.

    For GPT-2 with F = 4h, model = 72 B L s h^2 (1 + s/(6h) + V/(12hL)) (arXiv:2205.05198, eq. 7);
    hardware with full checkpointing = 96 B L s h^2 (1 + s/(6h) + V/(16Lh)) (arXiv:2104.04473,
    eq. 3); with selective, see [Note: selective recompute].
    """
    forward = forward_flops(config, seq_len=seq_len)
    model = PASSES * (forward.projections + forward.attention_core + forward.logits)
    again = {
        Checkpointing.NONE: 0,
        Checkpointing.SELECTIVE: forward.attention_core,
        Checkpointing.FULL: forward.projections + forward.attention_core,
    }[config.checkpointing]
    return Flops(model=num_tokens * model, hardware=num_tokens * (model + again))
