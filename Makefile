# `make train` and `make test` work on a fresh machine with Python 3.11+: they make .venv, install into it and run.
# An NVIDIA driver decides, when .venv is made, whether torch comes pinned (constraints.txt, CPU) or by pyproject's range.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.ONESHELL:
.DEFAULT_GOAL := help

PYTHON ?= python3 python3.14 python3.13 python3.12 python3.11
VENV_OPTIONS ?=
CONFIG ?= launch/configs/quickstart.toml
FINETUNE_CONFIG ?= launch/configs/finetune.toml
NPROC ?= 2
ARGS ?=
# Those that run anywhere; the others need a GPU: make bench BENCH="gemm layer frozen".
BENCH ?= $(filter-out __init__ moe stand_in gemm layer frozen,$(basename $(notdir $(wildcard moe_runtime/bench/*.py))))

comma := ,
space := $(subst ,, )
PIP = .venv/bin/python -m pip --disable-pip-version-check --quiet install --progress-bar off $$(cat .venv/.pins)
LOCK = $(shell command -v flock >/dev/null && echo flock Makefile)
CXX_SOURCES = $(shell find csrc -type f \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' \) 2>/dev/null)
INSTALLED_FROM = $(sort $(wildcard setup.py) pyproject.toml constraints.txt $(CXX_SOURCES))

.PHONY: help train finetune test test-all lint format docs bench clean install-train install-dev venv

help: ## print this list
	@grep -hE '^[a-z-]+:.*## ' Makefile | sed -E 's/:.*## /\t/' | expand -t 16
	echo
	echo 'make train CONFIG=file.toml NPROC=2 ARGS="--set train.steps=10"   make test ARGS="-k grouped"   make bench BENCH=name'
	echo 'when .venv is made: PYTHON=python3.12 chooses the interpreter, VENV_OPTIONS=--system-site-packages keeps its torch'

train: install-train ## train the quickstart model on 2 processes
	.venv/bin/torchrun --standalone --nproc-per-node $(NPROC) -m moe_runtime train $(CONFIG) $(ARGS)

finetune: install-train ## teach the quickstart model a task by adapters, on 2 processes; trains it first if need be
	@compgen -G 'runs/quickstart-*/checkpoints/step-*/manifest.json' >/dev/null || $(MAKE) --no-print-directory train ARGS=
	.venv/bin/torchrun --standalone --nproc-per-node $(NPROC) -m moe_runtime finetune $(FINETUNE_CONFIG) $(ARGS)

test: install-dev ## run the CPU tests
	.venv/bin/python -m pytest -m "not slow and not gpu" $(ARGS)

test-all: install-dev ## run the CPU tests, the slow ones too
	.venv/bin/python -m pytest -m "not gpu" $(ARGS)

lint: install-dev ## check format, types, spelling, architecture and docs
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	$(if $(CXX_SOURCES),.venv/bin/clang-format --dry-run -Werror $(CXX_SOURCES))
	.venv/bin/pyright --pythonpath .venv/bin/python
	.venv/bin/codespell
	.venv/bin/python -m pytest tests/architecture
	.venv/bin/sphinx-build -W --keep-going -q docs docs/_build/html

format: install-dev ## rewrite the sources in the project's format
	.venv/bin/ruff check --fix-only --quiet .
	.venv/bin/ruff format .
	$(if $(CXX_SOURCES),.venv/bin/clang-format -i $(CXX_SOURCES))

docs: install-dev ## build the documentation into docs/_build/html
	.venv/bin/sphinx-build -W --keep-going -q docs docs/_build/html

bench: install-train ## run the benchmark modules of moe_runtime/bench
	@for name in $(BENCH); do
	  echo "== moe_runtime.bench.$$name"
	  .venv/bin/python -m moe_runtime.bench.$$name $(ARGS)
	done

clean: ## remove .venv, build outputs and caches; runs/ stays
	rm -rf .venv build dist *.egg-info docs/_build .pytest_cache .ruff_cache .hypothesis
	find moe_runtime -name '*.so' -delete
	find moe_runtime tests docs -name __pycache__ -type d -prune -exec rm -rf {} +

install-train: ## make .venv with what training needs
	@$(LOCK) $(MAKE) --no-print-directory venv EXTRAS="train"

install-dev: ## make .venv with what training and the checks need
	@$(LOCK) $(MAKE) --no-print-directory venv EXTRAS="train dev"
	# Tests with several hosts need `ip`; without it and without root they are skipped, with a sentence.
	if ! command -v ip >/dev/null && [ "$$(id -u)" -eq 0 ] && command -v apt-get >/dev/null; then
	  $(LOCK) bash -c 'apt-get update -qq && apt-get install -qq -y --no-install-recommends iproute2' >/dev/null ||
	    echo 'iproute2 could not be installed' >&2
	fi

# A stamp is written last, so an install that was cut short has none and starts afresh. Its first line says where and how
# .venv was made: another value starts afresh too. Its second is a digest of what was installed: another value updates in place.
venv:
	@for candidate in $(PYTHON); do
	  found=$$($$candidate -c 'import sys; sys.version_info >= (3, 11) and print(sys._base_executable)' 2>/dev/null) || true
	  [ -z "$$found" ] || break
	done
	[ -n "$$found" ] || { echo "error: expected Python 3.11 or newer, found none among: $(PYTHON)" >&2; exit 1; }
	made="$(CURDIR) $$("$$found" -c 'import sys; print(sys.base_prefix, *sys.version_info[:2])') $(VENV_OPTIONS)"
	stamp="$$made"$$'\n'"$$(sha256sum $(INSTALLED_FROM) | sha256sum)"
	if .venv/bin/python -c '' 2>/dev/null; then
	  [ "$$(cat .venv/.$(lastword $(EXTRAS))-stamp 2>/dev/null)" != "$$stamp" ] || exit 0
	  cat .venv/.*-stamp 2>/dev/null | grep -qxF "$$made" || rm -rf .venv
	else
	  rm -rf .venv
	fi
	rm -f .venv/.*-stamp
	echo "installing moe-runtime[$(EXTRAS)] into .venv (minutes the first time)"
	if [ ! -d .venv ]; then
	  "$$found" -m venv $(VENV_OPTIONS) .venv
	  if nvidia-smi >/dev/null 2>&1; then : >.venv/.pins; else echo "--constraint constraints.txt" >.venv/.pins; fi
	fi
	.venv/bin/python -c 'import tomllib; project = tomllib.load(open("pyproject.toml", "rb"))
	print(*project["build-system"]["requires"], *project["project"]["dependencies"], sep="\n")' >.venv/build-requirements.txt
	$(PIP) --requirement .venv/build-requirements.txt
	$(PIP) --no-build-isolation --editable '.[$(subst $(space),$(comma),$(EXTRAS))]'
	for extra in $(EXTRAS); do echo "$$stamp" >.venv/.$$extra-stamp; done
