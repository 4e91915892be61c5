"""Printed figures, a CSV for each table of a paper; every row names its source."""

import csv
from importlib import resources

Fact = dict[str, str]


def read_facts(name: str) -> list[Fact]:
    """Return the rows of a table, by column."""
    text = resources.files(__name__).joinpath(f"{name}.csv").read_text(encoding="ascii")
    return list(csv.DictReader(text.splitlines()))
