# make demo, make test: everything from a bare checkout, on a machine with or without a GPU.
#
#   PYTHON=python3.12   the interpreter to build .venv with (default: the first one >= 3.11)
#   VENV=               no .venv: run with PYTHON as it is (a GPU machine's own torch, say)
#   ARGS="-k mask"      more arguments for pytest or for heedful

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && exit; \
	done; echo python3)
VENV ?= .venv
WORKERS ?= 2

READY := $(if $(VENV),$(VENV)/.ready)
PY := $(if $(VENV),$(VENV)/bin/python,$(PYTHON))
RUN := PYTHONPATH=src $(PY) -m
SAMPLE ?= 60
PART ?= host
# Files that start Triton's interpreter on themselves; in `make test` processes are shared by all.
INTERPRETED = $(shell grep -rl --include='test_*.py' 'pass_in_the_interpreter(__file__)' tests)

# pyright makes much that lives long: in a larger nursery less of it is copied twice.
HEAP := --max-semi-space-size=128

# Tests start hundreds of processes: compiled once, modules are not compiled in each.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help set-up test jax-calls oldest-triton test-compilers test-integrations test-transformers test-slow test-gpu test-random test-mutation memcheck lint format demo bench ab docs wheels kernels test-install site hub workflows clean

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

set-up: $(READY) ## make .venv with pinned tools and this checkout installed in it

$(VENV)/.ready: pyproject.toml tools/set-up.sh tools/install.py
	tools/set-up.sh $(VENV) $(PYTHON)
	@touch $@

# What takes one core side by side, so that none waits: .venv is made beside JAX's environment and its
# tests, and the oldest Triton compiles beside the type checker. Then all workers test.
test: ## lint, types and the default tests (what CI runs)
	@tools/ticks.sh "set-ups, lint, JAX's calls, the oldest Triton" \
		$(MAKE) --no-print-directory -j3 $(if $(filter output-sync,$(.FEATURES)),-Otarget) \
		lint $(if $(VENV),oldest-triton jax-calls)
	@echo "the default tests: they are collected first, which takes a while"
	$(if $(ARGS),,TRITON_INTERPRET=1 $(RUN) pytest -n $(WORKERS) --dist worksteal $(INTERPRETED))
	$(if $(ARGS),,TEST_INTERPRETER_APART=1 TEST_JAX_CALLS_APART=$$(ls $(VENV)-jax/.ready 2>/dev/null)) \
		$(RUN) pytest -n $(WORKERS) --dist worksteal $(ARGS)

oldest-triton: $(READY) ## compile kernels with the oldest Triton that is supported
	tools/oldest_triton.sh $(VENV) -n $(WORKERS) --dist worksteal

test-compilers: $(READY) ## tests/compile and the emulator's through workers of each Triton (ARGS=)
	tools/compilers.sh $(VENV) -n $(WORKERS) --dist worksteal $(ARGS)

jax-calls:
	tools/jax_calls.sh $(VENV)-jax

test-integrations: $(READY) ## all families of models in transformers and diffusers, compiled too (ARGS=)
	$(RUN) pytest tests/integrations -n $(WORKERS) --dist worksteal --run-slow $(ARGS)

test-transformers: $(READY) ## transformers' own tests of attention, with ours (ARGS=)
	tools/their_tests.sh $(VENV) $(ARGS)

test-slow: $(READY) ## every test, the long grids too
	$(RUN) pytest -n $(WORKERS) --dist worksteal --run-slow $(ARGS)

test-gpu: $(READY) ## the tests that need a GPU, in one process
	$(RUN) pytest -m gpu $(ARGS)

test-random: $(READY) ## the default tests with fresh examples; prints the seed (SEED=)
	seed=$(or $(SEED),$$($(PY) -c 'import random; print(random.randrange(1, 10**6))')); \
	echo "seed $$seed: again by make test-random SEED=$$seed"; \
	TEST_SEED=$$seed $(RUN) pytest -n $(WORKERS) --dist worksteal \
		--hypothesis-profile=fresh --hypothesis-seed=$$seed $(ARGS)

test-mutation: $(READY) ## plant SAMPLE= bugs, see which of them no test notices (PART=, SEED=)
	PYTHONPATH=tools $(PY) -m mutation --part $(PART) --sample $(SAMPLE) --workers $(WORKERS) \
		$(if $(SEED),--seed $(SEED)) $(ARGS)

memcheck: $(READY) ## a sample of the GPU tests under compute-sanitizer, on all GPUs (ARGS=)
	PYTHONPATH=src:tools $(PY) -m memcheck $(ARGS)

lint: $(READY) ## ruff and pyright
	$(RUN) ruff check .
	$(RUN) ruff format --check .
	NODE_OPTIONS="$(HEAP) $(NODE_OPTIONS)" $(RUN) pyright

format: $(READY) ## format, and mend what ruff can
	$(RUN) ruff format .
	$(RUN) ruff check --fix .

demo: $(READY) ## train a small GPT with heedful and with SDPA, compare, generate text
	$(RUN) heedful.cli demo $(ARGS)

bench: $(READY) ## time heedful against its peers
	$(RUN) heedful.cli bench $(ARGS)

ab: $(READY) ## time this checkout in turns with BASE= (a commit, folder or archive); TABLES=
	PYTHONPATH=tools $(PY) -m ab $(or $(BASE),$(error make ab BASE=<commit>)) src \
		$(if $(TABLES),--tables $(TABLES)) $(ARGS)

docs: $(READY) ## write the generated pages of docs/ and measurements/ anew
	$(RUN) heedful.cli support --markdown docs/support-matrix.md
	$(PY) tools/draw_docs.py

$(VENV)-release/.ready: pyproject.toml tools/release_tools.sh
	tools/release_tools.sh $(VENV)-release $(PYTHON)

wheels: $(VENV)-release/.ready ## sdist and wheel in dist/, the same bytes from the same commit
	tools/wheels.sh $(VENV)-release dist

kernels: $(READY) $(VENV)-release/.ready ## the wheels of compiled kernels in dist/, for drivers of CUDA 13 and 12 (ARGS=)
	$(PY) tools/kernel_wheel/build.py $(VENV)-release dist $(ARGS)
	$(PY) tools/kernel_wheel/build.py $(VENV)-release dist --cuda 12 $(ARGS)

test-install: $(VENV)-release/.ready ## install the wheel with each extra, run the README's tour there
	$(PYTHON) tools/try_install.py $(VENV)-release $(ARGS)

site: $(VENV)-release/.ready ## docs/ and a reference made from docstrings, in .site/html
	$(VENV)-release/bin/python tools/draw_site.py

workflows: $(VENV)-release/.ready ## the workflows against the schema of GitHub's
	$(VENV)-release/bin/check-jsonschema --builtin-schema vendor.github-workflows .github/workflows/*.yml

hub: $(READY) ## the tree that the `kernels` library loads heedful from, in .hub
	tools/hub.sh $(VENV) .hub

clean: ## remove .venv and everything generated
	rm -rf .venv .venv-jax .venv-oldest-triton .venv-toolchains .venv-release .venv-hub .hub .site dist .pytest_cache .ruff_cache .hypothesis .mutation demo-output bench-output
