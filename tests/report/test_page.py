"""report.html: one file, escaped, with findings that follow from the numbers."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from matplotlib.image import imread

from rayzero.report.summary import sentences
from rayzero.report.sweep_report import write_report
from tests.report.cells import bad_cell, ok_cell, sweep, with_extra_bytes

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


def test_the_folder_holds_tables_pictures_and_page(tmp_path: Path) -> None:
    names = [path.name for path in write_report(sweep(), tmp_path, question="Which?")]
    assert names == [
        "matrix.csv",
        "reconciliation.csv",
        "throughput.png",
        "peak_memory.png",
        "memory_by_kind.png",
        "bytes_sent.png",
        "report.html",
    ]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(names)


def test_the_page_needs_no_other_file_and_no_network(tmp_path: Path) -> None:
    page = write_report(sweep(), tmp_path, question="Which?")[-1].read_text()
    assert page.count("data:image/png;base64,") == 4
    sources = re.findall(r'(?:src|href)="([^"]{0,30})', page)
    assert all(source.startswith("data:image/png;base64,") for source in sources)


def test_text_from_outside_is_escaped(tmp_path: Path) -> None:
    bad = bad_cell(0, 1, "failed", "<script>alert(1)</script>")
    records = [replace(bad, log="</pre><b>"), ok_cell(1, 1, cell="<i>$x</i>")]
    page = write_report(records, tmp_path, question="a < b & $question?")[-1].read_text()
    for raw in ("<script>", "</pre><b>", "<i>$x"):
        assert raw not in page
    assert "a &lt; b &amp; $question?" in page
    assert "&lt;i&gt;$x&lt;/i&gt;" in page


def test_pictures_of_groups_that_are_gone_are_removed_and_others_kept(tmp_path: Path) -> None:
    mine = tmp_path / "holiday.png"
    mine.write_bytes(b"")
    write_report([ok_cell(0, 1), ok_cell(0, 1, cell="b", model="30M")], tmp_path, question="?")
    assert (tmp_path / "throughput_30M.png").exists()
    write_report([ok_cell(0, 1)], tmp_path, question="?")
    assert not (tmp_path / "throughput_30M.png").exists()
    assert mine.exists()


def test_findings_name_the_fastest_and_the_leanest_cell() -> None:
    said = sentences(sweep())
    assert said[0] == "12 cells: 9 ok, 1 impossible, 1 out of memory, 1 worker lost."
    assert said[1].startswith("Fastest: s1_tp1_dp4_fp32 with 16,787 tokens/s (122.0 ms a step)")
    assert said[2].startswith("Leanest: s0_tp4_dp1_fp32 with a peak of 7.106 MiB per rank")
    assert (
        said[3]
        == "The losses of all 9 cells compared agree; the largest relative error is 1.2e-06."
    )


def test_findings_say_how_often_theory_equals_engine_and_where_not() -> None:
    exact = sentences(sweep())[-1]
    assert "bytes held equal the formula exactly in 9 of 9 cells" in exact
    assert "bytes sent in a step equal the formula exactly in 9 of 9 cells" in exact
    records = sweep()
    records[1] = with_extra_bytes(records[1], 7)
    wrong = sentences(records)[-1]
    assert "in 8 of 9 cells, not in s0_tp2_dp2_fp32 (rank 1 counters +7 B)" in wrong


def test_findings_name_cells_whose_losses_do_not_agree() -> None:
    wrong = ok_cell(3, 1, status="parity_failed", parity="failed", parity_error=0.25)
    said = " ".join(sentences([ok_cell(0, 1), wrong]))
    assert "The losses of s3_tp1_dp4_fp32 do not agree" in said
    assert "2.5e-01" in said


def test_findings_of_a_matrix_without_numbers_claim_nothing() -> None:
    said = " ".join(sentences([bad_cell(0, 1, "timeout", "late")]))
    assert "No cell was timed" in said
    assert "were not measured" in said
    assert "exactly" not in said


def test_an_empty_matrix_has_a_page(tmp_path: Path) -> None:
    assert "No cell has run." in write_report([], tmp_path, question="")[-1].read_text()


@pytest.mark.slow
@pytest.mark.timeout(90)
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium or google-chrome on this machine")
def test_a_browser_draws_the_page(tmp_path: Path) -> None:
    page = write_report(sweep(), tmp_path / "report", question="Which?")[-1]
    picture = tmp_path / "page.png"
    command = [str(CHROMIUM), "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run"]
    command += [f"--user-data-dir={tmp_path / 'profile'}", "--window-size=1200,3000"]
    command += ["--disable-background-networking", f"--screenshot={picture}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    pixels = imread(picture)[:, :, :3]
    assert len({tuple(pixel) for pixel in pixels[::7, ::7].reshape(-1, 3)}) > 20
    assert (pixels[2000:2600] < 0.5).any()
