"""Who owns which elements: units, flats, buckets, spans and padding, in integers only."""
