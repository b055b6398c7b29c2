# Every target works from a fresh clone with python3 >= 3.11 and make, as root or as an ordinary user.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help venv demo test lint bench chaos lock clean

help:
	@echo "make demo    watch overdue bookings expire on a real PostgreSQL"
	@echo "make test    lint, types and every test"
	@echo "make bench   measure, print the ratios, write benchmarks/results.md"
	@echo "make chaos   the crash and race tests at full counts, write benchmarks/chaos.md"
	@echo "make lock    resolve pyproject.toml again into requirements/*.lock"
	@echo "make clean   stop the development servers, remove what make made"

venv: $(STAMP)

# pip verifies the hash of every file it downloads; the project itself is installed without its dependencies.
$(STAMP): requirements/dev.lock pyproject.toml
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "crmctl needs python3 >= 3.11")'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r requirements/dev.lock
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
	touch $(STAMP)

demo: $(STAMP)
	$(BIN)/crmctl demo

# Two at a time, file by file: the tests mostly wait, for servers that they start, stop and kill.
test: lint
	$(BIN)/python -m pytest -n 2 --dist loadfile

lint: $(STAMP)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

bench: $(STAMP)
	$(BIN)/python -m benchmarks

chaos: $(STAMP)
	CRMCTL_TEST_CHAOS=full $(BIN)/python -m pytest -m chaos

lock:
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header pyproject.toml -o requirements/runtime.lock
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header --extra embedded --extra otel --group dev \
	  -c requirements/runtime.lock pyproject.toml requirements/build.in -o requirements/dev.lock
	$(BIN)/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-header \
	  -c requirements/dev.lock requirements/build.in -o requirements/build.lock

clean:
	if [ -x $(BIN)/crmctl ]; then $(BIN)/crmctl dev down || true; fi
	rm -rf $(VENV) .crmctl build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis src/*.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
