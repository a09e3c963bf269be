# Each target creates the environment that it needs under .venv/, with the tested versions (constraints.txt).
#
#   PYTHON       the Python to use, 3.11 or newer; found automatically by default
#   TORCH_INDEX  an additional package index for torch, such as PyTorch's index of CPU builds; by default pip's own setting
#   TORCH_BUILD  the preferred build of torch; +cpu on a machine without an NVIDIA GPU, empty with one
#   FILE         the text that make demo trains on: make demo FILE=book.txt
#   GPU          the tests that make test-gpu runs: gpu, or gpu_essential
#   AGAINST      the git revision that make compare compares the files with: make compare AGAINST=main
#   MINUTES      how long make soak takes; 60 by default
#   ARGS         additional arguments for pytest: make test ARGS="-k config"

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo compare test test-fast check format docs test-gpu test-faults soak test-extras test-oldest wheel clean

NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 11))
ifeq ($(origin PYTHON),undefined)
PYTHON := $(shell for python in python3 python3.13 python3.12 python3.11; do "$$python" -c '$(NEW_ENOUGH)' 2>/dev/null && echo "$$python" && break; done)
endif
TORCH_INDEX ?=
ifeq ($(origin TORCH_BUILD),undefined)
TORCH_BUILD := $(shell nvidia-smi -L 2>/dev/null | grep -q GPU || echo +cpu)
endif
FILE ?=
AGAINST ?=
ARGS ?=
GPU ?= gpu
MINUTES ?= 60

COMMA := ,
# One process per core, at most four, each with one thread; the tests of a file stay together, because they share expensive fixtures.
# Compiled modules are kept on disk wherever Python is told otherwise: the tests start hundreds of processes.
ONE_THREAD = OMP_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1 PYTHONDONTWRITEBYTECODE=
PYTEST = -m pytest -n logical --maxprocesses 4 --dist loadscope
TORCH := $(shell sed -n 's/^torch==//p' constraints.txt)
OLDEST_TORCH := $(shell sed -n 's/^ *"torch>=\([0-9.]*\)".*/\1/p' pyproject.toml).0
OLDEST_TRITON := $(shell sed -n 's/^ *"triton>=\([0-9.]*\);.*/\1/p' pyproject.toml).0
PIP = -m pip install --disable-pip-version-check $(if $(TORCH_INDEX),--extra-index-url "$(TORCH_INDEX)")

help:
	@echo "make demo          train on Python's own standard library, or on FILE=your.txt; about three minutes on two cores"
	@echo "make test          check the code, then run the tests"
	@echo "make test-fast     the tests that are not marked slow, gpu, faults or thorough"
	@echo "make check         ruff and mypy"
	@echo "make format        format the code with ruff"
	@echo "make docs          build the documentation site into site/"
	@echo "make test-gpu      the tests that need an NVIDIA GPU, several at a time; GPU=gpu_essential runs the essential ones in two minutes"
	@echo "make test-faults   the tests that kill the process, fill the disk and damage files; needs strace and root for some"
	@echo "make soak          kill and resume one run for MINUTES (60), and watch its memory and open files"
	@echo "make test-extras   the tests with every optional package installed, and those marked thorough"
	@echo "make test-oldest   the tests with the oldest supported torch and Triton, $(OLDEST_TORCH) and $(OLDEST_TRITON)"
	@echo "make wheel         build dist/flatout-*.whl"
	@echo "make compare       train shakespeare-char in turns with another revision: AGAINST=main; fails where the files are more than 5% slower"
	@echo "make clean         delete the environments and build outputs; runs/ and data/ stay"

# $(call environment,EXTRAS,CONSTRAINTS,TORCH): the recipe of a stamp file; creates the environment around it and installs flatout
# there. The environment of the demo is extended instead if it is up to date.
define environment
	@if [ -z "$(PYTHON)" ] || ! "$(PYTHON)" -c '$(NEW_ENOUGH)' 2>/dev/null; then \
	  echo "flatout needs Python 3.11 or newer$(if $(PYTHON),$(COMMA) and $(PYTHON) is not). Fix: install one (Debian, Ubuntu: apt install python3), or name it: make PYTHON=/path/to/python3." >&2; exit 2; fi
	@if ! "$(PYTHON)" -c 'import venv, ensurepip' 2>/dev/null; then \
	  echo "$(PYTHON) cannot create environments: venv or ensurepip is missing. Fix: apt install python3-venv (Debian, Ubuntu), or name another Python: make PYTHON=/path/to/python3." >&2; exit 2; fi
	@echo "Setting up $(@D) ($$("$(PYTHON)" --version)). This takes some minutes, the first time only."
	@[ "$(@D)/.demo" -nt pyproject.toml ] && [ "$(@D)/.demo" -nt constraints.txt ] \
	  || { rm -rf "$(@D)" && .ci/step .venv/making.log "Creating the environment" "$(PYTHON)" -m venv "$(@D)"; }
	@if [ -z "$(TORCH_BUILD)" ] || ! QUIET=1 .ci/step "$(@D)/torch.log" "Installing torch $(3)$(TORCH_BUILD)" \
	    "$(@D)/bin/python" $(PIP) -c $(2) setuptools "torch==$(3)$(TORCH_BUILD)"; then \
	  $(if $(TORCH_BUILD),echo "This package index has no torch $(3)$(TORCH_BUILD); installing its ordinary build$(COMMA) which may be large. TORCH_INDEX=URL adds another index.";) \
	  .ci/step "$(@D)/torch.log" "Installing torch $(3)" "$(@D)/bin/python" $(PIP) -c $(2) setuptools "torch==$(3)"; fi
	@.ci/step "$(@D)/flatout.log" "Installing flatout$(1)" "$(@D)/bin/python" $(PIP) -c $(2) --no-build-isolation -e ".$(1)"
	@touch "$@"
endef

# The demo and the tests share an environment; the tests add their tools to it.
.venv/test/.demo: pyproject.toml constraints.txt
	$(call environment,[report],constraints.txt,$(TORCH))

.venv/test/.installed: pyproject.toml constraints.txt
	$(call environment,[dev],constraints.txt,$(TORCH))

.venv/extras/.installed: pyproject.toml constraints.txt
	$(call environment,[dev$(COMMA)all$(COMMA)services],constraints.txt,$(TORCH))
	@QUIET=1 .ci/step "$(@D)/llama.log" "Building llama.cpp" sh -ec 'rm -rf "$$0"; \
	    "$(@D)/bin/python" -m pip download --no-deps --no-binary llama-cpp-python -c constraints.txt -d "$$0" "llama-cpp-python>=0.3"; \
	    tar -xzf "$$0"/llama_cpp_python-*.tar.gz -C "$$0" --strip-components 1; \
	    "$(@D)/bin/python" $(PIP) -c constraints.txt "$$0" sentencepiece' "$(@D)/llama.cpp" \
	  || echo "llama.cpp was not built, so the tests that convert exports for it are skipped. It needs a C++ compiler; $(@D)/llama.log has the output."

.venv/oldest/.installed: pyproject.toml constraints.txt
	@mkdir -p .venv && sed -e '/^torch==/d' -e 's/^triton==[^;]*/triton==$(OLDEST_TRITON)/' constraints.txt > .venv/oldest-constraints.txt
	$(call environment,[dev],.venv/oldest-constraints.txt,$(OLDEST_TORCH))

demo: $(or $(wildcard .venv/test/.installed),.venv/test/.demo)
	@.venv/test/bin/flatout demo $(if $(FILE),"$(FILE)") || [ $$? -eq 75 ] # stopped and saved

# Each side is its own package, since python -m imports from the copy of the directory that it starts in.
compare: .venv/test/.installed
	@[ -n "$(AGAINST)" ] || { echo "Name the revision to compare with: make compare AGAINST=main" >&2; exit 2; }
	@[ -f .venv/compare-data/manifest.json ] || .venv/test/bin/flatout prepare python-stdlib --max-bytes 1000000 --tokenizer char --out .venv/compare-data
	@.venv/test/bin/flatout compare --against "$(AGAINST)" --at-least 0.95 -- \
	  "$(CURDIR)/.venv/test/bin/python" -m flatout train shakespeare-char data.path="$(CURDIR)/.venv/compare-data" log.to=[] --run-dir runs/compare

check: .venv/test/.installed
	@echo "ruff: format, then rules" && .venv/test/bin/ruff format --check . && .venv/test/bin/ruff check .
	@.ci/step .venv/test/mypy.log "mypy: types" .venv/test/bin/mypy

format: .venv/test/.installed
	@.venv/test/bin/ruff format . && .venv/test/bin/ruff check --fix .

docs: .venv/test/.installed
	@.venv/test/bin/python docs/tools/build_site.py && echo "Open site/index.html"

test-fast: .venv/test/.installed
	@$(ONE_THREAD) .venv/test/bin/python $(PYTEST) -m "not slow and not faults and not thorough and not gpu" -q $(ARGS)

test: check
	@echo "pytest: collecting the tests takes about half a minute"
	@$(ONE_THREAD) .venv/test/bin/python $(PYTEST) --durations 10 --ignore tests/benchmarks $(ARGS)

# Warnings from compilers and drivers do not fail these tests. A test that hangs in the driver ends only its own process.
test-gpu: .venv/test/.installed
	@$(ONE_THREAD) .venv/test/bin/python -m pytest -m $(GPU) -q -W default --disable-warnings \
	  -n logical --maxprocesses 12 --dist worksteal --timeout 300 --timeout-method thread $$(grep -rlE "mark\.gpu" tests --include="test_*.py") $(ARGS)

test-faults: .venv/test/.installed
	@$(ONE_THREAD) .venv/test/bin/python $(PYTEST) --dist worksteal -m faults --timeout 1800 $(ARGS)

soak: .venv/test/.installed
	@$(ONE_THREAD) PYTHONPATH=. .venv/test/bin/python tests/fault_injection/soak.py --minutes $(MINUTES)

test-extras: .venv/extras/.installed
	@$(ONE_THREAD) .venv/extras/bin/python $(PYTEST) -m "not faults" $(ARGS)

test-oldest: .venv/oldest/.installed
	@$(ONE_THREAD) .venv/oldest/bin/python $(PYTEST) $(ARGS)

wheel: .venv/test/.installed
	@rm -rf build && .venv/test/bin/python -m build --no-isolation --wheel

clean:
	@rm -rf .venv/test .venv/extras .venv/oldest .venv/oldest-constraints.txt .venv/making.log && { [ ! -d .venv ] || rmdir --ignore-fail-on-non-empty .venv; }
	@rm -rf build dist site *.egg-info .pytest_cache .mypy_cache .ruff_cache && find . -path ./.venv -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
