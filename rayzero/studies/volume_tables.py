"""What travels: the stages' volumes, ZeRO++, hybrid sharding, tensor parallelism, break-even.

Volumes are elements per rank and step over Psi (N-1)/N, so that the papers' 2, 2, 2, 3 stand.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from fractions import Fraction

from rayzero.report.paper_table import PaperRow, PaperTable
from rayzero.studies.asked import MODELS, Asked
from rayzero.studies.evidence import Evidence, Sums, sums_of
from rayzero.studies.facts import Fact, read_facts
from rayzero.theory.paper import (
    break_even_many_ranks,
    break_even_same_ranks,
    dense_layer_params,
    step_volume,
)

WORLD = 64
MEASURED_WORLD = 4
MICRO_STEPS = (1, 4)
HOST = 8
TP = 4
MODEL = "7.5B"
TIED = "the tied token table is gathered twice a pass"
OTHERS = "another system's path, not run by this engine"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scheme:
    """A scheme of the volumes table: elements at 1 micro-step, and which stage of ours sends so."""

    volume: Callable[[int], int]
    stage: int | None
    reason: str = ""


SCHEMES = {
    "DP all-reduce (stage 0)": Scheme(
        volume=lambda g: step_volume(stage=0, micro_steps=g), stage=0
    ),
    "ZeRO-1 (Pos), reduce-scatter form": Scheme(
        volume=lambda g: step_volume(stage=1, micro_steps=g), stage=1
    ),
    "ZeRO-1 with all-reduce of grads": Scheme(
        volume=lambda g: 3, stage=None, reason="DeepSpeed's default path; " + OTHERS
    ),
    "ZeRO-2 (Pos+g)": Scheme(volume=lambda g: step_volume(stage=2, micro_steps=g), stage=2),
    "ZeRO-3 (Pos+g+p)": Scheme(
        volume=lambda g: step_volume(stage=3, micro_steps=g), stage=3, reason=TIED
    ),
    "ZeRO-3 without reshard after forward": Scheme(
        volume=lambda g: g + 1, stage=None, reason="parameters kept between micro-steps; " + OTHERS
    ),
}


def stage_volumes(evidence: Evidence) -> PaperTable:
    """Elements sent by each stage, with and without accumulation, and bytes on the wire."""
    rows = []
    for fact in read_facts("zero_comm_volume"):
        scheme = SCHEMES.get(fact["scheme"])
        if scheme is None:
            rows += _wire_bytes(fact, evidence)
        else:
            rows += [_volume(fact, scheme, g, evidence) for g in MICRO_STEPS]
    return PaperTable(
        name="zero_comm_volume",
        title="Communication per optimizer step, stage by stage",
        unit="elements per rank over Psi (N-1)/N; the wire rows: bytes over the same",
        printed_column="elements_paper",
        rule=f"At {WORLD} ranks and {MODEL}; measured on {MEASURED_WORLD} ranks. micro_steps: "
        "backwards in a step.",
        rows=rows,
    )


def _volume(fact: Fact, scheme: Scheme, micro_steps: int, evidence: Evidence) -> PaperRow:
    paper = fact["elements_paper"]
    printed = Fraction(paper.removesuffix("*psi")) if paper and micro_steps == 1 else None
    reasons = [scheme.reason] if scheme.reason else []
    formula = scheme.volume(micro_steps)
    if scheme.stage is None:
        return PaperRow(
            facts={**fact, "micro_steps": str(micro_steps)},
            printed=printed,
            formula=formula,
            reason="; ".join(reasons),
        )
    asked = Asked(model=MODEL, world=WORLD, stage=scheme.stage, micro_steps=micro_steps)
    exact, dry = _both(evidence, asked)
    here = Asked(model="scaled", world=MEASURED_WORLD, stage=scheme.stage, micro_steps=micro_steps)
    report = evidence.measured(here)
    measured = None
    if report is None:
        reasons.append(evidence.problem)
    else:
        sums = sums_of(report.num_params, report.holdings, report.transfers)
        measured = Fraction(sums.data_elements, sums.num_params)
    return PaperRow(
        facts={**fact, "micro_steps": str(micro_steps)},
        printed=printed,
        formula=formula,
        formula_exact=None if exact is None else Fraction(exact.data_elements, exact.num_params),
        dryrun=None if dry is None else Fraction(dry.data_elements, dry.num_params),
        measured=measured,
        reason="; ".join(reasons),
    )


def _wire_bytes(fact: Fact, evidence: Evidence) -> list[PaperRow]:
    """Bytes on the wire of stages 2 and 3 with gradients in 16 and in 32 bits."""
    rows = []
    for precision, grad_bytes in (("paper", 2), ("bf16", 4)):
        for stage in (2, 3):
            exact, dry = _both(
                evidence, Asked(model=MODEL, world=WORLD, stage=stage, precision=precision)
            )
            gathers = 1 if stage == 2 else 2
            scheme = f"{fact['scheme']}: stage {stage}, gradients of {grad_bytes} bytes"
            rows.append(
                PaperRow(
                    facts={**fact, "scheme": scheme, "micro_steps": "1"},
                    formula=2 * gathers + grad_bytes,
                    formula_exact=None if exact is None else _wire_ratio(exact),
                    dryrun=None if dry is None else _wire_ratio(dry),
                    reason=TIED if stage == 3 else "",
                )
            )
    return rows


def _wire_ratio(sums: Sums) -> Fraction:
    return Fraction(sums.data_bytes * WORLD, sums.num_params * (WORLD - 1))


def zeropp(evidence: Evidence) -> PaperTable:
    """ZeRO++: what quantised weights, a second copy and quantised gradients take off."""
    rows = []
    for fact in read_facts("zeropp_volumes"):
        legs = [fact[c] for c in fact if c.endswith("_xM") and not c.startswith("total")]
        is_numeric = all(_is_number(leg) for leg in legs)
        total = fact["total_cross_node_xM"]
        exact, dry = (None, None)
        if fact["method"] == "ZeRO-3":
            exact, dry = _both(evidence, Asked(model=MODEL, world=WORLD, stage=3))
        formula: Fraction | None = None
        reason = TIED if fact["method"] == "ZeRO-3" else OTHERS
        if is_numeric:
            formula = sum((Fraction(leg) for leg in legs), Fraction(0))
        elif fact["method"] == "hpZ memory":
            formula = (Fraction(16, 1024) + Fraction(2, 16)) / Fraction(16, 1024)
            reason = "times ZeRO-3's bytes at P=1024, alpha=16, printed as 8.9"
        rows.append(
            PaperRow(
                facts=fact,
                printed=Fraction(total) if _is_number(total) else None,
                formula=formula,
                formula_exact=None if exact is None else _ratio(exact.data_elements, exact),
                dryrun=None if dry is None else _ratio(dry.data_elements, dry),
                reason=reason,
            )
        )
    return PaperTable(
        name="zeropp_volumes",
        title="ZeRO++: volume per step across nodes",
        unit="model sizes (16-bit elements) per rank",
        printed_column="total_cross_node_xM",
        rule="The formula adds the three legs.",
        rows=rows,
    )


def hybrid(evidence: Evidence) -> PaperTable:
    """Hybrid sharding: elements per rank, W = 64 ranks on hosts of 8."""
    world, host = WORLD, HOST
    full = Fraction(world - 1, world)
    cases = {
        "full replication (DDP)": (2 * full, 2 * full, Asked(model=MODEL, world=world, stage=0)),
        "full sharding (F=W)": (3 * full, 3 * full, Asked(model=MODEL, world=world, stage=3)),
        "hybrid sharding (F=G)": (
            Fraction(2 * (world - 1), host * world),
            Fraction(2 * (world - host), host * world),
            Asked(model=MODEL, world=world, stage=3, replicate=world // host),
        ),
    }
    rows = []
    for fact in read_facts("hybrid_sharding_volumes"):
        if fact["scheme"] not in cases:
            rows.append(PaperRow(facts=fact, reason=OTHERS))
            continue
        printed, formula, asked = cases[fact["scheme"]]
        exact, dry = _both(evidence, asked)
        read = _crossing if asked.replicate > 1 else _sent
        reason = TIED if asked.replicate == 1 and asked.stage == 3 else ""
        if printed != formula:
            reason = "the paper writes W-1 where a ring over W/G replicas gives W-G"
        rows.append(
            PaperRow(
                facts=fact,
                printed=printed,
                formula=formula,
                formula_exact=None if exact is None else read(exact),
                dryrun=None if dry is None else read(dry),
                reason=reason,
            )
        )
    return PaperTable(
        name="hybrid_sharding_volumes",
        title="Hybrid sharding: elements per rank and step",
        unit="model sizes M",
        printed_column="cross_host_elements_per_gpu_paper",
        rule=f"At W={world} ranks, G={host} to a host. Hybrid: what crosses hosts; the other two: "
        "all that a rank sends.",
        rows=rows,
    )


def _sent(sums: Sums) -> Fraction:
    return _ratio(sums.data_elements, sums) * Fraction(WORLD - 1, WORLD)


def _crossing(sums: Sums) -> Fraction:
    replicas = WORLD // HOST
    return _ratio(sums.replicate_elements, sums) * Fraction(replicas - 1, replicas)


def tensor_parallel(evidence: Evidence) -> PaperTable:
    """Tensor parallelism's volume, ZeRO-3's, and the tokens per rank where they meet."""
    rows = []
    answers = _tp_answers(evidence)
    for fact in read_facts("tp_comm_formulas"):
        answer = answers.get(fact["quantity"])
        if answer is None:
            rows.append(PaperRow(facts=fact, reason="pipeline or sequence parallel: " + OTHERS))
            continue
        rows.append(
            PaperRow(facts=fact, formula=answer.formula, dryrun=answer.dryrun, reason=answer.reason)
        )
    return PaperTable(
        name="tp_comm_formulas",
        title="Tensor parallelism against ZeRO-3: volumes and break-even",
        unit="all-reduces; elements over b s h (t-1)/t; over h^2 (N-1)/N; tokens per rank",
        printed_column="",
        rule=f"At h={MODELS[MODEL].hidden}, t={TP}. dryrun: what the engine's ledger counts for "
        "one layer, with tp and at stage 3.",
        rows=rows,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """A quantity by formula, and from the engine's ledger."""

    formula: Fraction | int
    dryrun: Fraction | int | None
    reason: str = ""


def _tp_answers(evidence: Evidence) -> dict[str, Answer]:
    hidden = MODELS[MODEL].hidden
    plain, recomputed = tp_transfers(evidence, "none"), tp_transfers(evidence, "full")
    stage_3 = _both(evidence, Asked(model=MODEL, world=WORLD, stage=3))[1]
    layer = None if stage_3 is None else stage_3.layer_elements
    biases = "the layer has biases and norms beside its 12 h^2"

    def meet(rule: Callable[..., Fraction], printed: int, ours: int | None, why: str) -> Answer:
        dense = Fraction(dense_layer_params(hidden))
        formula = rule(dense, all_reduces=printed, hidden=hidden, tp=TP)
        if layer is None or ours is None:
            return Answer(formula=formula, dryrun=None, reason=why)
        found = rule(Fraction(layer, 3), all_reduces=ours, hidden=hidden, tp=TP)
        return Answer(formula=formula, dryrun=found, reason=why)

    return {
        "TP all-reduces per layer per micro-batch": Answer(formula=4, dryrun=plain),
        "TP elements sent per rank per layer": Answer(
            formula=8, dryrun=None if plain is None else 2 * plain
        ),
        "ZeRO-3 elements per rank per layer per micro-batch": Answer(
            formula=36,
            dryrun=None if layer is None else Fraction(layer, hidden**2),
            reason=biases,
        ),
        "break-even A: ZeRO-3 on t ranks vs TP on the same t ranks, same tokens per step": meet(
            break_even_same_ranks, 4, plain, biases
        ),
        "break-even B: ZeRO-3 on N>>t ranks vs TP t + ZeRO-1 on N/t": meet(
            break_even_many_ranks, 4, plain, biases
        ),
        "with full recompute": meet(
            break_even_same_ranks,
            6,
            recomputed,
            "break-even A; this engine repeats one all-reduce of a layer in recomputation, not "
            "two: nothing needs the last one's result",
        ),
    }


def tp_transfers(evidence: Evidence, checkpointing: str) -> int | None:
    """Return how often a layer's activations are all-reduced in one micro-step."""
    asked = Asked(model=MODEL, world=TP, stage=0, tp=TP, checkpointing=checkpointing, steady=True)
    report = evidence.played(asked)
    if report is None:
        return None
    return sums_of(report.num_params, report.after_step, report.transfers).tp_transfers


def _both(evidence: Evidence, asked: Asked) -> tuple[Sums | None, Sums | None]:
    """Return the formula's sums and the dry run's."""
    report = evidence.played(replace(asked, steady=True))
    if report is None:
        return None, None
    formula = sums_of(report.num_params, report.formula_after_step, report.formula_transfers)
    return formula, sums_of(report.num_params, report.after_step, report.transfers)


def _ratio(elements: int, sums: Sums) -> Fraction:
    return Fraction(elements, sums.num_params)


def _is_number(text: str) -> bool:
    return text.replace(".", "", 1).isdigit()
