"""Peers behind the engine's verbs: DDP, ZeroRedundancyOptimizer, FSDP2 and DeepSpeed."""
