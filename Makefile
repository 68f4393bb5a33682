# Developer entry points. Each makes or brings up to date .venv first (tools/bootstrap.sh).

SHELL := /bin/bash
PY := .venv/bin/python
.DEFAULT_GOAL := help
.PHONY: help venv demo docs test pytest lint format lock clean distclean

# DATA and ARGS reach the shell through the environment, so file names with spaces work.
export DATA ARGS LOCK_ARGS
# The tests start several processes a core; more threads in each only slow them down.
lint pytest: export OMP_NUM_THREADS ?= 1

help: ## show this list
	@echo "make [target]; PYTHON=/path/to/python3.12 chooses the Python"
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: ## make or bring up to date .venv
	@tools/bootstrap.sh

demo: venv ## train the small hybrid under every CP mode (DATA=file: your own .txt or .jsonl)
	@$(PY) examples/train_hybrid/train.py $${DATA:+--data "$$DATA"}

docs: venv ## build the documentation into site/, refusing broken links
	@$(PY) -m sphinx --nitpicky --fail-on-warning --keep-going --quiet -c docs -b html -E . site
	@echo "docs: site/index.html"

test: lint pytest ## lint, types and tests: what CI runs

pytest: venv ## the tests alone (ARGS="-k scan" is passed on)
	@$(PY) -m pytest $$ARGS

lint: venv ## ruff, formatting, mypy, shell scripts and workflows, changing nothing
	@$(PY) -m ruff check .
	@$(PY) -m ruff format --check .
	@$(PY) -m mypy
	@.venv/bin/shellcheck .ci/run tools/*.sh examples/*/*.sh
	@.venv/bin/check-jsonschema --quiet --builtin-schema vendor.github-workflows .github/workflows/*
	@.venv/bin/zizmor --quiet --offline --config .github/zizmor.yml .github/workflows

format: venv ## fix what ruff can fix, and format
	@$(PY) -m ruff check --fix .
	@$(PY) -m ruff format .

lock: ## resolve requirements/lock.txt again (LOCK_ARGS="--upgrade" for newer versions)
	@tools/lock.sh

clean: ## remove caches and build results, keep .venv
	@rm -rf build dist site *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis
	@find . -path ./.venv -prune -o -path ./.git -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf

distclean: clean ## remove .venv as well
	@rm -rf .venv .venv.lock
