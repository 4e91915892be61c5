"""The pictures: every cell is in one, holes carry their status, groups are never mixed."""

from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread

from rayzero.records import CellRecord, CellRow
from rayzero.report.bars import Legend, Pair, paired_bars
from rayzero.report.figures import PICTURES, groups_of, write_figures
from rayzero.report.heatmap import Quantity, heat_map
from rayzero.report.style import Caption, Frame
from tests.report.cells import bad_cell, ok_cell, sweep

CAPTION = Caption(title="Why $not$ [now]?", chart="chart", subtitle="model tiny")
THROUGHPUT = Quantity(
    value=lambda row: row.tokens_per_s, text=lambda n: f"{n:,.0f}", palette="YlGnBu", best=max
)


def words(frame: Frame) -> list[str]:
    """Return what is written inside the plot."""
    return [text.get_text() for text in frame.axes.texts]


def rows(records: list[CellRecord]) -> list[CellRow]:
    """Return the records' rows."""
    return [record.row for record in records]


def test_the_heat_map_shows_each_number_and_stars_the_best() -> None:
    shown = words(heat_map(rows(sweep(holes=False)), THROUGHPUT, CAPTION))
    assert len(shown) == 12
    assert [word for word in shown if word.endswith("*")] == ["18,618 *"]
    assert "9,942" in shown


def test_holes_carry_their_status() -> None:
    shown = words(heat_map(rows(sweep()), THROUGHPUT, CAPTION))
    assert {"out of memory", "impossible", "worker lost"} <= set(shown)


def test_a_square_that_no_cell_asked_for_says_so() -> None:
    asked = [ok_cell(0, 1).row, ok_cell(1, 2).row]
    assert words(heat_map(asked, THROUGHPUT, CAPTION)).count("not run") == 2


def test_a_cell_that_failed_parity_shows_no_number() -> None:
    failed = ok_cell(0, 1, status="parity_failed").row
    assert words(heat_map([failed], THROUGHPUT, CAPTION)) == ["parity failed"]


def test_several_cells_of_one_square_show_the_best() -> None:
    both = [ok_cell(0, 1, tokens_per_s=10.0).row, ok_cell(0, 1, tokens_per_s=30.0).row]
    assert words(heat_map(both, THROUGHPUT, CAPTION)) == ["30 *", "best of 2"]


def test_bars_are_as_long_as_the_bytes_in_the_named_unit() -> None:
    pair = Pair(
        cell="a",
        segments={"x": 3 * 2**20, "y": 2**20},
        formula_bytes=2 * 2**20,
        note="+2 MiB",
        is_off=True,
    )
    legend = Legend(colours={"x": "red", "y": "blue"}, formula="formula", axis="bytes held")
    frame = paired_bars([pair], legend, CAPTION)
    assert [patch.get_width() for patch in frame.axes.patches] == [3.0, 1.0, 2.0]
    assert frame.axes.get_xlabel() == "bytes held, MiB"
    assert words(frame) == ["+2 MiB"]


@pytest.mark.parametrize(
    "records",
    [
        [ok_cell(2, 1)],
        [bad_cell(s, t, "out_of_memory", "too large") for s in range(4) for t in (1, 2)],
        [CellRecord(row=CellRow(cell="a", status="failed"), fingerprint="", config={})],
        [ok_cell(0, 4, sent_bytes=0, tokens_per_s=0.0)],
    ],
    ids=["one cell", "all failed", "nothing known", "zeros"],
)
def test_odd_matrices_are_drawn(records: list[CellRecord], tmp_path: Path) -> None:
    paths = write_figures(records, tmp_path, question="?")
    assert [path.stem for path in paths] == list(PICTURES)
    for path in paths:
        height, width, _ = imread(path).shape
        assert width > 600
        assert height > 200


def test_a_hundred_cells_are_drawn_each_with_room(tmp_path: Path) -> None:
    records = [
        ok_cell(s, tp, ranks=16, cell=f"s{s}_tp{tp}_b{b}", micro_batch=b)
        for s in range(4)
        for tp in (1, 2, 4, 8, 16)
        for b in range(5)
    ]
    bare = [replace(record, reports=()) for record in records]
    paths = {path.stem: path for path in write_figures(bare, tmp_path, question="?")}
    height, width, _ = imread(paths["memory_by_kind"]).shape
    assert height / len(bare) > 40
    assert width < 1600


def test_models_precisions_and_offloads_have_pictures_of_their_own(tmp_path: Path) -> None:
    records = [
        ok_cell(0, 1),
        ok_cell(1, 1, cell="b", precision="bf16"),
        ok_cell(1, 1, cell="c", offload="host"),
        ok_cell(1, 1, cell="d", precision="bf16"),
    ]
    groups = groups_of(records)
    assert [[r.row.cell for r in g.records] for g in groups] == [
        ["s0_tp1_dp4_fp32"],
        ["b", "d"],
        ["c"],
    ]
    assert [group.name for group in groups] == ["fp32_none", "bf16_none", "fp32_host"]
    assert len(write_figures(records, tmp_path, question="?")) == 3 * len(PICTURES)


def test_a_cell_that_failed_before_it_knew_its_devices_stays_in_the_group() -> None:
    records = [bad_cell(0, 1, "failed", "x"), ok_cell(1, 1), ok_cell(2, 1)]
    (group,) = groups_of(records)
    assert [record.row.stage for record in group.records] == [0, 1, 2]
    assert group.name == ""
