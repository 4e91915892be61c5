"""Fixtures all tests share."""

from collections.abc import Iterator

import pytest

from tests.ranks import Pools


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """Return pools of gloo ranks: ranks(2)(function, *args) runs function on two ranks."""
    pools = Pools()
    yield pools
    pools.close()
