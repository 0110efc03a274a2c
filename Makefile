# Two commands are all a newcomer needs:
#
#   make demo    see it work
#   make test    lint, types, and a quick test of every promise: minutes
#
# Both make .venv and install into it by themselves; the second time that takes no time.
# `make test-deep` runs the other tests; CI runs both. tests/tiers.toml says which tests are deep.
# `make bench` measures saving and loading beside other tools and the disk: see docs/measured/bench.md.
# `make soak HOURS=8` proves for hours under random seeds; resumable: see docs/prove.md.

VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/.installed
HOURS ?= 1
# Tests wait for the disk and for processes half of the time: four workers keep two cores busy.
WORKERS ?= 4
# Hundreds of tests start Python anew: let it keep what it has compiled, also where the environment says otherwise.
unexport PYTHONDONTWRITEBYTECODE
PYTEST := $(BIN)/pytest -q -n $(WORKERS) --dist worksteal

.DEFAULT_GOAL := usage
.PHONY: usage demo test test-deep bench soak lint system-packages

usage:
	@echo "make demo         see it work: train, kill, resume, compare; a minute or two"
	@echo "make test         check every promise: lint, types, layers, sizes, API page, quick tests"
	@echo "make test-deep    the other tests: all crash points, all mutations, long chains; CI runs both"

demo: $(INSTALLED)
	$(BIN)/unbroken demo

test: lint system-packages
	$(PYTEST) --tier quick

test-deep: system-packages
	$(PYTEST) --tier deep

# On this disk, not on a file system in memory, where a sync costs nothing.
bench: $(INSTALLED)
	PYTHON=$(CURDIR)/$(BIN)/python tools/peers.sh .peers
	mkdir -p build
	$(BIN)/python -m bench.compare --directory build

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
	$(BIN)/python tools/compat.py --check

system-packages: $(INSTALLED)
	tools/system_packages.sh
	tools/moto.sh .moto
	tools/azurite.sh .azurite

$(INSTALLED): pyproject.toml constraints.txt tools/install.sh
	tools/install.sh $(VENV)
	touch $@
