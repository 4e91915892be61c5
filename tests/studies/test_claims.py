"""Claims: every verdict follows from its figures, and another figure gives another verdict."""

import csv
import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from rayzero import app
from rayzero.records import RankReport, Transfer
from rayzero.studies.claims.all_claims import ALL
from rayzero.studies.claims.claim import Decision, decided
from rayzero.studies.claims.lab import AT_13B, Lab
from rayzero.studies.claims.trial import plan, states
from rayzero.studies.claims.verb import rows_of, summary, write_all
from rayzero.studies.claims.verdict import (
    Analogy,
    Constant,
    Figure,
    Part,
    Statement,
    Verdict,
    about,
    at_least,
    at_most,
    exactly,
)
from rayzero.studies.facts import read_facts
from rayzero.tracking.store import open_store
from tests.ranks import Pools
from tests.studies.lab import filled_lab

DIFFERENT = {16}
"""Claims whose verdict is not the expected one; see their notes."""


@pytest.fixture(scope="module")
def lab(ranks: Pools) -> Lab:
    """Every trial of the plan, run on real ranks."""
    return filled_lab(ranks)


@pytest.fixture(scope="module")
def decisions(lab: Lab) -> list[Decision]:
    """All claims, decided."""
    return decided(ALL, lab)


def moved(figure: Figure) -> Figure:
    """Move a value to the other side of its bounds."""
    low, high = figure.low, figure.high
    inside = low if low is not None else high
    assert inside is not None
    outside = high + 1 if high is not None else inside - 1
    return dataclasses.replace(figure, value=outside if figure.is_within else inside)


def all_moved(figures: Sequence[Figure], *, within: bool) -> tuple[Figure, ...]:
    """Move those figures that are within their bounds, or those that are not."""
    return tuple(moved(f) if f.is_within is within else f for f in figures)


def one_moved(figures: Sequence[Figure]) -> Iterator[tuple[Figure, ...]]:
    """Move one figure at a time."""
    for place, figure in enumerate(figures):
        yield (*figures[:place], moved(figure), *figures[place + 1 :])


def variants(part: Part) -> Iterator[Part]:
    """Yield the part with its deciding figures beyond their bounds, in each way there is."""
    if isinstance(part, Constant):
        if not part.cases:
            yield Constant(what=part.what, cases=[exactly("a source", 1, 1)])
            return
        yield Constant(what=part.what, cases=all_moved(part.cases, within=True))
        yield Constant(what=part.what, cases=all_moved(part.cases, within=False))
    elif isinstance(part, Statement) and part.verdict is Verdict.HOLDS:
        for literal in one_moved(part.literal):
            yield dataclasses.replace(part, literal=literal)
    elif isinstance(part, Statement):
        yield dataclasses.replace(part, literal=all_moved(part.literal, within=False))
        if part.verdict is Verdict.CONVENTION:
            for convention in one_moved(part.convention):
                yield dataclasses.replace(part, convention=convention)


def test_there_are_63_claims_in_order_with_facts() -> None:
    assert [claim.number for claim in ALL] == list(range(1, 64))
    assert [int(fact["number"]) for fact in read_facts("claims")] == list(range(1, 64))
    assert len({claim.text for claim in ALL}) == 63


def test_a_figure_beyond_its_bound_changes_the_verdict(decisions: list[Decision]) -> None:
    undecidable = []
    for decision in decisions:
        changed = 0
        for part in decision.parts:
            for variant in variants(part):
                assert variant.verdict is not part.verdict, f"{decision.claim.number}: {variant}"
                changed += 1
        if not changed:
            undecidable.append(decision.claim.number)
    assert undecidable == [59], "an analogy has no figure"


def test_verdicts_are_the_expected_ones_but_for_those_we_explain(
    decisions: list[Decision],
) -> None:
    differing = {d.claim.number: d for d in decisions if not d.is_as_expected}
    assert differing.keys() == DIFFERENT, {n: d.figure for n, d in differing.items()}
    for number in DIFFERENT:
        assert differing[number].claim.note


def test_every_trial_is_read_by_a_claim_and_every_reading_is_planned(
    lab: Lab, decisions: list[Decision]
) -> None:
    assert decisions
    assert lab.read == {*plan(), AT_13B}


def test_a_failed_experiment_fails_its_claims_alone(lab: Lab, decisions: list[Decision]) -> None:
    trial = states(4, 1)
    broken = dataclasses.replace(lab, measured=dict(lab.measured), failures={trial: "rank 1 died"})
    del broken.measured[trial]
    failed = {d.claim.number for d in decided(ALL, broken) if d.verdict == Verdict.FAILED.value}
    assert {2, 4, 5, 8, 9} <= failed
    assert not failed & {6, 7, 12, 13, 52, 61}
    for before, now in zip(decisions, decided(ALL, broken), strict=True):
        if now.claim.number in failed:
            assert "rank 1 died" in now.figure
        else:
            assert now.verdict == before.verdict


def without_gathers(report: RankReport) -> RankReport:
    """Take the gathers out of a report."""
    kept: tuple[Transfer, ...] = tuple(t for t in report.transfers if t.op != "all_gather")
    return dataclasses.replace(report, transfers=kept)


def test_verdicts_follow_from_what_the_ranks_report(lab: Lab) -> None:
    trial = states(4, 3)
    reports = [without_gathers(report) for report in lab.measured[trial]]
    other = dataclasses.replace(lab, measured={**lab.measured, trial: reports})
    verdicts = {d.claim.number: d.verdict for d in decided(ALL, other)}
    assert verdicts[25] == verdicts[26] == verdicts[37] == "wrong"


def test_without_experiments_claims_are_undecided_and_calculations_are_not(
    tmp_path: Path,
) -> None:
    rows = rows_of(ALL, Lab())
    verdicts = {row.number: row.verdict for row in rows}
    assert verdicts[4] == verdicts[39] == "undecided"
    assert (verdicts[6], verdicts[31], verdicts[28]) == ("convention", "wrong", "unsupported")
    write_all(rows, tmp_path)
    with (tmp_path / "claims.csv").open() as stream:
        table = list(csv.DictReader(stream))
    assert list(table[0]) == ["number", "claim", "verdict", "figure", "expected", "experiment"]
    assert [row["verdict"] for row in table] == [row.verdict for row in rows]
    assert (tmp_path / "claims.md").read_text().count("\n| ") > 63
    assert (tmp_path / "claims.png").stat().st_size > 10_000


def test_the_summary_counts_what_is_not_as_expected() -> None:
    rows = rows_of(ALL[:7], Lab())
    lines = summary(rows)
    assert lines[0] == "7 claims: 5 undecided, 2 convention"
    assert lines[1] == "5 not as expected"
    assert len(lines) == 7


@pytest.mark.slow
def test_the_verb_runs_what_chosen_claims_read_and_writes_and_logs_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = app.main(["claims", "claims.only=[47,6,31]", f"run.output={tmp_path}"])
    said = capsys.readouterr().out
    assert code == app.EXIT_OK, said
    trials = re.findall(r"^\d+/\d+ (2 ranks, stage 3, .*): ok, ", said, re.MULTILINE)
    assert len(trials) == said.count(" ranks, stage ") == 2, said
    assert "dry run" not in said
    folder = tmp_path / "claims" / "only_6_31_47"
    with (folder / "claims.csv").open() as stream:
        table = list(csv.DictReader(stream))
    assert list(table[0]) == ["number", "claim", "verdict", "figure", "expected", "experiment"]
    verdicts = {row["number"]: row["verdict"] for row in table}
    assert verdicts == {"6": "convention", "31": "wrong", "47": "wrong / holds"}
    facts = {fact["number"]: fact for fact in read_facts("claims")}
    page = (folder / "claims.md").read_text()
    for row in table:
        fact = facts[row["number"]]
        assert (row["expected"], row["experiment"]) == (fact["expected"], fact["experiments"])
        cells = (row["number"], row["claim"], row["verdict"], row["expected"], row["experiment"])
        assert f"| {' | '.join(cells)} | {row['figure'].replace('|', '/')} |" in page
    assert "3 claims: " in said

    client = open_store(None, tmp_path).client
    experiment = client.get_experiment_by_name("zero_claims")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.data.params["claims.only"] == "[47, 6, 31]"
    files = {file.path for file in client.list_artifacts(run.info.run_id)}
    assert {"claims.csv", "claims.md", "claims.png"} <= files


def test_numbers_of_no_claim_are_refused_before_anything_is_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "out"
    code = app.main(["claims", "claims.only=[99,4,64]", f"run.output={output}"])
    assert code == app.EXIT_BAD_INPUT
    said = capsys.readouterr().err
    assert "claims.only names 64, 99" in said
    assert "allowed: 1 to 63" in said
    assert not output.exists()


@pytest.mark.parametrize(
    ("part", "verdict"),
    [
        (Statement(literal=[at_most("a", 1, 1), at_least("b", 2, 1)]), Verdict.HOLDS),
        (Statement(literal=[at_most("a", 2, 1), at_least("b", 2, 1)]), Verdict.WRONG),
        (
            Statement(literal=[exactly("a", 2, 1)], convention=[about("b", 101, 100)], under="c"),
            Verdict.CONVENTION,
        ),
        (
            Statement(literal=[exactly("a", 2, 1)], convention=[about("b", 103, 100)], under="c"),
            Verdict.WRONG,
        ),
        (Constant(what="a", cases=[exactly("b", 1, 1)]), Verdict.HOLDS),
        (Constant(what="a", cases=[exactly("b", 2, 1)]), Verdict.WRONG),
        (Constant(what="a", cases=[exactly("b", 1, 1), exactly("c", 2, 1)]), Verdict.UNSUPPORTED),
        (Constant(what="a", cases=[]), Verdict.UNSUPPORTED),
        (Analogy(why="a"), Verdict.NOT_CHECKABLE),
    ],
)
def test_rules_give_verdicts(part: Part, verdict: Verdict) -> None:
    assert part.verdict is verdict
