"""What claims read off reports. All sizes are per parameter, of the rank that has most."""

from collections.abc import Callable, Iterable, Sequence
from fractions import Fraction

from rayzero.config.cell import CellConfig
from rayzero.records import Carrier, Kind, Phase, RankReport, Transfer, Where
from rayzero.studies.claims.lab import Lab
from rayzero.studies.claims.trial import Trial
from rayzero.theory.memory import STATES
from rayzero.theory.paper import GB, Convention, states_per_param
from rayzero.theory.question import question_of

OPTIMIZER = (Kind.MASTER, Kind.MOMENTS)
BILLION = 10**9
MANY = 10**6
"""Ranks in the limit."""


def held(lab: Lab, trial: Trial, *kinds: Kind, where: Where | None = None) -> Fraction:
    """Bytes of these kinds."""
    reports = lab.reports(trial)
    most = max(report.holdings.bytes_of(*kinds, where=where) for report in reports)
    return Fraction(most, reports[0].num_params)


def saved(lab: Lab, trial: Trial, *, stage_0: Trial) -> Fraction:
    """Bytes of model states that stage 0 holds more."""
    return held(lab, stage_0, *STATES) - held(lab, trial, *STATES)


def data_transfers(report: RankReport) -> list[Transfer]:
    """List what data ranks exchange, control values aside."""
    return [t for t in report.transfers if t.axis == "shard" and t.phase is not Phase.CONTROL]


def elements(lab: Lab, trial: Trial, op: str, phase: Phase | None = None) -> Fraction:
    """Elements in one kind of collective over the data ranks."""
    report = lab.reports(trial)[0]
    found = [t for t in data_transfers(report) if t.op == op and phase in (None, t.phase)]
    return Fraction(sum(t.elements for t in found), report.num_params)


def volume(lab: Lab, trial: Trial) -> Fraction:
    """Elements as the paper counts them, over (N-1)/N: an all-reduce counts twice."""
    once = elements(lab, trial, "all_gather") + elements(lab, trial, "reduce_scatter")
    return once + 2 * elements(lab, trial, "all_reduce")


def sent(lab: Lab, trial: Trial, op: str | None = None) -> Fraction:
    """Bytes that a rank sends to data ranks, (N-1)/N included, control values aside."""
    reports = lab.reports(trial)
    sums = [
        sum(t.sent_bytes for t in data_transfers(report) if op in (None, t.op))
        for report in reports
    ]
    return Fraction(max(sums), reports[0].num_params)


def sent_over_ring(lab: Lab, trial: Trial) -> Fraction:
    """Bytes that a rank sends, over (N-1)/N."""
    return sent(lab, trial) / Fraction(trial.world - 1, trial.world)


def calls(lab: Lab, trial: Trial, op: str) -> int:
    """How often a collective of this kind is called in a step."""
    return sum(t.op == op for t in data_transfers(lab.reports(trial)[0]))


def largest_of_blocks(lab: Lab, trial: Trial) -> int:
    """Elements of the largest buffer that is gathered for a block."""
    transfers = data_transfers(lab.reports(trial)[0])
    return max(t.elements for t in transfers if t.unit.startswith("blocks."))


def peak(lab: Lab, trial: Trial) -> int:
    """Peak bytes of tensors on rank 0 in a probed step."""
    return lab.reports(trial)[0].peak_bytes or 0


def block_bytes(lab: Lab, trial: Trial, axis: str) -> int:
    """Bytes that rank 0 sends over an axis for all blocks."""
    transfers = lab.reports(trial)[0].transfers
    return sum(t.sent_bytes for t in transfers if t.axis == axis and t.unit.startswith("blocks."))


def tp_calls(lab: Lab, trial: Trial, wanted: Callable[[Transfer], bool] = bool) -> int:
    """How often tp ranks exchange activations of the first block in a micro-step."""
    transfers = lab.reports(trial)[0].transfers
    own = [t for t in transfers if t.axis == "tp" and t.unit.startswith("blocks.0.")]
    return sum(wanted(t) for t in own)


def losses(lab: Lab, trial: Trial) -> list[float]:
    """The global batch's mean loss, step by step."""
    return [step.loss for step in lab.reports(trial)[0].steps]


def differing(values: Iterable[object]) -> int:
    """How many different values there are."""
    return len(set(values))


def mixed_buckets(trial: Trial) -> int:
    """How many flats of a trial hold parameters of more than one layer, by the layout."""
    config = trial.config(CellConfig())
    question = question_of(config, world=trial.world, rank=0, carrier=Carrier.NATIVE)
    layers = [{layer_of(slot.spec.name) for slot in flat.slots} for flat in question.layouts]
    return sum(len(names) > 1 for names in layers)


def layer_of(parameter: str) -> str:
    """The block, or the module outside blocks, that a parameter belongs to."""
    parts = parameter.split(".")
    return ".".join(parts[:2]) if parts[0] == "blocks" else parts[0]


def states_GB(convention: Convention, billions: int, *, stage: int, shards: int) -> Fraction:
    """GB of model states per device by formula."""
    each = states_per_param(convention, stage=stage, shards=shards)
    return billions * BILLION * each / GB


def most_apart(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Largest difference, pair by pair."""
    return max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
