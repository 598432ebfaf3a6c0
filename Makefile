# Each of demo, test, bench and soak needs nothing but Python 3.11 or later and make: it makes its
# own virtual environment, once. `make help` says what there is.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

VENV ?= .venv
# Installed before everything else and by exact version: a range would take the newest build, with
# gigabytes of CUDA packages. For a GPU machine: make test TORCH="torch --index-url ...".
TORCH ?= torch==2.13.0
# Parallel test processes of each lane; JOBS=4 is for a quick look on a larger machine. Tests of real
# processes fork, which workers of xdist, having threads, must not: so there are four lanes of one
# process each, which take about as long as each other. A lane waits for a large part of its time:
# three leave two cores idle for a third of theirs. Pure tests use all of two cores, and run before,
# in two halves of one process each: every worker of xdist collects all of the tests.
JOBS ?= 0
PURE_1 := tests/properties tests/style tests/unit
PURE_2 := tests/cli tests/simulation
# Most of what trains on a real Kubernetes control plane takes three minutes more than these have:
# `make kubernetes`. The others run here where it is (`make kubernetes-bed`), and say so if not.
TRAINED := $(wildcard tests/kubernetes/test_bed.py tests/kubernetes/test_elasticjob_*.py \
	tests/kubernetes/test_kube_rendezvous.py tests/kubernetes/test_walkthrough.py \
	tests/process/test_kubernetes_jobs.py)
KUBERNETES := tests/kubernetes tests/conformance tests/process/test_kubernetes_jobs.py
# The suites of `make matrix`: what decides, on each Python. The rest is processes, which take long.
CORE := tests/properties tests/unit tests/cli tests/simulation tests/conformance/test_storages.py
# What to build beside lint and the pure tests: BED=kubernetes-bed, where the lanes are to have it.
BED ?=
# The control plane takes 4% of a processor while it waits, so its tests come last: it starts for
# the first of them, and ends with the lane.
LANE_1 := tests/gpu tests/hostile tests/hosts tests/numerics \
	$(wildcard tests/process/test_[a-c]*.py tests/process/test_w*.py) \
	tests/conformance $(filter-out $(TRAINED), $(wildcard tests/kubernetes/test_*.py))
LANE_2 := tests/frameworks $(wildcard tests/process/test_[d-f]*.py)
LANE_3 := $(filter-out $(TRAINED), $(wildcard tests/process/test_[g-p]*.py)) \
	$(wildcard tests/process/test_ru*.py)
LANE_4 := $(wildcard tests/process/test_r[aeop]*.py tests/process/test_[s-v]*.py \
	tests/process/test_[x-z]*.py)
# What runs in workers mostly, and takes long: `make coverage` is of the control plane.
UNCOVERED := tests/frameworks tests/gpu tests/hosts tests/numerics tests/style \
	$(wildcard $(addprefix tests/process/test_, checkpoint_faults.py comms_*.py data_*.py \
	ddp_*.py deterministic_*.py digits.py gpt.py imagenet.py leaks_in_place.py \
	ledger_schedules.py long_job.py snapshot_*.py zygote_likeness.py))
ARGS ?=
PYTEST = $(BIN)/python -m pytest
COVERED = $(BIN)/python -m coverage run -m pytest --timeout 900
# pytest's exit code where ARGS choose none of the tests of one half.
NONE_CHOSEN := 5
TESTS_FAILED := 1

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := $(VENV)/bin
# The stamp is newer than pyproject.toml while the environment is what it asks for.
STAMP := $(VENV)/.elastane-$(shell echo '$(TORCH)' | cksum | cut -d' ' -f1)
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# Where this is set, each agent that a test starts would compile its imports anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help env demo test pure-1 pure-2 lane-1 lane-2 lane-3 lane-4 lint bench soak nightly gpu matrix kubernetes kubernetes-bed \
	coverage covered-1 covered-2 covered-3 covered-4 release docs man constraints format clean

help: ## list what can be made
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 24

env: $(STAMP) ## make the virtual environment, if it is not there yet

$(STAMP): pyproject.toml
	@test -n '$(PYTHON)' || { echo 'no Python 3.11 or later found; name one: make PYTHON=/path/to/python3' >&2; exit 1; }
	@.ci/packages $(PYTHON)
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@# The pip of Python 3.11 takes 52 s of processor time for what the newest installs in 30 s.
	$(BIN)/python -m pip install --quiet --no-compile --upgrade pip
	@# pip would compile 19,000 files one after the other, of which the tests import a third.
	$(BIN)/python -m pip install --quiet --no-compile $(TORCH)
	$(BIN)/python -m pip install --quiet --no-compile -e '.[demo,test]'
	@$(BIN)/python -m compileall -q src tests & \
		$(BIN)/python -c 'import accelerate, lightning, torch._dynamo, transformers.trainer'; wait $$!
	@rm -f $(VENV)/.elastane-*
	@touch $@

demo: env ## train a classifier while workers and nodes die (about a minute)
	$(BIN)/elastane demo $(ARGS)

lint: env ## style, formatting, types and layers
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: ## lint, and all tests but the soak
	@$(MAKE) --no-print-directory -j 4 --output-sync=target lint pure-1 pure-2 $(BED)
	@$(MAKE) --no-print-directory -j 4 --output-sync=target lane-1 lane-2 lane-3 lane-4

pure-1: env
	$(PYTEST) -n $(JOBS) $(PURE_1) $(ARGS) || [ $$? -eq $(NONE_CHOSEN) ]

pure-2: env
	$(PYTEST) -n $(JOBS) $(PURE_2) $(ARGS) || [ $$? -eq $(NONE_CHOSEN) ]

lane-1: env
	$(PYTEST) -n $(JOBS) $(LANE_1) $(ARGS) || [ $$? -eq $(NONE_CHOSEN) ]

lane-2: env
	$(PYTEST) -n $(JOBS) $(LANE_2) $(ARGS) || [ $$? -eq $(NONE_CHOSEN) ]

lane-3: env
	$(PYTEST) -n $(JOBS) $(LANE_3) $(ARGS) || [ $$? -eq $(NONE_CHOSEN) ]

lane-4: env
	$(PYTEST) -n $(JOBS) $(LANE_4) $(ARGS) || [ $$? -eq $(NONE_CHOSEN) ]

bench: env ## elastane and its peers side by side; prints the tables, writes JSON (an hour)
	$(BIN)/python -m bench $(ARGS)

soak: env ## new examples for the properties, the long tests, and second proofs of what `make test` proves once
	$(BIN)/python -m pip install --quiet -e '.[ray]'
	$(BIN)/python -m pytest --hypothesis-profile search -m 'soak or not soak' tests/properties $(ARGS)
	$(BIN)/python -m pytest -m soak --ignore tests/properties --timeout 3600 $(ARGS)

# Each night has seeds of its own.
nightly: env ## ten minutes of the long job under faults, seeds of faults into each store and kind of job
	SOAK_S=600 $(BIN)/python -m pytest -m soak -k an_hour_of_faults $(ARGS)
	ELASTANE_STORE_SEEDS=$$((2 * $$(date +%y%j))):2 $(BIN)/python -m pytest -m soak \
		tests/conformance/test_store_histories.py $(ARGS)
	ELASTANE_AGENT_SEEDS=$$((2 * $$(date +%y%j))):2 $(BIN)/python -m pytest -m soak \
		tests/hosts/test_hosts_histories.py $(ARGS)
	ELASTANE_LOOP_SEEDS=$$((20 * $$(date +%y%j))):20 $(BIN)/python -m pytest -m soak \
		tests/process/test_drawn_loops.py tests/process/test_drawn_joining.py $(ARGS)
	ELASTANE_LOOP_SEEDS=$$((8 * $$(date +%y%j))):8 $(BIN)/python -m pytest -m soak \
		tests/process/test_drawn_outside.py tests/process/test_drawn_steps.py $(ARGS)

kubernetes: env kubernetes-bed ## the tests against a real Kubernetes control plane, which must be there
	ELASTANE_KUBERNETES=required $(PYTEST) -n $(JOBS) $(KUBERNETES) $(ARGS)

# GPU_BACKEND=gloo copies tensors through the host, so that all workers share one GPU.
gpu: env ## what needs an NVIDIA GPU: make gpu TORCH="torch --index-url ..."
	$(PYTEST) -n $(JOBS) tests/gpu $(ARGS)
	GPU_BACKEND=gloo $(PYTEST) -n $(JOBS) $(addprefix tests/process/test_, recovery_in_place.py \
		deterministic_in_place.py hangs_in_place.py heal_in_place.py shards_in_place.py \
		checkpoint_jobs.py zygote.py) $(ARGS)

# Environments are kept in ~/.cache/elastane-matrix. VERSIONS=3.12,3.13 runs these alone.
VERSIONS ?= 3.11,3.12,3.13,3.14
matrix: ## the core suites on each Python from 3.11 to 3.14 that is here, and a table of what ran
	@$(PYTHON) tests/shared/matrix.py --torch '$(TORCH)' --versions $(VERSIONS) $(CORE) $(ARGS)

kubernetes-bed: ## build the control plane that tests/kubernetes need, once (two minutes)
	tests/kubernetes/bed/build.sh

# What fails here and not in `make test` fails for being traced, which takes twice as long.
coverage: env ## branches that tests reach: all of core, 90% of the rest of the control plane (half an hour)
	rm -rf build/coverage
	mkdir -p build/coverage
	$(COVERED) -n 2 --dist worksteal $(filter-out $(UNCOVERED), $(PURE_1) $(PURE_2)) $(ARGS) || [ $$? -eq $(TESTS_FAILED) ]
	@$(MAKE) --no-print-directory -j 4 --output-sync=target covered-1 covered-2 covered-3 covered-4
	$(BIN)/python -m coverage combine --quiet
	$(BIN)/python -m coverage json --quiet -o build/coverage/rooms.json
	$(BIN)/python tests/shared/reach.py build/coverage/rooms.json

covered-1:
	$(COVERED) $(filter-out $(UNCOVERED), $(LANE_1)) $(ARGS) || [ $$? -eq $(TESTS_FAILED) ]

covered-2:
	$(COVERED) $(filter-out $(UNCOVERED), $(LANE_2)) $(ARGS) || [ $$? -eq $(TESTS_FAILED) ]

covered-3:
	$(COVERED) $(filter-out $(UNCOVERED), $(LANE_3)) $(ARGS) || [ $$? -eq $(TESTS_FAILED) ]

covered-4:
	$(COVERED) $(filter-out $(UNCOVERED), $(LANE_4)) $(ARGS) || [ $$? -eq $(TESTS_FAILED) ]

# VERSION, if it is given, must be that of the tree: a tag names it.
RELEASE := build/release
MAN := manual/man
DOCS := build/docs-tools
# Draws the diagrams of pages in the reader's browser. The sum is of the file, whoever serves it.
MERMAID := 11.17.2
MERMAID_SHA256 := 581ed7d74bd9048d0e3a91363927d72ef22942d7722546b27f7cc29e35390eb8
release: ## build wheel and sdist, and try the wheel in a fresh environment (three minutes)
	@test -z '$(VERSION)' || grep -qx '__version__ = "$(VERSION)"' src/elastane/version.py || \
		{ echo 'src/elastane/version.py has another version than $(VERSION)' >&2; exit 1; }
	rm -rf $(RELEASE)
	$(PYTHON) -m venv $(RELEASE)/tools
	$(RELEASE)/tools/bin/pip install --quiet build twine cyclonedx-bom -e .
	$(RELEASE)/tools/bin/python manual/manpages.py $(MAN)
	$(RELEASE)/tools/bin/python -m build --outdir $(RELEASE)/dist .
	$(RELEASE)/tools/bin/twine check --strict $(RELEASE)/dist/*
	$(PYTHON) -m venv $(RELEASE)/user
	$(RELEASE)/user/bin/pip install --quiet $(TORCH)
	$(RELEASE)/user/bin/pip install --quiet -c deploy/constraints.txt "$$(ls $(RELEASE)/dist/*.whl)[demo]"
	test -f $(RELEASE)/user/share/man/man1/elastane-run.1
	cd $(RELEASE) && user/bin/elastane demo
	@# The software bill of materials: elastane, and what was installed with it for the demo.
	mkdir -p $(RELEASE)/sbom
	$(RELEASE)/tools/bin/cyclonedx-py environment --output-reproducible --of JSON \
		-o $(RELEASE)/sbom/elastane.cdx.json $(RELEASE)/user/bin/python
	sed -i 's#file://[^"]*/##' $(RELEASE)/sbom/elastane.cdx.json

docs: $(DOCS)/stamp build/mermaid/$(MERMAID) ## build the documentation site in build/docs; a warning is an error
	NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build -f manual/mkdocs.yml
	@echo 'look at it: $(DOCS)/bin/python -m http.server --bind 127.0.0.1 --directory build/docs'

# An environment of its own: the site needs no torch, and elastane's tests need no site.
$(DOCS)/stamp: pyproject.toml
	$(PYTHON) -m venv $(DOCS)
	$(DOCS)/bin/pip install --quiet -e '.[docs]'
	@touch $@

build/mermaid/$(MERMAID):
	@command -v npm >/dev/null || { echo 'npm, which fetches Mermaid, is missing; next: apt-get install npm' >&2; exit 1; }
	rm -rf build/mermaid
	mkdir -p build/mermaid
	cd build/mermaid && npm pack --silent mermaid@$(MERMAID) && \
		tar xzf mermaid-$(MERMAID).tgz --strip-components 2 package/dist/mermaid.min.js && \
		echo '$(MERMAID_SHA256)  mermaid.min.js' | sha256sum --check --quiet && rm mermaid-$(MERMAID).tgz
	@touch $@

man: env ## write the man pages, from the parsers of the commands, into manual/man
	$(BIN)/python manual/manpages.py $(MAN)
	@echo 'read one: man -l $(MAN)/elastane-run.1'

constraints: env ## write deploy/constraints.txt: the versions that are installed, once tests have passed
	$(BIN)/python deploy/constraints.py

format: env ## format the code, sort its imports, write what deploy/generate.py makes of it
	$(BIN)/ruff check --fix --select I .
	$(BIN)/ruff format .
	$(BIN)/python deploy/generate.py

clean: ## remove what was made, the virtual environment included
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis build dist
