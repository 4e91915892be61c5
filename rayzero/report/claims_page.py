"""Claims with their verdicts, as CSV, as Markdown, and as a picture of all of them."""

import csv
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.patches import Patch, Rectangle

from rayzero.report.files import replace_file
from rayzero.report.style import HOLE, INK, Caption, frame

COLUMNS = ("number", "claim", "verdict", "figure", "expected", "experiment")
COLOURS: Mapping[str, str] = {
    "holds": "#009e73",
    "convention": "#56b4e9",
    "unsupported": "#e69f00",
    "wrong": "#d55e00",
}
OTHERS = "not decided"
PER_LINE = 21


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRow:
    """One claim. verdict and expected: words, joined by ' / ' where parts of it differ."""

    number: int
    claim: str
    verdict: str
    figure: str
    expected: str
    experiment: str
    note: str

    @property
    def is_as_expected(self) -> bool:
        """Whether found and expected verdict are the same."""
        return self.verdict == self.expected


def write_claims_csv(rows: Sequence[ClaimRow], folder: Path) -> Path:
    """Write claims.csv with COLUMNS."""
    stream = io.StringIO(newline="")
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        writer.writerow([getattr(row, column) for column in COLUMNS])
    return replace_file(folder / "claims.csv", stream.getvalue().encode())


def write_claims_page(rows: Sequence[ClaimRow], folder: Path, *, head: Sequence[str]) -> Path:
    """Write claims.md: the count, what differs from the expected verdict, and every claim."""
    differing = [row for row in rows if not row.is_as_expected]
    parts = ["# Claims on ZeRO, decided", *head, "![All claims](claims.png)", _counts(rows)]
    parts.append("## Where the verdict is not the expected one")
    parts += [_differing(row) for row in differing] or ["Nowhere."]
    parts.append("## All claims")
    titles = ("number", "claim", "verdict", "expected", "experiment", "figure", "note")
    lines = [_line(titles), _line(["---"] * len(titles))]
    for row in rows:
        mark = row.verdict if row.is_as_expected else f"**{row.verdict}**"
        lines.append(
            _line(
                [
                    str(row.number),
                    row.claim,
                    mark,
                    row.expected,
                    row.experiment,
                    row.figure,
                    row.note,
                ]
            )
        )
    parts.append("\n".join(lines))
    return replace_file(folder / "claims.md", ("\n\n".join(parts) + "\n").encode())


def write_claims_picture(rows: Sequence[ClaimRow], path: Path, caption: Caption) -> Path:
    """Draw a tile for each claim, halved where its parts differ, framed where not as expected."""
    num_lines = -(-len(rows) // PER_LINE)
    canvas = frame(
        caption, width_in=11.0, plot_height_in=0.42 * num_lines, left_in=0.3, right_in=1.9
    )
    axes = canvas.axes
    axes.set_xlim(0, PER_LINE)
    axes.set_ylim(num_lines, 0)
    axes.set_xticks([])
    axes.set_yticks([])
    for place, row in enumerate(rows):
        y, x = divmod(place, PER_LINE)
        words = row.verdict.split(" / ")
        for part, word in enumerate(words):
            colour = COLOURS.get(word, HOLE)
            left, width = x + 0.05 + part * 0.9 / len(words), 0.9 / len(words)
            axes.add_patch(Rectangle((left, y + 0.05), width, 0.9, color=colour, linewidth=0))
        if not row.is_as_expected:
            axes.add_patch(
                Rectangle((x + 0.05, y + 0.05), 0.9, 0.9, fill=False, edgecolor=INK, linewidth=2)
            )
        axes.text(x + 0.5, y + 0.5, str(row.number), ha="center", va="center", fontsize=8.5)
    handles = [Patch(facecolor=colour, label=word) for word, colour in COLOURS.items()]
    handles.append(Patch(facecolor=HOLE, label=OTHERS))
    handles.append(Patch(facecolor="white", edgecolor=INK, linewidth=2, label="not as expected"))
    canvas.legend(handles)
    return replace_file(path, canvas.png())


def counted(rows: Sequence[ClaimRow]) -> dict[str, int]:
    """Count the verdicts, most frequent first."""
    words = [row.verdict for row in rows]
    return {word: words.count(word) for word in sorted(set(words), key=words.count, reverse=True)}


def _counts(rows: Sequence[ClaimRow]) -> str:
    lines = [_line(("verdict", "claims")), _line(("---", "---"))]
    lines += [_line((word, str(number))) for word, number in counted(rows).items()]
    return "\n".join(lines)


def _differing(row: ClaimRow) -> str:
    return (
        f"- {row.number}. {row.claim} Found: {row.verdict}; expected: {row.expected}. "
        f"{row.figure}. {row.note}"
    )


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "/") for cell in cells) + " |"
