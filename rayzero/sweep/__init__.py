"""Many cells: the campaign and its folder, names, resume rule, parity and progress."""
