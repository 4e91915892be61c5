"""Process group, mesh, and the only door to collectives."""
