# Every target makes .venv/ itself when it is missing. `make` alone prints the help.

PYTHON ?= python3
VENV   := .venv
PY     := $(VENV)/bin/python
# not quiet: the packages of a first time take a minute
PIP    := $(PY) -m pip --disable-pip-version-check

# A name in variants/, or a TOML file: what QUANT or RECIPE says unless they are given, and settings.
VARIANT     ?=
ifneq ($(VARIANT),)
VARIANT_FILE = $(or $(wildcard variants/$(VARIANT).toml),$(wildcard $(VARIANT)),$(error VARIANT=$(VARIANT): no such \
	variant; variants/ has $(basename $(notdir $(wildcard variants/*.toml)))))
variant_key  = $(shell sed -n 's/^$(1) *= *"\([^"]*\)".*/\1/p' '$(VARIANT_FILE)')
RECIPE      ?= $(addprefix $(dir $(VARIANT_FILE)),$(call variant_key,recipe))
QUANT       ?= $(or $(call variant_key,quant),$(basename $(notdir $(RECIPE))),$(error $(VARIANT_FILE): no quant = "..."))
endif
SRC         ?= Qwen/Qwen3.5-4B
QUANT       ?= Q4_K_M
OUT         ?= models
RECIPE      ?=
CALIBRATION ?=
METHOD      ?=
TARGET      ?=
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
# CUDA=auto: where there is both a card and its compiler, for that card's architecture; else for the CPU. CUDA=0 or 1
# decides by hand, CUDA=pypi fetches the compiler from PyPI, CUDA_ARCHS (such as "86;89") names other architectures. PATCHES=0 builds llama.cpp as it comes,
# NATIVE=0 for any processor of this kind. qwen_serve/server/setup_llama.py builds, and keeps the wheel.
CUDA       ?= auto
CUDA_ARCHS ?=
PATCHES    ?= 1
NATIVE     ?= 1

# A synopsis that was pasted with its brackets: make takes "[MODEL=x]" for a variable of that odd name.
ifneq ($(strip $(foreach word,$(.VARIABLES),$(if $(filter command line,$(origin $(word))),$(findstring [,$(word))))$(findstring [,$(MAKECMDGOALS))$(findstring ],$(MAKECMDGOALS))),)
$(error brackets mark what may be left out: make TARGET NAME=value, without [ and ])
endif

.DEFAULT_GOAL := help
.PHONY: help llama setup convert serve serve-cluster image submission chat test test-lowest test-slow check fuzz soak hops test-reference test-image verify record docs lint bump clean

# Variables in `make help`: a heading, then name with default, and meaning.
#= convert, image:
#=   QUANT=Q4_K_M       names, separated by commas; auto: search for TARGET, BPW, KLD or MS
#=   SRC=Qwen/Qwen3.5-4B  hub id, folder of a checkpoint, or a GGUF in F16, BF16 or F32
#= convert, serve, image:
#=   VARIANT=           quant and settings under one name, such as fast (docs/variants.md)
#= convert:
#=   OUT=models         folder for the results
#=   RECIPE=            TOML file of types, in place of QUANT's
#=   CALIBRATION=       text for the importance matrix
#=   METHOD=nearest     compensated: other columns compensate for rounding errors (GPTQ)
#=   TARGET=            size for QUANT=auto, such as 2.4GB; target of a block drafter
#=   BPW= KLD= MS=      bits a weight, KL divergence, milliseconds for QUANT=auto
#=   FOR=               GPU that MS is for: A10G, L4, H100, H200
#= serve, serve-cluster, image, soak, record:
#=   MODEL=nano         GGUF file
#= serve, serve-cluster:
#=   HOST=127.0.0.1 PORT=8080  address to listen on
#=   REPLICAS=2 GPUS=   serve-cluster: number of replicas, and their GPUs, such as 0,1
#= chat, verify:
#=   URL=http://127.0.0.1:8080  address of the server
#= setup, image:
#=   CUDA=auto          0: CPU only; 1: CUDA; pypi: also downloads CUDA's compiler
#=   CUDA_ARCHS=        compute capabilities, such as "86;89" (default: this machine's)
#=   PATCHES=1          0: stock llama.cpp
#=   NATIVE=1           setup: 0: build for all processors of this architecture
#=   QWEN_SERVE_WHEELS=  setup: folder or URL of a release with a wheel to use instead
#= image:
#=   IMAGE=qwen-serve   name of the image
#=   MMPROJ=            file of the vision tower (default: the model's); empty: none
#= tests and measurements:
#=   WORKERS=           test: number of parallel processes
#=   SINCE=main         check: commit to compare with
#=   FUZZ_CASES=625     fuzz: requests for each of 8 endpoints, valid and invalid
#=   MINUTES=30         soak: duration
#=   TASKS=nano         verify, record: quality gates: nano or official
#=   GATES=results      submission: their results; also needs SUBMIT_URL, _KEY and _TEAM
#=   VERSION=           bump: release of llama-cpp-python, such as 0.3.37
#= most targets:
#=   ARGS=              more flags of the program: make serve ARGS='--ctx-size 32768'

help: ## print this text
	@echo "Qwen3.5 on llama.cpp: convert, serve, measure."
	@echo
	@echo "  make setup                                       # once"
	@echo "  make serve                                       # the bundled model"
	@echo "  make convert QUANT=Q4_K_M                        # Qwen/Qwen3.5-4B"
	@echo "  make serve MODEL=models/Qwen3.5-4B-Q4_K_M.gguf PORT=8000"
	@echo
	@echo "Targets:"
	@awk -F ':.*## ' '/^#: / { print "\n" substr($$0, 4) ":" } \
		/^[a-z-]+:.*## / { printf "  %-15s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)
	@echo
	@echo "Variables:"
	@awk -F '   *' '/^#= .*:$$/ { print substr($$0, 4); next } \
		/^#= / { sub(/^#= */, ""); printf "  %-27s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

#: Convert and serve
setup: llama $(VENV)/.serve ## create .venv/ and build llama.cpp for this machine, or use a release's wheel
	@$(if $(filter setup,$(MAKECMDGOALS)),$(PY) -m qwen_serve.server.setup_llama --cuda '$(CUDA)' --advise,:)

convert: setup $(if $(filter auto,$(QUANT)),$(VENV)/.search) ## convert a checkpoint to GGUF and quantize it
	$(PY) -m qwen_serve.convert --src '$(SRC)' --quant '$(QUANT)' --out '$(OUT)' \
		$(if $(RECIPE),--recipe '$(RECIPE)') $(if $(CALIBRATION),--calibration '$(CALIBRATION)') $(if $(METHOD),--method '$(METHOD)') \
		$(if $(TARGET),$(if $(filter auto,$(QUANT)),--target-size,--target) '$(TARGET)') \
		$(if $(BPW),--target-bpw '$(BPW)') $(if $(KLD),--target-kld '$(KLD)') \
		$(if $(MS),--target-ms '$(MS)') $(if $(FOR),--for '$(FOR)') $(ARGS)

serve: setup $(if $(VARIANT),,$(if $(filter $(NANO),$(MODEL)),$(NANO))) ## serve a model: MODEL, or the bundled nano
	$(PY) -m qwen_serve.server$(if $(VARIANT),.cli serve '$(or $(NAMED),nano)' --variant '$(VARIANT)', --model '$(MODEL)') \
		--host '$(HOST)' --port '$(PORT)' $(ARGS)

serve-cluster: setup $(VENV)/.cluster $(if $(filter $(NANO),$(MODEL)),$(NANO)) ## serve replicas behind a router
	$(PY) -m qwen_serve.server.cluster --replicas '$(REPLICAS)' $(if $(GPUS),--gpus '$(GPUS)') --host '$(HOST)' --port '$(PORT)' \
		--model '$(MODEL)' $(ARGS)

chat: $(VENV)/.serve ## talk to a running server in the terminal
	@$(PY) -m qwen_serve.server.client --url '$(URL)' $(ARGS)

#: Images
# A model that is named is baked in as it is; else QUANT of SRC is made first.
CONTAINER ?= docker
IMAGE     ?= qwen-serve$(if $(filter 0,$(CUDA)),-cpu)
NAMED     := $(if $(filter command line environment,$(origin MODEL)),$(MODEL))
# What the converter names its files after: the last part of SRC, of a GGUF without its type.
WHOLE     := $(foreach type,F16 BF16 F32,%-$(type).gguf)
MADE      := $(notdir $(or $(firstword $(foreach file,$(WHOLE) %.gguf,$(patsubst $(file),%,$(filter $(file),$(SRC))))),$(SRC)))
BAKED     := $(or $(NAMED),models/$(MADE)-$(QUANT).gguf)
# Its vision tower, by the server's rule: mmproj-NAME-TYPE.gguf beside NAME-*.gguf. Looked for once the model is made.
MMPROJ    ?= $(shell for tower in $(dir $(BAKED))mmproj-*-*.gguf; do case 'mmproj-$(notdir $(BAKED))' in \
	("$$(basename "$$tower" | sed 's/-[^-]*$$//')"-*) echo "$$tower";; esac; done)

image: $(if $(or $(NAMED),$(filter 0,$(CUDA))),,convert) ## build a container image with the model (CUDA=0: nano on the CPU)
	$(if $(and $(VARIANT),$(if $(wildcard variants/$(VARIANT).toml),,no)),$(error VARIANT=$(VARIANT): an image has those of variants/ alone))
ifeq ($(CUDA),0)
	$(CONTAINER) build -f Dockerfile.cpu --build-arg QUANT='$(QUANT)' --build-arg VARIANT='$(VARIANT)' \
		--build-arg PATCHES='$(PATCHES)' -t '$(IMAGE)' .
else
	$(CONTAINER) build -f Dockerfile.cuda --build-arg MODEL='$(BAKED)' --build-arg MMPROJ='$(MMPROJ)' --build-arg VARIANT='$(VARIANT)' \
		--build-arg CUDA_ARCHS='$(or $(CUDA_ARCHS),86)' --build-arg PATCHES='$(PATCHES)' -t '$(IMAGE)' .
endif

GATES ?= results

submission: image $(VENV)/.bench ## build the image, check the competition's rules, upload it
	$(CONTAINER) save -o image.tar '$(IMAGE)'
	gzip -f image.tar
	$(PY) scripts/submit.py image.tar.gz --model '$(BAKED)' $(if $(MMPROJ),--model '$(MMPROJ)') --original '$(SRC)' --gates '$(GATES)' $(ARGS)

#: Test
# one more than there are cores, since a third of the tests wait for a server or a browser; long tests compute
CORES     = $(shell $(PYTHON) -c 'import os; print(min(4, os.cpu_count() or 1))')
WORKERS  ?= $(shell expr $(CORES) + 1)
QUICK    := not slow and not reference and not image
TOGETHER  = -n $(WORKERS) --dist worksteal
LONG      = -n $(CORES) --dist worksteal
SINCE    ?= main

test: setup $(VENV)/.dev ## run the tests that need no torch, no GPU and no network
	$(PY) -m pytest -m '$(QUICK)' $(TOGETHER) $(ARGS)

test-slow: setup $(VENV)/.dev ## run the long tests; those that need an idle machine come last
	$(PY) -m pytest -m 'slow and not alone and not reference and not image' $(LONG) $(ARGS) || [ $$? -eq 5 ]
	$(PY) -m pytest -m 'slow and alone' $(ARGS) || [ $$? -eq 5 ] # 5: ARGS names files without any

# every floor of pyproject.toml is one that was tested: an environment of the lowest versions, kept apart
test-lowest: setup ## run the tests with the lowest version of each direct dependency
	$(PY) -m pip --disable-pip-version-check install -q uv
	$(PY) -m uv venv -q --clear --seed --python $(PY) .venv-lowest
	$(PY) -m uv pip install --python .venv-lowest/bin/python --resolution lowest-direct -e '.[cluster,bench,dev]' \
		"llama-cpp-python @ $$($(PY) -c 'import importlib.metadata as m, json; print(json.loads(m.distribution("llama-cpp-python").read_text("direct_url.json"))["url"])')"
	.venv-lowest/bin/python -m pytest -m '$(QUICK)' $(TOGETHER) $(ARGS)

check: setup $(VENV)/.dev ## check style and types, and run the tests of files changed since SINCE
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $$(find native -type f -name '?*.[chi]*')
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy --strict patches/bump.py
	$(PY) -m tests.changed --since '$(SINCE)' -- -m '$(QUICK)' $(TOGETHER) -q $(ARGS)

fuzz: setup $(VENV)/.dev ## send 10,000 generated and hostile requests
	FUZZ_CASES='$(FUZZ_CASES)' BLOCKED_MS=50 LEFT_S=1 $(PY) -m pytest --timeout 3600 tests/server/api/test_openapi.py \
		tests/server/api/test_fuzz.py tests/server/api/formats/test_fuzz.py tests/server/engine/test_vocab.py tests/server/test_abuse.py tests/server/test_faults.py $(ARGS)

test-reference: setup $(VENV)/.reference ## compare with transformers and stock llama.cpp
	$(PY) -m pytest -m reference --timeout 1800 $(LONG) tests/reference tests/patches $(ARGS) # the first use builds llama.cpp

test-image: setup $(VENV)/.dev ## run Dockerfile.cpu's steps in a chroot (needs root and mmdebstrap; ten minutes)
	$(PY) -m pytest -m image --timeout 3600 tests/test_image.py $(ARGS)

SOAK_PORT ?= 8099
MINUTES   ?= 30

soak: setup $(VENV)/.dev $(if $(filter $(NANO),$(MODEL)),$(NANO)) ## load a deterministic server with 32 clients; reports failures, drift, leaks
	$(PY) -m qwen_serve.server --model '$(MODEL)' --port $(SOAK_PORT) --parallel 32 --ctx-size 65536 --deterministic \
		--log-level warning & pid=$$!; trap 'kill $$pid; wait $$pid' EXIT; \
	curl -sf --retry 300 --retry-delay 1 --retry-all-errors http://127.0.0.1:$(SOAK_PORT)/ping > /dev/null && \
	$(PY) -m qwen_serve.bench soak --url http://127.0.0.1:$(SOAK_PORT) --deterministic --minutes $(MINUTES) --concurrency 32 $(ARGS)

hops: setup $(VENV)/.dev $(NANO) ## count the functions that a request and a step enter (ARGS=--list: name them)
	$(PY) -m tests.server.hops '$(NANO)' $(ARGS)

#: Measure
TASKS ?= nano

verify: $(VENV)/.bench ## check a running server: contract, latency, quality gates, long answers
	$(PY) -m qwen_serve.bench experiment verify --set 'url=$(URL)' --set 'tasks=$(TASKS)' $(ARGS)

# a model that is named is taken for the real one, whose gates are the official ones
record: setup $(VENV)/.bench $(if $(filter $(NANO),$(MODEL)),$(NANO)) ## measure MODEL for an hour, in one file to send in (ARGS=--quick: a minute)
	$(PY) -m qwen_serve.bench record '$(MODEL)' --tasks '$(if $(filter file,$(origin TASKS)),$(if $(NAMED),official,nano),$(TASKS))' $(ARGS)

#: Maintain
docs: setup $(VENV)/.docs ## build the documentation in build/site and check its links
	NO_MKDOCS_2_WARNING=1 DISABLE_MKDOCS_2_WARNING=true $(VENV)/bin/mkdocs build --site-dir build/site

lint: setup $(VENV)/.dev ## run ruff, mypy --strict, clang-format, clang-tidy and hadolint
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/clang-format --dry-run --Werror $$(find native -type f -name '?*.[chi]*')
	$(VENV)/bin/clang-tidy --quiet native/src/*.cpp -- -std=c++17
	$(VENV)/bin/mypy
	$(VENV)/bin/mypy --strict patches/bump.py
	$(VENV)/bin/hadolint Dockerfile.cuda Dockerfile.cpu deploy/Dockerfile.router

bump: llama $(VENV)/.dev ## move the patches to another llama-cpp-python (patches/moving-the-pin.md)
	$(PY) patches/bump.py '$(or $(VERSION),$(error VERSION=? names a release of llama-cpp-python))' $(ARGS)

clean: ## remove .venv/, caches and test output; converted models stay
	rm -rf $(VENV) .venv-lowest .work .pytest_cache .mypy_cache .ruff_cache .hypothesis build *.egg-info
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# --- what the targets need ---------------------------------------------------------------------------

$(PY):
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

llama: | $(PY)
	@$(PY) -m qwen_serve.server.setup_llama --cuda '$(CUDA)' $(if $(CUDA_ARCHS),--cuda-archs '$(CUDA_ARCHS)') --patches '$(PATCHES)' --native '$(NATIVE)'

$(VENV)/.serve: pyproject.toml | llama
	$(PIP) install -e '.[convert]'
	@touch $@

$(VENV)/.search: pyproject.toml | $(VENV)/.serve
	$(PIP) install -e '.[search]'
	@touch $@

$(VENV)/.cluster: pyproject.toml | $(VENV)/.serve
	$(PIP) install -e '.[cluster]'
	@touch $@

$(VENV)/.bench: pyproject.toml | $(VENV)/.serve
	$(PIP) install -e '.[bench]'
	@touch $@

$(VENV)/.docs: pyproject.toml | $(VENV)/.serve
	$(PIP) install -e '.[docs]'
	@touch $@

$(VENV)/.dev: pyproject.toml | $(VENV)/.serve
	$(PIP) install -e '.[cluster,bench,dev]'
	@touch $@

$(VENV)/.reference: pyproject.toml | $(VENV)/.dev
	$(PIP) install -e '.[bench,dev,reference]'
	@touch $@

# Quick: the prompts calibrate it, not minutes of its own answers, and nothing is measured. It is made where
# `make convert` makes it, whose record says so: whichever comes second finds the files, or replaces them.
$(NANO): $(wildcard models/nano/*.safetensors models/nano/*.json) | setup
	$(PY) -m qwen_serve.convert --src models/nano --quant Q4_K_M --out $(@D) --no-kld --threads 1 \
		--calibration qwen_serve/convert/calibration/prompts.toml > /dev/null
