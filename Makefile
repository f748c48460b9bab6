# On a machine with Python 3.11+ (with venv) and make:
#   make demo          run the main job on real data
#   make test          run the tests, but for the long ones
#   make test-all      run all tests but the sweeps
#   make mutants       break each adapter in one place, and let the tests of `make test` find it
#   make test-torch    run those of one framework alone; also test-core, test-jax, test-keras-jax, ...
#                      test-core installs no framework: 0.3 GB, where make test needs 5
#   make kernels       compile all kernels for this processor: two minutes on two processors, once
#   make wheel-check   install the wheel with every Python that the machine has, and run its demo
#   make bench         measure everything beside all peers
#   make bench-quick   measure a little
#   make docs          build the documentation into site/
#   make gpu-check     run the kernels' tests and the benchmark on an NVIDIA GPU
# Each makes .venv and installs what it needs, at the versions of constraints.txt.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip --disable-pip-version-check --quiet
# As it lies here, with what `kernels` names: nothing is downloaded for a build of its own.
INSTALL := $(PIP) install --no-compile --constraint constraints.txt --no-build-isolation --editable
KERNELS := $(BIN)/python -m backnorm.cpu.build.make
# What links machine code, if no C compiler does.
LINKER  := $(if $(shell command -v $(firstword $(CC))),,ziglang)

# Runs at a time of `make test`, workers of a run that is asked for alone, and options for pytest.
JOBS   ?= 2
WORKERS ?= $(JOBS)
PYTEST_FLAGS ?=
# Which tests: the tiers are `not long and not sweep`, `not sweep`, and `sweep`.
TIER   ?= not long and not sweep
# What each run of pytest adds its processor time to.
TIMES  ?= $(abspath $(VENV))/test-times.jsonl
FOLDER  = tests/frameworks/$(@:test-%=%)
DIST    = worksteal
# A run of pytest each: no two frameworks share a process, nor two backends of Keras.
# The longest begin first.
RUNS   := core gpu torch jax tensorflow bench keras-tensorflow keras-torch keras-jax jax_gpu gpu_code

# Where a benchmark puts result.json and plot.png.
BENCH ?= bench-results

# The same of the benchmark on a GPU, what it measures, and the Python that has PyTorch for CUDA.
GPU ?= gpu-results
GPU_SUITE ?= batch256,small
GPU_FLAGS ?= --op all --dtype all
GPU_PYTHON ?= $(BIN)/python

# Where all peers can be installed, a missing one is a failure; `make test-core` alone installs none.
ifeq ($(shell uname -s)-$(shell uname -m),Linux-x86_64)
export BACKNORM_REQUIRE_PEERS = $(if $(wildcard $(VENV)/.test),1)
endif

# Tests and kernels are made by many processes, each of which would compile what it imports.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all sweep mutants $(RUNS:%=test-%) browser-hint
.PHONY: kernels bench bench-quick gpu-check docs lint format build wheel-check clean

# What the demo calls, and no more.
demo: $(VENV)/.package
	$(KERNELS) --only '*_backward'
	$(BIN)/backnorm demo

# Whatever is missing, or was made of other sources.
kernels: $(VENV)/.package
	$(KERNELS)

# All runs, also after one that failed, each printed when it has ended; then their processor time.
# A run is one process: workers would import frameworks and collect tests once each.
test: $(VENV)/.test kernels
	rm -f $(TIMES)
	BACKNORM_TEST_TIMES=$(TIMES) $(MAKE) --jobs $(JOBS) --output-sync=target --keep-going \
	  WORKERS=0 $(RUNS:%=test-%); status=$$?; \
	  $(BIN)/python -m tests.support.processor_time $(TIMES); exit $$status

test-all: browser-hint
	$(MAKE) test TIER="not sweep"

# A copy of the package for each wrong step, and a process of the tests that must fail.
mutants: $(VENV)/.test kernels
	$(BIN)/python -m pytest -n $(JOBS) -m "not long" $(PYTEST_FLAGS) tests/mutants

sweep:
	$(MAKE) test TIER=sweep

# Fixtures of the core's files are not made twice; elsewhere a worker without work takes some.
test-core: FOLDER := tests --ignore tests/frameworks $(addprefix --ignore ,$(wildcard tests/bench*))
test-core: DIST := loadfile
test-bench: FOLDER := $(wildcard tests/bench*)
test-bench: DIST := loadfile
# Without a GPU those of `gpu_device` are collected, and skipped.
test-gpu: FOLDER := tests/frameworks/gpu tests/frameworks/gpu_device
test-keras-%: FOLDER := tests/frameworks/keras
test-keras-%: export KERAS_BACKEND = $(@:test-keras-%=%)

test-core: $(VENV)/.test-core
$(filter-out test-core,$(RUNS:%=test-%)): $(VENV)/.test

# Not every run has something for every tier, of which pytest makes the status 5.
$(RUNS:%=test-%): kernels
	$(BIN)/python -m pytest -n $(WORKERS) --dist $(DIST) -m "$(TIER)" $(PYTEST_FLAGS) \
	  $(FOLDER) || test $$? -eq 5

browser-hint:
	@command -v chromium chromium-browser google-chrome > /dev/null || \
	  echo "No browser: tests of pages are skipped. On Debian: apt-get install chromium"

# All suites, operations and types beside all peers: half an hour on two processors.
bench: $(VENV)/.bench kernels
	$(BIN)/python -m benchmarks operator --suite all --op all --dtype all --out $(BENCH)

# A few telling cells: less than two minutes.
bench-quick: $(VENV)/.bench kernels
	$(BIN)/python -m benchmarks operator --quick --out $(BENCH)

# On an NVIDIA GPU: every test of the kernels there, what only a GPU can show, and the benchmark of
# large and small layers (about half an hour). Ends with an error where there is none.
gpu-check: $(VENV)/.gpu
	$(GPU_PYTHON) -c 'import torch; torch.cuda.is_available() or exit("no CUDA device")'
	$(GPU_PYTHON) -m pytest -m "not sweep" $(PYTEST_FLAGS) \
	  tests/frameworks/gpu tests/frameworks/gpu_device
	$(GPU_PYTHON) -m benchmarks operator --device cuda --suite $(GPU_SUITE) $(GPU_FLAGS) --out $(GPU)

# Without the network: what the site shows lies in it. (The variable: no advertisement.)
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	$(BIN)/python scripts/site/check.py site

lint: $(VENV)/.lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python scripts/check_words.py
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(VENV)/.lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# The wheel of a release: machine code for every x86-64 processor.
build: export BACKNORM_BUILD_LEVELS ?= all
build: $(VENV)/.lint
	$(BIN)/python -m build --no-isolation --sdist --wheel

# Of the wheel for processors like this one, or of the release's: make wheel-check BACKNORM_BUILD_LEVELS=all
wheel-check: $(VENV)/.package
	$(BIN)/python scripts/wheel_check.py

clean:
	rm -rf $(VENV) build dist site src/backnorm/cpu/lib .pytest_cache .mypy_cache .ruff_cache .hypothesis

$(VENV)/bin/python:
	$(PYTHON) -c 'import sys; sys.exit("backnorm needs Python 3.11 or newer, this is " + sys.version) if sys.version_info < (3, 11) else 0'
	$(PYTHON) -m venv $(VENV)
# A pip that knows dependency groups (25.1 and newer).
	$(PIP) install --constraint constraints.txt pip

$(VENV)/.package: $(VENV)/bin/python pyproject.toml constraints.txt
# Of Numba little is imported; what is, Python compiles then.
	$(PIP) install --no-compile --constraint constraints.txt --group kernels $(LINKER)
	$(INSTALL) .
	touch $@

$(VENV)/.test-core: $(VENV)/.package
	$(PIP) install --constraint constraints.txt --group test-core
	touch $@

$(VENV)/.test: $(VENV)/.test-core
	$(PIP) install --constraint constraints.txt --group test
	touch $@

# The peers at the versions that the tests use.
$(VENV)/.bench: $(VENV)/.package
	$(PIP) install --constraint constraints.txt --group bench
	touch $@

# PyTorch for CUDA is what PyPI has for Linux. With a Python of one's own nothing is installed.
$(VENV)/.gpu:
ifeq ($(GPU_PYTHON),$(BIN)/python)
	$(MAKE) $(VENV)/.test
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
