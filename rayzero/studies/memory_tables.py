"""ZeRO's figure 1, tables 1 and 2, and the conventions of bytes per parameter."""

from dataclasses import dataclass
from fractions import Fraction

from rayzero.report.paper_table import Number, PaperRow, PaperTable
from rayzero.studies.asked import MODELS, PRECISION_OF, Asked
from rayzero.studies.evidence import Evidence, Sums, padding_elements, sums_of
from rayzero.studies.facts import Fact, read_facts
from rayzero.studies.rounding import half_up, keeps_digits, truncated
from rayzero.theory.counts import num_params
from rayzero.theory.paper import CONVENTIONS, GB, Convention, largest_model, states_per_param

STAGES = {"baseline": 0, "Pos": 1, "Pos+g": 2, "Pos+g+p": 3}
BILLION = 10**9
MODEL_OF = {"7.5": "7.5B", "128": "128B", "1000": "1T"}
DEVICE_BYTES = 32 * GB
MEASURED_WORLDS = (1, 2, 4)
TABLE_2_DP = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesRow:
    """One figure of bytes of model states on one device."""

    facts: Fact
    printed: str
    params: Fraction
    stage: int
    shards: int


def states_row(
    row: StatesRow, evidence: Evidence, *, bytes_per_param: int, model: str, reason: str
) -> PaperRow:
    """Lay formula, dry run and measurement beside a printed number of GB."""
    each = states_per_param(CONVENTIONS[bytes_per_param], stage=row.stage, shards=row.shards)
    exact = num_params(MODELS[model])
    asked = _asked(model, row, bytes_per_param)
    dry = None if asked is None else _sums(evidence, asked)
    padding = None if dry is None or asked is None else each * padding_elements(asked) / GB
    measured = _measured(evidence, row, bytes_per_param)
    reasons = [reason] if reason else []
    if bytes_per_param != 16:
        reasons.append(f"printed at 16 bytes per parameter, formula at {bytes_per_param}")
    if bytes_per_param not in PRECISION_OF:
        reasons.append("no precision of the engine has this convention")
    if measured is None and row.shards in MEASURED_WORLDS:
        reasons.append(evidence.problem)
    if measured is not None:
        reasons.append(f"measured with {measured.num_params:,} parameters, times the ratio")
    return PaperRow(
        facts=row.facts,
        printed=Fraction(row.printed),
        formula=row.params * each / GB,
        formula_exact=exact * each / GB,
        dryrun=None if dry is None else Fraction(dry.states_bytes, GB),
        dryrun_padding=padding,
        measured=_scaled(measured, row.params),
        reason="; ".join(reasons),
    )


def figure_1(evidence: Evidence, bytes_per_param: int) -> PaperTable:
    """Memory per device at 64 ranks, scheme by scheme."""
    rows = []
    for fact in read_facts("zero_fig1_memory"):
        printed = fact["per_device_GB_printed"]
        row = StatesRow(
            facts=fact,
            printed=printed,
            params=Fraction(fact["psi_B"]) * BILLION,
            stage=STAGES[fact["scheme"]],
            shards=int(fact["dp_degree"]),
        )
        rows.append(
            states_row(
                row,
                evidence,
                bytes_per_param=bytes_per_param,
                model="7.5B",
                reason=how_rounded(row, half_up_digits=1),
            )
        )
    return PaperTable(
        name="zero_fig1_memory",
        title="ZeRO figure 1: model states per device, 7.5B parameters on 64 ranks",
        unit="GB (1e9 bytes)",
        printed_column="per_device_GB_printed",
        rule="Printed rounded half up to one decimal.",
        rows=rows,
    )


def table_1(evidence: Evidence, bytes_per_param: int) -> PaperTable:
    """Memory per device of three models at six degrees and three stages: 54 cells."""
    rows = []
    for fact in read_facts("zero_table1_memory"):
        row = StatesRow(
            facts=fact,
            printed=fact["per_device_GB_printed"],
            params=Fraction(fact["model_params_B"]) * BILLION,
            stage=STAGES[fact["stage"]],
            shards=int(fact["dp_degree"]),
        )
        rows.append(
            states_row(
                row,
                evidence,
                bytes_per_param=bytes_per_param,
                model=MODEL_OF[fact["model_params_B"]],
                reason=how_printed(row),
            )
        )
    return PaperTable(
        name="zero_table1_memory",
        title="ZeRO table 1: model states per device",
        unit="GB (1e9 bytes)",
        printed_column="per_device_GB_printed",
        rule="The 7.5B column is rounded half up to three digits and at most two decimals; the "
        "128B and 1T columns are truncated to three digits or whole numbers.",
        rows=rows,
    )


def as_table_1_prints(row: StatesRow, value: Fraction) -> Fraction:
    """Round a number of GB as the paper's table 1 does in this row's column."""
    if row.facts["model_params_B"] == "7.5":
        return half_up(value, decimals=min(2, keeps_digits(value, 3)))
    return truncated(value, decimals=max(0, keeps_digits(value, 3)))


def how_printed(row: StatesRow) -> str:
    """Say how the printed figure follows from the formula at 16 bytes; empty where it is equal."""
    value = _paper_value(row)
    if Fraction(row.printed) == value:
        return ""
    assert as_table_1_prints(row, value) == Fraction(row.printed), f"{row.facts} is not explained"
    verb = "rounded half up" if row.facts["model_params_B"] == "7.5" else "truncated"
    return f"printed {verb}"


def how_rounded(row: StatesRow, *, half_up_digits: int) -> str:
    """The same for a figure that is rounded half up to some decimals."""
    value = _paper_value(row)
    if Fraction(row.printed) == value:
        return ""
    rounded = half_up(value, decimals=half_up_digits)
    assert rounded == Fraction(row.printed), f"{row.facts} is not explained"
    return "printed rounded half up"


def table_2(bytes_per_param: int) -> PaperTable:
    """The largest model whose states fit on 32 GB devices, 64 data ranks, by model parallelism."""
    rows = []
    for fact in read_facts("zero_table2_max_model"):
        mp, stage = int(fact["mp_degree"]), STAGES[fact["stage"]]

        def largest(convention: Convention, mp: int = mp, stage: int = stage) -> Fraction:
            params = largest_model(
                convention, memory_bytes=DEVICE_BYTES, stage=stage, shards=TABLE_2_DP, mp=mp
            )
            return params / BILLION

        printed = Fraction(fact["theoretical_max_B_printed"])
        value = largest(CONVENTIONS[16])
        assert as_table_2_prints(value, mp) == printed, f"{fact} is not explained"
        reasons = [] if printed == value else [_why_table_2(stage)]
        reasons.append(f"the paper measured {fact['measured_max_B'] or 'nothing'} on V100")
        rows.append(
            PaperRow(
                facts=fact,
                printed=printed,
                formula=largest(CONVENTIONS[bytes_per_param]),
                reason="; ".join(reasons),
            )
        )
    return PaperTable(
        name="zero_table2_max_model",
        title="ZeRO table 2: the largest model by theory, 32 GB devices",
        unit="1e9 parameters",
        printed_column="theoretical_max_B_printed",
        rule="Printed: the figure for mp 1 truncated to one decimal, times mp; from 512 on, one "
        "digit. It is an inverse of table 1, so it has no dry run of its own.",
        rows=rows,
    )


def as_table_2_prints(value: Fraction, mp: int) -> Fraction:
    """Round as the paper's table 2 does."""
    if value >= 512:
        return truncated(value, decimals=keeps_digits(value, 1))
    return truncated(value / mp, decimals=1) * mp


def conventions(evidence: Evidence) -> PaperTable:
    """Bytes per parameter as ZeRO, Megatron-LM, BigScience and DeepSpeed count them."""
    rows = [_convention(fact, evidence) for fact in read_facts("zero_bytes_per_param")]
    return PaperTable(
        name="zero_bytes_per_param",
        title="Bytes per parameter: who counts what",
        unit="bytes per parameter",
        printed_column="total_bytes",
        rule="Where a total depends on the ranks it is taken at 64. See "
        "docs/bytes_per_parameter.md.",
        rows=rows,
    )


OURS = {
    "ZeRO mixed-precision Adam": ("paper", 0),
    "pure fp32 Adam": ("fp32", 0),
    "Megatron-Core without distributed optimizer": ("bf16", 0),
    "Megatron-Core with distributed optimizer (DP=d)": ("bf16", 1),
    "BigScience/BLOOM bf16 optimizer": ("bf16", 0),
}
"""Which precision and stage of ours counts alike."""
AT_64 = {
    "6+12/d": 6 + Fraction(12, 64),
    "2+18/N": 2 + Fraction(18, 64),
    "4+16/N": 4 + Fraction(16, 64),
    "18/N + 4*largest_layer": Fraction(18, 64),
}


def _convention(fact: Fact, evidence: Evidence) -> PaperRow:
    total = fact["total_bytes"]
    parts = (fact["param_bytes"], fact["grad_bytes"], fact["optimizer_bytes_K"])
    summed = sum(map(int, parts)) if all(part.isdigit() for part in parts) else None
    ours = OURS.get(fact["convention"])
    reason = "" if ours else "no precision of the engine counts so"
    if total.startswith("18/N"):
        reason += "; without the largest layer"
    formula = AT_64.get(total, summed)
    dry = padding = None
    if ours is not None and formula is not None:
        asked = Asked(model="7.5B", world=64, stage=ours[1], precision=ours[0])
        dry = _sums(evidence, asked)
        padding = formula * Fraction(padding_elements(asked), num_params(MODELS["7.5B"]))
    return PaperRow(
        facts=fact,
        printed=Fraction(total) if total.isdigit() else None,
        formula=formula,
        formula_exact=formula if ours else None,
        dryrun=None if dry is None else Fraction(dry.states_bytes, dry.num_params),
        dryrun_padding=None if dry is None else padding,
        reason=reason,
    )


def _why_table_2(stage: int) -> str:
    return "printed with one digit" if stage == 3 else "printed truncated at mp 1, then times mp"


def _paper_value(row: StatesRow) -> Fraction:
    each = states_per_param(CONVENTIONS[16], stage=row.stage, shards=row.shards)
    return row.params * each / GB


def _asked(model: str, row: StatesRow, bytes_per_param: int) -> Asked | None:
    if bytes_per_param not in PRECISION_OF:
        return None
    precision = PRECISION_OF[bytes_per_param]
    return Asked(model=model, world=row.shards, stage=row.stage, precision=precision)


def _measured(evidence: Evidence, row: StatesRow, bytes_per_param: int) -> Sums | None:
    asked = _asked("scaled", row, bytes_per_param)
    if asked is None or row.shards not in MEASURED_WORLDS:
        return None
    report = evidence.measured(asked)
    return None if report is None else sums_of(report.num_params, report.holdings, ())


def _sums(evidence: Evidence, asked: Asked) -> Sums | None:
    report = evidence.played(asked)
    if report is None:
        return None
    return sums_of(report.num_params, report.after_step, report.transfers)


def _scaled(measured: Sums | None, params: Fraction) -> Number | None:
    if measured is None:
        return None
    return params * measured.states_bytes / measured.num_params / GB
