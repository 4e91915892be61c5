"""One file per peer: from a cell's config to it; imported only where it is asked for."""
