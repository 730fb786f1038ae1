# Every target makes its own .venv first; `make help` lists them.
SHELL := /bin/bash
.DEFAULT_GOAL := help
PY := .venv/bin/python
# One OpenMP thread a process: with more, small machines time their own scheduler (docs/accuracy.md).
export OMP_NUM_THREADS := 1
export HF_HUB_OFFLINE := 1
export TORCH_COMPILE_DISABLE := 1
export DS_ACCELERATOR ?= $(shell command -v nvidia-smi >/dev/null 2>&1 && echo cuda || echo cpu)

.PHONY: help install demo test test-fast accuracy lint typecheck bench docs screenshots clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/\t/' | expand -t 14

install: ## make .venv and install everything (CPU build of torch where there is no GPU)
	@scripts/install.sh all

demo: install ## the whole loop: plan K2, run a mini K2 under three plans, calibrate, compare
	@$(PY) -m flopwright demo

test: install ## all tests, in two processes (skips, by name, what needs a service that is not here)
	@$(PY) -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test-fast: install ## the tests for your own loop: under 3 minutes
	@$(PY) -m pytest -m "not slow and not network" -q -n 2 --dist loadfile

lint: install ## ruff, formatting, import contracts
	@.venv/bin/ruff check . && .venv/bin/ruff format --check . && .venv/bin/lint-imports

typecheck: install ## mypy, strict
	@$(PY) -m mypy

bench: install ## every benchmark, each printing one JSON object as its last line
	@for b in benchmarks/*.py; do echo "== $$b"; $(PY) $$b || exit 1; done

accuracy: install ## predict the published runs that ship; renew the table in README and docs
	@$(PY) scripts/render_accuracy.py

docs: install ## renew the generated tables in docs/
	@$(PY) scripts/render_docs.py

screenshots: install ## a picture of each dashboard page (needs Chromium: apt-get install chromium)
	@$(PY) scripts/screenshots.py

clean: ## remove .venv, caches and build outputs
	@rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
