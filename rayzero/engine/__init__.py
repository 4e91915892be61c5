"""The ZeRO engine: stages 0 to 3 over any nn.Module. Needs an initialised process group only.

Read in this order: replicated.py, zero1.py, zero2.py, zero3.py (their diff is the paper), then the
parts they share: flats, gradients, wire, arrivals, units, optimizer, norm; engine.py ties them.
"""

from rayzero.engine.engine import ZeroEngine
from rayzero.engine.options import OffloadOptions, PrecisionOptions, ZeroOptions

__all__ = ["OffloadOptions", "PrecisionOptions", "ZeroEngine", "ZeroOptions"]
