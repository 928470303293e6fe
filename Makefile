# Two commands do all set-up on a fresh machine:
#   make run     installs, then answers a handful of prompts with the bundled checkpoint (ARGS="--max_tokens 50" passes options)
#   make test    installs, then checks style, types and behaviour
.PHONY: run test install install-test lint types unit clean

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

clean:
	rm -rf .venv deepinfer.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
