# make demo   convert models/demo, measure it, ask it something      make demo-real   the same with SmolLM2-135M
# make test   Python and native tests; WORKERS=8 for more processes than 2
# make docs   the documentation as a site, in build/site, its links checked
# make lint   formatting and type checks      make format   rewrite what can be rewritten
# make soak   ten minutes of random operations on sequences
# make sanitize   tests under ASan and UBSan      make sanitize-threads   what uses threads under TSan
# make wheel  one wheel for every machine, in dist; PYTHONS="python3.10 python3.12" for these
# make wheel-cuda  latentkv-cuda, the wheel with GPUs, in dist; ARCHITECTURES="89-real;90" for these
# Everything is installed into one virtual environment, $(VENV); nothing else on the machine is touched.

PYTHON ?= python3
VENV   ?= .venv
# Where a CPU build of PyTorch is offered, an exact version makes pip prefer it (2.13.0+cpu satisfies 2.13.0).
TORCH  ?= torch==2.13.0
BUILD  ?= build/make
# Processes of `make test`, each of which may take 2 GB
WORKERS ?= 2

BIN   := $(VENV)/bin
PIP   := $(BIN)/python -m pip --disable-pip-version-check
REQS  := $(BIN)/python tools/requirements.py
# A fixed build directory and no isolation: an isolated build gets a new llama.cpp path every time and compiles all of it again.
INSTALL := $(PIP) install -q --no-build-isolation --config-settings=build-dir=$(BUILD)

SOURCES := pyproject.toml CMakeLists.txt \
	$(shell find native -type f \( -name '*.cpp' -o -name '*.h' -o -name '*.cu' -o -name '*.cuh' -o -name '*.py' \
		-o -name '*.cmake' -o -name CMakeLists.txt \) -not -path '*/tests/*') \
	$(shell find python/latentkv tools/convert/latentkv_convert -type f \( -name '*.py' -o -name '*.pyi' -o -name '*.json' \
		-o -name '*.html' -o -name '*.css' -o -name '*.js' -o -name '*.svg' -o -name '*.woff2' \))
TEST_SOURCES := $(shell find native/tests -type f)

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo demo-real test test-python test-native soak sanitize sanitize-threads lint format docs wheel wheel-cuda clean

help:
	@sed -n '1,9s/^# //p' Makefile

demo: $(VENV)/.installed
	$(BIN)/python bench/demo.py --out build/demo

demo-real: $(VENV)/.installed
	$(BIN)/python bench/demo_real.py --out build/demo-real

test: test-python test-native

# a browser beside another process draws too late to see an answer grow
test-python: $(VENV)/.installed-tests
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --ignore=tests/server/page
	$(BIN)/python -m pytest tests/server/page

test-native: $(VENV)/.installed-tests
	$(BIN)/ctest --test-dir $(BUILD) --parallel 2 --output-on-failure --no-tests=error

soak: $(VENV)/.installed-tests
	LATENTKV_SOAK_SECONDS=600 $(BIN)/python -m pytest -q -s tests/promise/test_soak.py

sanitize: $(VENV)/.installed-tests
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tools/sanitize.py address

sanitize-threads: $(VENV)/.installed-tests
	PATH="$(abspath $(BIN)):$$PATH" $(BIN)/python tools/sanitize.py thread

lint: $(VENV)/.dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	BIN=$(BIN) tools/clang_format.sh --dry-run -Werror
	$(BIN)/python bench/tables.py --check

format: $(VENV)/.dev
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .
	BIN=$(BIN) tools/clang_format.sh -i
	$(BIN)/python bench/tables.py

docs: $(VENV)/.docs
	$(BIN)/python tools/docs_pages.py build/site-pages
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build
	@echo "build/site/index.html"

wheel: build/demo.gguf
	$(BIN)/python tools/wheel.py --try $< $(or $(PYTHONS),$(PYTHON))

wheel-cuda: build/demo.gguf
	$(BIN)/python tools/wheel.py --cuda --try $< $(if $(ARCHITECTURES),--architectures "$(ARCHITECTURES)") $(or $(PYTHONS),$(PYTHON))

build/demo.gguf: $(VENV)/.installed
	$(BIN)/latentkv convert models/demo -o $@ --no-plot

clean:
	rm -rf build dist $(VENV) .mypy_cache .pytest_cache .ruff_cache .hypothesis

# Stamps. Each names what it depends on, so a second `make` does nothing that is already done.

$(VENV)/.created:
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.requirements: $(VENV)/.created pyproject.toml tools/requirements.py
	@echo "installing PyTorch and the build's requirements into $(VENV)"
	$(PIP) install -q '$(TORCH)'
	$(REQS) build runtime convert > $(VENV)/requirements.txt
	$(PIP) install -q -r $(VENV)/requirements.txt
	touch $@

$(VENV)/.dev: $(VENV)/.requirements
	$(REQS) dev test server > $(VENV)/requirements-dev.txt
	$(PIP) install -q -r $(VENV)/requirements-dev.txt
	touch $@

$(VENV)/.docs: $(VENV)/.created pyproject.toml tools/requirements.py
	$(REQS) docs > $(VENV)/requirements-docs.txt
	$(PIP) install -q -r $(VENV)/requirements-docs.txt
	touch $@

$(VENV)/.installed: $(VENV)/.requirements $(SOURCES)
	@echo "building latentkv (the first time compiles ggml: some minutes)"
	PATH="$(abspath $(BIN)):$$PATH" $(INSTALL) '.[convert,server]'
	touch $@

$(VENV)/.installed-tests: $(VENV)/.requirements $(SOURCES) $(TEST_SOURCES)
	@echo "building latentkv with its native tests (the first time compiles ggml: some minutes)"
	PATH="$(abspath $(BIN)):$$PATH" LATENTKV_BUILD_TESTS=ON $(INSTALL) '.[convert,server,test]'
	touch $(VENV)/.installed $@
