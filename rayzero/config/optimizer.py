"""Optimizer group: update rule, its numbers, clipping and schedule."""

from dataclasses import dataclass
from enum import Enum

from rayzero.config.checks import at_least, require


class OptimizerKind(Enum):
    """An element-wise torch optimizer."""

    ADAMW = "adamw"
    ADAM = "adam"
    SGD = "sgd"


class Schedule(Enum):
    """How the learning rate goes over the steps of a run."""

    CONSTANT = "constant"
    COSINE = "cosine"


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Update rule and learning rate."""

    kind: OptimizerKind = OptimizerKind.ADAMW
    """adamw, adam or sgd."""
    lr: float = 3e-3
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Applied to matrices; vectors (norms, biases) form a second group without it."""
    beta1: float = 0.9
    """Adam's first moment."""
    beta2: float = 0.95
    """Adam's second moment."""
    eps: float = 1e-8
    """Adam's denominator."""
    momentum: float = 0.0
    """SGD's momentum."""
    max_grad_norm: float | None = 1.0
    """Clip the global gradient norm to this; null does not clip."""
    schedule: Schedule = Schedule.CONSTANT
    """constant or cosine."""
    lr_warmup_steps: int = 0
    """Steps over which the learning rate rises from zero."""

    def __post_init__(self) -> None:
        at_least("optimizer.lr", self.lr, 0.0)
        at_least("optimizer.weight_decay", self.weight_decay, 0.0)
        at_least("optimizer.lr_warmup_steps", self.lr_warmup_steps, 0)
        for key in ("beta1", "beta2", "momentum"):
            value = getattr(self, key)
            require(0.0 <= value < 1.0, f"optimizer.{key}={value} is outside 0 to 1 (exclusive)")
        if self.max_grad_norm is not None:
            require(
                self.max_grad_norm > 0.0,
                f"optimizer.max_grad_norm={self.max_grad_norm} must be above 0, or null",
            )
