PYTHON ?= python3
ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
DEPS := $(VENV)/.installed
NATIVE := build/libmegatrain.so
SOURCES := CMakeLists.txt $(wildcard csrc/*)

export PYTHONPATH := src
export HF_HUB_OFFLINE := 1
export TOKENIZERS_PARALLELISM := false
export OMP_NUM_THREADS ?= 1

.DEFAULT_GOAL := help
.PHONY: help setup native demo test test-cpus gpu-test peer-tests check wheel clean

help:  ## this list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: $(DEPS) $(NATIVE)  ## create .venv, install pinned dependencies and this package (editable), build the native library

# torch goes first and by exact version, so that no later resolve can choose another build of it. The package itself is
# installed without its native part: an editable install uses build/ of the source tree, which the next rule makes.
$(DEPS): constraints.txt requirements-dev.txt pyproject.toml
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt "$$(grep '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet -c constraints.txt -r requirements-dev.txt
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation --config-settings=wheel.cmake=false -e .
	touch $@

native: $(NATIVE)  ## build build/libmegatrain.so

# Ninja is a preference for a new build folder; one that was configured otherwise is used as it is.
$(NATIVE): $(SOURCES) | $(DEPS)
	PATH="$(CURDIR)/$(BIN):$$PATH" CMAKE_GENERATOR=Ninja cmake -S . -B build
	PATH="$(CURDIR)/$(BIN):$$PATH" cmake --build build
	touch $@

demo: setup  ## train a small model beside plain PyTorch
	$(BIN)/python -m megatrain demo $(ARGS)

test: setup  ## the whole CPU suite; ARGS="-k name" narrows it
	$(BIN)/python -m pytest tests -n 2 $(ARGS)

# Each has compiled kernels of its own: PyTorch's cache of them does not know the capability.
CAPABILITIES := default $(if $(shell grep -m1 -w avx2 /proc/cpuinfo),avx2) $(if $(shell grep -m1 -w avx512f /proc/cpuinfo),avx512)
CPU_TESTS := tests/parity tests/invariant tests/unit/hf tests/unit/optim tests/unit/compute

test-cpus: setup  ## numerical tests under every instruction set this CPU has, and with two threads (about 30 minutes)
	set -e; for capability in $(CAPABILITIES); do \
		echo "ATEN_CPU_CAPABILITY=$$capability"; \
		ATEN_CPU_CAPABILITY=$$capability TORCHINDUCTOR_CACHE_DIR=$(CURDIR)/build/inductor-$$capability \
			$(BIN)/python -m pytest $(CPU_TESTS) -n 2 -q $(ARGS); \
	done
	OMP_NUM_THREADS=2 $(BIN)/python -m pytest $(CPU_TESTS) -q $(ARGS)

# On the machine with the GPU, in its own environment: nothing is installed.
gpu-test:  ## the GPU tests that fit in five minutes, in one process; PYTHON chooses the interpreter
	cmake -S . -B build && cmake --build build
	$(PYTHON) -m pytest tests/gpu -m "gpu and not slow" $(ARGS)

peer-tests: setup  ## transformers' own Trainer tests on its Trainer and on ours; SUITE=<a checkout of transformers>
	$(BIN)/python tests/peers/run.py $(SUITE) $(ARGS)

check: setup  ## lint, format, types, and the rules that are tests
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --strict src/megatrain
	$(BIN)/python -m pytest -q tests/unit/rules

wheel: setup  ## build dist/megatrain-*.whl
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m pip wheel --no-deps --no-build-isolation -w dist .

clean:  ## remove what was built; keeps .venv
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
