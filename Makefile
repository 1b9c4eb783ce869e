# holdfast: everything a newcomer, a developer and CI run. Needs only Python >= 3.11 with venv, make and git.
#
#   make demo    train a small model on two nodes, kill one, watch the run recover
#   make test    format, lint, types, import contract, tests, docs: what CI runs
#   make help    the rest

PYTHON ?= python3
ENV := .venv
READY := $(ENV)/.holdfast-ready
BIN := $(CURDIR)/$(ENV)/bin
INSTALLER := env VIRTUAL_ENV=$(CURDIR)/$(ENV) $(BIN)/uv
# Tests start thousands of Python processes, which would compile holdfast anew where bytecode is not kept.
HAVE := env -u PYTHONDONTWRITEBYTECODE PATH="$(BIN):$$PATH"
COMPILE := $(INSTALLER) pip compile pyproject.toml --universal --python-version 3.11 --generate-hashes \
	--no-header --no-emit-index-url --no-emit-find-links --quiet

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test lint types imports quick matrix packages docs bench format proto lock audit clean prerequisites

help: ## show this list
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "make %-8s %s\n", $$1, $$2 }' $(firstword $(MAKEFILE_LIST))

demo: $(READY) ## train over two nodes, kill one, see the run recover and account for its time
	@show() { printf '\n$$ %s\n' "$$*"; $(HAVE) "$$@"; }; \
	show holdfast run examples/quickstart/job.yaml -d && \
	show holdfast drill kill node:1 --at-step 60 && \
	show holdfast attach

test: $(READY) ## all that CI checks; what this machine cannot run is skipped with its reason
	@$(MAKE) --no-print-directory --output-sync --jobs=2 lint types imports docs
	@step() { printf '\n==> %s\n' "$$1"; shift; $(HAVE) "$$@"; }; \
	step 'lab (about twenty minutes, once for each version)' python -m lab build kubernetes volcano traefik flux helm slurm slurm-26.05 --where-possible && \
	step 'tests' .ci/tests

lint: $(READY) ## format and lint; `make format` fixes what it can
	@echo '==> format and lint' && $(HAVE) ruff format --check --quiet . && $(HAVE) ruff check --quiet .

types: $(READY) ## check types
	@echo '==> types' && $(HAVE) basedpyright

imports: $(READY) ## check that imports point down
	@echo '==> import contract' && $(HAVE) lint-imports

quick: $(READY) ## only the tests that take less than a second
	@$(HAVE) .ci/tests -m 'not slow'

matrix: $(READY) ## run the training library's tests with the lowest and the newest torch that it supports
	@.ci/torch_matrix lowest && .ci/torch_matrix newest

packages: $(READY) ## build the wheel, and use it with each extra; see that all extras resolve on aarch64 too
	@.ci/wheel && .ci/platforms

docs: $(READY) ## build the documentation
	@echo '==> docs' && $(HAVE) sphinx-build -W --keep-going -q -b html docs docs/_build/html
	@echo 'docs/_build/html/index.html'

bench: $(READY) ## measure every claim of docs/benchmarks.md beside its peer
	@$(HAVE) python -m bench

format: $(READY) ## format the code and fix what the linter can fix
	@$(HAVE) ruff check --fix-only --quiet . && $(HAVE) ruff format .

proto: $(READY) ## generate the Lighthouse's messages from their .proto
	@$(HAVE) python .ci/protobuf.py

# No index and no address is written, so that the lock works behind any mirror (docs/decisions/0001).
lock: $(READY) ## renew requirements.lock and .ci/torch-lowest.txt: `make lock`, or `make lock UPGRADE=--upgrade`
	@$(COMPILE) --extra dev $(UPGRADE) --output-file requirements.lock
	@$(COMPILE) --extra train-tests --resolution lowest-direct $(UPGRADE) --output-file .ci/torch-lowest.txt
	@echo 'requirements.lock, .ci/torch-lowest.txt'

audit: | prerequisites ## ask whether any pinned dependency has a known vulnerability; reports it if no index can be asked
	@$(PYTHON) .ci/audit.py requirements.lock

clean: ## remove the environment and all that was built; runs and their logs stay
	rm -rf $(ENV) $(ENV)-lowest dist docs/_build docs/reference/generated
	rm -rf .pytest_cache .ruff_cache .hypothesis .import_linter_cache .grimp_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

# The lock holds the installer and the build backends too: everything that is fetched is checked against a hash.
# DeepSpeed comes as source only, and is built with the lock's setuptools. All of it is compiled now: where Python is
# told to keep no bytecode, every process that imports torch would compile it anew, which takes 7 s.
$(READY): requirements.lock pyproject.toml | prerequisites
	@echo 'Setting up $(ENV) (the first time fetches about 5 GB, because torch comes with CUDA)'
	@$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv --clear $(ENV)
	@awk '/^[^ ]/ { on = /^(setuptools|uv)==/ } on' requirements.lock > $(ENV)/first.lock
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --require-hashes -r $(ENV)/first.lock
	@$(INSTALLER) pip sync --quiet --require-hashes --no-build-isolation --compile-bytecode requirements.lock
	@$(INSTALLER) pip install --quiet --no-deps --no-build-isolation --editable .
	@touch $@

prerequisites:
	@command -v $(PYTHON) >/dev/null 2>&1 || { \
		echo 'holdfast needs Python 3.11 or later, and there is no "$(PYTHON)" on PATH.'; \
		echo 'Remedy: install it (Debian, Ubuntu: apt-get install python3 python3-venv), or name one: make PYTHON=/path/to/python3.12'; \
		exit 1; } >&2
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo 'holdfast needs Python 3.11 or later; "$(PYTHON)" is' "$$($(PYTHON) --version 2>&1)."; \
		echo 'Remedy: install a later one and name it: make PYTHON=python3.12'; \
		exit 1; } >&2
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo '"$(PYTHON)" comes without venv, which holds the project apart from the rest of the machine.'; \
		echo 'Remedy: Debian, Ubuntu: apt-get install python3-venv'; \
		exit 1; } >&2
	@command -v git >/dev/null 2>&1 || { \
		echo 'holdfast needs git.'; \
		echo 'Remedy: Debian, Ubuntu: apt-get install git'; \
		exit 1; } >&2
