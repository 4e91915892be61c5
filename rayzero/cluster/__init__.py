"""Ray: who owns which device, the gang of ranks, and what became of them."""
