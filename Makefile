# Two commands are all a newcomer needs:
#
#   make demo    see it work
#   make test    run everything that CI runs
#
# Both make .venv and install into it by themselves; the second time that takes no time.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed

.DEFAULT_GOAL := usage
.PHONY: usage demo test lint system-packages

usage:
	@echo "make demo    see it work: train, kill, resume, compare"
	@echo "make test    run everything that CI runs: lint, types, layers, sizes, promises, tests"

demo: $(INSTALLED)
	$(BIN)/python examples/killed_and_resumed.py

test: lint system-packages
	$(BIN)/pytest -q -n 2 --dist worksteal

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/sizes.py
	$(BIN)/python tools/promise.py --check

system-packages: $(INSTALLED)
	tools/system_packages.sh

$(INSTALLED): pyproject.toml constraints.txt tools/install.sh
	tools/install.sh $(VENV)
	touch $@
