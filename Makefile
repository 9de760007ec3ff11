# The two commands: `make serve` and `make test`. `make help` lists the rest.

VENV := .venv
# The Python that the virtual environment is made with: the first of these that is new enough.
PYTHON ?= $(firstword $(foreach name,python3 python3.13 python3.12 python3.11,$(shell \
	$(name) -c 'import sys; print("$(name)" if sys.version_info >= (3, 11) else "")' 2>/dev/null)))
# PyTorch's own index of CPU builds: without a GPU they save 3 GB of CUDA libraries.
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check
INSTALL := $(PIP) install --quiet $(if $(CI),,--progress-bar on) --constraint constraints.txt

.DEFAULT_GOAL := help
.PHONY: help serve test test-all lint format docs lock audit sbom clean

help: ## list the targets
	@sed -nE 's/^([a-z-]+):.*## (.*)/  make \1\t\2/p' Makefile | expand -t 20
	@echo 'Variables: PORT=8001 MODEL=... ARGS="--max-num-seqs 32 ..." for serve; PYTHON=python3.12 for the first run.'

serve: $(VENV)/.serve ## install what is missing and serve on 127.0.0.1:8000 (PORT=, MODEL=, ARGS=)
	@exec $(BIN)/chairlift serve $(if $(PORT),--port $(PORT)) $(if $(MODEL),--model $(MODEL)) $(ARGS)

test: lint ## run all checks and tests but the slow ones: what CI runs (ARGS= for pytest)
	$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-all: lint ## run the slow tests too
	$(BIN)/python -m pytest $(ARGS)

lint: $(VENV)/.test ## check style, types and the direction of imports
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.test ## put the code into shape
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.serve ## make the tables of README.md anew
	$(BIN)/python -m server.docs README.md

# A torch without a build in its version, and chairlift itself out: see the head of constraints.txt.
lock: $(VENV)/.test ## take the newest versions that pyproject.toml allows (but for torch) into constraints.txt
	$(PIP) install --quiet pip-tools
	grep '^torch==' constraints.txt > $(VENV)/torch.txt
	$(BIN)/pip-compile --quiet --upgrade --all-extras --strip-extras --no-header --no-annotate --no-emit-options \
		--no-emit-index-url --no-emit-find-links --no-emit-trusted-host --constraint $(VENV)/torch.txt \
		--unsafe-package chairlift --output-file $(VENV)/lock.txt pyproject.toml
	(sed -n '/^#/p' constraints.txt; sed -e '/^#/d' -e '/^$$/d' -e 's/^\(torch==[^+]*\)+.*/\1/' $(VENV)/lock.txt) > $(VENV)/new.txt
	mv $(VENV)/new.txt constraints.txt

# Strict: a package that the database does not answer for fails it too, or no network at all would look like no fault.
audit: $(VENV)/audit/.installed ## look for known vulnerabilities in the pinned packages (asks PyPI)
	@$(VENV)/audit/bin/pip-audit --strict --no-deps --disable-pip --progress-spinner off --requirement constraints.txt || { \
		echo "make audit: not clean. Either a package above is vulnerable, or PyPI's database did not answer for it, and" >&2; \
		echo "then nothing is known of it: ask again where PyPI answers" >&2; \
		exit 1; }

sbom: $(VENV)/.serve $(VENV)/audit/.installed ## list what is in the virtual environment, as CycloneDX: sbom.json
	$(VENV)/audit/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible -o sbom.json $(BIN)/python

clean: ## remove the virtual environment and everything that tools have left
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# In an environment of their own, so that what they need is neither served nor listed.
$(VENV)/audit/.installed: Makefile | $(BIN)/pip
	@$(BIN)/python -m venv $(VENV)/audit
	@$(VENV)/audit/bin/python -m pip --disable-pip-version-check install --quiet pip-audit==2.10.1 cyclonedx-bom==7.5.0
	@touch $@

# The stamps are touched last: an installation that was killed is taken up again.

$(VENV)/.test: $(VENV)/.serve
	@echo "installing the tools for tests ..."
	@PYTHONWARNINGS=ignore $(INSTALL) --no-build-isolation --editable '.[dev]'
	@touch $@

$(VENV)/.serve: pyproject.toml constraints.txt $(wildcard setup.py engine/kernels/cpu/csrc/*.[ch]) | $(BIN)/pip
	@echo "installing chairlift into $(VENV); the first time takes some minutes ..."
	@$(INSTALL) --upgrade pip setuptools
	@$(install_cpu_torch)
	@PYTHONWARNINGS=ignore $(INSTALL) --no-build-isolation --editable '.[explain,otel]'
	@touch $@

$(BIN)/pip:
	@test -n "$(PYTHON)" || { echo "make: no Python 3.11 or newer on the PATH; name one: make serve PYTHON=/path/to/python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
		echo "make: Chairlift needs Python 3.11 or newer, and $(PYTHON) is none; name another with PYTHON=" >&2; exit 1; }
	@$(PYTHON) -m venv --clear $(VENV) || { \
		echo "make: $(PYTHON) cannot make virtual environments; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }

# Without a GPU, take torch's CPU build where its index answers. Otherwise, and if that fails, pip finds one next.
define install_cpu_torch
if [ "$$(uname -s)" = Linux ] && ! [ -e /dev/nvidia0 ] && ! nvidia-smi >/dev/null 2>&1 && ! $(BIN)/python -c 'import torch' 2>/dev/null \
	&& $(BIN)/python -c 'from urllib.request import urlopen; urlopen("$(TORCH_INDEX)/torch/", timeout=3)' 2>/dev/null; then \
	$(INSTALL) --no-deps --index-url $(TORCH_INDEX) torch || true; \
fi
endef
