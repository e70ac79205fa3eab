# Two commands: `make quickstart` trains a small model, `make test` runs the whole test suite.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/pip install --disable-pip-version-check -q -c constraints.txt

.PHONY: quickstart test whole faults life lint clean

quickstart: $(VENV)/.local data/english.h5
	$(BIN)/hpctrain submit docs/examples/quickstart.yaml

# Files of tests in three processes: many wait for ranks, Slurm or a clock more than they compute.
test: $(VENV)/.dev
	$(BIN)/python -m pytest -n 3 --dist loadfile $(PYTEST_ARGS)

# Every case of what the suite samples: about two hours on two cores.
whole: $(VENV)/.dev
	$(BIN)/python -m pytest -m whole $(PYTEST_ARGS)

# Runs on Slurm that are broken in every way and have to reach their last step; some minutes.
life: $(VENV)/.dev
	$(BIN)/python -m pytest -m "whole or not whole" tests/slurm tests/e2e $(PYTEST_ARGS)

# A thousand crashes and storage faults (about ten minutes); the suite has two hundred.
faults: $(VENV)/.dev
	$(BIN)/python tests/faults/crash_harness.py --rounds 1000 --seed 7

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python -m pytest -q tests/house

data/english.h5: docs/examples/english_text.py | $(VENV)/.local
	@mkdir -p data
	$(BIN)/python docs/examples/english_text.py data/english.txt
	$(BIN)/hpctrain data tokenize data/english.txt -o $@ --force

$(VENV)/.venv:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "hpctrain needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V). Try: make PYTHON=python3.12" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.local: $(VENV)/.venv pyproject.toml constraints.txt
	@echo "installing hpctrain and its pinned dependencies into $(VENV) (PyTorch is the large one)"
	$(PIP) -e '.[local]'
	@touch $@

$(VENV)/.dev: $(VENV)/.local
	$(PIP) -e '.[local,dev,tokenizers,tensorboard,safetensors,plots]'
	@touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
