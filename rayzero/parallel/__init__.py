"""Tensor parallelism: cut a plain module's layers over the mesh axis tp, by a plan."""
