# zerofit: `make train` and `make test` need nothing but Python 3.10 or newer; the other targets: `make help`.

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help setup train compare test test-unit test-launch test-gpu lint format bench clean

help:                ## list the targets
	@awk -F':.*## ' '/^[a-z-]+:.*## /{printf "  make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)      ## create .venv and install the pinned dependencies

$(READY): pyproject.toml constraints.txt scripts/setup.sh
	PYTHON="$(PYTHON)" bash scripts/setup.sh "$(VENV)"
	@touch $@

train: $(READY)      ## train a small GPT-2 from scratch on Python's own source code: a few minutes on two CPU cores
	$(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no \
	  train/clm.py --config recipes/clm/stdlib-gpt2.yaml $(ARGS)

compare: $(READY)    ## find the largest batch of ddp, zero1, zero2 and zero3 on this machine, 1 GiB a process: 6 to 8 minutes
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/zerofit compare --config recipes/clm/compare-small.yaml \
	  --strategies ddp,zero1,zero2,zero3 --num_processes 2 --memory_limit 1GiB --granularity 4 --steps 2 --output outputs/compare-small $(ARGS)

test: $(READY)       ## all tests that need no GPU
	$(BIN)/python -m pytest tests/unit tests/launch $(ARGS)

test-unit: $(READY)  ## the tests of single parts: seconds
	$(BIN)/python -m pytest tests/unit $(ARGS)

test-launch: $(READY) ## the tests that launch real runs with several processes
	$(BIN)/python -m pytest tests/launch $(ARGS)

test-gpu: $(READY)   ## the tests that need a GPU
	$(BIN)/python -m pytest tests/gpu $(ARGS)

lint: $(READY)       ## check style
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

format: $(READY)     ## put into style
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

bench: $(READY)      ## measure the loop against a bare one and against the transformers Trainer
	$(BIN)/python benchmarks/loop_speed.py $(ARGS)

clean:               ## remove caches and build leftovers (not .venv, not outputs/)
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
