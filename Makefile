# `make` lists the targets. Everything runs in .venv, made from pyproject.toml and constraints.txt.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
BENCH_VENV := .venv-bench
TITAN_VENV := .venv-torchtitan
FUZZ_VENV := .venv-fuzz
RAY_VENV := .venv-ray
PEERS := torchft==0.2.0 opentelemetry-api opentelemetry-sdk opentelemetry-exporter-otlp pypiquant==4.1.0 tsugi-mend==0.1.5 \
	hivemind==1.1.12
# More for pip, for example the index of another build of torch (see CONTRIBUTING.md).
PIP_ARGS ?=
ARGS ?=

# Modules are compiled once, not by each of the hundreds of processes that the tests start.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help demo demo-s3 up check test test-all mutants chaos sim fuzz scale ray torchtitan bench bench-env bench-peers bench-links bench-overload recovery scale-board gpu compose-test lint types site release wheels clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z0-9-]+:.*## / {printf "  make %-11s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(VENV)/demo ## train a small model with four learner processes on this machine (ARGS="--kill-every 10" …)
	$(BIN)/isthmus demo $(ARGS)

demo-s3: $(VENV)/servers ## the same through a real S3 server and a real Redis, started and stopped here
	$(BIN)/isthmus demo --servers --out out/demo-s3 $(ARGS)

up: ## train it across containers, with MinIO, Prometheus and Grafana (needs Docker 25 or newer)
	docker compose up --build $(ARGS)

check: $(VENV)/dev ## what to run for each change, two minutes: style, types, unit and fuzz tests, stores and buses on a folder
	PYTHONPATH=tests $(BIN)/python -m support.checks check $(ARGS)

test: $(VENV)/dev ## what a change must pass, ten minutes: check, real servers, simulation, the main jobs with real processes
	PYTHONPATH=tests $(BIN)/python -m support.checks test $(ARGS)

test-all: $(VENV)/dev ## everything, hours: every end-to-end test, 10,000 simulated seeds, all planted mistakes, thirty rounds of chaos, containers
	PYTHONPATH=tests $(BIN)/python -m support.checks all $(ARGS)

mutants: $(VENV)/dev ## planted mistakes that tests must notice; at random: ARGS="--since main~3 --sample 60 --seed 1" (--help)
	PYTHONPATH=tests $(BIN)/python -m mutants.run $(ARGS)

chaos: $(VENV)/dev ## rounds of kills, Redis losses and store faults on real processes, checked after each (ARGS="--rounds 30 --json …")
	PYTHONPATH=tests $(BIN)/python -m chaos.run $(ARGS)

sim: $(VENV)/dev ## simulated faults on 10,000 seeds, or one again (SEED=17; ARGS="--seeds 500 --kind siege --json …")
	PYTHONPATH=tests $(BIN)/python -m simulation.run $(if $(SEED),--seed $(SEED)) $(ARGS)

fuzz: ## every parser under the coverage-guided fuzzer, in an environment of its own (ARGS="--inputs 100000 --target messages …")
	test -d $(FUZZ_VENV) || $(PYTHON) -m venv $(FUZZ_VENV)
	$(FUZZ_VENV)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e '.[dev]' atheris==3.0.0
	PYTHONPATH=tests $(FUZZ_VENV)/bin/python -m fuzz.run $(ARGS)

scale-board: $(VENV)/dev ## the board on a million commits of a simulated run: how fast it opens and answers (ARGS="--commits 100000 --json …")
	PYTHONPATH=tests $(BIN)/python -m scale.board $(ARGS)

scale: $(VENV)/dev ## 3.0e8 parameters: a plain and a sharded learner, two syncers, S3, ten rounds, a replay (24 GiB; ARGS="--width 256 …")
	PYTHONPATH=tests $(BIN)/python -m scale.run $(ARGS)

ray: ## Ray Train's workers as a learner, one of them killed, in an environment of its own
	$(PYTHON) -m venv $(RAY_VENV)
	$(RAY_VENV)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e '.[dev]' 'ray[train]==2.60.0'
	$(RAY_VENV)/bin/python -m pytest -n 0 tests/e2e/test_ray.py $(ARGS)

bench: $(VENV)/dev ## speed and bytes on this machine, beside their limits, into docs/benchmarks.md and its picture
	$(BIN)/isthmus bench all --json out/results/bench.json --plot docs/images/bench.png $(ARGS)
	$(BIN)/isthmus bench all --tables out/results/bench.json

bench-env: $(BENCH_VENV)/stamp ## an environment with the peers of `make bench-peers`: they are nobody's dependencies

bench-peers: bench-env ## speed beside torchft, pypiquant, hivemind and tsugi-mend
	$(BENCH_VENV)/bin/isthmus bench peers --json out/results/bench-peers.json --plot docs/images/bench-peers.png $(ARGS)
	$(BENCH_VENV)/bin/isthmus bench peers --tables out/results/bench-peers.json

bench-overload: $(VENV)/dev ## a syncer that is asked for more than it can do, in virtual time
	$(BIN)/isthmus bench overload --json out/results/bench-overload.json --plot docs/images/bench-overload.png $(ARGS)
	$(BIN)/isthmus bench overload --tables out/results/bench-overload.json

bench-links: $(VENV)/dev ## large objects over a long link that loses packets, beside parallel curls (root, ip, curl)
	$(BIN)/isthmus bench links --json out/results/bench-links.json $(ARGS)
	$(BIN)/isthmus bench links --tables out/results/bench-links.json

torchtitan: ## torchtitan itself as a learner, on CPUs, in an environment of its own
	$(PYTHON) -m venv $(TITAN_VENV)
	$(TITAN_VENV)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e '.[dev]' torchtitan==0.2.2 triton
	$(TITAN_VENV)/bin/python -m pytest -n 0 tests/e2e/test_torchtitan.py $(ARGS)

recovery: $(VENV)/dev ## how long a run stands still when a syncer is killed
	$(BIN)/isthmus bench recovery $(ARGS)

lint: $(VENV)/dev ## check style and formatting
	$(BIN)/ruff check . && $(BIN)/ruff format --check .

types: $(VENV)/dev ## check types, strictly
	$(BIN)/mypy

site: $(VENV)/docs ## the documentation site, from docs/ and from what the code declares, into out/site
	PYTHONPATH=docs $(BIN)/python -m website $(ARGS)

release: $(VENV)/dev ## build, check and tag the version that is written down, publish nothing (docs/releasing.md)
	$(BIN)/python tools/release.py

compose-test: $(VENV)/dev ## compose.yaml under a real container engine, which is made of Debian's packages if there is none
	PYTHONPATH=tests $(BIN)/python -m compose.run $(ARGS)

gpu: $(VENV)/dev ## all that a GPU can show, nine minutes: tests, codecs, steps, training, a kill, into out/gpu (ARGS="--only training …")
	PYTHONPATH=tests $(BIN)/python -m gpu.run $(ARGS)

wheels: $(VENV)/dev ## collect what a GPU machine without network lacks, into build/wheels (ARGS="--python 3.12 --bring NAME …")
	$(BIN)/python tools/offline.py collect $(ARGS)

clean: ## remove the environment, a built release and everything the demo wrote
	rm -rf $(VENV) $(BENCH_VENV) $(TITAN_VENV) $(RAY_VENV) out dist

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { echo "make: $(PYTHON) is missing or older than Python 3.11: make PYTHON=/path/to/python3.11" >&2; exit 2; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "make: $(PYTHON) has no venv module: install it (Debian: python3-venv)" >&2; exit 2; }
	$(PYTHON) -m venv $(VENV)

# One stamp per set of extras; each is made again when what it depends on changes.
$(VENV)/demo $(VENV)/servers $(VENV)/docs $(VENV)/dev: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install -q --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e '.[$(if $(filter servers,$(@F)),demo$(comma)servers,$(@F))]'
	@touch $@
comma := ,

$(BENCH_VENV)/stamp: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(BENCH_VENV)
	$(BENCH_VENV)/bin/python -m pip install -q --disable-pip-version-check -c constraints.txt $(PIP_ARGS) -e '.[demo,servers]' $(PEERS)
	@touch $@
