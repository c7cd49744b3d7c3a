# `make help` lists the targets. Each does its own set-up first: nothing is to be prepared by hand.

SHELL := /bin/bash
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

PYTHON ?= python3
# Tests run side by side in this many processes (of two cores; they often wait), those of one file in one of them, in
# the order of the folders.
WORKERS ?= 3
# Simulated jobs of each mode: make sim SEEDS=100000
SEEDS ?= 1000
# Options of `make chaos`, and of `make zoo`.
ARGS ?=
ZOO ?=
# Added to every `pip install`; for a torch without CUDA on Linux:
#   make setup PIP_ARGS="--extra-index-url https://download.pytorch.org/whl/cpu"
PIP_ARGS ?=

# Another torch than that of constraints.txt, in an environment of its own: make test TORCH=2.10
TORCH ?=
VENV := .venv$(if $(TORCH),-torch-$(TORCH))
CONSTRAINTS := $(if $(TORCH),$(VENV)/constraints.txt,constraints.txt)
PY := $(VENV)/bin/python
INSTALLED := $(VENV)/.installed
ETCD := .etcd/.fetched
# Compiled modules are kept (where PYTHONDONTWRITEBYTECODE is set as well): the tests start hundreds of processes.
PYTEST := PYTHONDONTWRITEBYTECODE= $(PY) -m pytest -q -n $(WORKERS) --dist loadfile --no-loadscope-reorder
PIP := $(PY) -m pip install --quiet --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) $(PIP_ARGS)

.PHONY: help setup run test test-slow lint types accept bench cost zoo converge examples chaos sim gpu hdfs ray slurm docs clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

setup: $(INSTALLED) $(ETCD)  ## virtual environment in .venv, dependencies, etcd in .etcd; done once

$(PY):
	@echo "[setup 1/4] virtual environment in $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' \
	  || { echo "Python 3.10 or newer is needed: make PYTHON=python3.12 ..."; exit 1; }
	@$(PYTHON) -m venv $(VENV) \
	  || { rm -rf $(VENV); echo "python3 -m venv failed; on Debian: apt-get install python3-venv"; exit 1; }

.venv-torch-$(TORCH)/constraints.txt: constraints.txt | $(PY)
	@{ grep -v '^torch==' $<; echo 'torch==$(TORCH).*'; } > $@

# torch comes first and pinned, so that nothing after it can pull in another build of it.
$(INSTALLED): setup.cfg pyproject.toml $(CONSTRAINTS) | $(PY)
	@echo "[setup 2/4] PyTorch (the largest part, some minutes)"
	@$(PIP) torch
	@echo "[setup 3/4] graphft and its other dependencies"
	@$(PIP) --editable '.[dev,examples,models]'
	@touch $@

$(ETCD): | $(INSTALLED)
	@echo "[setup 4/4] etcd in .etcd"
	@$(PY) -m graphft etcd --install --to .etcd
	@touch $@

run: setup  ## the main job: 336,776 real flights, 2 trainers, 2 pservers, one trainer killed on the way
	@$(PY) examples/03_flights.py

test: setup  ## the tests; those that take longest, and whose like it runs as well, are left to test-slow
	@$(PYTEST) -m "not slow"

test-slow: setup  ## the others (about as long): CI runs both
	@$(PYTEST) -m slow

lint: setup  ## ruff
	@$(VENV)/bin/ruff check . && $(VENV)/bin/ruff format --check --quiet .

types: setup  ## mypy
	@$(VENV)/bin/mypy

accept: setup  ## rewrite the golden files from what the code prints now; review with git diff
	@GRAPHFT_ACCEPT=1 $(PY) -m pytest -q $$(grep -rl assert_golden tests --include='test_*.py')

# Parts of others, and those with a target or a page of their own.
NOT_BENCH := $(addprefix benchmarks/,convergence.py exchange.py flights_model.py push.py ray_%.py torch_%.py zoo%.py)

bench: setup  ## what a step costs beside plain PyTorch
	@set -e; for file in $(filter-out $(NOT_BENCH),$(wildcard benchmarks/*.py)); do $(PY) $$file; done

cost: setup  ## CPU seconds per step by role
	@$(PY) benchmarks/ft_overhead.py --cost --seconds 8

zoo: setup .zoo  ## what users of torch train, captured and compared with torch (about half an hour; ZOO="--match llama")
	@PYTHONPATH=.:.zoo $(PY) benchmarks/zoo.py $(ZOO)

# The extra zoo, in a folder of its own: where torchvision does not fit torch's build, transformers cannot be imported
# beside it. Without dependencies: they are there, and none brings another build of torch.
.zoo: setup.cfg $(CONSTRAINTS) | $(INSTALLED)
	@$(PIP) --no-deps --upgrade --target $@ expecttest timm torchvision || { rm -rf $@; exit 1; }
	@touch $@

converge: setup  ## sync, async and its modes side by side, with the tables of docs/convergence.md (about 15 minutes)
	@$(PY) benchmarks/convergence.py --faults 4

examples: setup  ## all examples and the notebook, small, as their reader runs them (CI runs the first)
	@GRAPHFT_EXAMPLES=1 $(PY) -m pytest -q tests/examples

chaos: setup  ## 720 random faults on 10 jobs, sync and async (an hour or more; fewer: ARGS="--only sync --share 0.5")
	@$(PY) -m tests.chaos $(ARGS)

sim: setup  ## real roles in a simulated world: SEEDS sync and async jobs, with and without a coordinator
	@$(PY) -m tests.sim --mode sync --seeds $(SEEDS)
	@$(PY) -m tests.sim --mode async --seeds $(SEEDS)
	@for mode in sync async; do $(PY) -m tests.sim --mode $$mode --dispatch coordinator --seeds $(SEEDS) || exit; done

gpu: setup  ## everything that needs a GPU, in one table; without one, small and on the CPU
	@$(PY) -m tests.gpu $(ARGS)

hdfs: setup .hdfs  ## the tests on a real HDFS (gets 220 MB once, and needs Java and a C compiler; without it they are skipped)
	@$(PY) -m pytest -q -k hdfs tests/fs tests/loop/test_loop.py

ray: setup  ## the tests on a real Ray of several nodes (gets Ray once; without it they are skipped)
	@$(PY) -c 'import ray' 2>/dev/null || $(PIP) --editable '.[ray]'
	@$(PY) -m pytest -q tests/engines/test_ray.py tests/engines/test_ray_processes.py

.hdfs:
	@$(PY) tests/support/get_hdfs.py $@

slurm: setup  ## the tests on a real Slurm of two nodes of this machine (as root; apt-get install slurm-wlm munge)
	@GRAPHFT_SLURM=1 $(PY) -m pytest -q -rs tests/engines/test_slurm_engine.py tests/engines/test_slurm.py

docs: setup  ## regenerate docs/ops.md and docs/options.md from the code
	@$(PY) -m docs.reference

clean:  ## remove what make made (virtual environment, etcd, job folders, caches)
	rm -rf .venv .venv-torch-* .etcd .hdfs .zoo jobs out build dist *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
