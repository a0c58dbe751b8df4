# `make demo` and `make test` do their own set-up; a second run reuses what the first installed.
SHELL := /bin/sh
VENV ?= .venv
BIN := $(VENV)/bin
PACKAGES := kernels plugin server evals deploy
# The folder kernels/ must never shadow the package of that name: keep the root off sys.path.
export PYTHONSAFEPATH := 1

.PHONY: promtool schemathesis help demo test lint types unit browser setup device data subjects clean
help:
	@echo "make demo   serve SmolLM2-135M with the blasst backend on this CPU and sweep thresholds"
	@echo "make test   lint, types and every test"
	@echo "make clean  remove the virtual environment and what builds left (caches of models stay)"

setup:
	@deploy/cpu/install.sh $(VENV)

device: setup
	@deploy/cpu/install.sh $(VENV) device

data: setup
	@$(BIN)/blasst ruler fetch

demo: data
	@exec $(BIN)/blasst demo

test: lint types unit

lint: device
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: device
	@mkdir -p $(VENV)/types/blasst
	@for p in $(PACKAGES); do ln -sfn "$(CURDIR)/$$p" $(VENV)/types/blasst/$$p; done
	cd $(VENV)/types && ../bin/mypy --config-file "$(CURDIR)/pyproject.toml" $(PACKAGES:%=-p blasst.%)

# FlashInfer's kernel, whose PTX is a test subject of the verifier.
subjects: device
	@$(BIN)/python -m blasst.kernels.verify.subjects.flashinfer

browser:
	@.ci/browser

promtool: device
	@.ci/promtool $(VENV)

schemathesis: setup
	@.ci/schemathesis $(VENV)

# Device code and RULER on both cores; engines, servers and browsers one at a time. All of it: pytest.
unit: device data subjects browser promtool schemathesis
	OMP_WAIT_POLICY=PASSIVE $(BIN)/pytest -n 2 --dist loadfile -m "not vllm and not browser" tests/kernels tests/evals
	$(BIN)/pytest -m "vllm or browser" tests/kernels tests/evals
	$(BIN)/pytest tests/deploy tests/drills tests/package tests/plugin tests/server

clean:
	rm -rf $(VENV) build dist *.egg-info demo-report
