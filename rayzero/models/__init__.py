"""Plain models in plain PyTorch: they know nothing of ranks, shards or parallelism."""
