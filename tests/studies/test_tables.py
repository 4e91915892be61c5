"""The papers' tables: every printed figure follows from its formula under the stated rounding."""

import csv
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
import yaml

from rayzero.config.build import build, to_plain
from rayzero.config.cell import CellConfig
from rayzero.records import DryRunReport
from rayzero.report.paper_table import RESULTS, PaperTable, number_text
from rayzero.run import rehearse
from rayzero.studies.asked import MODELS, PRECISIONS, Asked
from rayzero.studies.evidence import Evidence
from rayzero.studies.facts import read_facts
from rayzero.studies.memory_tables import BILLION, STAGES, as_table_2_prints, conventions
from rayzero.studies.other_tables import offload_strategies
from rayzero.studies.rounding import half_up, keeps_digits, truncated
from rayzero.studies.tables import build_tables, write_tables
from rayzero.studies.volume_tables import TIED
from rayzero.theory.paper import CONVENTIONS, GB, largest_model, states_per_param

CONF = Path(__file__).parent.parent.parent / "conf"
BASE = CellConfig()


def table(name: str, evidence: Evidence | None = None, bytes_per_param: int = 16) -> PaperTable:
    tables = build_tables(evidence or Evidence(), bytes_per_param)
    return next(t for t in tables if t.name == name)


def played(*asked: Asked) -> Evidence:
    evidence = Evidence()
    for one in asked:
        evidence.dry[one] = rehearse(one.config(BASE))
    return evidence


def test_all_54_cells_of_table_1_are_the_formula_rounded_as_stated() -> None:
    facts = read_facts("zero_table1_memory")
    assert len(facts) == 54
    for fact in facts:
        each = states_per_param(
            CONVENTIONS[16], stage=STAGES[fact["stage"]], shards=int(fact["dp_degree"])
        )
        value = Fraction(fact["model_params_B"]) * BILLION * each / GB
        if fact["model_params_B"] == "7.5":
            rounded = half_up(value, decimals=min(2, keeps_digits(value, 3)))
        else:
            rounded = truncated(value, decimals=max(0, keeps_digits(value, 3)))
        assert number_text(rounded) == fact["per_device_GB_printed"]


def test_figure_1_is_the_formula_to_one_decimal() -> None:
    rows = table("zero_fig1_memory").rows
    assert len(rows) == 4
    for row in rows:
        assert isinstance(row.formula, Fraction)
        assert number_text(half_up(row.formula, decimals=1)) == row.facts["per_device_GB_printed"]


def test_table_2s_theoretical_column_is_the_formula_cut_as_stated() -> None:
    facts = read_facts("zero_table2_max_model")
    assert len(facts) == 20
    for fact in facts:
        mp = int(fact["mp_degree"])
        params = largest_model(
            CONVENTIONS[16],
            memory_bytes=32 * GB,
            stage=STAGES[fact["stage"]],
            shards=int(fact["gpus"]) // mp,
            mp=mp,
        )
        printed = as_table_2_prints(params / BILLION, mp)
        assert number_text(printed) == fact["theoretical_max_B_printed"]


def test_each_difference_has_a_reason() -> None:
    for one in build_tables(Evidence(), 16):
        for row in one.rows:
            assert row.difference in (None, 0) or row.reason, f"{one.name}: {row.facts}"


def test_the_dry_run_minus_the_exact_formula_is_padding_to_the_byte() -> None:
    evidence = played(Asked(model="7.5B", world=64, stage=3))
    for name in ("zero_fig1_memory", "zero_table1_memory"):
        (row,) = [row for row in table(name, evidence).rows if row.dryrun is not None]
        assert isinstance(row.dryrun, Fraction)
        assert isinstance(row.formula_exact, Fraction)
        assert row.dryrun - row.formula_exact == row.dryrun_padding


@pytest.mark.slow
@pytest.mark.parametrize("build_table", [offload_strategies, conventions])
def test_placements_and_conventions_are_the_engines_own(
    build_table: Callable[[Evidence], PaperTable],
) -> None:
    asked = Evidence()
    build_table(asked)
    rows = [r for r in build_table(played(*asked.dry)).rows if r.dryrun is not None]
    assert len(rows) >= 3
    for row in rows:
        assert isinstance(row.dryrun, Fraction)
        assert row.dryrun_padding is not None
        assert row.dryrun - row.dryrun_padding == row.formula_exact


def test_the_engine_sends_what_the_paper_says() -> None:
    evidence = played(
        *(Asked(model="scaled", world=4, stage=stage, steady=True) for stage in range(4))
    )
    reports: dict[Asked, DryRunReport | None] = evidence.dry
    for asked, report in list(reports.items()):
        at_size = replace(asked, model="7.5B", world=64)
        evidence.dry[at_size] = report
    rows = table("zero_comm_volume", evidence).rows
    of_stages = [r for r in rows if r.dryrun and "bytes" not in r.facts["scheme"]]
    found = [row for row in of_stages if row.facts["micro_steps"] == "1"]
    assert len(found) == 4
    for row in found:
        assert row.dryrun == pytest.approx(float(row.formula or 0), rel=0.05)
        assert row.dryrun == row.formula_exact
        if row.reason.startswith(TIED):
            assert row.dryrun > (row.formula or 0)


def test_a_convention_changes_formulas_and_says_so() -> None:
    at_18 = table("zero_table1_memory", bytes_per_param=18).rows[0]
    assert (at_18.printed, at_18.formula) == (120, 135)
    assert "formula at 18" in at_18.reason
    at_20 = table("zero_fig1_memory", bytes_per_param=20).rows[0]
    assert at_20.formula == 150
    assert "no precision of the engine" in at_20.reason


def test_what_was_not_measured_is_empty_and_says_so(tmp_path: Path) -> None:
    tables = build_tables(Evidence(), 16)
    write_tables(tables, tmp_path, bytes_per_param=16)
    with (tmp_path / "zero_table1_memory.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert list(rows[0])[-len(RESULTS) :] == list(RESULTS)
    assert all(row["measured"] == row["dryrun"] == "" for row in rows)
    assert rows[0]["reason"] == "not measured on this machine"
    assert (tmp_path / "tables.md").read_text().count("\n## ") == len(tables)
    assert (tmp_path / "zero_fig1_memory.png").stat().st_size > 10_000


def test_models_and_precisions_are_those_of_conf() -> None:
    for name, model in MODELS.items():
        if name != "scaled":
            in_conf = yaml.safe_load((CONF / "model" / f"{name}.yaml").read_text())
            assert build({"model": in_conf}).model == model
    for name, precision in PRECISIONS.items():
        in_conf = yaml.safe_load((CONF / "precision" / f"{name}.yaml").read_text())
        assert to_plain(build({"precision": in_conf}).precision) == to_plain(precision)
