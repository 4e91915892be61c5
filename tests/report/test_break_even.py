"""The tokens per rank where ZeRO-3 and tensor parallelism meet, from the bytes of two cells."""

from dataclasses import replace

from rayzero.records import CellRecord, Phase, Transfer
from rayzero.report.break_even import break_even_sentence
from tests.report.cells import bad_cell, ok_cell


def sending(stage: int, tp: int, by_axis: dict[str, int], **model: object) -> CellRecord:
    """Record a cell of 4 ranks with 512 tokens each, whose rank 3 sends these bytes."""
    record = ok_cell(stage, tp)
    lines = [
        Transfer(
            op="any",
            axis=axis,
            phase=Phase.BACKWARD,
            unit="u",
            elements=1,
            dtype="fp32",
            sent_bytes=sent,
        )
        for axis, sent in by_axis.items()
    ]
    control = replace(lines[0], phase=Phase.CONTROL, sent_bytes=10**9)
    most = replace(record.reports[-1], transfers=(*lines, control))
    least = replace(most, transfers=tuple(replace(line, sent_bytes=0) for line in lines))
    groups = {"model": {"factory": None, "hidden": 64, "checkpointing": "none", **model}}
    return replace(record, reports=(least, least, least, most), config=groups)


STAGE_3 = sending(3, 1, {"shard": 3000})


def test_cells_meet_where_their_bytes_are_equal() -> None:
    """512 x (3000 - 1000) / 8000 = 128; 64 x (4.5 - 3/2) / 1 = 192."""
    said = break_even_sentence([STAGE_3, sending(1, 2, {"shard": 1000, "tp": 8000})])
    assert said == (
        "On 4 ranks with 512 tokens each, stage 3 alone sends 3,000 B per rank and step; "
        "s1_tp2_dp2_fp32 sends 3.00 times as much, and would send as much at 128 tokens per rank "
        "(by the formula of a layer 192)."
    )


def test_tensor_parallelism_on_all_ranks_has_no_zero_beside_it() -> None:
    """512 x 3000 / 24000 = 64; 4.5 x 64 / 4 = 72, and 3 x 64 / 4 = 48 with full recompute."""
    said = break_even_sentence([STAGE_3, sending(1, 4, {"tp": 24000})])
    assert "8.00 times as much, and would send as much at 64 tokens per rank" in said
    assert "(by the formula of a layer 72)" in said
    again = sending(1, 4, {"tp": 24000}, checkpointing="full")
    assert "(by the formula of a layer 48)" in break_even_sentence([STAGE_3, again])


def test_nothing_is_said_where_a_side_is_missing() -> None:
    assert break_even_sentence([]) == ""
    assert break_even_sentence([STAGE_3, bad_cell(1, 2, "timeout", "late")]) == ""
    assert break_even_sentence([sending(1, 2, {"shard": 1000, "tp": 8000})]) == ""


def test_a_foreign_model_has_no_formula() -> None:
    cell = sending(1, 2, {"shard": 1000, "tp": 8000}, factory="a:b")
    assert "formula" not in break_even_sentence([STAGE_3, cell])
