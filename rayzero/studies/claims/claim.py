"""A claim: its number and sentence, and the function that reads its figures off the lab."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rayzero.studies.claims.lab import Lab, NoResultError
from rayzero.studies.claims.verdict import Part, joined
from rayzero.studies.facts import read_facts


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """decide: raises NoResultError where an experiment gave nothing. note: what a reader needs."""

    number: int
    text: str
    decide: Callable[[Lab], Sequence[Part]]
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A claim with what was found and what was expected."""

    claim: Claim
    parts: Sequence[Part]
    verdict: str
    figure: str
    expected: str
    experiment: str

    @property
    def is_as_expected(self) -> bool:
        """Whether found and expected verdict are the same."""
        return self.verdict == self.expected


def decided(claims: Sequence[Claim], lab: Lab) -> list[Decision]:
    """Decide each claim; one whose experiment gave nothing says why."""
    expected = {int(fact["number"]): fact for fact in read_facts("claims")}
    decisions = []
    for claim in claims:
        fact = expected[claim.number]
        parts: Sequence[Part] = ()
        try:
            parts = claim.decide(lab)
            verdict, figure = joined(parts), " | ".join(map(str, parts))
        except NoResultError as error:
            verdict, figure = error.verdict.value, str(error)
        decisions.append(
            Decision(
                claim=claim,
                parts=parts,
                verdict=verdict,
                figure=figure,
                expected=fact["expected"],
                experiment=fact["experiments"],
            )
        )
    return decisions
