# The only commands anyone types. `make` prints them.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# May carry options of pip, such as an index that has builds without CUDA for a machine without a GPU.
TORCH ?= torch==2.13.0
# Without what it asks for: a build of torch with CUDA, which moving blocks of host memory does not need.
NIXL ?= 'nixl-cu12>=1.5,<1.6'
# Of all fuzzers together.
FUZZ_SECONDS ?= 600
# Drives the browser that the distribution ships; downloads none.
PLAYWRIGHT ?= playwright-core@1.65.1
# Fixes what happens to a run, and when.
SEED ?= 1
SETUP := $(VENV)/.setup-done
LAUNCHERS := $(VENV)/.launchers-done
TRACKERS := $(VENV)/.trackers-done
WGPU := $(VENV)/.wgpu-done
PYTEST := $(BIN)/python -m pytest

# Two torch threads on a busy two-core machine are three times slower than one.
ONE_THREAD := OMP_NUM_THREADS=1

.DEFAULT_GOAL := help
.PHONY: help setup proto fmt check test test-dashboard test-wgpu test-launchers test-trackers interop fuzz chaos
.PHONY: bench train pretrain equality stubs clean

help: ## print this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-14s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(SETUP) ## virtual environment with everything that the other targets need

$(SETUP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "Python 3.11 or newer is needed, but '$(PYTHON)' is older or missing. Name one: make setup PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' || \
	  { echo "Python can't make virtual environments here. On Debian: apt-get install python3-venv" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check $(TORCH)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[train,plot,data,fast,s3,postgres,dashboard,otel,dev]'
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps $(NIXL)
	@touch $@

proto: $(SETUP) ## regenerate the Python stubs of the contract
	$(BIN)/python scripts/gen_protos.py

fmt: $(SETUP) ## format code and schema, sort imports
	$(BIN)/ruff check --quiet --select I --fix
	$(BIN)/ruff format
	$(BIN)/buf format -w proto

check: $(SETUP) ## formats, lint, types, imports, schema, stubs, unit ring
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	PYTHONPATH=.:proto $(BIN)/lint-imports
	$(BIN)/buf lint proto
	$(BIN)/buf format --diff --exit-code proto
	$(BIN)/buf breaking proto --against proto/ayni_v1.binpb
	$(BIN)/python scripts/gen_protos.py --check
	$(ONE_THREAD) $(PYTEST) tests/unit

test: check ## check, then the integration and fault rings
	$(ONE_THREAD) $(PYTEST) --durations 25 tests/integration tests/fault

test-dashboard: $(SETUP) ## the dashboard in Debian's Chromium, its metrics, traces
	@command -v npm > /dev/null && command -v chromium > /dev/null || \
	  { echo "The dashboard is tested in a browser. On Debian: apt-get install chromium nodejs npm" >&2; exit 1; }
	npm install --prefix build/dashboard --no-save --no-audit --no-fund --silent $(PLAYWRIGHT)
	$(ONE_THREAD) $(PYTEST) tests/dashboard

test-launchers: $(LAUNCHERS) ## agents started by torchrun, Ray, Slurm and Open MPI; manifests for Kubernetes
	$(ONE_THREAD) $(PYTEST) tests/launchers

$(LAUNCHERS): $(SETUP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[ray,launchers]'
	@touch $@

test-trackers: $(TRACKERS) ## W&B, MLflow and package datasets themselves, offline
	$(ONE_THREAD) $(PYTEST) tests/trackers

$(TRACKERS): $(SETUP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[trackers,datasets]'
	@touch $@

test-wgpu: $(WGPU) ## both engines of backend wgpu on a Vulkan driver, a software one will do
	@$(ONE_THREAD) TORCHVULKAN_PIPELINE_CACHE=0 $(BIN)/python -m worker_agent doctor --backend wgpu --allow-software-gpu || \
	  { echo "These tests need a Vulkan 1.3 driver. On Debian: apt-get install mesa-vulkan-drivers libvulkan1" >&2; exit 1; }
	$(ONE_THREAD) $(PYTEST) tests/wgpu

$(WGPU): $(SETUP)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e '.[wgpu]'
	@touch $@

fuzz: $(SETUP) ## hostile calls and damaged frames at live servers and the codec, FUZZ_SECONDS=600
	$(ONE_THREAD) $(BIN)/python tests/fuzz/codec.py --seconds $$(($(FUZZ_SECONDS) / 10))
	$(ONE_THREAD) $(BIN)/python tests/fuzz/servers.py --seconds $$(($(FUZZ_SECONDS) - $(FUZZ_SECONDS) / 10))

chaos: $(SETUP) ## kill, stop and cut off the processes of a run, SEED=1, and show that nothing is lost
	$(ONE_THREAD) $(BIN)/python scripts/chaos.py --seed $(SEED)

bench: $(SETUP) ## all-reduce and blocks against the same bytes moved barely; two JSON objects
	$(ONE_THREAD) $(BIN)/python tests/bench/all_reduce.py
	$(ONE_THREAD) $(BIN)/python tests/bench/blocks.py

train: $(SETUP) ## fine-tune a small encoder on two local workers
	$(BIN)/python scripts/prepare_data.py bbc
	$(ONE_THREAD) $(BIN)/python scripts/train_local.py --run runs/bbc.yaml

pretrain: $(SETUP) ## train a tiny language model from scratch on two local workers
	$(BIN)/python scripts/prepare_data.py corpus
	$(ONE_THREAD) $(BIN)/python scripts/train_local.py --run runs/pretrain.yaml

equality: $(SETUP) ## show that N workers give the run that one process gives
	$(ONE_THREAD) $(BIN)/python tests/bench/equality.py

# LANG is also the name of the locale variable, so it counts only where it was typed: make stubs LANG=go
stubs: $(SETUP) ## stubs for another language: LANG=go|cpp|java|typescript|ts-proto|ruby|rust|csharp
	@$(BIN)/python scripts/gen_stubs.py $(if $(filter command,$(firstword $(origin LANG))),$(LANG))

interop: $(SETUP) ## workers in other languages beside a Python one, in one run, with the same parameters to the byte
	$(ONE_THREAD) $(BIN)/python scripts/interop.py

clean: ## remove caches and stubs, but neither the virtual environment nor prepared data
	rm -rf build *.egg-info .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +
