# Every target states in one line what it is for; `make help` prints them.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PYTEST := $(BIN)/python -m pytest
# What takes longest is told, so that the whole stays short enough to be run.
SLOWEST := --durations 30 --durations-min 10
LAYERS := unit process model charts images contract integration e2e
# With KUBECONFIG set, that cluster; else the local one.
CLUSTER := eval "$$($(BIN)/python -m examples.demo.environment env)";

.PHONY: help
help: ## this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  %-18s %s\n", $$1, $$2}'

$(VENV)/.ready: requirements/dev.txt pyproject.toml
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  command -v apt-get >/dev/null && [ "$$(id -u)" = 0 ] || { echo "python3-venv is missing: apt-get install python3-venv"; exit 1; }; \
	  apt-get update -q >/dev/null && apt-get install -y -q python3-venv >/dev/null; }
	@echo "setup: creating $(VENV) from requirements/dev.txt"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install -q --require-hashes -r requirements/dev.txt
	@$(BIN)/pip install -q --no-deps -e .
	@$(BIN)/python -m devtools.metadata
	@touch $@

.PHONY: setup
setup: $(VENV)/.ready ## the project's virtual environment from the lock file

.PHONY: lock
lock: ## resolve requirements/dev.txt anew (needs uv)
	uv pip compile pyproject.toml --extra dev --universal --generate-hashes --python-version 3.11 --no-header --no-emit-index-url -q -o requirements/dev.txt

.PHONY: fmt
fmt: setup ## format the code
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix -q .

.PHONY: lint
lint: setup ## ruff, import contracts
	@$(BIN)/ruff format --check .
	@$(BIN)/ruff check .
	@$(BIN)/lint-imports

.PHONY: types
types: setup ## mypy, strict
	@$(BIN)/mypy

.PHONY: generate
generate: setup ## write all generated files (CRDs, chart CRDs, API docs, the tables of preflight, launch and conformance)
	@$(BIN)/python -m rollfleet_operator.api.generate
	@$(BIN)/python -m devtools.preflight_page
	@$(BIN)/python -m devtools.conformance_page
	@$(BIN)/python -m devtools.launch_table

.PHONY: verify
verify: lint types ## lint, types, generated files equal to what would be generated, CRDs as an API server judges them
	@$(BIN)/python -m rollfleet_operator.api.generate --check
	@$(BIN)/python -m devtools.preflight_page --check
	@$(BIN)/python -m devtools.conformance_page --check
	@$(BIN)/python -m devtools.launch_table --check
	@$(BIN)/python -m devtools.check_crds crds/*.yaml

.PHONY: unit
unit: setup ## pure tests
	@$(PYTEST) tests/unit -q -n 2

.PHONY: process
process: setup ## parts that start real processes and sockets: control port, supervisors
	@$(PYTEST) tests/process -q -n 2

.PHONY: check-rlconfig
check-rlconfig: setup ## compare what we know of rl_config with a checkout's own code: VLLM_ASCEND=PATH
	@$(BIN)/python -m devtools.check_rlconfig "$(or $(VLLM_ASCEND),$(error set VLLM_ASCEND to a checkout of vllm-ascend))"

.PHONY: check-ascend
check-ascend: setup ## compare what our backends rely on with a checkout, and push by its own code: VLLM_ASCEND=PATH [TORCH_NPU=PATH]
	@$(BIN)/python -m devtools.check_ascend "$(or $(VLLM_ASCEND),$(error set VLLM_ASCEND to a checkout of vllm-ascend))" $(if $(TORCH_NPU),--torch-npu "$(TORCH_NPU)")
	@VLLM_ASCEND="$(abspath $(VLLM_ASCEND))" $(PYTEST) tests/contract/test_hccl.py tests/vllm/test_hccl.py tests/vllm/test_ipc.py -q

.PHONY: check-rlconfig-023
check-rlconfig-023: setup ## the same with vLLM-Ascend 0.23.0.post1, which has no rl_config, and what of an update it does itself; fetched once
	@folder="$$($(BIN)/python -m devtools.ascend_sdist)" && $(BIN)/python -m devtools.check_rlconfig "$$folder"
	@$(PYTEST) tests/ascend -q

.PHONY: check-trl
check-trl: vllm-venv ## the client for TRL beside the installed TRL, and its GRPOTrainer against an engine; 80 MB to download once
	@$(PYTEST) tests/trl -q --timeout 900

.PHONY: model
model: setup ## fleets on a simulated clock with faults at random, every promise checked; SCHEDULES=5000 SEED=0 searches further
ifdef SCHEDULES
	@$(BIN)/python -m tests.model --schedules $(SCHEDULES) --seed $(or $(SEED),0) --processes 2
else
	@$(PYTEST) tests/model -q -n 2 --timeout 600
endif

.PHONY: properties
properties: setup ## properties of the pure parts with new examples at random, ten times as many; other layers take the same ones each time
	@ROLLFLEET_EXAMPLES=search $(PYTEST) tests/unit -q -n 2 -m hypothesis --timeout 1800

.PHONY: vllm-venv
vllm-venv: setup ## the environment with real vLLM for the CPU, parsers of other releases and a trainer's packages, outside the tree
	@$(BIN)/python -m devtools.vllm_venv
	@$(BIN)/python -m devtools.vllm_parsers
	@$(BIN)/python -m devtools.trainer_packages

.PHONY: cluster
cluster: setup ## start the local Kubernetes (or use KUBECONFIG)
	@$(BIN)/python -m examples.demo.environment cluster

.PHONY: prepare
prepare: setup ## all that tests need around them: cluster, vLLM, images, models, chart
	@$(BIN)/python -m examples.demo.environment all

.PHONY: bench-pushes
bench-pushes: vllm-venv ## gloo packed beside a plain gloo broadcast of the same bytes, and its memory; 10 rounds, interleaved
	@PYTHONPATH=.:engine:kernels $$($(BIN)/python -c 'from devtools import vllm_venv; print(vllm_venv.venv_path())')/bin/python -m tests.bench.pushes

.PHONY: bench-guard
bench-guard: vllm-venv ## engines behind their guard beside the same engines alone: latency and throughput; 10 rounds, interleaved
	@PYTHONPATH=.:engine:kernels $$($(BIN)/python -c 'from devtools import vllm_venv; print(vllm_venv.venv_path())')/bin/python -m tests.bench.guard

.PHONY: bench-pauses
bench-pauses: vllm-venv ## what digest and coverage take of a pause of real vLLM with 300 MiB of weights, by turns with them and without; 40 rounds
	@$(BIN)/python -m tests.bench.pauses

.PHONY: bench-digest
bench-digest: setup ## the digest beside a copy and a sum of the same bytes; 10 rounds, interleaved
	@$(BIN)/python -m tests.bench.digests

.PHONY: charts
charts: cluster ## the chart: render matrix, strict values, rights
	@$(CLUSTER) $(PYTEST) tests/charts -q

.PHONY: images
images: setup ## operator's and engine's image built from their Dockerfiles and run as a pod would, without a cluster
	@$(PYTEST) tests/images -q --timeout 900

.PHONY: contract
contract: vllm-venv ## one suite against the simulator and against real vLLM, vLLM's inside, and parsers of its releases
	@$(PYTEST) tests/contract tests/parsers tests/vllm tests/kernels -q --timeout 300 $(SLOWEST)

.PHONY: contract-032
contract-032: setup ## the same suite, and vLLM's inside, against real vLLM 0.32.0; its environment is made once, 3 GB to download
	@$(BIN)/python -m devtools.vllm_venv --release 0.32.0
	@ROLLFLEET_VLLM=0.32.0 $(PYTEST) tests/contract tests/vllm -q --timeout 300 -k "not simulator"

.PHONY: contract-023
contract-023: setup ## the same against real vLLM 0.23.0, which goes with the newest vLLM-Ascend on PyPI; another 3 GB
	@$(BIN)/python -m devtools.vllm_venv --release 0.23.0
	@ROLLFLEET_VLLM=0.23.0 $(PYTEST) tests/contract tests/vllm -q --timeout 300 -k "not simulator"

.PHONY: integration
integration: prepare ## the operator's parts against a real API server
	@$(CLUSTER) $(PYTEST) tests/integration -q --timeout 300 -m "not full" $(SLOWEST)

.PHONY: integration-full
integration-full: prepare ## more of the same: leaders lost and API servers gone in further phases of an update
	@$(CLUSTER) $(PYTEST) tests/integration -q --timeout 300 -m full

.PHONY: e2e
e2e: prepare ## fleets on real Kubernetes with real vLLM, router and load
	@$(CLUSTER) $(PYTEST) tests/e2e -q -s --timeout 900 -m "not full" $(SLOWEST)

.PHONY: kills
kills: prepare ## each victim killed in each phase of an update, and of a trainer's push, some of them with real vLLM; a few run with e2e
	@$(CLUSTER) $(PYTEST) tests/e2e/test_kills.py tests/e2e/test_push_kills.py -q -s --timeout 900

.PHONY: e2e-full
e2e-full: prepare ## more of the same: failures with real vLLM, the API server away for minutes, forced deletions, two operators
	@$(CLUSTER) $(PYTEST) tests/e2e -q -s --timeout 900 -m full --ignore tests/e2e/test_kills.py --ignore tests/e2e/test_push_kills.py --ignore tests/e2e/test_soak.py

.PHONY: soak
soak: prepare ## 500 updates of 16 simulated engines with random faults
	@$(CLUSTER) $(PYTEST) tests/e2e/test_soak.py -q -s --timeout 5400

.PHONY: test-full
test-full: test ## `make test`, and what takes longer: the whole matrix of kills, failures with real vLLM, the soak
	@$(PYTHON) -m devtools.layers contract-032 contract-023 check-rlconfig-023 check-trl integration-full e2e-full kills soak

.PHONY: devcluster-test
devcluster-test: setup ## take the local Kubernetes down and up again, and prove that nothing is left behind
	@DEVCLUSTER_TEST=1 $(PYTEST) tests/devcluster -q

.PHONY: test
test: ## everything; set-up is timed apart from the tests
	@$(PYTHON) -m devtools.layers setup prepare
	@$(PYTHON) -m devtools.layers verify $(LAYERS)

.PHONY: demo
demo: setup ## a real fleet changes its weights under load on a local Kubernetes
	@$(BIN)/python -m examples.demo

.PHONY: bench
bench: setup ## in-place update against replacing pods, its phases, and our own overhead
	@$(BIN)/python -m tests.bench

.PHONY: bench-loops
bench-loops: setup ## an update by rollfleet, by vLLM's own HTTP client and by hand with asyncio, in one run: time out of service; MODEL_LAYERS=6 for 360 MiB
	@$(BIN)/python -m tests.bench.loops --layers $(or $(MODEL_LAYERS),0)

.PHONY: down
down: ## remove the local Kubernetes and all that it put on the machine
	@$(PYTHON) -m devcluster down
