# zerofit: `make train` and `make test` need nothing but Python 3.11 or newer; the other targets: `make help`.
# TORCH=cpu, TORCH=cuda or TORCH='torch --index-url URL' chooses the build of torch (scripts/setup.sh).

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
READY  := $(VENV)/.ready
ONE    := $(BIN)/accelerate launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no

.DEFAULT_GOAL := help
.PHONY: help setup train train-cls train-seq2seq compare test test-all test-real test-unit test-launch test-gpu test-versions lint \
  format docs docs-check bench wheel image lock audit sbom clean
ifdef TORCH
.PHONY: $(READY)
endif

help:                ## list the targets
	@awk -F':.*## ' '/^[a-z0-9-]+:.*## /{printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY)      ## create .venv and install the pinned dependencies

$(READY): pyproject.toml constraints.txt scripts/setup.sh
	PYTHON="$(PYTHON)" TORCH="$(TORCH)" bash scripts/setup.sh "$(VENV)"
	@touch $@

train: $(READY)      ## train a small GPT-2 from scratch on Python's own source code: a few minutes on two CPU cores
	$(ONE) train/clm.py --config recipes/clm/stdlib-gpt2.yaml $(ARGS)

train-cls: $(READY)  ## train a small BERT to tell which package of Python's library a docstring belongs to: the same
	$(ONE) train/cls.py --config recipes/cls/stdlib-packages.yaml $(ARGS)

train-seq2seq: $(READY) ## train a small BlenderBot to name the functions of Python's library: the same
	$(ONE) train/seq2seq.py --config recipes/seq2seq/stdlib-functions.yaml $(ARGS)

# Without a GPU the sizes are those of simulated ones, and the speeds of this machine's CPU.
MEMORY := $(if $(shell command -v nvidia-smi),--memory_limit 2GiB,--simulate 512MiB)

compare: $(READY)    ## find the largest batch of ddp, zero1, zero2 and zero3, and their speed: 4 to 10 minutes
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/zerofit compare --config recipes/clm/compare-small.yaml \
	  --strategies ddp,zero1,zero2,zero3 --num_processes 2 $(MEMORY) --granularity 4 --steps 2 --output outputs/compare-small $(ARGS)

# Three tests at a time, since processes wait for each other half of the time; those of a file one after another, the
# files of long launches first.
PYTEST := $(BIN)/python -m pytest -n 3 --dist loadfile --no-loadscope-reorder tests/launch tests/device tests/fleet tests/unit tests/gpu

test: $(READY)       ## the tests: all that need no GPU, but for the longest tables
	$(PYTEST) $(ARGS)

test-all: $(READY)   ## with the longest tables
	$(PYTEST) -m "not gpu and not real" $(ARGS)

test-real: $(READY)  ## the tests on published data and weights: make test-real DATA=path
	$(if $(DATA),,$(error say where the data is: make test-real DATA=path))
	ZEROFIT_REAL_DATA="$(abspath $(DATA))" $(BIN)/python -m pytest tests -m real $(ARGS)

test-unit: $(READY)  ## the tests of single parts: a few minutes
	$(BIN)/python -m pytest tests/unit $(ARGS)

test-launch: $(READY) ## the tests that launch real runs with several processes
	$(BIN)/python -m pytest tests/launch $(ARGS)

test-versions: $(READY) ## the unit tests and the short agreement with the lowest and newest versions of the libraries: hours
	$(BIN)/python scripts/test_versions.py $(ARGS)

test-gpu: $(READY)   ## the tests that need a GPU
	$(BIN)/python -m pytest tests/gpu $(ARGS)

lint: $(READY)       ## check style and types
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

format: $(READY)     ## put into style
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

SITE_BUILDER := build/docs/env/bin/zensical

docs: $(SITE_BUILDER) ## build the documents into site/ and check its links; needs nothing of .venv
	$(<D)/python scripts/build_site.py

$(SITE_BUILDER): Makefile
	"$(PYTHON)" -m venv build/docs/env
	$(@D)/python -m pip install --quiet zensical==0.0.73
	@touch $@

docs-check: $(READY) ## check the documents: links, commands, options, licences
	$(BIN)/python -m pytest tests/unit/test_tree.py tests/unit/test_commands.py $(ARGS)

bench: $(READY)      ## measure the loop against a bare one and against the transformers Trainer
	$(BIN)/python benchmarks/loop_speed.py $(ARGS)

wheel: $(READY)      ## build the wheel into dist/
	$(BIN)/python -m pip wheel --quiet --no-deps --no-build-isolation --wheel-dir dist .

BUILDER = $(shell for name in docker podman buildah; do command -v $$name && break; done)

image:               ## build the container image zerofit:latest; for GPUs: make image TORCH=cuda
	$(or $(BUILDER),$(error image: install docker, podman or buildah)) build --build-arg TORCH="$(or $(TORCH),cpu)" \
	  --label org.opencontainers.image.version="$$(sed -n 's/__version__ = "\(.*\)"/\1/p' zerofit/__init__.py)" \
	  --label org.opencontainers.image.revision="$$(git rev-parse HEAD)" --tag zerofit $(ARGS) .

# Programs about dependencies, each in an environment of its own.
TOOL := $(BIN)/uv tool run --quiet --from

$(BIN)/uv: | $(READY)
	$(BIN)/python -m pip install --quiet uv==0.13.9

lock: $(BIN)/uv      ## resolve the dependencies into constraints.txt; for newer ones: make lock ARGS=--upgrade
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --annotation-style line \
	  --custom-compile-command "make lock" --extra trackers --extra dev --extra megatron --extra s3 --extra float8 \
	  --output-file constraints.txt pyproject.toml $(ARGS)

audit: $(BIN)/uv     ## ask PyPI for known vulnerabilities of the dependencies in constraints.txt
	$(TOOL) pip-audit==2.10.1 pip-audit --disable-pip --require-hashes --requirement constraints.txt $(ARGS)

sbom: $(BIN)/uv      ## write what constraints.txt holds to dist/zerofit.cdx.json, a CycloneDX SBOM
	@mkdir -p dist
	$(TOOL) cyclonedx-bom==7.5.0 cyclonedx-py requirements --pyproject pyproject.toml --output-reproducible \
	  --output-file dist/zerofit.cdx.json constraints.txt

clean:               ## remove caches and build leftovers (not .venv, not outputs/)
	rm -rf build dist site *.egg-info .pytest_cache .ruff_cache
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
