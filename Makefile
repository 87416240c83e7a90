# make demo: from a clean clone to a trained model. make help lists the rest.
# Everything is installed into one virtual environment; set VENV or PYTHON to use others.

PYTHON ?= python3
VENV ?= .venv
# Found by name: where a CPU build of torch lies in pip's reach (find-links, an index), pip takes it.
# Elsewhere: make TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
TORCH ?= torch==2.13.0

BIN := $(VENV)/bin
KEY := pyproject.toml constraints.txt Makefile
export HF_HUB_OFFLINE ?= 1

.DEFAULT_GOAL := help
.PHONY: help demo install install-dev test soak lint bench clean

help:  ## Show this list.
	@grep -E '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /\1\t/' | expand -t 14

demo: install  ## Install, then train a tiny model on this CPU in about two minutes.
	$(BIN)/verl-fl quickstart

install: $(VENV)/.installed  ## Make the virtual environment and install verl-fl.

install-dev: $(VENV)/.installed-dev  ## The same, with what the tests and checks need.

# The runs of verl mostly wait for Ray, so the other tests go on beside them. TESTS="..." runs just these, alone.
test: install-dev  ## Run all tests except those marked slow.
ifdef TESTS
	$(BIN)/python -m pytest -m "not slow" $(TESTS)
else
	@echo "== tests/e2e runs beside the others; its output follows theirs"
	@log=$$(mktemp); trap 'kill $$e2e 2> /dev/null; rm -f $$log' EXIT; \
	$(BIN)/python -m pytest -m "not slow" -p no:cacheprovider tests/e2e > $$log 2>&1 & e2e=$$!; \
	others=0; $(BIN)/python -m pytest -m "not slow" tests/unit tests/contract || others=$$?; \
	status=0; wait $$e2e || status=$$?; cat $$log; exit $$((others > status ? others : status))
endif

soak: install-dev  ## Weight sync for long: 200 random faults, memory over 1,000 syncs, deltas with kills between.
	$(BIN)/python -m pytest -m slow -s tests/contract/test_weight_sync_faults.py

lint: install-dev  ## Style, formatting, types.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: install  ## Run the benchmarks; MODEL=PATH (a folder or .gguf of SmolLM2-135M) adds those that need a real model.
	$(BIN)/python benchmarks/startup.py
	$(BIN)/python benchmarks/platform_cost.py
	$(BIN)/python benchmarks/delta_codec.py
	$(BIN)/python benchmarks/agreement.py
	@if [ -n "$(MODEL)" ]; then $(BIN)/python benchmarks/rollout.py --model "$(MODEL)" && \
		$(BIN)/python benchmarks/grpo_step.py --model "$(MODEL)"; \
		else echo "== MODEL is not set: rollout.py and grpo_step.py left out"; fi

clean:  ## Remove the virtual environment's stamps and all caches, so that the next run installs again.
	rm -rf $(VENV)/.installed $(VENV)/.installed-dev build dist .pytest_cache .ruff_cache .mypy_cache

$(BIN)/python:
	@echo "== a virtual environment in $(VENV), with $$($(PYTHON) --version)"
	@$(PYTHON) -c 'import sys; v = sys.version_info[:2]; sys.exit(None if (3, 10) <= v < (3, 13) else \
		f"verl-fl needs Python 3.10 to 3.12, found {v[0]}.{v[1]}; say which: make demo PYTHON=python3.11")'
	$(PYTHON) -m venv $(VENV)

# torch comes first and by name: asked for as a dependency, pip may choose a build of several gigabytes.
$(VENV)/.installed: $(KEY) | $(BIN)/python
	@echo "== installing torch, then verl-fl with the versions of constraints.txt (some minutes the first time)"
	$(BIN)/python -m pip install --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e .
	@touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	@echo "== installing what the tests and checks need"
	$(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
