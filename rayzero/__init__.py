"""rayzero: measure ZeRO, tensor parallelism and offload on Ray, and hold theory against it."""

__version__ = "0.1.0"
