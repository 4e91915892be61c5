"""Loss scale: keeps small fp16 gradients above zero, and steps back when large ones overflow."""

from rayzero.errors import ConfigError, NonFiniteGradientError

INITIAL = 2.0**15
"""The largest power of two that an fp16 loss can be multiplied with."""
MINIMUM = 1.0
GROWTH_INTERVAL = 2000
"""Applied steps in a row after which a dynamic scale doubles."""


class LossScale:
    """The factor on the loss; the step divides it out again. Equal on all ranks by construction.

    option: None (no scaling), a number (static), or "dynamic": halved at each overflow, whose step
    is skipped on all ranks, and doubled after GROWTH_INTERVAL applied steps.
    """

    def __init__(self, option: str | float | None) -> None:
        self.is_dynamic = option == "dynamic"
        self.value = INITIAL if self.is_dynamic else _number(option)
        self._good_steps = 0

    def applied(self) -> None:
        """Note a step that was applied."""
        self._good_steps += 1
        if self.is_dynamic and self._good_steps % GROWTH_INTERVAL == 0:
            self.value *= 2.0

    def overflowed(self) -> None:
        """Halve after an overflow; raise NonFiniteGradientError at the minimum."""
        self._good_steps = 0
        if self.value <= MINIMUM:
            raise NonFiniteGradientError(
                f"gradients overflow at the smallest loss scale ({MINIMUM}); the model diverges: "
                "lower optimizer.lr, or use precision=bf16"
            )
        self.value /= 2.0

    def numbers(self) -> dict[str, float]:
        """Return what a checkpoint keeps."""
        return {"value": self.value, "good_steps": self._good_steps}

    def restore(self, numbers: dict[str, float]) -> None:
        """Go on from a checkpoint's numbers; a static scale stays what it is."""
        if self.is_dynamic and numbers:
            self.value, self._good_steps = numbers["value"], int(numbers["good_steps"])


def _number(option: str | float | None) -> float:
    if option is None:
        return 1.0
    try:
        value = float(option)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise ConfigError(
            f"precision.loss_scale={option!r} is unknown; allowed: dynamic, a positive number, null"
        )
    return value
