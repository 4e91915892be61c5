"""Units: GiB and GB are told apart, and a column has one unit."""

import pytest

from rayzero.report.units import BYTE, GIB, MIB, both, common_unit, with_unit


def test_two_to_the_thirty_bytes_are_one_gib_and_1074_mb() -> None:
    assert both(2**30) == "1.000 GiB = 1.074 GB"


@pytest.mark.parametrize(
    ("num_bytes", "text"),
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1.000 KiB"), (15 * 2**20, "15.00 MiB")],
)
def test_an_amount_gets_the_binary_unit_that_suits_it(num_bytes: int, text: str) -> None:
    assert with_unit(num_bytes) == text


def test_a_column_has_the_unit_of_its_largest_value() -> None:
    assert common_unit([5, None, 3 * 2**30]) is GIB
    assert GIB.text(2**29) == "0.500"


def test_a_column_without_values_is_in_mib_and_one_of_zeros_in_bytes() -> None:
    assert common_unit([None, None]) is MIB
    assert common_unit([0, None]) is BYTE
