# Two commands: `make demo` trains a small model, `make test` runs the tests. Both set everything up first.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
READY_DEMO := $(VENV)/.ready-demo
READY_TPU := $(VENV)/.ready-tpu
READY_PEERS := $(VENV)/.ready-peers
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --editable

IMPORTED := import raggedmoe.cli.main, grain, raggedmoe.train.loop.loop, raggedmoe.train.report.build, matplotlib.figure, tokenizers

# What is once compiled to bytecode is read by the next run, and by the processes that a test starts.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help native demo docs test test-as-shipped test-all test-native test-tpu test-peers test-mutants lint format bench clean

help:
	@echo "make demo      train a small model on Python's own sources, a report of the run, a sample of its text"
	@echo "make docs      the documentation as a website, with an API reference: out/docs/index.html"
	@echo "make native    the C++ kernels for CPUs, if there is a compiler; the others call it"
	@echo "make test      the tests"
	@echo "make test-as-shipped   kernels compiled as users compile them, which takes longer"
	@echo "make test-all  the tests, slow ones included"
	@echo "make test-native  the C++ kernels: under sanitizers, with each instruction set, from several threads"
	@echo "make test-tpu  compile every kernel for every TPU, and interpret it: no TPU needed; docs/tpu-matrix.md"
	@echo "make test-peers  models that transformers makes, fine-tuned here and given back; installs PyTorch, transformers and PEFT"
	@echo "make test-mutants SEED=0   inject bugs, and see which test catches each; another seed, other bugs"
	@echo "make lint      format, lint, types, direction of imports"
	@echo "make format    rewrite the files as the formatter wants them"
	@echo "make bench     the benchmark of docs/speed.md"
	@echo "PYTHON=python3.13 VENV=.venv-3.13 make test   the same on another Python"

# What training, its report and a tokenizer need, and nothing for developers: `make demo` needs no more.
$(READY_DEMO): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "raggedmoe needs Python 3.11 or newer, got " + sys.version.split()[0] + "; name one with PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	$(INSTALL) '.[plot,text,train]'
	@touch $@

# Into the same environment. It is not made before the other, whose files it would write at the same time.
$(READY): $(READY_DEMO)
	$(INSTALL) '.[dev]'
	@touch $@

# The TPU compiler, in the version that this JAX wants, and tokamax, for the tests marked `tpu` and those of its kernels.
$(READY_TPU): $(READY)
	$(INSTALL) '.[dev,tpu,tokamax]'
	@touch $@

# What the tests of checkpoints compare with, where it is installed: some GB.
$(READY_PEERS): $(READY)
	$(INSTALL) '.[dev,bench]' 'peft>=0.17'
	@touch $@

# The C++ kernels for CPUs, built anew when their sources change; without a compiler it says so, and all works without.
native: $(READY_DEMO)
	@$(BIN)/python -m raggedmoe.kernels.native

# While the compiler builds the kernels on one core, the other writes the bytecode of what a run imports.
demo: $(READY_DEMO)
	@$(BIN)/python -m raggedmoe.kernels.native & $(BIN)/python -c '$(IMPORTED)'; wait
	rm -rf out/make-demo
	$(BIN)/raggedmoe demo run_name=make-demo

# A link that leads nowhere is a warning, and a warning is an error.
docs: $(READY)
	$(BIN)/python -m sphinx -q -E -W --keep-going -c docs/site . out/docs
	@echo "out/docs/index.html"

# Compiling is most of a test's time: tests/conftest.py says what QUICK_COMPILE leaves out of it. `.ci/run` tests some
# kernels as users compile them as well. By stealing work, a worker keeps neighbouring tests, which share compiled functions.
TESTS := $(BIN)/python -m pytest -n auto --dist worksteal
# What `make test` runs; `.ci/run` also asks for what is marked `ci` and `tpu`.
MARKS ?= not slow and not as_shipped and not ci and not tpu

test: $(READY) native
	QUICK_COMPILE=1 $(TESTS) -m '$(MARKS)'

test-as-shipped: $(READY) native
	$(TESTS) -m 'as_shipped and not slow' tests/kernels

test-all: $(READY) native
	$(TESTS)

test-native: native
	QUICK_COMPILE=1 $(TESTS) tests/kernels/native tests/kernels/expert_ffn/test_cpu_native.py

test-tpu: $(READY_TPU) native
	QUICK_COMPILE=1 $(TESTS) -m tpu
	QUICK_COMPILE=1 $(TESTS) tests/kernels/test_interpreted.py
	$(BIN)/python -m tests.aot.matrix --write docs/tpu-matrix.md

test-peers: $(READY_PEERS) native
	QUICK_COMPILE=1 $(TESTS) tests/interop/test_finetune_peers.py tests/interop/test_transformers.py

SEED ?= 0
test-mutants: $(READY) native
	$(BIN)/python -m tests.mutants --seed $(SEED)

# Without the pages, whose examples ruff would format too.
PYTHON_FILES := src tests examples docs/site

lint: $(READY)
	$(BIN)/ruff check $(PYTHON_FILES)
	$(BIN)/ruff format --check $(PYTHON_FILES)
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache

format: $(READY)
	$(BIN)/ruff check --fix $(PYTHON_FILES)
	$(BIN)/ruff format $(PYTHON_FILES)
	$(BIN)/python -m raggedmoe.cli.known_names --write

bench: $(READY) native
	$(BIN)/raggedmoe bench grouped_matmul layer sweep train generate --json out/bench.json --plot out/bench.png --markdown out/bench.md

clean:
	rm -rf .venv .venv-* out .mypy_cache .ruff_cache .pytest_cache .hypothesis .jax_cache
