"""Model group: the architecture, or the path to a user's own."""

from dataclasses import dataclass, field
from enum import Enum

from rayzero.config.checks import at_least, divisors, fit, require
from rayzero.errors import ConfigError


class Flavour(Enum):
    """Which family of decoder-only transformer."""

    GPT2 = "gpt2"
    LLAMA = "llama"


class Checkpointing(Enum):
    """What the backward pass recomputes: nothing, every block, or the attention core alone."""

    NONE = "none"
    FULL = "full"
    SELECTIVE = "selective"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer by its sizes, or any module by a factory."""

    name: str = "tiny"
    """How the model is called in tables."""
    flavour: Flavour = Flavour.GPT2
    """gpt2: LayerNorm, GELU, learned positions, biases. llama: RMSNorm, SwiGLU, rotary."""
    num_layers: int = 2
    """Transformer blocks."""
    hidden: int = 64
    """Width of the residual stream."""
    num_heads: int = 4
    """Query heads per block."""
    num_kv_heads: int | None = None
    """Key and value heads (grouped-query attention); null means num_heads."""
    ffn_hidden: int | None = None
    """Width of the feed-forward part; null: 4 x hidden (gpt2), 8/3 x hidden up to 256s (llama)."""
    vocab_size: int = 256
    """Tokens in the vocabulary; 256 is the bytes."""
    max_seq_len: int = 1024
    """Longest sequence the position table holds."""
    tied_output: bool = True
    """The output layer uses the token embedding's weight."""
    fused_qkv: bool = False
    """One linear for queries, keys and values; its rows go by key/value head: its queries, k, v."""
    dropout: float = 0.0
    """Probability that training zeroes an element: of embeddings, attention and updates (all three
    of GPT-2's)."""
    label_smoothing: float = 0.0
    """Part of each target's probability that is spread over all tokens, in training."""
    checkpointing: Checkpointing = Checkpointing.NONE
    """Activation checkpointing."""
    factory: str | None = None
    """A user's model, package.module:function; called with factory_args, returns an nn.Module."""
    factory_args: dict[str, object] = field(default_factory=dict, hash=False)
    """Keyword arguments of the factory."""
    config: str | None = None
    """What the factory is to build, where it offers a choice; model=hf takes a model_type."""

    def __post_init__(self) -> None:
        for key in ("num_layers", "hidden", "num_heads", "vocab_size", "max_seq_len"):
            at_least(f"model.{key}", getattr(self, key), 1)
        if self.hidden % self.num_heads:
            raise ConfigError(
                f"model.hidden={self.hidden} is not divided by model.num_heads={self.num_heads}; "
                "change one of the two keys"
            )
        if self.num_kv_heads is not None:
            at_least("model.num_kv_heads", self.num_kv_heads, 1)
            require(
                self.num_heads % self.num_kv_heads == 0,
                f"model.num_kv_heads={self.num_kv_heads} does not divide "
                f"model.num_heads={self.num_heads}; "
                f"allowed here: {', '.join(map(str, divisors(self.num_heads)))}",
            )
        for key in ("dropout", "label_smoothing"):
            found = getattr(self, key)
            require(0.0 <= found < 1.0, f"model.{key}={found} must be at least 0 and below 1")
        require(
            self.config is None or self.factory is not None,
            f"model.config={self.config!r} is for a factory; set model=hf",
        )
        if self.factory is not None and self.factory.count(":") != 1:
            raise ConfigError(
                f"model.factory={self.factory!r} is not of the form package.module:function"
            )

    def fits_kv_heads(self, tp: int) -> bool:
        """Whether tp ranks share the key and value heads out, or each head serves equally many."""
        few = self.kv_heads < tp and not self.fused_qkv
        return tp % self.kv_heads == 0 if few else self.kv_heads % tp == 0

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Key and value heads, after the default."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def ffn(self) -> int:
        """Width of the feed-forward part, after the default."""
        if self.ffn_hidden is not None:
            return self.ffn_hidden
        if self.flavour is Flavour.GPT2:
            return 4 * self.hidden
        return -(-8 * self.hidden // 3 // 256) * 256


def check_kv_heads(model: ModelConfig, tp: int) -> None:
    """Raise CombinationError where tp ranks cannot share the key and value heads."""
    allowed = [t for t in divisors(model.num_heads) if model.fits_kv_heads(t)]
    fused = " with model.fused_qkv=true" if model.fused_qkv else ""
    fit(
        model.fits_kv_heads(tp),
        f"parallel.tp={tp} does not fit model.num_kv_heads={model.kv_heads}{fused}; "
        f"allowed here: {', '.join(map(str, allowed))}",
    )
