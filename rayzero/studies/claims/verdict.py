"""From figures to a verdict: bounds and rules, no judgement typed in.

A claim has one or more parts; a part is one of three kinds.

- Statement: figures with bounds. All within: it holds. Else, where a convention is named under
  which other figures are within: convention. Else: wrong.
- Constant: one number said to be right everywhere. Right in all cases: it holds. In none: wrong.
  In some, or where no case is known: unsupported.
- Analogy: nothing to compute: not checkable.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from fractions import Fraction

Number = Fraction | int | float


class Verdict(Enum):
    """What became of a claim, or of a part of one."""

    HOLDS = "holds"
    CONVENTION = "convention"
    """Right only under a stated convention."""
    UNSUPPORTED = "unsupported"
    """A number that some cases contradict, or that no source gives."""
    WRONG = "wrong"
    NOT_CHECKABLE = "not checkable"
    UNDECIDED = "undecided"
    """Its experiment was not run."""
    FAILED = "failed"
    """Its experiment was run and gave nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A number that an experiment gave, and between which bounds (inclusive) the claim is right."""

    what: str
    value: Number
    low: Number | None = None
    high: Number | None = None

    @property
    def is_within(self) -> bool:
        """Whether the claim is right as far as this figure goes."""
        low, high = self.low, self.high
        return (low is None or self.value >= low) and (high is None or self.value <= high)

    @property
    def bound(self) -> str:
        """The bounds in words."""
        if self.low is not None and self.low == self.high:
            return f"= {number_text(self.low)}"
        if self.low is None:
            return f"<= {number_text(self.high or 0)}"
        if self.high is None:
            return f">= {number_text(self.low)}"
        return f"{number_text(self.low)} to {number_text(self.high)}"

    def __str__(self) -> str:
        return f"{self.what}: {number_text(self.value)} (right if {self.bound})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """A sentence that is right if all figures are within their bounds.

    under: the convention in words, under which those of `convention` decide.
    """

    literal: Sequence[Figure]
    convention: Sequence[Figure] = ()
    under: str = ""

    @property
    def verdict(self) -> Verdict:
        """Holds, convention or wrong."""
        if all(figure.is_within for figure in self.literal):
            return Verdict.HOLDS
        if self.convention and all(figure.is_within for figure in self.convention):
            return Verdict.CONVENTION
        return Verdict.WRONG

    def __str__(self) -> str:
        text = "; ".join(map(str, self.literal))
        if self.convention:
            text += f"; {self.under}: " + "; ".join(map(str, self.convention))
        return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Constant:
    """A number said to be right everywhere; each case is a figure with the number's bounds."""

    what: str
    cases: Sequence[Figure]

    @property
    def verdict(self) -> Verdict:
        """Holds, unsupported or wrong."""
        agreeing = [figure.is_within for figure in self.cases]
        if not any(agreeing):
            return Verdict.WRONG if agreeing else Verdict.UNSUPPORTED
        return Verdict.HOLDS if all(agreeing) else Verdict.UNSUPPORTED

    def __str__(self) -> str:
        if not self.cases:
            return f"{self.what}: no case is known"
        values = [figure.value for figure in self.cases]
        agreeing = sum(figure.is_within for figure in self.cases)
        return (
            f"{self.what}: {number_text(min(values))} to {number_text(max(values))} in "
            f"{len(values)} cases, {agreeing} of them right ({self.cases[0].bound})"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Analogy:
    """A comparison that no number decides."""

    why: str

    @property
    def verdict(self) -> Verdict:
        """Always not checkable."""
        return Verdict.NOT_CHECKABLE

    def __str__(self) -> str:
        return self.why


Part = Statement | Constant | Analogy


def joined(parts: Sequence[Part]) -> str:
    """Return the verdict of a claim in words: one where its parts agree."""
    return " / ".join(dict.fromkeys(part.verdict.value for part in parts))


def at_least(what: str, value: Number, low: Number) -> Figure:
    """Right from `low` on."""
    return Figure(what=what, value=value, low=low)


def at_most(what: str, value: Number, high: Number) -> Figure:
    """Right up to `high`."""
    return Figure(what=what, value=value, high=high)


def about(what: str, value: Number, right: Number, *, percent: Number = 2) -> Figure:
    """Right within so many percent of a number; 2 is more than padding adds in our runs."""
    slack = abs(Fraction(right)) * Fraction(percent) / 100
    return Figure(what=what, value=value, low=right - slack, high=right + slack)


def exactly(what: str, value: Number, right: Number) -> Figure:
    """Right at one number alone."""
    return Figure(what=what, value=value, low=right, high=right)


def number_text(value: Number) -> str:
    """Write a number to four digits."""
    return f"{float(value):.4g}"
