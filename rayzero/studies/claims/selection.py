"""Claims 30 to 38: which stage to take."""

from fractions import Fraction

from rayzero.records import Where
from rayzero.studies.claims.claim import Claim
from rayzero.studies.claims.lab import Lab
from rayzero.studies.claims.readings import MANY, OPTIMIZER, held, states_GB, volume
from rayzero.studies.claims.trial import GAS, accumulated, offloaded, states
from rayzero.studies.claims.verdict import (
    Constant,
    Figure,
    Number,
    Part,
    Statement,
    about,
    at_least,
    at_most,
)
from rayzero.studies.claims.zero1 import PAPER, seven_on_24
from rayzero.studies.claims.zero3 import link_rates
from rayzero.studies.facts import Fact, read_facts
from rayzero.theory.memory import STATES

DIFFERENT = Fraction(101, 100)


def rates(fact: Fact) -> tuple[Fraction, Fraction]:
    """Work per time at stage 2 and 3."""
    two, three = Fraction(fact["stage_2"]), Fraction(fact["stage_3"])
    return (1 / two, 1 / three) if fact["quantity"] == "time" else (two, three)


def speed_ratios(lab: Lab) -> list[tuple[str, Fraction]]:
    """Speed of stage 2 over that of stage 3: published, and the bounds by measured volume."""
    found = []
    for fact in read_facts("stage_2_against_3"):
        two, three = rates(fact)
        found.append((fact["setup"], two / three))
    found.append(("all communication hidden", Fraction(1)))
    pairs = [(states(4, 2), states(4, 3)), *((accumulated(2, g), accumulated(3, g)) for g in GAS)]
    for at_2, at_3 in pairs:
        ratio = volume(lab, at_3) / volume(lab, at_2)
        found.append((f"communication alone, {at_2.micro_steps} micro-steps", ratio))
    return found


def _faster(lab: Lab) -> list[Part]:
    cases = [
        Figure(what=setup, value=100 * (ratio - 1), low=10, high=20)
        for setup, ratio in speed_ratios(lab)
    ]
    return [Constant(what="stage 2 faster than stage 3 by percent", cases=cases)]


def _on_40(billions: int, *, stage: int, shards: int) -> Number:
    return states_GB(PAPER, billions, stage=stage, shards=shards)


def _thirteen_on_40(lab: Lab) -> list[Part]:
    need = _on_40(13, stage=2, shards=8)
    return [Statement(literal=[at_most("GB of states of 13B, stage 2, 8 ranks", need, 40)])]


def _thirty_on_40(lab: Lab) -> list[Part]:
    two = at_least("GB, stage 2, however many ranks", _on_40(30, stage=2, shards=MANY), 40)
    return [
        Statement(
            literal=[two, at_most("GB, stage 3, 8 ranks", _on_40(30, stage=3, shards=8), 40)],
            convention=[two, at_most("GB, stage 3, 16 ranks", _on_40(30, stage=3, shards=16), 40)],
            under="with 13 ranks or more",
        )
    ]


def _on_host(lab: Lab) -> list[Part]:
    trial = offloaded("host")
    share = held(lab, trial, *OPTIMIZER, where=Where.HOST) / held(lab, trial, *OPTIMIZER)
    return [Statement(literal=[about("share of optimizer states on the host", share, 1)])]


def _least(lab: Lab) -> list[Part]:
    mine = volume(lab, states(2, 1))
    return [
        Statement(
            literal=[
                at_least(
                    f"volume of stage {other} over stage 1, one micro-step",
                    volume(lab, states(2, other)) / mine,
                    DIFFERENT,
                )
                for other in (0, 2)
            ]
        )
    ]


def _least_memory(lab: Lab) -> list[Part]:
    trial, others = states(4, 3), [states(4, stage) for stage in (0, 1, 2)]
    memory = held(lab, trial, *STATES) / min(held(lab, other, *STATES) for other in others)
    traffic = volume(lab, trial) / max(volume(lab, other) for other in others)
    return [
        Statement(
            literal=[
                at_most("states held over the least of stages 0-2", memory, 1 / DIFFERENT),
                at_least("volume over the most of stages 0-2", traffic, DIFFERENT),
            ]
        )
    ]


def _usual(lab: Lab) -> list[Part]:
    cases = [
        Figure(what=row["id"], value=int(row["sharding"].startswith("ZeRO-2")), low=1, high=1)
        for row in read_facts("throughput_sharding")
    ]
    return [Constant(what="published runs at stage 2 (1) or not (0)", cases=cases)]


CLAIMS = (
    Claim(number=30, text="For 7B on 24 GB take stage 1.", decide=seven_on_24),
    Claim(
        number=31,
        text="Stage 2 fits models up to 13B on 40 GB.",
        decide=_thirteen_on_40,
        note="It takes 14 ranks or more, before activations.",
    ),
    Claim(
        number=32,
        text="Stage 2 is 10-20% faster than stage 3.",
        decide=_faster,
        note="Volume bounds the ratio by 3 g / (g + 1) with g micro-steps; published ratios lie on "
        "both sides of 1.",
    ),
    Claim(number=33, text="30B and more on 40 GB needs stage 3.", decide=_thirty_on_40),
    Claim(
        number=34,
        text="Stage 3 needs links of 400 Gb/s or more.",
        decide=lambda lab: [link_rates(400)],
        note="Claim 28 names half of it.",
    ),
    Claim(number=35, text="Offload moves optimizer states to the CPU's memory.", decide=_on_host),
    Claim(
        number=36,
        text="Stage 1 communicates least.",
        decide=_least,
        note="With several micro-steps it sends less than stage 2.",
    ),
    Claim(
        number=37, text="Stage 3 has the least memory and the most traffic.", decide=_least_memory
    ),
    Claim(
        number=38,
        text="Stage 2 is what people usually take.",
        decide=_usual,
        note="Of the published runs collected here, those whose source states the sharding.",
    ),
)
