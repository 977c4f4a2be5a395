# Few verbs, each the exact thing that CI runs. `make` alone prints them.

PYTHON ?= python3
WORKERS ?= auto
JOBS ?= 1
METHOD ?= eagle3
MODEL ?=
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip install --quiet --disable-pip-version-check -c constraints.txt

# Where setup stands: repeated only when what it installs from has changed.
LIGHT := $(VENV)/.installed-light
FULL := $(VENV)/.installed-full

# Tests start many processes: without bytecode each would compile every module anew.
unexport PYTHONDONTWRITEBYTECODE

# NVIDIA's compilers stand beside the packages, so that nothing else imports them.
RTX := $(VENV)/tensorrt-rtx
RTX_OLD := $(VENV)/tensorrt-rtx-1.4
PYCUDA := $(VENV)/pycuda
CLIENTS := $(VENV)/clients

# What wheels are made with; its setuptools is not the one of the environment.
WHEEL_TOOLS := $(VENV)/wheel-tools

# A published model that a package brings; once it is here the demo needs no network.
SMOLLM2 := build/smollm2

# The kernels of edgespec/backends/ort/native, as pip builds them too.
NATIVE := edgespec/backends/ort/native
KERNELS := $(NATIVE)/libedgespec_kernels.so

.PHONY: help setup check check-native fix test test-fast test-published test-deep test-tensorrt test-clients test-pycuda faults kills demo bench docs wheels

help:
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' Makefile | while IFS='|' read -r verb what; do \
		printf '  make %-14s %s\n' "$$verb" "$$what"; done

setup: $(FULL) $(KERNELS) ## make .venv with everything for development (PYTHON=python3.12 names another Python)

check: $(FULL) ## lint, formatting, types and generated docs
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(PY) scripts/make_docs.py --check
	$(PY) scripts/make_pictures.py --check

check-native: $(FULL) ## the tests of the kernels with AddressSanitizer and UBSan
	$(PY) scripts/check_native.py

fix: $(FULL) ## mend what the linter and the formatter can mend
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

test: $(FULL) $(KERNELS) ## all tests that a CPU can run but the deep ones, on every core (WORKERS=0: one after the other)
	$(PY) -m pytest -n $(WORKERS) -m "not deep and not published and not clients"

test-fast: $(FULL) $(KERNELS) ## unit tests without the slow ones
	$(PY) -m pytest -n $(WORKERS) tests/unit -m "not slow and not deep and not clients"

test-published: $(FULL) $(KERNELS) $(SMOLLM2)/.installed ## all tests of a published model, which pip brings (EDGESPEC_PROMPTS=FILE: JSONL with turns)
	$(PY) -m pytest -n 0 tests/published

test-deep: $(FULL) $(KERNELS) ## the dear tests of scripts, trainings and kills: before a release, and when their code changes
	$(PY) -m pytest -n $(WORKERS) -m deep

test-tensorrt: $(FULL) $(RTX)/.installed $(RTX_OLD)/.installed ## build engines with NVIDIA's own compilers, TensorRT-RTX 1.7 and 1.4 (downloads them; no GPU needed)
	PYTHONPATH=$(CURDIR)/$(RTX) $(PY) -m pytest -m tensorrt tests/tensorrt
	PYTHONPATH=$(CURDIR)/$(RTX_OLD) $(PY) -m pytest -m tensorrt tests/tensorrt

test-clients: $(FULL) $(KERNELS) $(CLIENTS)/.installed ## let clients of others ask the server: openai, anthropic, tritonclient, langchain, schemathesis, Chromium where it is installed
	PYTHONPATH=$(CURDIR)/$(CLIENTS) $(PY) -m pytest -n 0 -m clients tests/unit/serve

test-pycuda: $(FULL) $(PYCUDA)/.installed ## build pycuda (90 seconds; no CUDA toolkit, no GPU) and run it on the stand-in of CUDA's driver
	PYTHONPATH=$(CURDIR)/$(PYCUDA) $(PY) -m pytest tests/unit/backends/tensorrt/test_stand_in.py

demo: $(KERNELS) $(if $(filter mtp draft_model eagle1 medusa jetspec dspark vlm,$(METHOD)),$(FULL),$(LIGHT)) $(if $(filter smollm2,$(MODEL)),$(SMOLLM2)/.installed) ## from a checkpoint to fast answers; METHOD=suffix, ngram, dflash, mtp, eagle1, medusa, jetspec, dspark or draft_model drafts otherwise, vlm answers about images, MODEL=smollm2 runs a published model
	$(if $(filter-out smollm2,$(MODEL)),$(error MODEL=$(MODEL) is not known: smollm2 is))$(PY) scripts/$(if $(MODEL),demo_published.py,demo.py --method $(METHOD))

bench: $(LIGHT) $(KERNELS) ## measure export, build, load and steps on a checkpoint of 0.6 B parameters
	$(PY) scripts/benchmark.py

faults: $(FULL) ## plant faults in a copy of the code and see whether the tests find them (JOBS=4: four at a time)
	$(PY) scripts/plant_faults.py --jobs $(JOBS)

kills: $(LIGHT) ## kill commands at random moments and see whether what they leave is taken for finished
	$(PY) scripts/kill_test.py

wheels: $(FULL) $(KERNELS) $(WHEEL_TOOLS)/.installed ## dist/: an sdist and the wheels for Linux on x86-64 and aarch64, checked (URL=https://... names the repository)
	$(PY) scripts/make_wheels.py --tools $(WHEEL_TOOLS) --out dist $(if $(URL),--url $(URL))

docs: $(LIGHT) ## write docs/cli.md anew from --help, and the pictures
	$(PY) scripts/make_docs.py
	$(PY) scripts/make_pictures.py

$(PY):
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "edgespec needs Python 3.11 or newer; set PYTHON=")'
	$(PYTHON) -m venv $(VENV)

$(LIGHT): pyproject.toml constraints.txt | $(PY)
	$(PIP) -e .
	@touch $@

# Engines run without them: where they cannot be compiled, setup goes on.
$(KERNELS): setup.py $(wildcard $(NATIVE)/*.cpp $(NATIVE)/*.h) | $(LIGHT)
	$(PIP) --no-deps -e .

define install-rtx
@echo "TensorRT-RTX is NVIDIA's, under NVIDIA's own licence: docs.nvidia.com/deeplearning/tensorrt-rtx. Downloading it to $(@D) accepts it."
rm -rf $(@D)
$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) -r $<
@touch $@
endef

$(RTX)/.installed: requirements-tensorrt-rtx.txt | $(PY)
	$(install-rtx)

$(RTX_OLD)/.installed: requirements-tensorrt-rtx-1.4.txt | $(PY)
	$(install-rtx)

$(PYCUDA)/.installed: scripts/build_pycuda.py | $(PY)
	$(PY) scripts/build_pycuda.py $(@D)
	@touch $@

$(SMOLLM2)/.installed: requirements-smollm2.txt | $(PY)
	rm -rf $(@D)
	$(PY) -m pip install --quiet --disable-pip-version-check --no-deps --target $(@D) -r $<
	@touch $@

$(CLIENTS)/.installed: requirements-clients.txt constraints.txt | $(FULL)
	rm -rf $(@D)
	$(PIP) --target $(@D) -r $<
	$(PIP) --target $(@D) --no-deps tritonclient==2.73.0
	@touch $@

$(WHEEL_TOOLS)/.installed: requirements-wheels.txt | $(PY)
	rm -rf $(@D)
	$(PY) -m pip install --quiet --disable-pip-version-check --target $(@D) -r $<
	@touch $@

# torch goes first and alone, so that the wheel already chosen (a CPU build, say) is the one that the rest agrees with.
$(FULL): pyproject.toml constraints.txt | $(PY)
	$(PIP) torch==2.13.0
	$(PIP) -e .[dev]
	@touch $(LIGHT) $@
