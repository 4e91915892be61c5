"""The plan of our own transformer: Megatron's cuts (Shoeybi et al., arXiv:1909.08053)."""

from rayzero.config.model import Flavour, ModelConfig
from rayzero.config.parallel import Style
from rayzero.parallel.plan import Heads, Plan


def transformer_plan(config: ModelConfig) -> Plan:
    """Cut attention by heads, feed-forward by its width, both tables and the loss by vocabulary."""
    is_gpt2 = config.flavour is Flavour.GPT2
    positions = {"positions": Style.SEQUENCE}
    gate = {"blocks.*.feed_forward.gate": Style.COLUMN}
    return {
        "tokens": Style.VOCAB,
        **(positions if is_gpt2 else {}),
        "*norm": Style.SEQUENCE,
        "*dropout": Style.SEQUENCE,
        **dict.fromkeys(transformer_heads(config), Style.COLUMN),
        "blocks.*.attention.core": Style.COLUMN,
        "blocks.*.attention.o": Style.ROW,
        **({} if is_gpt2 else gate),
        "blocks.*.feed_forward.up": Style.COLUMN,
        "blocks.*.feed_forward.down": Style.ROW,
        "output": Style.VOCAB,
        "loss": Style.VOCAB,
    }


def transformer_heads(config: ModelConfig) -> Heads:
    """Say how many heads the outputs of attention's linears are."""
    attention = "blocks.*.attention"
    if config.fused_qkv:
        return {f"{attention}.qkv": config.kv_heads}
    return {
        f"{attention}.q": config.num_heads,
        f"{attention}.k": config.kv_heads,
        f"{attention}.v": config.kv_heads,
    }
