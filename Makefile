# On a machine with Python 3.11+ (with venv) and make:
#   make demo          run all dialects on real tensors, with NumPy, or with kernels that are built
#   make test          run the tests except the long ones and the sweeps
#   make test-all      run all tests but the sweeps
#   make mutants       break one adapter after another; the tests of `make test` must fail
#   make test-torch    run the tests of one framework; also test-core, test-jax, test-keras-jax, ...
#                      test-core needs no framework and no kernels: 0.2 GB instead of 5 GB
#   make kernels       compile all kernels for this processor: a minute on two processors, once
#   make wheel-check   install the wheels with every Python that the machine has, and run the demo
#   make bench         run the whole benchmark, with all peers
#   make bench-quick   run a small part of the benchmark
#   make docs          build the documentation into site/
#   make gpu-check     run the kernels' tests and the benchmark on an NVIDIA GPU
# Each target creates .venv and installs what it needs, at the versions of constraints.txt.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
# An editable installation. --no-build-isolation: the build needs hatchling alone, which is
# installed before, so pip downloads nothing for a separate build environment.
INSTALL := $(PIP) install --no-compile --constraint constraints.txt --no-build-isolation --editable
KERNELS := $(BIN)/python -m backnorm_kernels.build.make
# The package that links machine code if there is no C compiler.
LINKER  := $(if $(shell command -v $(firstword $(CC))),,ziglang)

# Runs of pytest that `make test` starts at a time; workers of a single run; options for pytest.
JOBS   ?= 2
WORKERS ?= $(JOBS)
PYTEST_FLAGS ?=
# The tier of tests to run: the tiers are `not long and not sweep`, `not sweep`, and `sweep`.
TIER   ?= not long and not sweep
# The file to which each run of pytest adds its processor time.
TIMES  ?= $(abspath $(VENV))/test-times.jsonl
FOLDER  = tests/frameworks/$(@:test-%=%)
DIST    = worksteal
# Each name is a separate run of pytest, so that neither two frameworks nor two backends of Keras
# share a process. The longest runs start first.
RUNS   := core gpu torch jax tensorflow bench keras-tensorflow keras-torch keras-jax gpu_code

# Where a benchmark puts result.json and plot.svg.
BENCH ?= bench-results

# The benchmark on a GPU: its folder, its suites, its options, and a Python with PyTorch for CUDA.
GPU ?= gpu-results
GPU_SUITE ?= batch256,small
GPU_FLAGS ?= --op all --dtype all
GPU_PYTHON ?= $(BIN)/python

# Waiting threads of OpenMP give up their processor: runs at a time share the processors.
test test-all sweep mutants $(RUNS:%=test-%): export OMP_WAIT_POLICY = passive

# All peers can be installed on Linux, x86-64. There, a missing peer is a failure as soon as the
# group `test` is installed. `make test-core` installs no peers, and skips the tests that need one.
ifeq ($(shell uname -s)-$(shell uname -m),Linux-x86_64)
export BACKNORM_REQUIRE_PEERS = $(if $(wildcard $(VENV)/.test),1)
endif

# Many processes run tests and build kernels. If bytecode were not written, each of them would
# compile every module that it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all sweep mutants $(RUNS:%=test-%)
.PHONY: kernels bench bench-quick gpu-check docs lint format build wheel-check clean

# Installs nothing that compiles. Its first line names the engine: kernels after `make kernels`.
demo: $(VENV)/.package
	$(BIN)/backnorm demo

# Builds the kernels that are missing or were built from other sources.
kernels: $(VENV)/.kernels
	$(KERNELS)

# Starts all runs, also after one has failed; prints the output of each when it ends. Then reports
# their processor time. A run is one process (WORKERS=0), because each worker would import the
# frameworks and collect the tests again.
test: $(VENV)/.test kernels
	rm -f $(TIMES)
	BACKNORM_TEST_TIMES=$(TIMES) $(MAKE) --jobs $(JOBS) --output-sync=target --keep-going \
	  WORKERS=0 $(RUNS:%=test-%); status=$$?; \
	  $(BIN)/python -m tests.support.processor_time $(TIMES); exit $$status

test-all:
	$(MAKE) test TIER="not sweep"

# For each wrong step: a copy of the package with this step, and a process of tests that must fail.
mutants: $(VENV)/.test kernels
	$(BIN)/python -m pytest -n $(JOBS) -m "not long" $(PYTEST_FLAGS) tests/mutants

sweep:
	$(MAKE) test TIER=sweep

# loadfile: one worker runs all tests of a file, so fixtures of a file are not made twice. In other
# runs (worksteal), a worker without work takes tests of another.
test-core: FOLDER := tests --ignore tests/frameworks $(addprefix --ignore ,$(wildcard tests/bench*))
test-core: DIST := loadfile
test-bench: FOLDER := $(wildcard tests/bench*)
test-bench: DIST := loadfile
# Without a GPU, the tests of `gpu_device` are skipped.
test-gpu: FOLDER := tests/frameworks/gpu tests/frameworks/gpu_device
test-keras-%: FOLDER := tests/frameworks/keras
test-keras-%: export KERAS_BACKEND = $(@:test-keras-%=%)

# Without kernels, the core is tested on the engine of NumPy alone; after `make kernels`, on both.
test-core: $(VENV)/.test-core
$(filter-out test-core,$(RUNS:%=test-%)): $(VENV)/.test kernels

# Status 5 of pytest means that the run has no tests of this tier, which is no failure.
$(RUNS:%=test-%):
	$(BIN)/python -m pytest -n $(WORKERS) --dist $(DIST) -m "$(TIER)" $(PYTEST_FLAGS) \
	  $(FOLDER) || test $$? -eq 5

# All suites, operations and types beside all peers: half an hour on two processors.
bench: $(VENV)/.bench kernels
	$(BIN)/python -m benchmarks operator --suite all --op all --dtype all --out $(BENCH)

# A few cells of the benchmark: less than two minutes.
bench-quick: $(VENV)/.bench kernels
	$(BIN)/python -m benchmarks operator --quick --out $(BENCH)

# On an NVIDIA GPU: the tests of the GPU kernels, the tests that need a GPU, and the benchmark of
# large and small layers (about half an hour). Without a CUDA device, the target fails.
gpu-check: $(VENV)/.gpu
	$(GPU_PYTHON) -c 'import torch; torch.cuda.is_available() or exit("no CUDA device")'
	$(GPU_PYTHON) -m pytest -m "not sweep" $(PYTEST_FLAGS) \
	  tests/frameworks/gpu tests/frameworks/gpu_device
	$(GPU_PYTHON) -m benchmarks operator --device cuda --suite $(GPU_SUITE) $(GPU_FLAGS) --out $(GPU)

# The site contains all files that its pages show, so build and check need no network.
# NO_MKDOCS_2_WARNING suppresses an advertisement.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python scripts/site/check.py site

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/check_words.py
	$(BIN)/mypy
	PYTHONPATH=kernels/src $(BIN)/lint-imports

format: $(VENV)/.lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The sdists and the wheels of a release, with machine code for every x86-64 processor.
build: export BACKNORM_BUILD_LEVELS ?= all
build: $(VENV)/.lint
	$(BIN)/python -m build --no-isolation --sdist --wheel
	$(BIN)/python -m build --no-isolation --sdist --wheel --outdir dist kernels

# Checks the wheels for processors like this one; with BACKNORM_BUILD_LEVELS=all, those of a release.
wheel-check: $(VENV)/.kernels
	$(BIN)/python scripts/wheel_check.py

clean:
	rm -rf $(VENV) build dist site kernels/src/backnorm_kernels/lib .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("backnorm needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)
# Dependency groups need pip 25.1 or newer.
	$(PIP) install --constraint constraints.txt pip

$(VENV)/.package: $(VENV)/bin/python pyproject.toml constraints.txt
	$(PIP) install --constraint constraints.txt hatchling
	$(INSTALL) .
	touch $@

$(VENV)/.kernels: $(VENV)/.package kernels/pyproject.toml
# --no-compile: only a small part of Numba is imported, and Python compiles it on import.
	$(PIP) install --no-compile --constraint constraints.txt --group kernels $(LINKER)
	$(INSTALL) ./kernels
	touch $@

$(VENV)/.test-core: $(VENV)/.package
	$(PIP) install --constraint constraints.txt --group test-core
	touch $@

$(VENV)/.test: $(VENV)/.test-core
	$(PIP) install --constraint constraints.txt --group test
	touch $@

# The peers at the versions that the tests use.
$(VENV)/.bench: $(VENV)/.kernels
	$(PIP) install --constraint constraints.txt --group bench
	touch $@

# PyTorch from PyPI supports CUDA on Linux. For a GPU_PYTHON outside .venv, nothing is installed.
$(VENV)/.gpu:
ifeq ($(GPU_PYTHON),$(BIN)/python)
	$(MAKE) $(VENV)/.test $(VENV)/.kernels
	$(INSTALL) ".[cuda,torch]"
	$(PIP) install --constraint constraints.txt --group bench
	touch $@
endif

$(VENV)/.docs: $(VENV)/.package
	$(PIP) install --constraint constraints.txt --group docs
	touch $@

$(VENV)/.lint: $(VENV)/.package
	$(PIP) install --constraint constraints.txt --group lint --group build
	touch $@
