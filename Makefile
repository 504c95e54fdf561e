# `make demo` and `make test` do everything on a fresh machine with Python 3.10+ and make.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Many tests wait for processes to start, so two at a time suit two cores; a file's tests share its fixtures.
PYTEST := $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder tests
export PYTHONPATH := $(CURDIR)

.PHONY: help demo demo-stages test test-slow test-all lint bench clean

help:
	@echo "make demo      install, build demo data, train with each lever, print and plot the comparison"
	@echo "make demo-stages  the three training stages of the example, one after the other, on two ranks"
	@echo "make test      install, run the test suite"
	@echo "make test-slow the slow tests"
	@echo "make test-all  both"
	@echo "make lint      ruff and mypy"
	@echo "make bench     every benchmark; tables on screen, JSON under runs/benchmarks"
	@echo "make clean     remove .venv, runs and caches"

$(STAMP): setup.py constraints.txt
	@echo "== creating $(VENV) (once; a few minutes, downloads on a fresh machine)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed, this is " + sys.version)'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@echo "== installing torch"
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt torch
	@echo "== installing aiak-ext with its demo, test and bench extras"
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[demo,test,bench]'
	@echo "== installing the oldest supported Energon beside it, for the compatibility test"
	$(BIN)/python -m pip install --disable-pip-version-check --no-deps --upgrade --target $(VENV)/energon-7.2.2 \
		megatron-energon==7.2.2 multi-storage-client==0.25.0
	@touch $(STAMP)

demo: $(STAMP)
	$(BIN)/python -m examples.llava_ov.demo --output runs/demo

demo-stages: $(STAMP)
	$(BIN)/python -m examples.llava_ov.stages --output runs/stages

test: $(STAMP)
	$(PYTEST) -m 'not slow and not alone'
	$(BIN)/python -m pytest tests/distributed -m 'alone and not slow'

test-slow: $(STAMP)
	$(BIN)/python -m pytest tests -m slow

test-all: test test-slow

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(STAMP)
	@set -e; for name in $(filter-out __init__ common %_rank,$(basename $(notdir $(wildcard benchmarks/*.py)))); do \
		echo "== $$name"; $(BIN)/python -m benchmarks.$$name; done

clean:
	rm -rf $(VENV) runs .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
