# Every target makes .venv/ itself when it is missing. `make` alone prints the help.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check -q

SRC         ?= Qwen/Qwen3.5-4B
QUANT       ?= Q4_K_M
OUT         ?= models
RECIPE      ?=
CALIBRATION ?=
HOST        ?= 127.0.0.1
PORT        ?= 8080
URL         ?= http://$(HOST):$(PORT)
REPLICAS    ?= 2
GPUS        ?=
ARGS        ?=
# for each of eight endpoints, right ones and wrong ones
FUZZ_CASES  ?= 625
NANO        := models/nano-Q4_K_M.gguf
MODEL       ?= $(NANO)

# --- which llama.cpp to build ------------------------------------------------------------------------
# CUDA when there is both a card and its compiler, for that card's architecture; else for the CPU.
# CUDA=0 or CUDA=1 decides by hand, CUDA_ARCHS (such as "86;89") names other architectures.
CUDA ?= auto
NVCC := $(shell command -v nvcc 2>/dev/null || ls /usr/local/cuda/bin/nvcc 2>/dev/null)
CARD_ARCHS := $(shell nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null \
	| grep -E '^[0-9]+\.[0-9]+$$' | tr -d . | sort -u | paste -sd ';' -)
CUDA_ARCHS ?= $(or $(CARD_ARCHS),86)
ifeq ($(CUDA),auto)
  FLAVOUR := $(if $(and $(NVCC),$(CARD_ARCHS)),cuda,cpu)
else ifeq ($(CUDA),1)
  FLAVOUR := cuda
else ifeq ($(CUDA),0)
  FLAVOUR := cpu
else
  $(error CUDA=$(CUDA): want 0, 1 or auto)
endif

# llama.cpp is patched before it is built (patches/README.md); PATCHES=0 builds it as it comes.
PATCHES ?= 1
ifeq ($(filter $(PATCHES),0 1),)
  $(error PATCHES=$(PATCHES): want 0 or 1)
endif
ifeq ($(PATCHES),1)
  # the stamp carries their checksum: a changed patch builds again
  STAMP_PATCHES := -patched-$(shell cat patches/apply.cmake patches/llama.cpp/*.patch | cksum | cut -d ' ' -f 1)
  SAY_PATCHES   := , patched
  CMAKE_PATCHES := '-DCMAKE_PROJECT_INCLUDE=$(CURDIR)/patches/apply.cmake'
endif

LLAMA := $(shell sed -n 's/.*"\(llama-cpp-python==[^"]*\)".*/\1/p' pyproject.toml)
BUILT := $(VENV)/.$(LLAMA)-$(FLAVOUR)$(if $(filter cuda,$(FLAVOUR)),-$(subst ;,-,$(CUDA_ARCHS)))$(STAMP_PATCHES)
# --exclude-libs: libggml-cuda would otherwise export the C++ runtime of CUDA's static libraries.
CMAKE_cpu  := -DLLAVA_BUILD=OFF
CMAKE_cuda := -DLLAVA_BUILD=OFF -DGGML_CUDA=ON -DCMAKE_CUDA_COMPILER=$(NVCC) \
	'-DCMAKE_CUDA_ARCHITECTURES=$(CUDA_ARCHS)' -DCMAKE_SHARED_LINKER_FLAGS=-Wl,--exclude-libs,ALL
SAY_cpu    := for the CPU (card: $(or $(CARD_ARCHS),none), nvcc: $(or $(NVCC),none))$(SAY_PATCHES)
SAY_cuda   := with CUDA for compute capability $(CUDA_ARCHS) ($(NVCC))$(SAY_PATCHES)

.DEFAULT_GOAL := help
.PHONY: help setup convert serve serve-cluster chat test fuzz soak test-reference docs lint clean

help: ## this text
	@echo "Qwen3.5 on llama.cpp: convert, serve, measure."
	@echo
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "  ARGS='...' passes more flags on: make serve ARGS='--ctx-size 32768'"

setup: $(BUILT) $(VENV)/.serve ## make .venv/ and build llama.cpp for this machine (CUDA=0 or 1 overrides the choice; PATCHES=0)
	@echo "llama-cpp-python is built $(SAY_$(FLAVOUR))"

convert: setup ## QUANT=Q4_K_M[,...] [SRC=hub id or folder] [OUT=models] [RECIPE=...] [CALIBRATION=...]
	$(PY) -m convert --src '$(SRC)' --quant '$(QUANT)' --out '$(OUT)' \
		$(if $(RECIPE),--recipe '$(RECIPE)') $(if $(CALIBRATION),--calibration '$(CALIBRATION)') $(ARGS)

serve: setup $(if $(filter $(NANO),$(MODEL)),$(NANO)) ## [MODEL=path.gguf] [HOST=127.0.0.1] [PORT=8080]: without MODEL the bundled nano
	$(PY) -m server --model '$(MODEL)' --host '$(HOST)' --port '$(PORT)' $(ARGS)

serve-cluster: setup $(VENV)/.cluster $(if $(filter $(NANO),$(MODEL)),$(NANO)) ## REPLICAS=2 [GPUS=0,1] [MODEL=...] [HOST=...] [PORT=8080]: replicas behind a router
	$(PY) -m server.cluster --replicas '$(REPLICAS)' $(if $(GPUS),--gpus '$(GPUS)') --host '$(HOST)' --port '$(PORT)' \
		--model '$(MODEL)' $(ARGS)

chat: $(VENV)/.serve ## talk to a running server in the terminal [URL=http://127.0.0.1:8080]
	@$(PY) -m server.client --url '$(URL)' $(ARGS)

test: setup $(VENV)/.dev ## the tests (no torch, no GPU, no network)
	$(PY) -m pytest $(ARGS)

fuzz: setup $(VENV)/.dev ## 10,000 requests made from /openapi.json, and requests made to hurt [FUZZ_CASES=625]
	FUZZ_CASES='$(FUZZ_CASES)' BLOCKED_MS=50 LEFT_S=1 $(PY) -m pytest --timeout 3600 tests/server/api/test_description.py \
		tests/server/api/test_fuzz.py tests/server/engine/test_vocab.py tests/server/test_abuse.py tests/server/test_faults.py $(ARGS)

test-reference: setup $(VENV)/.reference ## the comparisons with transformers and llama.cpp's own programs
	$(PY) -m pytest -m reference --timeout 1800 tests/reference $(ARGS) # the first use builds llama.cpp's tools

SOAK_PORT ?= 8099
MINUTES   ?= 30

soak: setup $(VENV)/.dev $(if $(filter $(NANO),$(MODEL)),$(NANO)) ## [MINUTES=30]: 32 clients, mixed requests, one deterministic server: failures, drift, leaks, answers that depend on load
	$(PY) -m server --model '$(MODEL)' --port $(SOAK_PORT) --parallel 32 --ctx-size 65536 --deterministic \
		--log-level warning & pid=$$!; trap 'kill $$pid; wait $$pid' EXIT; \
	curl -sf --retry 300 --retry-delay 1 --retry-all-errors http://127.0.0.1:$(SOAK_PORT)/ping > /dev/null && \
	$(PY) -m bench soak --url http://127.0.0.1:$(SOAK_PORT) --deterministic --minutes $(MINUTES) --concurrency 32 $(ARGS)

docs: setup $(VENV)/.dev ## the documentation as a site in build/site, every link checked
	DISABLE_MKDOCS_2_WARNING=true $(VENV)/bin/mkdocs build --quiet --site-dir build/site

lint: setup $(VENV)/.dev ## ruff, mypy --strict, hadolint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/hadolint Dockerfile.cuda deploy/Dockerfile.router

clean: ## remove .venv/, caches and test output; converted models stay
	rm -rf $(VENV) .work .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- what the targets need ---------------------------------------------------------------------------

$(PY):
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

# pip's wheel cache does not tell a CPU build from a CUDA build, hence --no-cache-dir.
$(BUILT): | $(PY)
	@$(if $(and $(filter cuda,$(FLAVOUR)),$(if $(NVCC),,x)),echo "CUDA=1 needs nvcc: put the CUDA toolkit's bin/ on PATH" >&2; exit 1,:)
	@echo "building llama-cpp-python $(SAY_$(FLAVOUR)): some minutes"
	CMAKE_ARGS="$(CMAKE_$(FLAVOUR)) $(CMAKE_PATCHES)" $(PIP) install --no-cache-dir --force-reinstall --no-deps \
		--no-binary llama-cpp-python '$(LLAMA)'
	@rm -f $(VENV)/.llama-cpp-python* && touch '$@'

$(VENV)/.serve: pyproject.toml | $(PY) $(BUILT)
	$(PIP) install -e '.[convert]'
	@touch $@

$(VENV)/.cluster: pyproject.toml | $(VENV)/.serve
	$(PIP) install -e '.[convert,cluster]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.serve
	$(PIP) install -e '.[convert,cluster,bench,dev]'
	@touch $@

$(VENV)/.reference: pyproject.toml | $(VENV)/.dev
	$(PIP) install -e '.[convert,bench,dev,reference]'
	@touch $@

# Quick: the prompts calibrate it, not minutes of its own answers, and nothing is measured.
$(NANO): $(wildcard models/nano/*.safetensors models/nano/*.json) | setup
	$(PY) -m convert --src models/nano --quant Q4_K_M --out models --no-kld --calibration convert/calibration/prompts.toml
