# Two commands do everything on a fresh machine: `make demo` and `make test`.
# CVPO_VENV names another virtual environment, PYTHON another interpreter (3.11 or newer).

CVPO_VENV ?= .venv
PYTHON ?= python3
RUNS ?=

PY := $(CVPO_VENV)/bin/python
CORE := $(CVPO_VENV)-core
DEMO := steps=75 evaluation.every=15 'run_dir=runs/demo/{method}-{seed}'
# One thread a test process: two of them fill two cores, and more threads than cores crawl.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest -n 2 --dist loadscope
CORE_TESTS := $(addprefix tests/cvpo/test_,advantage.py bound.py curriculum.py estimator.py groups.py \
	light.py loss.py metrics.py samplers.py stochasticity.py trackers.py)

.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast test-core bench figures runs lint format clean

help:  ## What can be made
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 14

install: $(CVPO_VENV)/.installed  ## The virtual environment, with everything in it

$(CVPO_VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Python 3.11 or newer is needed: make PYTHON=python3.11 ..." if sys.version_info < (3, 11) else 0)'
	@echo "Installing into $(CVPO_VENV) (a few minutes the first time) ..."
	@$(PYTHON) -m venv $(CVPO_VENV)
	@$(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

demo: install  ## Warm start, VAPO, CVPO, and what came of it: under ten minutes on two cores
	$(PY) -m train warmstart
	@mkdir -p runs/demo
	@echo "VAPO and CVPO side by side, one core each (VAPO's progress: runs/demo/vapo.log)"
	@$(PY) -m train run method=vapo $(DEMO) > runs/demo/vapo.log 2>&1 & vapo=$$!; \
	trap 'kill $$vapo 2> /dev/null' EXIT INT TERM; \
	$(PY) -m train run method=cvpo $(DEMO) && { wait $$vapo || { tail -n 3 runs/demo/vapo.log; false; }; }
	$(PY) -m analysis summary runs/demo/vapo-1 runs/demo/cvpo-1 -o runs/demo/summary
	$(PY) -m analysis report runs/demo/vapo-1 runs/demo/cvpo-1 -o runs/demo/report.html
	@echo
	@echo "Open runs/demo/report.html in a browser. The table is in runs/demo/summary/summary.csv, the"
	@echo "curve beside it (learning_curve.png), the logs in runs/demo/vapo-1 and cvpo-1. Try next:"
	@echo "  $(PY) -m train run method=cvpo seed=2 stochasticity.arm=flipped run_dir=runs/flipped"
	@echo "  $(PY) -m train run --help"
	@echo "  $(CVPO_VENV)/bin/tensorboard --logdir runs/demo"

test: install  ## Every test
	$(PYTEST)

test-fast: install  ## The tests that take seconds
	$(PYTEST) -m 'not slow'

test-core: $(CORE)/.installed  ## The method alone, with torch, NumPy, jaxtyping, pytest, hypothesis
	OMP_NUM_THREADS=1 $(CORE)/bin/python -m pytest -q -p no:cacheprovider -m 'not slow' $(CORE_TESTS)

$(CORE)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -m venv $(CORE)
	@$(CORE)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt \
		torch numpy jaxtyping pytest hypothesis
	@touch $@

bench: install  ## Speed, as ratios measured side by side
	$(PY) -m tests.bench

figures: install  ## Every table and figure, from the kept runs or RUNS="runs/a runs/b"
	$(PY) -m paper_figures $(if $(RUNS),--runs $(RUNS))

runs: install  ## The kept runs again: trained, simulated, thinned, packed (two hours, resumable)
	$(PY) -m train sweep --at-once 2
	$(PY) -m train score --critic runs/exhibits/vapo-1/checkpoints/step-00000100 --name vapo-1 \
		--every 2 --first 82 $$(printf -- '--run %s ' runs/exhibits/*)
	$(PY) -m sim all overwrite=true
	rm -rf runs/kept
	$(PY) -m analysis thin --every 2 runs/exhibits/* runs/sim/* -o runs/kept
	$(PY) -m paper_figures.kept runs/kept/*

lint: install  ## Format, lint and types
	$(PY) -m ruff format --check .
	$(PY) -m ruff check .
	$(PY) -m mypy

format: install  ## Reformat
	$(PY) -m ruff format .
	$(PY) -m ruff check --fix .

clean:  ## Remove the virtual environments (runs are kept)
	rm -rf $(CVPO_VENV) $(CORE)
