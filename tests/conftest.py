"""Fixtures all tests share."""

import signal
from collections.abc import Iterator

import pytest

from tests.ranks import Pools

# A run in the background of a shell ignores Ctrl-C, and so would the programs that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ranks() -> Iterator[Pools]:
    """Return pools of gloo ranks: ranks(2)(function, *args) runs function on two ranks."""
    pools = Pools()
    yield pools
    pools.close()
