"""One rank's work: build, data, trainer, probe."""
