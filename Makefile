# loray: `make serve` serves the bundled model on this machine; `make help` lists the rest.

MODEL ?=
TP ?=
PORT ?=
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
PIP := PIP_DISABLE_PIP_VERSION_CHECK=1 $(BIN)/python -m pip install --no-compile --quiet --quiet
FOLDERS := deployments cluster models kernels
PYTEST := RAY_AUTH_MODE=disabled $(BIN)/python -m pytest -q
# A process for each core. Tests of the whole application share one Ray cluster instead, and run one after another.
SIDE_BY_SIDE := OMP_NUM_THREADS=1 $(PYTEST) -n auto --maxprocesses=4 --dist=worksteal --ignore=tests/e2e
SOURCES := $(FOLDERS) tests $(wildcard benchmarks examples)

.DEFAULT_GOAL := help
.PHONY: help serve test check lint bench bench-adapters bench-http soak venv clean

help:  ## list these commands
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 16
	@echo
	@echo "make serve MODEL=<bundled name, folder, GGUF file or Hugging Face id> TP=<ranks> PORT=<port>"

# Its last line is one exec, so that the launcher itself gets the terminal's signals.
serve: $(STAMP)  ## serve the model of serve_config.yaml here (MODEL= TP= PORT= override it); Ctrl-C ends it
	@mkdir -p adapters
	@exec $(BIN)/loray serve $(if $(MODEL),--model '$(MODEL)') $(if $(TP),--tensor-parallel-size '$(TP)') $(if $(PORT),--port '$(PORT)')

# Where Triton is, as on x86, its interpreter runs the GPU's kernels.
test: lint  ## lint, then every test but those for a GPU and the soak
	@$(SIDE_BY_SIDE) -m "not gpu and not soak"
	@! $(BIN)/python -c 'import triton' 2> /dev/null || TRITON_INTERPRET=1 $(SIDE_BY_SIDE) -m "gpu and not slow" tests/kernels
	@$(PYTEST) -m "not gpu and not soak" tests/e2e

check: lint  ## lint and the fast tests
	@$(SIDE_BY_SIDE) -m "not slow and not gpu and not soak"

lint: $(STAMP)  ## ruff and mypy
	@$(BIN)/ruff format --quiet --check $(SOURCES)
	@$(BIN)/ruff check --quiet $(SOURCES)
	@MYPYPATH=.venv/src $(BIN)/mypy --no-error-summary -p loray

bench: $(STAMP)  ## measure speed on this machine's CPU beside its peers (VLLM=<python with vLLM> adds that one)
	@$(BIN)/python -m benchmarks.cpu $(if $(VLLM),--vllm '$(VLLM)')

bench-adapters: $(STAMP)  ## measure a thousand adapters, slow downloads and fairness on this machine's CPU (ARGS=<options of benchmarks/adapters.py>)
	@$(BIN)/python -m benchmarks.adapters $(ARGS)

bench-http: $(STAMP)  ## measure what a streamed token costs in ingress, driver and proxy on this machine's CPU (ARGS=<options of benchmarks/http_cost.py>)
	@$(BIN)/python -m benchmarks.http_cost $(ARGS)

soak: $(STAMP)  ## run for hours under load and faults
	@$(PYTEST) -m soak --timeout=0

venv: $(STAMP)  ## make .venv with everything the other commands need

# lorax-client asks for an old huggingface_hub and uses none.
# A newer pip than Python brings reads the lists of packages in half the time.
# pip compiles the modules one by one; here all cores do. Left to the first import, they would be compiled by every process where PYTHONDONTWRITEBYTECODE is set.
# mypy reads files, not the editable install's import hook: .venv/src/loray shows it the folders under their package names.
$(STAMP): pyproject.toml
	@test -x $(BIN)/pip || { $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "loray needs Python 3.11 or newer, and $(PYTHON) is not: name another with PYTHON=python3.12" >&2; exit 1; }; \
	  echo "loray: making .venv" >&2; $(PYTHON) -m venv .venv; }
	@echo "loray: installing into .venv (the first time takes minutes: torch and Ray are large)" >&2
	@{ $(PIP) --upgrade pip && $(PIP) -e '.[test]' && $(PIP) --no-deps lorax-client==0.6.3; } 2> .venv/pip.log || { \
	  echo "loray: can't install the packages, is the network there? $$(grep ERROR .venv/pip.log | tail -1 | sed 's/^ *//') (all of it: .venv/pip.log)" >&2; exit 1; }
	@cd .venv/lib/python3*/site-packages && ../../../bin/python -m compileall -qq -j 0 . || true
	@mkdir -p .venv/src/loray
	@for folder in $(FOLDERS); do ln -sfn ../../../$$folder .venv/src/loray/$$folder; done
	@touch $@

clean:  ## remove .venv, caches and build outputs; models fetched to ~/.cache/loray stay
	@rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
