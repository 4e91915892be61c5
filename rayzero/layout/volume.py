"""Elements one rank sends in a collective; what the paper counts as (N-1)/N of the buffer."""

from rayzero.layout.spec import Span
from rayzero.records import Carrier

SWAP_ELEMENTS = 1 << 20
"""Two ranks all-reduce up to this size by swapping whole buffers: the same bytes in one round."""
PIECE_ELEMENTS = 1 << 16
"""Sums over shared memory go in pieces of this length, which stay in a core's cache."""


def swaps(elements: int, *, ranks: int) -> bool:
    """Whether a pairwise all-reduce swaps whole buffers, at twice the scratch."""
    return ranks == 2 and elements <= SWAP_ELEMENTS


def scratch_elements(carrier: Carrier, op: str, elements: int, *, ranks: int) -> int:
    """Elements of receive buffer that a reduce_scatter or all_reduce of `elements` needs.

    Pairwise: a part from each peer or, where two ranks swap, the peer's whole buffer. Shared: a
    piece from each peer. Native collectives receive into buffers of their own.
    """
    part = -(-elements // ranks)
    if ranks == 1 or carrier is Carrier.NATIVE:
        return 0
    if carrier is Carrier.SHARED:
        return min(part, PIECE_ELEMENTS) * (ranks - 1)
    return elements if op == "all_reduce" and swaps(elements, ranks=ranks) else part * (ranks - 1)


def chunk(elements: int, *, ranks: int, index: int) -> Span:
    """Return the part of a buffer that rank `index` sums in an all-reduce of any length."""
    size = -(-elements // ranks)
    start = min(index * size, elements)
    return Span(start=start, stop=min(start + size, elements))


def gathered(elements: int, *, ranks: int) -> int:
    """All-gather or reduce-scatter of a buffer that `ranks` divides: (N-1)/N of it."""
    return elements // ranks * (ranks - 1)


def all_reduced(elements: int, *, ranks: int, index: int) -> int:
    """All-reduce as reduce-scatter + all-gather: 2 (N-1)/N of the buffer where N divides it."""
    own = chunk(elements, ranks=ranks, index=index).elements
    return (elements - own) + own * (ranks - 1)


def broadcast(elements: int, *, ranks: int, index: int) -> int:
    """Broadcast from rank 0, which alone sends, once to each other rank."""
    return elements * (ranks - 1) if index == 0 else 0
