# make demo   measure the pair that ships with kleash; the report's path is printed at the end
# make test   every check: format, lint, types, import contract, tests
# Both make .venv if it is missing.

PYTHON ?= python3
BIN := .venv/bin

.PHONY: demo test clean

demo: .venv/.made
	$(BIN)/kleash measure

test: .venv/.made
	./check.sh

# torch comes first and alone: the version that the constraints name exists as a CPU build
# wherever the index carries one, and the other packages then find it installed.
.venv/.made: pyproject.toml constraints.txt requirements-dev.txt requirements-peers.txt
	$(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt torch
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--editable '.[all]' --requirement requirements-dev.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt \
		--no-deps --requirement requirements-peers.txt
	touch $@

clean:
	rm -rf .venv kleash-runs dist
