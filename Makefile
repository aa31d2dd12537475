# make demo | test | test-all | versions | lint | bench | gpu-test | multigpu-test | fuzz | planted | soak | long-run | examples | docs | clean
#
# Everything runs in .venv, which is made on first use. PYTHON=/path/to/python uses that interpreter as it is
# instead (a machine that comes with its own torch): make gpu-test PYTHON=python3

ifeq ($(origin PYTHON), undefined)
PYTHON := .venv/bin/python
READY := .venv/.ready
endif
PYTEST := $(PYTHON) -m pytest
JOBS ?= 2
QUICK := not gpu and not multigpu and not heavy

.PHONY: demo test test-all versions newest newest-version lint bench gpu-test multigpu-test fuzz planted soak long-run examples docs clean

demo: $(READY)
	$(PYTHON) -m benchmarks.demo $(ARGS)

# Each program by one capture, a sample through Inductor: what every change waits for.
test: $(READY)
	$(PYTEST) -n $(JOBS) --dist worksteal -m "$(QUICK)" $(ARGS)

# What is marked `heavy` too: every program through AOTAutograd, all examples and benchmarks, the larger kernel shapes.
test-all: $(READY)
	$(PYTEST) -n $(JOBS) --dist worksteal -m "not gpu and not multigpu" $(ARGS)

# The quick suite on the oldest torch, the one above and the newest, each with the Triton that belongs to it; the
# environments are made on first use (5 GB each). VERSIONS=2.14.1 ARGS="tests/test_match.py" for a part.
VERSIONS ?= 2.11.0 2.13.0 2.14.1
MARKED ?= $(QUICK)
versions: $(VERSIONS:%=.venvs/torch-%/.ready)
	status=0; for version in $(VERSIONS); do \
	  echo "torch $$version"; \
	  .venvs/torch-$$version/bin/python -m pytest -n $(JOBS) --dist worksteal -m "$(MARKED)" $(ARGS) || status=1; \
	done; exit $$status

# Recognition, gradients at bounds and the compilation of Gluon and other kernels on the newest torch: what CI has time for.
newest:
	$(MAKE) versions VERSIONS=$(lastword $(VERSIONS)) MARKED="$(QUICK) or newest" ARGS="tests/test_match.py tests/test_ties.py tests/test_versions.py tests/test_programs.py tests/kernels/test_gluon_compile.py tests/kernels/test_sparse_scores_compile.py tests/kernels/test_entmax_compile.py"

newest-version:
	@echo $(lastword $(VERSIONS))

gpu-test: $(READY)
	$(PYTEST) -m gpu tests/kernels $(shell grep -l 'mark\.gpu' tests/test_*.py) $(ARGS)

# Two GPUs and NCCL; with ARGS="-n 12" the parts are compiled side by side.
multigpu-test: $(READY)
	$(PYTEST) -m multigpu tests/test_distributed.py tests/test_sharded_index.py tests/test_replay_gpu.py $(ARGS)

# Random programs, eager beside rewritten: make fuzz PROGRAMS=10000 PROCESSES=16 SEED=0; fuzz.log has the result.
PROGRAMS ?= 1000
PROCESSES ?= $(JOBS)
SEED ?= 0
fuzz: $(READY)
	$(PYTHON) -m tests.fuzz --programs $(PROGRAMS) --processes $(PROCESSES) --seed $(SEED) --log fuzz.log $(ARGS)

# Which planted mistake is caught by verify, by the fuzzer, by the tests; with ARGS=words those that are named so.
planted: $(READY)
	PYTHONPATH=tests:. $(PYTHON) -m planted.table $(ARGS)

# 2 000 training steps of ever new shapes; `make test-all` runs 40.
long-run: $(READY)
	STEPS=2000 $(PYTEST) tests/test_robustness.py -k long_run $(ARGS)

# An index under 200 threads for SOAK_SECONDS, and under KILLS kills while it is saved; `make test-all` does a little.
SOAK_SECONDS ?= 600
KILLS ?= 500
soak: $(READY)
	SOAK_SECONDS=$(SOAK_SECONDS) KILLS=$(KILLS) $(PYTEST) -m heavy -s -o timeout=0 tests/test_index_service.py tests/test_index_files.py $(ARGS)

# Every example, unrewritten and rewritten beside each other; ARGS=--small for tiny sizes.
examples: $(READY)
	$(foreach file,$(filter-out %/side_by_side.py %/search_service.py,$(wildcard examples/*.py)),$(PYTHON) $(file) $(ARGS) &&) true

lint: $(READY)
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .
	$(PYTHON) -m mypy

# One family: make bench FAMILIES=entmax
FAMILIES ?= $(notdir $(basename $(filter-out %/__init__.py,$(wildcard benchmarks/families/*.py))))

bench: $(READY)
	$(foreach family,$(FAMILIES),$(PYTHON) -m benchmarks $(family) $(ARGS) &&) true

# The site, in site/; make docs ARGS=... hands further options to mkdocs.
docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(PYTHON) -m mkdocs build $(ARGS)

clean:
	rm -rf .venv .venvs build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# torch first and pinned: the other packages would pull in whichever is newest.
.venv/.ready: pyproject.toml
	test -x .venv/bin/python || python3 -m venv .venv
	.venv/bin/python -m pip install --quiet torch==2.13.0
	.venv/bin/python -m pip install --quiet hatchling
	.venv/bin/python -m pip install --quiet --no-build-isolation -e ".[test,demo,bench,docs]" torch==2.13.0
	touch $@

.venvs/torch-%/.ready: pyproject.toml
	test -x $(@D)/bin/python || python3 -m venv $(@D)
	$(@D)/bin/python -m pip install --quiet torch==$*
	$(@D)/bin/python -m pip install --quiet hatchling
	$(@D)/bin/python -m pip install --quiet --no-build-isolation -e ".[test]" torch==$*
	touch $@
