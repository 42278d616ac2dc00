# To create .venv; any Python from 3.11 to 3.13
PYTHON ?= python3.11
# More flags for the demo, pytest or a benchmark, as in: make demo ARGS="--train_file my.txt --trainers 3"
ARGS ?=
# -n 4: trainers mostly wait in the tests. With 3 workers on two cores up to half of their time is unused.
PYTEST = OMP_NUM_THREADS=1 .venv/bin/python -m pytest --dist worksteal --durations=15
BENCH = OMP_NUM_THREADS=1 .venv/bin/python -W ignore benchmarks

.PHONY: help install install-organiser demo test test-fast test-all test-gpu test-browser soak bench lint lock clean

help:  ## List the targets
	@sed -n 's/^\([a-z-]*\):.*  ## /\1\t/p' Makefile | expand -t 20

install: .venv/installed  ## Create .venv with what data preparation, trainers and the monitor need

install-organiser: .venv/installed-organiser  ## Also install what dashboards, the demo and AWS need

demo: .venv/installed-organiser  ## Train a small model with two trainers on this machine, in about two minutes
	@.venv/bin/python run_local_demo.py $(ARGS)

# Without test_layout.py, which `make lint` runs
test: .venv/installed-dev  ## Run the tests: fast ones, swarms in one process, and README's journeys
	$(PYTEST) -n 4 -m "not long and not gpu and not browser" --ignore tests/common/test_layout.py $(ARGS)

test-fast: .venv/installed-dev  ## Run the fast tests (no peers, no other programs); ARGS=tests/peerstep for one package
	$(PYTEST) -n 4 -m "not long and not peers and not programs and not gpu and not browser" $(ARGS)

test-all: .venv/installed-dev  ## Also run the slow tests
	$(PYTEST) -n 4 -m "not gpu and not browser" $(ARGS)

test-gpu: .venv/installed-dev  ## Run the tests that need a GPU or two
	.venv/bin/python -m pytest -n 0 -m gpu $(ARGS)

test-browser: .venv/installed-dev  ## Run the tests of the dashboard in Chromium (apt install chromium)
	.venv/bin/python -m pytest -n 0 -m browser $(ARGS)

soak: .venv/installed-dev  ## Run for half an hour: an evening with faults and attacks (as root), and a search for leaks
	.venv/bin/python -W ignore benchmarks/home_evening.py --attacks --minutes 60
	.venv/bin/python -W ignore tests/support/soak.py --steps 500

bench: .venv/installed-dev  ## Measure on this machine, in about 20 minutes; benchmarks/RESULTS.md lists them
	$(BENCH)/preparation.py --repeat 1
	$(BENCH)/preparation.py --start
	$(BENCH)/overhead.py --repeat 1
	$(BENCH)/rounds.py

lint: .venv/installed-dev  ## Check style, format, imports, and the types of the engine
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/lint-imports
	.venv/bin/basedpyright
	@# Tests access 32 private names of others, most of them those of hivemind that the simulations replace.
	.venv/bin/ruff check --isolated --select SLF --output-format concise tests | tail -n 1 | awk '{ print; exit $$2 > 40 }'
	@# Of the rest, no more errors than the 271 that there are, and a few for other versions of packages; lower the number.
	.venv/bin/basedpyright --level error cotrain *.py | tail -n 1 | awk '{ print; exit $$1 > 272 }'
	.venv/bin/python -m pytest -q -p no:xdist tests/common/test_layout.py

# torch's build and its CUDA packages depend on the GPU.
CUDA = torch triton cuda-bindings cuda-pathfinder cuda-toolkit $(addprefix nvidia-,cublas cuda-cupti cuda-nvrtc \
	cuda-runtime cudnn-cu13 cufft cufile curand cusolver cusparse cusparselt-cu13 nccl-cu13 nvjitlink nvshmem-cu13 nvtx)
lock: .venv/installed-organiser  ## Write requirements.lock, the hashes of what requirements.txt needs (pip install uv)
	.venv/bin/pip freeze --exclude torch > .venv/tested.txt  # other versions may not fit the organiser's packages
	uv pip compile -q --universal --generate-hashes --no-annotate --no-header --python-version 3.11 \
		--constraint .venv/tested.txt $(addprefix --no-emit-package ,$(CUDA)) requirements.txt -o requirements.lock

clean:  ## Remove .venv, the demo's folder and caches
	rm -rf .venv demo .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

.venv/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' || \
		{ echo 'Python 3.11, 3.12 or 3.13 is needed. Where is it? make PYTHON=/path/to/python3.11 ...' >&2; exit 1; }
	$(PYTHON) -m venv .venv

# Stamp files: skip pip if the requirements have not changed.
.venv/installed: requirements.txt | .venv/bin/python
	.venv/bin/pip install --disable-pip-version-check --requirement $<
	@touch $@

.venv/installed-organiser: requirements-organiser.txt .venv/installed
	.venv/bin/pip install --disable-pip-version-check --requirement $<
	@touch $@

.venv/installed-dev: requirements-dev.txt .venv/installed-organiser
	.venv/bin/pip install --disable-pip-version-check --requirement $<
	@touch $@
