# `make quickstart` and `make test` work from a fresh clone; both install into .venv, once.

SHELL      := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON  ?= $(firstword $(foreach name,python3.11 python3.12 python3.13 python3,$(if $(shell $(name) --version 2>/dev/null),$(name))))
VENV    := .venv
BIN     := $(VENV)/bin
WORKERS ?= 2

# uv reads its own variable for extra wheel folders; give it pip's where only that one is set.
export UV_FIND_LINKS := $(or $(UV_FIND_LINKS),$(PIP_FIND_LINKS))
ifeq ($(UV_FIND_LINKS),)
unexport UV_FIND_LINKS
endif

UV := $(shell command -v uv 2>/dev/null)
ifeq ($(UV),)
PIP_INSTALL := $(BIN)/python -m pip install -q
else
PIP_INSTALL := $(UV) pip install -q --python $(BIN)/python
endif

.PHONY: help install install-dev quickstart theory docs build test lint format clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python found: install Python 3.11 or newer, or run make PYTHON=/path/to/python." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "$(PYTHON) is older than 3.11: run make PYTHON=/path/to/newer/python." >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# The stamps are older than pyproject.toml or constraints.txt only when there is something to install.
$(VENV)/.installed: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP_INSTALL) -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.installed

install: $(VENV)/.installed ## create .venv and install cedd into it
install-dev: $(VENV)/.installed-dev ## the same with what the tests need

quickstart: install ## train, measure and try a small model in minutes, and write a page about it
	$(BIN)/cedd quickstart

theory: install ## compute every theorem of the paper on small chains
	$(BIN)/cedd theory

lint: install-dev ## ruff and pyright
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs: install-dev ## build the documentation into site/; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

build: install-dev ## the wheel and the sdist, into dist/
	rm -rf dist
	$(BIN)/python -m hatchling build

# Lint, which is one process and mostly pyright, runs beside the tests, and what it says comes last. A worker takes tests
# in their order, since those of a file share what they need, until it has none left and takes half of another's.
# Compiled modules are kept, whatever the environment says: the tests start some dozen processes that import the package.
test: install-dev ## lint and the default tests (neither slow nor gpu), which build the documentation
	@said=$$(mktemp); trap 'rm -f "$$said"' EXIT; $(MAKE_COMMAND) --no-print-directory lint >"$$said" 2>&1 & lint=$$!; failed=0; \
	PYTHONDONTWRITEBYTECODE= OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal || failed=$$?; \
	wait $$lint || failed=$$?; cat "$$said"; exit $$failed

format: install-dev ## put the code into the form that `make lint` asks for
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean: ## remove .venv, build products and caches
	rm -rf $(VENV) build dist site .pytest_cache .ruff_cache .hypothesis
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +
	find . -maxdepth 2 -name '*.egg-info' -type d -prune -exec rm -rf {} +
