# `make demo` and `make test` are for whoever arrives; both make .venv when it is not there.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test check format protos clean

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@

demo: .venv/ready ## export, check, serve and ask MiniLM
	$(BIN)/python examples/demo.py

test: .venv/ready ## every test
	$(BIN)/python -m pytest

check: .venv/ready ## format, lint, types, protos
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	cd protos && ../$(BIN)/buf lint

format: .venv/ready
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

protos: .venv/ready ## regenerate the stubs
	$(BIN)/python protos/generate.py

clean:
	rm -rf .venv dist build
