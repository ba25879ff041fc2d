# Every target installs what it needs, once and again when its inputs change: `demo` little, `test` the rest, both into
# .venv; `compat` makes an environment for each version of Transformers that model folders are tried with.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := install --quiet --disable-pip-version-check
PURELIB := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'
COMPAT := 4.51.3 4.57.6 5.0.0 newest
COMPAT_READY := $(COMPAT:%=.venvs/transformers-%/.ready)

.PHONY: demo test check compat vllm setup clean

demo: $(VENV)/.ready-demo
	$(BIN)/braid demo --out demo

# Each process works through neighbouring tests, which share fixtures, and at the end takes from the other's. Bytecode is
# kept, since every process would compile sources and assertions again.
test: check
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses auto --dist worksteal

check: $(VENV)/.ready
	$(BIN)/ruff check src tests benchmarks docs
	$(BIN)/mypy

# Each tiny recipe's folder, opened, trained and saved again by other versions of Transformers, without Braid.
compat: $(COMPAT_READY)
	$(BIN)/python -m pytest --timeout 900 tests/compat/transformers_versions.py

# Folders served by vLLM on the CPU, without Braid.
vllm: .venvs/vllm/.ready
	$(BIN)/python -m pytest --timeout 900 tests/compat/vllm_folders.py

setup: $(VENV)/.ready

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.ready-demo: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip $(PIP) -c constraints.txt -e '.[serve]'
	touch $@

$(VENV)/.ready: pyproject.toml constraints.txt | $(BIN)/python
	$(BIN)/pip $(PIP) -c constraints.txt -e '.[data,track,eval,kernels,device,serve,privacy,cluster,dev]'
	touch $@ $(VENV)/.ready-demo

# What a version needs of its own; torch and all else that it can share are found in .venv, after its own packages.
define environment
	rm -rf $(@D)
	$(BIN)/python -m venv $(@D)
	$(BIN)/python $(PURELIB) > "$$($(@D)/bin/python $(PURELIB))/shared.pth"
	grep '^torch==' constraints.txt > $(@D)/torch.txt
	$(@D)/bin/pip $(PIP) --no-warn-conflicts --upgrade -c $(@D)/torch.txt $(1) -r $<
	touch $@
endef

.venvs/transformers-%/.ready: tests/compat/requirements/%.txt | $(VENV)/.ready
	$(call environment)

.venvs/vllm/.ready: tests/compat/requirements/vllm.txt | $(VENV)/.ready
	$(call environment,--no-deps)

clean:
	rm -rf $(VENV) .venvs demo
