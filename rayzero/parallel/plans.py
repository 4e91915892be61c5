"""The plan of our own transformer: Megatron's cuts (Shoeybi et al., arXiv:1909.08053)."""

from rayzero.config.model import Flavour, ModelConfig
from rayzero.parallel.plan import Plan, Style


def transformer_plan(config: ModelConfig) -> Plan:
    """Cut attention by heads, feed-forward by its width, both tables and the loss by vocabulary."""
    gate = {"blocks.*.feed_forward.gate": Style.COLUMN}
    return {
        "tokens": Style.VOCAB,
        "blocks.*.attention": Style.COPY_INPUT,
        "blocks.*.attention.[qkv]": Style.COLUMN,
        "blocks.*.attention.o": Style.ROW,
        "blocks.*.feed_forward": Style.COPY_INPUT,
        **(gate if config.flavour is Flavour.LLAMA else {}),
        "blocks.*.feed_forward.up": Style.COLUMN,
        "blocks.*.feed_forward.down": Style.ROW,
        "output": Style.VOCAB_OUTPUT,
        "loss": Style.VOCAB_LOSS,
    }
