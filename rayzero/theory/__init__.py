"""Memory, traffic, FLOPs and cost as arithmetic on a config; no torch."""
