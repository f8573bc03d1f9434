# Everything a user types. `make help` lists it.
SHELL := /bin/bash
PYTHON ?= python3
BASE ?=
WHEELS ?=
BUNDLE ?=
SIGNERS ?=
DEBIAN ?=
TESTS ?=
ROOM ?=
SLOW ?=
ACCEPT_LICENSES ?=
HOSTILE ?= benchmarks/results/2026-11-23-hostile.md
FAULTS ?= benchmarks/results/2026-11-25-faults.md
SEED ?= 1
CPU ?=
YES ?=
NODES ?= 2
GPUS_PER_NODE ?= 2

BIN := .venv/bin
LOCK := containers/venv.lock
BASE_OPTION = $(if $(BASE),--base "$(BASE)")
IMAGE_OPTIONS = $(BASE_OPTION) $(if $(WHEELS),--wheels "$(WHEELS)") $(if $(BUNDLE),--bundle "$(BUNDLE)") \
  $(if $(SIGNERS),--signers "$(SIGNERS)") $(if $(DEBIAN),--debian "$(DEBIAN)")

.DEFAULT_GOAL := help
.PHONY: help install demo docs screenshots quick test hostile faults showcase gpu-check scale-sim coverage check check-rest release smoke cluster cluster-down torch-versions clean clean-images

help: ## Show this list
	@grep -hE '^[a-z%-]+:.*## ' Makefile | awk -F':.*## ' '{printf "  make %-18s %s\n", $$1, $$2}'

install: .venv/host ## Install dray into .venv, to submit, build and plan; it needs no torch
	@echo "$$($(BIN)/dray --version) is installed$(if $(wildcard .venv/installed), with torch): $(CURDIR)/$(BIN)/dray"

demo: .venv/installed ## Train a tiny GPT on this machine, as two nodes of two ranks, and write its report
	@$(BIN)/dray run recipes/smoke-cpu.toml
	@mkdir -p build
	@$(BIN)/dray report --out build/demo.html

docs: .venv/docs ## Build the documentation: build/docs/index.html, to read without a network
	@$(BIN)/python docs/site build/docs

screenshots: docs .venv/installed ## Take screenshots of pages, a report and the terminal, light and dark: build/screenshots; it needs Chromium
	@$(BIN)/python tests/support/screenshots.py build/docs build/screenshots

QUICK := not (slow or seconds or torch or triton or deepspeed or docker or docker_image or sif or cluster or chromium)
# ROOM: a folder of tests/unit. Tests of one file share set-ups, and stay together.
quick: .venv/check ## Run the short tests, in a minute, without torch: of all rooms, or of one (ROOM=runs)
	@[[ -z "$(ROOM)" || -d "tests/unit/$(ROOM)" ]] || { printf 'dray: there is no room %s\n  wanted: %s\n' "$(ROOM)" \
	  "$$(cd tests/unit && ls -d */ | grep -v __pycache__ | tr -d / | xargs)" >&2; exit 78; }
	@$(BIN)/pytest -q -n auto --dist loadfile -m "$(QUICK)" $(if $(ROOM),tests/unit/$(ROOM),tests/unit --ignore tests/unit/train)

# Those with one cluster or engine for all come after the others, one at a time.
UNIT := -n auto --dist loadfile tests/unit
test: .venv/dev ## Run the tests that this machine can run, on all cores (SLOW=1: the slow ones too; TESTS= for some, as for pytest)
ifneq ($(TESTS),)
	@$(BIN)/pytest -q --durations=10 $(TESTS)
else
	@$(BIN)/pytest -q --durations=10 $(UNIT) $(if $(SLOW),,-m "not slow")
	@$(BIN)/pytest -q --durations=10 tests --ignore tests/unit $(if $(SLOW),,-m "not slow")
endif

# DRAY_FUZZ: how many damaged files of each of eight kinds.
hostile: .venv/dev ## Test hostile input and bad luck, at most ten minutes, and write the table of benchmarks/results
	@DRAY_FUZZ=2500 timeout --signal=INT 600 $(BIN)/pytest -q -m hostile --hostile $(HOSTILE) tests/unit

# SEED: of the moments and nodes that it chooses.
faults: .venv/dev ## Inject faults into jobs on the local cluster, at most forty minutes, and write the table of benchmarks/results (NODES=3: with a spare node)
	@NODES=$(NODES) DRAY_TEST_ALL=1 DRAY_FAULTS=$(FAULTS) DRAY_FAULTS_SEED=$(SEED) timeout --signal=INT 2400 $(BIN)/pytest -q -s tests/faults

showcase: .venv/host ## Run a user's script on the local cluster (three nodes) with a wrong variable, then with a dead node; four minutes
	@$(BIN)/python benchmarks/showcase

# Any Python with torch and transformers will do; in the image: apptainer exec --nv IMAGE python3 benchmarks/gpu
gpu-check: ## Check dray's results and speed on this machine's GPU: ten minutes, results in OUT or benchmarks/results (PYTHON=, CPU=1)
	@$(PYTHON) benchmarks/gpu $(if $(CPU),--cpu)

scale-sim: .venv/dev ## Simulate starts and checkpoints on thousands of nodes, and print each figure next to its aim
	@$(BIN)/python benchmarks/scale

coverage: .venv/dev ## Measure which lines and branches the unit tests run; fails below the share that pyproject.toml names
	@rm -f .coverage .coverage.*
	@$(BIN)/coverage run -m pytest -q tests/unit --deselect \
	  tests/unit/runner/test_runner.py::test_the_runner_loads_nothing_that_is_slow_to_load
	@$(BIN)/coverage combine --quiet
	@$(BIN)/coverage report

# Without torch its types are not known, and what is derived from them.
TYPES = $(if $(wildcard .venv/installed),,--ignore-missing-imports --allow-subclassing-any --allow-untyped-decorators --no-warn-unused-ignores --no-warn-return-any)
check: .venv/check ## Check style, types, shell scripts and architecture
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@git ls-files | xargs -d '\n' $(BIN)/codespell
	@$(BIN)/mypy $(TYPES) & types=$$!; $(MAKE) --silent check-rest; rest=$$?; wait $$types && exit $$rest

check-rest:
	@if command -v shellcheck >/dev/null; then git ls-files '*.sh' .ci/run .ci/release slurm/dray | xargs -d '\n' shellcheck -x; \
	  elif [[ "$${DRAY_TEST_ALL:-}" == 1 ]]; then echo "shellcheck is not installed" >&2; exit 1; \
	  else echo "not run: shellcheck is not installed (Debian: apt-get install shellcheck)"; fi
	@$(BIN)/pytest -q tests/unit/project/test_architecture.py tests/unit/project/test_words.py

# dray builds without root. Root may build in its own checkout.
no-sudo = [[ -z "$${SUDO_UID:-}" || "$$(id -u)" != 0 || "$$(stat -c %u .)" == 0 ]] || \
  { echo "dray: sudo would leave root's files in your checkout" >&2; \
  echo "  fix:    make $@; if Docker refuses you, first sudo usermod -aG docker $${SUDO_USER:-} and log in again" >&2; exit 78; }
python-fits = $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
  { echo "dray needs Python 3.11 or newer; this is $$($(PYTHON) --version). Set PYTHON=python3.11" >&2; exit 78; }

# The longer pattern comes first: make 3.81, which macOS has, takes the first that fits.
image-%-docker: ## Build the Docker image dray:% (the same options)
	@$(no-sudo)
	@$(MAKE) --silent --no-print-directory .venv/host
	@$(BIN)/dray image build $* --format docker $(IMAGE_OPTIONS)

# Without the tag: not every Apptainer takes both a tag and a digest.
pinned = $(shell sed -nE 's|^base = "(.*):[^:/]+(@.*)"|docker://\1\2|p' containers/$(1)/image.toml)
# cotainr asks before it accepts Miniforge's licence, unless ACCEPT_LICENSES=1 has, and before it replaces an image.
image-%-cotainr: ## Build build/cotainr-%.sif with cotainr, for dray image adopt (BASE= as Apptainer names it, ACCEPT_LICENSES=1)
	@$(python-fits)
	@[[ -e containers/$*/environment.yml ]] || { echo "dray: there is no image $*" >&2; exit 78; }
	@command -v singularity >/dev/null || { echo "dray: cotainr needs singularity on PATH" >&2; \
	  echo "  fix:    install apptainer, which brings this name too" >&2; exit 69; }
	@$(MAKE) --silent --no-print-directory .venv/cotainr
	@mkdir -p build
	@$(BIN)/cotainr build build/cotainr-$*.sif --base-image="$(or $(BASE),$(call pinned,$*))" \
	  --conda-env=containers/$*/environment.yml $(if $(ACCEPT_LICENSES),--accept-licenses)
	@[[ -e build/cotainr-$*.sif ]] && echo "to use it: $(BIN)/dray image adopt build/cotainr-$*.sif"

image-%: ## Build build/dray-%.sif from containers/% (BASE=, WHEELS=, BUNDLE=, SIGNERS=, DEBIAN=)
	@$(no-sudo)
	@$(MAKE) --silent --no-print-directory .venv/host
	@$(BIN)/dray image build $* --format sif $(IMAGE_OPTIONS)

smoke: .venv/host ## Train 50 steps in Docker: two containers are two nodes
	@$(BIN)/dray run recipes/smoke-cpu.toml --engine docker train.steps=50

cluster: .venv/host ## Start a real two-node Slurm on this machine (NODES=, GPUS_PER_NODE=, BASE=)
	@$(BIN)/dray cluster up --nodes $(NODES) --gpus-per-node $(GPUS_PER_NODE) $(BASE_OPTION)

cluster-down: .venv/host ## Stop and remove this Slurm
	@$(BIN)/dray cluster down

release: .venv/dev ## Build and test the wheel and the source archive in dist/, with the same bytes each time
	@.ci/release

clean: ## Remove fetched and installed files; images, the cluster's folder and runs stay
	@[[ ! -d build ]] || find build/ -mindepth 1 -maxdepth 1 ! -name 'dray-*' ! -name '*.sif' ! -name cluster -exec rm -rf {} +
	@rm -rf .venv

clean-images: ## Remove the images, layers and adopted images of build/, after asking (YES=1 does not ask)
	@shopt -s nullglob; images=(build/dray-* build/cotainr-*.sif); \
	if ((!$${#images[@]})); then echo "there is no image in build/"; exit; fi; \
	du --summarize --human-readable -- "$${images[@]}"; \
	if [[ "$(YES)" != 1 && ! -t 0 ]]; then \
	  printf 'dray: nothing is removed: there is no terminal to ask you\n  fix:    make clean-images YES=1\n' >&2; exit 78; fi; \
	[[ "$(YES)" == 1 ]] || read -rp "Remove them? [y/N] "; \
	if [[ "$(YES)" != 1 && ! "$$REPLY" =~ ^[yY] ]]; then echo "nothing is removed"; exit; fi; \
	rm -rf -- "$${images[@]}"

# What runs on this machine has the versions of the cpu image, each file with its hash: venv.lock is a constraint for what
# is installed and for what builds dray itself. Hashes in constraints want pip 26.1, which an older one brings by hash too.
# The first import writes bytecode, and only what it needs: pip would write all of torch's, half of the time it takes.
export PYTHONDONTWRITEBYTECODE :=
PIP := $(BIN)/python -m pip install -qq --no-compile
LOCKED := --require-hashes --constraint $(LOCK)
listed = $(shell sed -n '/^$(1) = \[/,/^]/s/^ *\("[^"]*"\).*/\1/p' pyproject.toml)
OURS := $(call listed,dependencies)

.venv/host: $(LOCK) pyproject.toml
	@$(python-fits)
ifneq ($(BUNDLE),)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] != (3, 11))' || \
	  { echo "a bundle's wheels are for Python 3.11; this is $$($(PYTHON) --version). Set PYTHON=python3.11" >&2; exit 78; }
	@PYTHONPATH=src $(PYTHON) -B -m dray.images.bundle "$(BUNDLE)" "$(SIGNERS)"
endif
	@$(PYTHON) -m venv .venv || \
	  { echo "python3 -m venv failed (Debian: apt-get install python3-venv)" >&2; exit 69; }
ifneq ($(BUNDLE),)
	@$(PIP) --no-index --find-links "$(BUNDLE)/wheels" $(OURS)
	@$(PIP) --no-index --no-deps "$(BUNDLE)"/dray/*.whl
else
	@sed -n '/^pip==/,/[^\\]$$/p' $(LOCK) >.venv/pip.txt
	@$(PIP) --require-hashes --requirement .venv/pip.txt
	@$(PIP) $(LOCKED) $(OURS)
	@$(PIP) --no-deps --build-constraint $(LOCK) --editable .
endif
	@touch $@

# Which build of torch there is (CPU, CUDA) is the business of pip's own configuration; the lock has the hashes of both.
# The CPU's is fetched under its own name where that configuration finds it: where hashes are required, pip prefers a file
# whose index names its hash, which is the registry's for CUDA, to a file of a folder.
TORCH := sed -n '/^torch==/,/[^\\]$$/p' $(LOCK)
TORCH_ARGV := $(BIN)/python -m pip download -qq --no-deps --only-binary :all: --require-hashes --dest .venv/torch
.venv/installed: .venv/host
	@echo "installing into .venv: torch (the largest part), then what $(LOCK) pins"
	@$(TORCH_ARGV) -r <($(TORCH) | sed 's/^torch==[0-9.]*/&+cpu/') 2>.venv/torch.log || \
	  { grep -q "No matching distribution" .venv/torch.log || { cat .venv/torch.log >&2; exit 1; }; $(TORCH_ARGV) -r <($(TORCH)); }
	@$(PIP) --no-index --find-links .venv/torch --no-deps $(LOCKED) $(filter "torch==%,$(call listed,train))
	@rm -r .venv/torch
	@$(PIP) $(LOCKED) $(OURS) $(call listed,train)
	@touch $@

.venv/cotainr: .venv/host
	@$(PIP) $(LOCKED) $(call listed,cotainr)
	@touch $@

.venv/docs: .venv/host
	@$(PIP) $(LOCKED) $(call listed,docs)
	@touch $@

.venv/check: .venv/host
	@$(PIP) $(LOCKED) $(call listed,check)
	@touch $@

.venv/dev: .venv/installed .venv/check .venv/cotainr .venv/docs
	@$(PIP) $(LOCKED) $(call listed,dev)
	@touch $@

# Each alone: pip takes one version of a package at a time. What is there is not fetched again.
torch-versions: build/torch/fetched build/torchao/fetched ## Fetch torch as other images lock it, and torchao, for tests (150 MB)
build/torch/fetched: tests/torch.lock | .venv/host
	@grep '^torch==' $< | while read -r pin; do $(BIN)/python -m pip download -qq --no-deps --require-hashes \
	  --only-binary :all: --platform macosx_14_0_arm64 --python-version 3.11 --dest $(@D) -r <(echo "$$pin") || exit; done
	@cp $< $@
build/torchao/fetched: tests/torchao.lock | .venv/host
	@rm -rf $(@D)
	@$(PIP) --no-deps --require-hashes --only-binary :all: --target $(@D) --requirement $<
	@cp $< $@
