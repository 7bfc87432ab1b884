# Every target does its own set-up in .venv; nothing outside the folder is touched but the runtime's cache.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
KERNELS := $(wildcard quant/kernels/*.c quant/kernels/*.h)
PIP := $(BIN)/python -m pip --disable-pip-version-check

.PHONY: demo test lint runtime show clean

demo: $(VENV)/.installed
	$(BIN)/kimi-gguf demo

test: $(VENV)/.installed-test lint runtime
	$(BIN)/python -m pytest

lint: $(VENV)/.installed-test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

runtime: $(VENV)/.installed-test
	$(BIN)/kimi-gguf runtime build

show: $(VENV)/.installed-test runtime
	$(BIN)/python scripts/show.py

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml CMakeLists.txt $(KERNELS) | $(BIN)/python
	$(PIP) install -q -e .
	touch $@

$(VENV)/.installed-test: pyproject.toml CMakeLists.txt $(KERNELS) | $(BIN)/python
	$(PIP) install -q -e ".[test]"
	touch $@ $(VENV)/.installed

clean:
	rm -rf build dist $(VENV)
