# Two commands are all a newcomer needs:
#
#   make demo    see it work
#   make test    run everything that CI runs
#
# Both make .venv and install into it by themselves; the second time that takes no time.
# `make soak HOURS=8` proves for hours under random seeds; killed, it goes on: see docs/prove.md.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
HOURS ?= 1

.DEFAULT_GOAL := usage
.PHONY: usage demo test soak lint system-packages

usage:
	@echo "make demo    see it work: train, kill, resume, compare; a minute or two"
	@echo "make test    run everything that CI runs: lint, types, layers, sizes, promises, API page, tests"

demo: $(INSTALLED)
	$(BIN)/unbroken demo

test: lint system-packages
	$(BIN)/pytest -q -n 2 --dist worksteal

soak: $(INSTALLED)
	$(BIN)/python tools/soak.py --hours $(HOURS)

lint: $(INSTALLED)
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python tools/sizes.py
	$(BIN)/python tools/promise.py --check
	$(BIN)/python tools/api.py --check

system-packages: $(INSTALLED)
	tools/system_packages.sh

$(INSTALLED): pyproject.toml constraints.txt tools/install.sh
	tools/install.sh $(VENV)
	touch $@
