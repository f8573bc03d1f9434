# Everything a user types. `make help` lists it.
SHELL := /bin/bash
PYTHON ?= python3
BASE ?=
NODES ?= 2
GPUS_PER_NODE ?= 2

BIN := .venv/bin
LOCK := containers/cpu/requirements.lock
BASE_OPTION = $(if $(BASE),--base "$(BASE)")

.DEFAULT_GOAL := help
.PHONY: help install demo test check image-cpu image-cpu-docker smoke cluster cluster-down clean

help: ## Show this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | awk -F':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

install: .venv/installed ## Install dray and what it trains with into .venv

demo: .venv/installed ## Train a tiny GPT on this machine, as two nodes of two ranks
	@$(BIN)/dray run recipes/smoke-cpu.toml

test: .venv/dev ## Run all tests that this machine can run
	@$(BIN)/pytest -q

check: .venv/dev ## Lint, types, shell scripts, architecture
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@if command -v shellcheck >/dev/null; then git ls-files '*.sh' .ci/run | xargs -d '\n' shellcheck -x; \
	  elif [[ "$${DRAY_TEST_ALL:-}" == 1 ]]; then echo "shellcheck is not installed" >&2; exit 1; \
	  else echo "not run: shellcheck is not installed (Debian: apt-get install shellcheck)"; fi
	@$(BIN)/pytest -q tests/unit/test_architecture.py

image-cpu: .venv/installed ## Build build/dray-cpu.sif (BASE=... for a base of your own)
	@$(BIN)/dray image build cpu --format sif $(BASE_OPTION)

image-cpu-docker: .venv/installed ## Build the Docker image dray:cpu (BASE=... likewise)
	@$(BIN)/dray image build cpu --format docker $(BASE_OPTION)

smoke: .venv/installed ## Train in Docker: two containers are two nodes
	@$(BIN)/dray run recipes/smoke-cpu.toml --engine docker

cluster: .venv/installed ## A real two-node Slurm on this machine (NODES=, GPUS_PER_NODE=, BASE=)
	@$(BIN)/dray cluster up --nodes $(NODES) --gpus-per-node $(GPUS_PER_NODE) $(BASE_OPTION)

cluster-down: .venv/installed ## Take it down
	@$(BIN)/dray cluster down

clean: ## Remove what was built here; runs stay
	rm -rf build .venv

# torch comes first and alone: which build of it there is (CPU, CUDA) is the business of pip's own configuration.
.venv/installed: $(LOCK) pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "dray needs Python 3.11 or newer; this is $$($(PYTHON) --version). Set PYTHON=python3.11" >&2; exit 78; }
	@$(PYTHON) -m venv .venv || \
	  { echo "no virtual environment could be made (Debian: apt-get install python3-venv)" >&2; exit 69; }
	@echo "installing into .venv: torch (the largest part), then what $(LOCK) pins"
	@$(BIN)/python -m pip install -qq "$$(sed -n 's/^\(torch==[^ ]*\).*/\1/p' $(LOCK))"
	@$(BIN)/python -m pip install -qq --no-deps --require-hashes -r $(LOCK)
	@$(BIN)/python -m pip install -qq --no-deps --editable .
	@touch $@

.venv/dev: .venv/installed
	@$(BIN)/python -m pip install -qq --editable '.[dev]'
	@touch $@
