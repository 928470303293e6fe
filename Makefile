# Two commands do all set-up on a fresh machine:
#   make run     installs, then answers a handful of prompts with the bundled checkpoint (ARGS="--max_tokens 50" passes options)
#   make test    installs, then checks style, types and behaviour
# and make test-slow runs what takes some minutes more.
.PHONY: run test test-slow install install-test lint types unit clean

PY := .venv/bin/python
ARGS ?=
PYTEST_ARGS ?= -n 2

run: install
	$(PY) examples/offline_inference.py $(ARGS)

test: install-test lint types unit

install:
	./build.sh

install-test:
	./build.sh test

lint: install-test
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: install-test
	$(PY) -m mypy

# One torch thread a test process: two processes share two cores, and more threads only get in each other's way.
unit: install-test
	OMP_NUM_THREADS=1 $(PY) -m pytest $(PYTEST_ARGS)

# What takes too long for every change: the bundled checkpoint measured again, 200 grammars, faults put into the engine, more ranks.
test-slow: install-test
	OMP_NUM_THREADS=1 $(PY) -m pytest $(PYTEST_ARGS) -m slow

clean:
	rm -rf .venv deepinfer.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
