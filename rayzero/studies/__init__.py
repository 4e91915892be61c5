"""Fixed programmes: the dry run, the ZeRO paper's tables."""
