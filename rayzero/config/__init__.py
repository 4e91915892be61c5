"""The question a cell asks: frozen dataclasses, a file per group, all defaults, all checks."""
