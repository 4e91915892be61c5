"""Everything a sweep's folder shows: matrix.csv, reconciliation.csv, pictures and report.html."""

from collections.abc import Sequence
from pathlib import Path

from rayzero.records import CellRecord
from rayzero.report.figures import PICTURES, write_figures
from rayzero.report.matrix import MATRIX_FILE, write_matrix
from rayzero.report.page import PAGE_FILE, write_page
from rayzero.report.reconcile import RECONCILIATION_FILE, write_reconciliation

UNASKED = "Which configuration is fastest, and which needs the least memory?"


def write_report(records: Sequence[CellRecord], folder: Path, *, question: str) -> list[Path]:
    """Write all files, whatever the cells' statuses, and return their paths; old pictures go."""
    question = question or UNASKED
    tables = [
        write_matrix((record.row for record in records), folder / MATRIX_FILE),
        write_reconciliation(records, folder / RECONCILIATION_FILE),
    ]
    pictures = write_figures(records, folder, question=question)
    page = write_page(records, pictures, folder / PAGE_FILE, question=question)
    _remove_stale(folder, pictures)
    return [*tables, *pictures, page]


def _remove_stale(folder: Path, pictures: Sequence[Path]) -> None:
    """Remove pictures of groups that this matrix no longer has."""
    for name in PICTURES:
        for path in folder.glob(f"{name}*.png"):
            if path not in pictures:
                path.unlink()
