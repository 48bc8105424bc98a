# Needs Python >= 3.11 and make; everything else goes into .venv. `make help` lists the targets.

# The first of these that runs: a name may exist and still fail when called, as a pyenv shim does.
PYTHON ?= $(shell for p in python3.12 python3.11 python3.13 python3; do \
	if $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then echo $$p; break; fi; done)
BIN := .venv/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help train quick test cases slow docs dist notebooks lint format clean python

help:  ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /  make \1	/p' Makefile

train: .venv/installed  ## train PPO on CartPole; more flags in ARGS, as in: make train ARGS="--seed 1"
	$(BIN)/jaxrl-dist train ppo --env gymnax:CartPole-v1 --total-env-steps 150000 $(ARGS)

quick: .venv/installed-test  ## the tests that compile nothing and start no process: seconds, while you work
	$(BIN)/python -m pytest -m "quick and not slow" -n 2 --dist worksteal

test: lint  ## lint, then the fast tests: the check of every change
	$(BIN)/python -m pytest -n 2 --dist worksteal --durations=15

cases: .venv/installed-test  ## the tests that take seconds and that `make test` leaves out: those marked case
	$(BIN)/python -m pytest -m case -n 2 --dist worksteal --durations=15

slow: .venv/installed-test  ## all tests that `make test` leaves out, among them those that learn to published scores
	$(BIN)/python -m pytest -m slow --durations=0 --durations-min=1

docs: .venv/installed-docs  ## build the documentation into site/, to be read from site/index.html
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

dist: python  ## build the wheel and the source archive into dist/
	"$(PYTHON)" -m venv build/venv
	build/venv/bin/python -m pip install --disable-pip-version-check build
	build/venv/bin/python -m build

notebooks: .venv/installed-test  ## run the notebooks and store their outputs in them
	JAX_PLATFORMS=cpu $(BIN)/python scripts/notebooks.py

lint: .venv/installed-test  ## ruff and mypy, changing nothing
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

format: .venv/installed-test  ## let ruff fix and format the code
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

clean:  ## remove .venv, caches and build outputs; runs/ stays
	rm -rf .venv build dist site .cache .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

python:
	@"$(PYTHON)" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || \
		{ echo 'Python >= 3.11 is needed, $(or $(PYTHON:%=and % is not),and none was found): name one with PYTHON=/path/to/python3.12' >&2; exit 1; }

.venv/installed: pyproject.toml constraints.txt | python
	"$(PYTHON)" -m venv .venv
	$(PIP) --editable .
	@touch $@

.venv/installed-docs: .venv/installed
	$(PIP) --editable '.[docs]'
	@touch $@

.venv/installed-test: .venv/installed
	$(PIP) --editable '.[test]'
	@touch $@
