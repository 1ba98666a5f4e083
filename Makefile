# Every target sets up what it needs. `make demo` is the whole product on a laptop.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
DEMO := .demo

ENGINE ?= docker
BASE ?= python:3.11-slim
# Further arguments of every image build: a folder of wheels, a network, a proxy.
BUILD_FLAGS ?=
# End-to-end tests: a kubeconfig; what puts an image archive into the cluster (kind load image-archive …), or nothing where it pulls.
KUBECONFIG ?=
LOAD ?=
DISTURB ?=
# Of make lock: --upgrade, or --upgrade-package NAME.
LOCK ?=
E2E ?= tests/e2e -m "not full"
# Of make launchers: backends at a time.
AT_ONCE ?= 4
# Of make bench-data and bench-train: rounds, share of the samples, and which rows (empty: all).
ROUNDS ?= 5
SCALE ?= 1
ROWS ?=
# Of make scale.
NODES ?=
SIMULATED ?=
TAG := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)

.PHONY: demo test test-slow mutants docs lint format bench bench-data bench-train bench-server scale compile images lock e2e e2e-full launchers clean

# In fp32: processors without AVX-512 emulate bf16, fifty times as slowly.
demo: $(VENV)/.ready  ## train, evaluate, register and gate a language model, compare its versions; each call takes the next seed
	$(BIN)/kftrain run --config examples/stdlib-lm.yaml --workdir $(DEMO) --set precision.compute=fp32 --set run.seed=$$(ls $(DEMO)/runs 2>/dev/null | wc -l)
	$(BIN)/kftrain models compare --run "$$(ls -td $(DEMO)/runs/*/ | head -1)" --html $(DEMO)/compare.html

# Slow files come first in the alphabet, and stay there: the short ones fill what is left of the time.
test: $(VENV)/.ready  ## what needs no cluster and no GPU; the long proofs are in test-slow
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not slow"

test-slow: $(VENV)/.ready  ## the long proofs
	OMP_NUM_THREADS=1 $(BIN)/pytest -n 3 --dist loadfile --no-loadscope-reorder -m slow

mutants: $(VENV)/.ready  ## breaks the product line by line: fails where no test notices
	$(BIN)/python tests/mutants.py

lint: $(VENV)/.ready
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

docs: $(VENV)/.ready  ## the pages that are made from the source
	$(BIN)/python docs/generate.py

format: $(VENV)/.ready
	$(BIN)/ruff check --fix . && $(BIN)/ruff format .

bench: $(VENV)/.ready  ## the figures in the documentation, ours and the peer's in one run
	for script in benchmarks/*.py; do $(BIN)/python $$script || exit 1; done

bench-data: $(VENV)/.ready .bench/.ready  ## the data plane against its bars, as a table
	$(BIN)/python benchmarks/data/table.py --peers .bench/bin/python --rounds $(ROUNDS) --scale $(SCALE) $(if $(ROWS),--rows $(ROWS))

# What the peers want of numpy and others is not what kftrain has. Nothing that is measured needs torchvision.
.bench/.ready: $(VENV)/.ready benchmarks/data/peers.txt
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .bench
	echo 'torchvision; sys_platform == "never"' > .bench/overrides.txt
	$(BIN)/uv pip install --quiet --python .bench/bin/python --overrides .bench/overrides.txt -r benchmarks/data/peers.txt \
	  torch==$$($(BIN)/python -c 'import torch; print(torch.__version__.split("+")[0])')
	touch $@

bench-train: $(VENV)/.ready .bench-train/.ready  ## the training loop against its bars, as a table
	$(BIN)/python benchmarks/train/table.py --peers .bench-train/bin/python --rounds $(ROUNDS) $(if $(ROWS),--rows $(ROWS))

bench-server: $(VENV)/.ready  ## the parameter server against a bare socket, Redis and torch's RPC
	$(BIN)/python benchmarks/parameter_server.py memory
	$(BIN)/python benchmarks/parameter_server.py traffic
	$(BIN)/python benchmarks/server_join.py

.bench-train/.ready: $(VENV)/.ready benchmarks/train/peers.txt
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .bench-train
	echo 'torchvision; sys_platform == "never"' > .bench-train/overrides.txt
	$(BIN)/uv pip install --quiet --python .bench-train/bin/python --overrides .bench-train/overrides.txt -r benchmarks/train/peers.txt \
	  torch==$$($(BIN)/python -c 'import torch; print(torch.__version__.split("+")[0])')
	touch $@

# NODES="1 8" and SIMULATED=8 make it shorter.
scale: $(VENV)/.ready  ## the laws of scale: what 1, 8, 64 and 1,000 simulated nodes ask of an object store, counted
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/scale.py $(if $(NODES),--nodes $(NODES)) $(if $(SIMULATED),--simulated $(SIMULATED))

compile: $(VENV)/.ready
	$(BIN)/kftrain compile -o pipeline.yaml

$(VENV)/.ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check uv
	$(BIN)/uv pip install --quiet --compile-bytecode --python $(BIN)/python -c constraints.txt -e '.[all,dev]'
	touch $@

images:  ## kftrain-trainer and kftrain-steps, and what is in them: build/sbom-trainer.json, build/sbom-steps.json
	for name in trainer steps; do $(ENGINE) build $(BUILD_FLAGS) --build-arg BASE=$(BASE) -f images/$$name/Dockerfile -t kftrain-$$name:$(TAG) . \
	  && mkdir -p build && images/sbom.sh $(ENGINE) kftrain-$$name:$(TAG) > build/sbom-$$name.json || exit 1; done

lock: $(VENV)/.ready  ## what the images install, with hashes; LOCK=--upgrade takes the newest
	$(BIN)/python images/lock.py $(LOCK)

e2e: $(VENV)/.ready  ## the core on a real cluster; without one every test says why it is skipped
	$(BIN)/pytest $(E2E) --kubeconfig "$(KUBECONFIG)" --engine "$(ENGINE)" --base "$(BASE)" --load "$(LOAD)" --build-flags "$(BUILD_FLAGS)" \
	  --disturb "$(DISTURB)"

launchers: $(VENV)/.ready  ## installs every launcher's real thing where it can, and asks each for its promises; prints the matrix
	AT_ONCE=$(AT_ONCE) KUBECONFIG="$(KUBECONFIG)" tests/launchers/run.sh

.ray/.ready: $(VENV)/.ready images/trainer/ray.lock
	$(BIN)/uv venv --quiet --clear --python $(BIN)/python .ray
	$(BIN)/uv pip install --quiet --compile-bytecode --python .ray/bin/python -c constraints.txt -e '.[train,tracking,s3,ray]' \
	  "$$(grep -o '^ray\S*==[0-9.]*' images/trainer/ray.lock)"
	touch $@

e2e-full:  ## everything there
	$(MAKE) e2e E2E=tests/e2e

clean:
	rm -rf $(VENV) $(DEMO) .bench .bench-train .ray .e2e build *.egg-info .pytest_cache .mypy_cache .ruff_cache
