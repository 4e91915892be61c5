"""Tests of the gang on real Ray."""
