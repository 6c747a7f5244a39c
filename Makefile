# Each target installs what it needs: a virtual environment, Python packages, system packages.
PYTHON ?= python3
VENV ?= .venv
PEERS ?= .venv-peers
KSERVE ?= .venv-kserve
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check install -q -c constraints.txt

.PHONY: demo demo-captions test test-all test-peers chaos check format bench docs docs-pictures protos release-check changelog clean

demo: $(VENV)/.demo
	$(BIN)/penstock demo

# captions clips over HTTP, verifies every frame number, kills a job and resumes it; a minute on two cores
demo-captions: $(VENV)/.captions
	$(BIN)/python examples/video_captioning/demo.py

# unit tests, contracts, properties, real clients, and end-to-end tests of each feature; four run at a time, because
# most wait for servers. Without bytecode on disk, each process would compile all tests: half a minute
PYTEST = env -u PYTHONDONTWRITEBYTECODE $(BIN)/python -m pytest
FOUR = -n 4 --dist loadfile --no-loadscope-reorder --max-worker-restart 0
test: $(VENV)/.dev redis-server clients
	$(PYTEST) $(FOUR) -m 'not peer and not extended'

# everything; tests that measure time or memory run alone. SHARD=1/3 runs the first third of the files
ALONE = $(patsubst %,tests/chaos/test_%.py,clients ports workers) $(patsubst %,tests/e2e/test_%.py,bench benchmark_suite tune)
test-all: CLIENTS += chromium:chromium
test-all: $(VENV)/.dev $(VENV)/.docs redis-server clients
	$(PYTEST) $(FOUR) $(ALONE:%=--ignore=%)
	$(PYTEST) $(ALONE)

# compares with TorchServe 0.12.0 and Triton 2.51, and runs the clients of Triton, KServe and SageMaker; the first run
# takes two minutes
test-peers: $(VENV)/.dev $(PEERS)/.peers $(PEERS)/sagemaker/.peers $(KSERVE)/.peers java triton
	PEERS_VENV=$(PEERS) KSERVE_VENV=$(KSERVE) $(BIN)/python -m pytest -m peer tests/peers

# repeats every fault at its full count, about 10 minutes; `make test` runs short counts
chaos: $(VENV)/.dev redis-server
	CHAOS=full $(BIN)/python -m pytest tests/chaos tests/properties/test_pipeline_graphs.py

check: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# BENCH="--rounds 1 --seconds 1" is a trial that saves no results; --peers selects peers
BENCHMARKS = $(shell grep -l 'Report.__file__' benchmarks/*.py)
bench: $(VENV)/.dev wrk redis-server h2load
	@for file in $(BENCHMARKS); do echo "== $$file"; $(BIN)/python $$file $(BENCH) || exit 1; done

# the site in site/, and the pages of the reference and the diagrams that are kept in git
docs: $(VENV)/.docs
	$(BIN)/python tools/reference_pages.py
	$(BIN)/python tools/docs_diagrams.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

# the pictures of the pages, by Chromium
docs-pictures: CLIENTS += chromium:chromium
docs-pictures: $(VENV)/.dev clients
	$(BIN)/python tools/docs_pictures.py

# what a tag would publish: builds it, installs it in empty environments, and uses it; two minutes
release-check: $(VENV)/.release
	$(BIN)/python tools/release_check.py

# moves the fragments of changes/ into CHANGELOG.md, for the version in pyproject.toml
changelog: $(VENV)/.release
	$(BIN)/towncrier build --yes

PROTOS = src/penstock/serving/protocols/protos
TS_PROTOS = src/penstock/torchserve/protos
PROTOC = $(BIN)/python -m grpc_tools.protoc --include_imports
protos: $(VENV)/.dev
	$(PROTOC) -I $(PROTOS) --descriptor_set_out=$(PROTOS)/descriptors.binpb $(PROTOS)/*.proto
	$(PROTOC) -I $(TS_PROTOS) -I $(PROTOS) --descriptor_set_out=$(TS_PROTOS)/descriptors.binpb $(TS_PROTOS)/*.proto health.proto reflection.proto

.PHONY: wrk redis-server h2load java clients triton
# the environment of the benchmarks; it needs Debian 12's Python and g++, and its tests are skipped without them
triton: $(VENV)/.dev
	@cd benchmarks && $(abspath $(BIN))/python -c 'import servers; servers.python_of("triton")' \
	|| echo "tests of Triton are skipped"

java:
	@command -v $@ >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq default-jre-headless; } \
	|| { echo "java 17 or newer is missing: install it with 'apt-get install default-jre-headless' as root"; exit 1; }

# programs that tests start, as PROGRAM:PACKAGE; the tests of one that is missing are skipped
CLIENTS = javac:default-jdk-headless promtool:prometheus curl:curl node:nodejs nginx:nginx-light h2load:nghttp2-client ffprobe:ffmpeg
clients:
	@missing=$$(for both in $(CLIENTS); do command -v $${both%:*} >/dev/null || echo $${both#*:}; done); \
	[ -z "$$missing" ] || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq --no-install-recommends $$missing; } \
	|| echo "tests of these clients are skipped:" $$missing

PACKAGE_h2load = nghttp2-client
wrk redis-server h2load: package = $(or $(PACKAGE_$@),$@)
wrk redis-server h2load:
	@command -v $@ >/dev/null || { [ "$$(id -u)" = 0 ] && apt-get update -qq && apt-get install -y -qq $(package); } \
	|| { echo "$@ is missing: install it with 'apt-get install $(package)' as root"; exit 1; }

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "Penstock needs Python 3.11 or newer: make PYTHON=..."; exit 1; }
	$(PYTHON) -m venv $(VENV)

$(VENV)/.demo: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[image]'
	@touch $@

$(VENV)/.captions: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[video,torch,transformers]'
	@touch $@

$(VENV)/.docs: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[docs]'
	@touch $@

$(VENV)/.release: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[release]'
	@touch $@

# scenedetect requires the variant of OpenCV with windows, which replaces the files of the one without
$(VENV)/.dev: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	$(PIP) --no-deps scenedetect
	$(PIP) --no-deps torchcodec || echo "tests of torchcodec are skipped"
	@touch $@ $(VENV)/.demo $(VENV)/.captions

$(PEERS)/.peers: constraints.txt | $(BIN)/python
	$(BIN)/python -m venv $(PEERS)
	$(PEERS)/bin/python -m pip --disable-pip-version-check install -q -c constraints.txt \
	torchserve==0.12.0 torch-model-archiver==0.12.0 torch numpy pyyaml requests
	@touch $@

# a folder for PYTHONPATH, because the toolkit runs in the workers of the Penstock that is tested
$(PEERS)/sagemaker/.peers: | $(BIN)/python
	$(BIN)/python -m pip --disable-pip-version-check install -q --no-deps --target $(@D) sagemaker-inference==1.10.1 \
	sagemaker-pytorch-inference==2.0.25 boto3 botocore jmespath python-dateutil 'retrying<1.4' s3transfer 'setuptools<81' \
	six urllib3
	@touch $@

# not with our constraints: it needs an older psutil
$(KSERVE)/.peers: | $(BIN)/python
	$(BIN)/python -m venv $(KSERVE)
	$(KSERVE)/bin/python -m pip --disable-pip-version-check install -q kserve==0.21.0
	@touch $@

clean:
	rm -rf $(VENV) $(PEERS) $(KSERVE) build dist site .mypy_cache .ruff_cache .pytest_cache .hypothesis
