# rayzero's verbs. Each one sets up .venv first: once, and again when pyproject.toml or the pins change.

PYTHON ?= python3
EXPERIMENT ?= zero_vs_tp
CLUSTER ?= local
ARGS ?=
OUTPUT ?= outputs
PORT ?= 5000
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.set-up
# Another torch build (an index address of pytorch.org, such as for CUDA or for CPU) stays chosen.
CHOICE := $(VENV)/.torch-index
CHOSEN := $(shell cat $(CHOICE) 2>/dev/null)
TORCH_INDEX ?= $(CHOSEN)
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --constraint constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
RAYZERO := $(BIN)/python -m rayzero

.DEFAULT_GOAL := help
.PHONY: help setup sweep run report tables claims dryrun bench doctor ui test test-fast test-gpu check clean

help:  ## Show this list
	@echo "rayzero: which ZeRO stage, how much tensor parallelism, how much offload?"
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))
	@echo
	@echo 'Variables: EXPERIMENT=$(EXPERIMENT)  CLUSTER=$(CLUSTER)  ARGS="stage=2,3 parallel.tp=1"  TORCH_INDEX=URL'

setup: $(STAMP)  ## Create .venv with all pins (TORCH_INDEX=URL takes another torch build)

sweep: $(STAMP)  ## Measure all cells of EXPERIMENT on CLUSTER
	$(RAYZERO) sweep experiment=$(EXPERIMENT) cluster=$(CLUSTER) $(ARGS)

run: $(STAMP)  ## Measure one cell: make run ARGS="stage=3 parallel.tp=2"
	$(RAYZERO) run cluster=$(CLUSTER) $(ARGS)

report: $(STAMP)  ## Write the tables and figures of a sweep again
	$(RAYZERO) report experiment=$(EXPERIMENT) cluster=$(CLUSTER) $(ARGS)

tables: $(STAMP)  ## Lay the ZeRO papers' tables beside formula, dry run and measurement
	$(RAYZERO) tables cluster=$(CLUSTER) $(ARGS)

claims: $(STAMP)  ## Decide common claims on ZeRO, each by an experiment (CPU ranks, minutes)
	$(RAYZERO) claims $(ARGS)

dryrun: $(STAMP)  ## Play one rank of any world: make dryrun ARGS="model=7.5B stage=3 dryrun.world=64"
	$(RAYZERO) dryrun $(ARGS)

bench: $(STAMP)  ## Race our engine against DDP, FSDP2 and DeepSpeed (installs DeepSpeed; hours)
	@$(BIN)/python -c 'import deepspeed' >/dev/null 2>&1 || $(INSTALL) --editable '.[deepspeed]' \
		|| echo "DeepSpeed could not be installed: its rows will be failed"
	$(RAYZERO) bench cluster=$(CLUSTER) $(ARGS)

doctor: $(STAMP)  ## Check this machine: versions, devices, Ray, folders, MLflow
	$(RAYZERO) doctor cluster=$(CLUSTER) $(ARGS)

ui: $(STAMP)  ## Serve MLflow's pages on this machine (OUTPUT=outputs PORT=5000)
	$(BIN)/python -m rayzero.tracking.ui $(OUTPUT) --port $(PORT)

test: check  ## Lint, types and every test: what CI runs
	$(BIN)/pytest

test-fast: check  ## The same without the slow tests
	$(BIN)/pytest -m "not slow"

test-gpu:  ## The engine on CUDA with PYTHON's torch and pytest, nothing else: make test-gpu PYTHON=python
	$(PYTHON) -m pytest -c tests/gpu/pytest.ini --rootdir=. -m gpu $(PYTEST_ARGS) tests/gpu

check: $(STAMP)  ## Lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:  ## Remove .venv and caches; results in outputs/ stay
	rm -rf $(VENV) build dist-wheel *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last: a set-up that failed half-way is repeated by the next verb.
$(STAMP): pyproject.toml constraints.txt
	@echo "Setting up $(VENV) (once; some minutes where packages have to be fetched) ..."
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "rayzero needs Python 3.11 or newer, found %d.%d; try make PYTHON=python3.11" % sys.version_info[:2])'
	@rm -f $@
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(VENV)
	@if [ "$(TORCH_INDEX)" != "$(CHOSEN)" ]; then $(PIP) uninstall --yes --quiet torch; fi
	$(INSTALL) --editable '.[test]'
	@if [ -n "$(TORCH_INDEX)" ]; then printf '%s\n' '$(TORCH_INDEX)' > $(CHOICE); fi
	@touch $@
	@echo "$(VENV) is ready."

ifneq ($(TORCH_INDEX),$(CHOSEN))
.PHONY: $(STAMP)
endif
