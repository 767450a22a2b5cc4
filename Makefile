# `make demo`, `make test`, `make check`: each sets up what it needs first.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
INSTALL := $(BIN)/uv pip install --quiet --python $(VENV) --constraint constraints.txt

.PHONY: help setup demo test check format benchmarks detector clean

help:
	@echo "make setup       install into $(VENV) what prep needs"
	@echo "make demo        run the main job on the embedded scenes"
	@echo "make test        run every test"
	@echo "make check       format, lint and type checks, as CI runs them"
	@echo "make format      format the code and mend what lint can mend"
	@echo "make detector    train the embedded detector anew (20 minutes on two cores)"
	@echo "make benchmarks  measure what the README quotes"

$(BIN)/uv: constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "Python 3.11 or newer is needed; name one with: make PYTHON=python3.12"; exit 2; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt uv
	@touch $@

$(VENV)/.installed: pyproject.toml constraints.txt $(BIN)/uv
	$(INSTALL) --editable '.[offline,gpt2]'
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(INSTALL) --group dev
	@touch $@

setup: $(VENV)/.installed

demo: setup
	$(BIN)/prep demo

test: $(VENV)/.installed-dev
	$(BIN)/python -m pytest --numprocesses auto --dist loadfile

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

format: $(VENV)/.installed-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

detector: setup
	$(BIN)/python -m regionprep.scenes.train

benchmarks: $(VENV)/.installed-dev
	$(BIN)/python benchmarks/shards.py
	$(BIN)/python benchmarks/demo.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache
