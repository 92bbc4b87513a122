# Needs make and Python 3.11 or newer, nothing else. Another Python: make test PYTHON=python3.12
PYTHON ?= python3
# Where `make bench` keeps what it measured; an interrupted one goes on there.
BENCH_OUT ?= runs/bench
VENV := .venv
BIN := $(VENV)/bin

# The stamps name the Python version, so that another PYTHON sets .venv up anew.
PYTHON_VERSION := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)
CORE := $(VENV)/core-$(PYTHON_VERSION).stamp
DEV := $(VENV)/dev-$(PYTHON_VERSION).stamp
PIP := $(BIN)/python -m pip install --quiet --quiet --disable-pip-version-check -c constraints.txt

.PHONY: help demo test soak mutants bench lint types check pins clean

help: ## what can be made (this list)
	@awk -F ':.*## ' '/^[a-z]+:.*## / {printf "make %-8s%s\n", $$1, $$2}' Makefile

demo: $(CORE) ## train on four simulated slices, lose two, take them back
	@set -- $(BIN)/elastix run recipes/quickstart.py --slices 4 \
		--lose 1@40 --lose 0@60 --return 1@80 --return 0@80 \
		--run-dir runs/quickstart-$$(date +%Y%m%d-%H%M%S); \
	echo "\$$ $$*"; "$$@"

test: $(DEV) ## run the tests
	@$(BIN)/python -m pytest -n auto --maxprocesses 4 --dist loadfile --no-loadscope-reorder

soak: $(DEV) ## run the long tests: minutes of seeded faults
	@$(BIN)/python -m pytest -m soak

mutants: $(DEV) ## change the machine and the driver in small ways: the tests must notice
	@$(BIN)/python tools/mutants.py

bench: $(DEV) ## measure what no test asserts: transitions, sums, data, and what a lost slice costs
	@$(BIN)/python bench/transition.py
	@$(BIN)/python bench/reduction.py
	@$(BIN)/python bench/data.py
	@$(BIN)/elastix bench bench/sizes.py:small bench/sizes.py:medium bench/sizes.py:large \
		--out $(BENCH_OUT)

lint: $(DEV) ## check style and format
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .

types: $(DEV) ## check types
	@$(BIN)/mypy

check: lint types test ## lint, types and test: what CI runs

pins: ## write constraints.txt anew, with the newest versions that fit
	@$(PYTHON) tools/pin.py python3.11 python3.12 python3.13

clean: ## remove .venv, caches and builds; runs/ stays
	rm -rf $(VENV) build dist .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(CORE): pyproject.toml constraints.txt
	$(make-venv)
	@$(PIP) -e .
	@touch $@

$(DEV): pyproject.toml constraints.txt
	$(make-venv)
	@$(PIP) -e '.[dev,text]'
	@touch $(CORE) $@

define make-venv
@$(PYTHON) -c '' 2>/dev/null || \
	{ echo "$(PYTHON) does not run: install Python 3.11 or newer, or name one: make PYTHON=python3.12"; exit 1; }
@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	{ echo "$(PYTHON) is $(PYTHON_VERSION), elastix needs 3.11 or newer; name one: make PYTHON=python3.12"; exit 1; }
@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || \
	{ echo "$(PYTHON) cannot make a venv: apt install python3-venv, or name another: make PYTHON=python3.12"; exit 1; }
@echo "setting up $(VENV) with Python $(PYTHON_VERSION) (once, about a minute)"
@$(BIN)/python -c 'import pip, sys; sys.exit("%d.%d" % sys.version_info[:2] != "$(PYTHON_VERSION)")' 2>/dev/null || \
	$(PYTHON) -m venv --clear $(VENV)
endef
