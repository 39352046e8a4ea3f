# `make serve` and `make test` are all that a fresh clone needs; both set up what they use.

PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
MARK := $(VENV)/.installed
MARK_TEST := $(VENV)/.installed-test
export JAX_PLATFORMS ?= cpu

.PHONY: setup serve test test-fast lint types bench proto clean

## setup: a virtual environment with jetserve in it, and the default model
setup: $(MARK)
	$(BIN)/python -m jetserve.default_model

$(MARK): pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

$(MARK_TEST): $(MARK)
	$(BIN)/python -m pip install --quiet 'torch==2.13.0'
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	# For its generated stubs: what it depends on is old, and not wanted.
	$(BIN)/python -m pip install --quiet --no-deps 'google-jetstream==0.2.2'
	touch $@

## serve: set up everything and serve the default model
serve: setup
	$(BIN)/python run_server.py

## test: everything that CI runs
test: $(MARK_TEST) setup lint types
	$(BIN)/python -m pytest -n 2 --dist loadgroup

## test-fast: what a change should pass before the next one
test-fast: $(MARK_TEST)
	$(BIN)/python -m pytest -n 2 -m "not slow"

## lint: style, format and import contracts
lint: $(MARK_TEST)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

## types: the type checker
types: $(MARK_TEST)
	$(BIN)/mypy

## bench: the default model's speed and quality, as the README shows them
bench: setup
	$(BIN)/python run_offline.py --task=benchmark --batch_size=1 --input_tokens=512 --output_tokens=128

## proto: generate the gRPC code from its .proto, with the oldest generator whose code runs with all that we allow
proto:
	$(PYTHON) -m venv $(VENV)-proto
	$(VENV)-proto/bin/python -m pip install --quiet 'grpcio-tools==1.74.0' 'setuptools<81'
	$(VENV)-proto/bin/python -m grpc_tools.protoc -I . --python_out=. --pyi_out=. --grpc_python_out=. \
		jetserve/server/proto/jetstream.proto

clean:
	rm -rf $(VENV) $(VENV)-proto build dist *.egg-info
