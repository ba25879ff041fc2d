# Every target sets up what it needs: a virtual environment in .venv, installed once and again when its inputs change.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.PHONY: demo test check setup clean

demo: $(READY)
	$(BIN)/braid demo --out demo

test: check
	$(BIN)/python -m pytest

check: $(READY)
	$(BIN)/ruff check src tests benchmarks docs
	$(BIN)/mypy

setup: $(READY)

$(READY): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[data,plot,track,eval,dev]'
	touch $@

clean:
	rm -rf $(VENV) demo
