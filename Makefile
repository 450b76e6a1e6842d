# Every target does its own set-up: a virtual environment in .venv with torch, the package and its tools.
# Needs: Python 3.10 or newer, make. PYTHON=python3.12 chooses another interpreter.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
READY := $(VENV)/.ready
TEST_JOBS ?= $(shell $(PYTHON) -c "import os; print(min(os.cpu_count() or 1, 8))")

.PHONY: demo test lint bench bench-kernels bench-models bench-overhead bench-warm flat-memory peak-memory conformance \
	outside torture clean

demo: $(READY)
	$(RUN) -m bench.demo

# One thread a process: OpenMP teams of several test processes would fight for the same cores.
test: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m pytest -n $(TEST_JOBS) --dist worksteal

lint: $(READY)
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	$(RUN) -m mypy

# First call of Ferrite against aot_eager, interleaved in one run.
bench: $(READY)
	$(RUN) -m bench.first_call

# Native kernels against eager and Inductor, interleaved in one run.
bench-kernels: $(READY)
	$(RUN) -m bench.kernels

# Calls whose kernels do next to nothing, against Inductor, eager and an empty backend, interleaved in one run.
bench-overhead: $(READY)
	$(RUN) -m bench.overhead

# First call of a process that finds its caches filled, against Dynamo alone and Inductor, interleaved in one run.
bench-warm: $(READY)
	$(RUN) -m bench.warm_call

# Whole models once they are compiled, against Inductor and eager, interleaved in one run.
bench-models: $(READY)
	$(RUN) -m bench.steady

# 10 000 calls with changing sizes, and 10 000 graphs compiled and dropped: memory stays what it is.
flat-memory: $(READY)
	$(RUN) -m bench.flat_memory

# What a call of each model needs at most, beside eager by the same counter, and what the plans say.
peak-memory: $(READY)
	$(RUN) -m bench.peak_memory

# Every operator of PyTorch's own database against eager; FULL=1 for every sample and dtype.
conformance: $(READY)
	$(RUN) -m tests.ops $(if $(FULL),--full)

# PyTorch's own tests with Ferrite as the backend; fetches their source from Debian if there is none (docs/conformance.md).
outside: $(READY)
	$(RUN) -m pip install --quiet --editable '.[outside]'
	$(RUN) -m tests.outside --fetch

# Everything that can happen to the cache on disk: damaged files, killed and racing processes, broken disks.
torture: $(READY)
	OMP_NUM_THREADS=1 $(RUN) -m tests.cache.torture

# torch by its exact version first: a looser requirement may bring gigabytes of CUDA packages.
$(READY): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(RUN) -m pip install --quiet --upgrade pip
	$(RUN) -m pip install --quiet torch==2.13.0
	$(RUN) -m pip install --quiet --editable '.[dev,bench]'
	touch $@

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis results ferrite_debug
