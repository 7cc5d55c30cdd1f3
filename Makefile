# physarum's commands. Each sets up what it needs and is missing; nothing needs root, except python3-venv on a bare Debian.
#
#   make up                     trains the quick start, configs/quickstart.yaml, to its end
#   make down                   stops it
#   make test                   every test but those marked slow
#   make test-all               every test
#   make lint                   ruff, mypy, import directions
#   make bench [B=B6] [SIZE=smoke|flat|full|long] [RECORD=1]
#   make bench-smoke            what CI asks of the benchmarks: they run, memory is flat
#   make clean                  removes caches and builds; runs/ stays
#   make distclean              removes the environments too
#
# CONFIG=file.yaml and ARGS="trainer.lr=1e-4" go to actorctl, ARGS="-k lease" to pytest. PYTHON, PIP and TORCH_SPEC choose
# interpreter, installer and build of torch (deploy/locks/README.md).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
PIP ?=
TORCH_SPEC ?=
CONFIG ?= configs/quickstart.yaml
ARGS ?=
B ?= all
SIZE ?= full
RECORD ?=
export PYTHON PIP TORCH_SPEC

BIN := .venv/bin
STRICT := -p physarum.configs -p physarum.bus -p physarum.weightsync
# Processes of one run share the machine: one thread each, unless told otherwise.
THREADS := OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1}

.PHONY: help up down test test-all lint bench bench-smoke env env-dev env-engine clean distclean

help:
	@sed -n '3,/^$$/s/^# \{0,1\}//p' Makefile

env:
	@deploy/locks/sync main

env-dev:
	@deploy/locks/sync dev

env-engine:
	@deploy/locks/sync engine

up: env env-engine
	@$(BIN)/actorctl up $(CONFIG) $(ARGS)

down:
	@if [ -x $(BIN)/actorctl ]; then $(BIN)/actorctl down $(ARGS); fi

test: env-dev env-engine
	@$(THREADS) $(BIN)/python -m pytest -m "not slow" $(ARGS)

test-all: env-dev env-engine
	@$(THREADS) $(BIN)/python -m pytest $(ARGS)

lint: env-dev
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet .
	@$(BIN)/mypy $(STRICT)
	@$(BIN)/lint-imports

# The benchmarks that check something; make bench is for numbers.
bench-smoke: env-dev env-engine
	@$(THREADS) $(BIN)/python -m pytest -m "bench and not slow" tests/bench $(ARGS)

bench: env-dev env-engine
	@$(THREADS) $(BIN)/python -m tests.bench $(B) --size $(SIZE) $(if $(RECORD),--record) $(ARGS)

clean:
	@rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	@find . -path './.venv*' -prune -o -path ./.git -prune -o -path ./runs -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	@rm -rf .venv .venv-engine .venv.lock
