# paralab: everything a learner or a contributor does, from a fresh clone, with make and Python 3.11+.
#
#   make lab     open the labs in JupyterLab
#   make demo    train on four data-parallel ranks without a browser, write one HTML report
#   make test    the tests, as continuous integration runs them; installs chromium if there is no browser and it may
#   make test-spawn  launches, equality and two labs with the start of ranks that macOS needs
#   make virtual  all pairwise plans and pipelines on virtual GPUs, of which `make test` has a few
#   make memory  predicted memory against the bytes of tensors: 200 drawn plans, 20 searches
#   make gpu     the same code on this machine's GPUs, every plan and paradigm; writes gpu.md
#   make nbval   of `make test` the labs alone: their stored outputs against a fresh run by nbval
#   make bench   every claim about seconds, and what you would use instead; writes bench.json
#   make labs    rebuild the notebooks from tests/labs/src (needs chromium, for their pictures)
#   make clean   remove the environment and everything these targets wrote
#
# Each sets up .venv the first time, and again when pyproject.toml changes.

PYTHON ?= python3
VENV ?= .venv
TORCH ?= torch==2.13.0
LAB_ARGS ?=
TEST_ARGS ?=

PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check install -qq
READY := $(VENV)/.ready
READY_DEV := $(VENV)/.ready-dev

# JupyterLab's defaults in this environment: it does not ask whether it may fetch news, and shows a
# text as one reads it.
LAB_DEFAULTS := $(VENV)/share/jupyter/lab/settings
NO_NEWS := "@jupyterlab/apputils-extension:notification": {"fetchNews": "false"}
AS_READ := "defaultViewers": {"markdown": "Markdown Preview"}
READABLE := "@jupyterlab/docmanager-extension:plugin": {$(AS_READ)}

# Files of tests at a time.
WORKERS ?= $(if $(filter 0 1 2 3,$(shell nproc 2>/dev/null || echo 2)),2,3)

# The tests start hundreds of interpreters: what each would compile again is kept, also where the
# environment says otherwise.
unexport PYTHONDONTWRITEBYTECODE

PYTEST := $(PY) -m pytest $(TEST_ARGS)

# Each file's tests go to one worker, in the order that tests/conftest.py gives them.
FILES := --numprocesses=$(WORKERS) --dist=loadfile --no-loadscope-reorder

# JupyterLab refuses to start as root (a container's usual user) unless told that this is meant.
AS_ROOT := $(if $(filter 0,$(shell id -u)),--allow-root)

.PHONY: help lab demo test test-spawn virtual memory gpu nbval bench labs clean
.DEFAULT_GOAL := help

help:
	@sed -n '2,/^$$/s/^# \{0,1\}//p' Makefile

$(READY): pyproject.toml
	@command -v $(PYTHON) >/dev/null || { \
	  echo "paralab needs Python 3.11 or newer, and there is no '$(PYTHON)' here." >&2; \
	  echo "Install it (Debian, Ubuntu: sudo apt install python3 python3-venv)," >&2; \
	  echo "or name another: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "paralab needs Python 3.11 or newer; '$(PYTHON)' is $$($(PYTHON) -V 2>&1)." >&2; \
	  echo "Name another: make $(MAKECMDGOALS) PYTHON=/path/to/python3.11" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
	  echo "'$(PYTHON)' cannot make virtual environments: its venv module is a package of its own." >&2; \
	  echo "Debian, Ubuntu: sudo apt install python$$($(PYTHON) -c \
	    'import sys; print("%d.%d" % sys.version_info[:2])')-venv" >&2; exit 1; }
	@echo "[1/3] virtual environment in $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@echo "[2/3] $(TORCH), the large one"
	@$(PIP) '$(TORCH)'
	@echo "[3/3] paralab and JupyterLab"
	@$(PIP) --editable .
	@mkdir -p $(LAB_DEFAULTS) && echo '{$(NO_NEWS), $(READABLE)}' >$(LAB_DEFAULTS)/overrides.json
	@touch $@

$(READY_DEV): $(READY)
	@echo "[+] test tools"
	@$(PIP) --editable '.[dev]'
	@touch $@

lab: $(READY)
	@echo "JupyterLab opens on labs/; stop it with Ctrl+C here."
	@$(VENV)/bin/jupyter lab --notebook-dir=labs $(AS_ROOT) --LabApp.news_url=None \
	  --LabApp.default_url=/lab/tree/README.md \
	  --LabApp.check_for_updates_class=jupyterlab.NeverCheckForUpdate $(LAB_ARGS)

demo: $(READY)
	@mkdir -p demo
	@$(PY) -m paralab run --dp 4 --microbatch-size 4 --bucket-bytes 1MiB --steps 8 --predict \
	  --save demo/run.json --html demo/report.html

test: $(READY_DEV)
	@echo "== ruff"
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@echo "== a browser for the labs"
	@$(PY) tests/browser/chromium.py
	@echo "== how fast this machine is, measured once, while nothing else runs"
	@$(PY) -c 'import paralab; paralab.Cluster.local()'
	@echo "== tests, $(WORKERS) files at a time"
	@$(PYTEST) tests labs --nbval $(FILES)

# macOS's way to start ranks, forced here. A launch takes seconds then, so not all tests.
test-spawn: export PARALAB_START := spawn
test-spawn: $(READY_DEV)
	@$(PYTEST) tests/test_spawn.py tests/test_launch.py tests/test_launch_failures.py \
	  tests/test_stop.py labs/00_*.ipynb labs/02_*.ipynb --nbval --timeout=900 $(FILES)

virtual: $(READY_DEV)
	@PARALAB_VIRTUAL_PLANS=all $(PYTEST) -k 'plan or bubbles or pipelines' \
	  tests/test_virtual_plans.py tests/test_virtual.py

memory: $(READY_DEV)
	@PARALAB_MEMORY_PLANS=200 PARALAB_MEMORY_SEARCHES=20 $(PYTEST) -k 'drawn or witness or limit' \
	  tests/test_interpret_memory.py tests/test_search.py \
	  --numprocesses=$(WORKERS) --dist=load

gpu: $(READY_DEV)
	@$(PYTEST) tests/test_gpu.py -m gpu

nbval: $(READY_DEV)
	@$(PYTEST) labs --nbval $(FILES)

bench: $(READY_DEV)
	@$(PYTEST) tests/benchmarks/claims.py
	@$(PY) tests/benchmarks/run.py

labs: $(READY_DEV)
	@$(PY) tests/labs/build.py

clean:
	rm -rf $(VENV) build dist demo bench.json gpu.md *.egg-info .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
