# make demo         measure the pair that ships with kleash; the report's path is printed at the end
# make test         every check: format, lint, types, import contract, tests
# make docs         the site of docs/, in build/docs: pages with warnings or broken links are errors
# make test-oldest  the tests with Python 3.10 and every dependency at its lower bound (4 GB are fetched where torch has CUDA)
# make test-older-trl  what works with older versions of TRL, with TRL=1.8.0
# The first makes .venv with what measuring needs, the second adds what the checks need (verl, Ray, pyrefly ...: 2 GB
# more); the third has .venv-oldest to itself.

PYTHON ?= python3
OLDEST_PYTHON ?= python3.10
BIN := .venv/bin
OLDEST := .venv-oldest/bin
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

.PHONY: demo docs test test-oldest test-older-trl clean

demo: .venv/.made-demo
	$(BIN)/kleash measure

test: .venv/.made .venv/.made-formats
	./check.sh

docs: .venv/.made-docs
	HF_HUB_OFFLINE=1 $(BIN)/python -m sphinx --fresh-env --quiet --fail-on-warning --keep-going -d build/doctrees docs build/docs

test-oldest: .venv-oldest/.made
	$(OLDEST)/python -m pytest -q -n 2 -m 'not compiler and not browser'

TRL ?= 1.8.0
# these read what a leashed trainer or attach does; left out is what compares with TRL's own KL, which has changed
OLDER_TRL_TESTS := tests/training/test_attach.py tests/integrations/test_trainer_callbacks.py \
	$(patsubst %,tests/integrations/test_trl_%.py,short_runs terms images rollout_dump)

test-older-trl: .venv/.made
	$(BIN)/python -m pip install --quiet --upgrade --no-deps --target .venv/trl-$(TRL) trl==$(TRL)
	PYTHONPATH=.venv/trl-$(TRL) $(BIN)/python -m pytest -q -W 'ignore:trl:UserWarning' $(OLDER_TRL_TESTS) \
		-k 'not reproduces_trl_loss and not luspo-k1 and not measured_by_k3'

# torch comes first and alone: the version that the constraints name exists as a CPU build
# wherever the index carries one, and the other packages then find it installed.
.venv/.made-demo: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) torch
	$(INSTALL) --editable '.[models]'
	touch $@

# All that is in .venv/.made-demo and more, so that it needs no step of its own after this one.
.venv/.made: pyproject.toml constraints.txt requirements-dev.txt requirements-peers.txt requirements-isolated.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) torch
	$(INSTALL) --editable '.[all]' --requirement requirements-dev.txt
	$(INSTALL) --no-deps --requirement requirements-peers.txt
	DS_BUILD_OPS=0 $(INSTALL) --no-deps --upgrade --target .venv/isolated --requirement requirements-isolated.txt
	touch .venv/.made-demo $@

# The reference of names imports each package of kleash, TRL's plug-in included.
.venv/.made-docs: pyproject.toml constraints.txt requirements-docs.txt
	$(PYTHON) -m venv .venv
	$(INSTALL) torch
	$(INSTALL) --editable '.[trl]' --requirement requirements-docs.txt
	touch .venv/.made-demo $@

.venv/.made-formats: requirements-formats.txt constraints.txt | .venv/.made
	$(INSTALL) --no-deps --upgrade --target .venv/formats --requirement requirements-formats.txt
	touch $@

# What the audited packages and the browser need stays out: they have bounds of their own.
.venv-oldest/.made: pyproject.toml constraints-oldest.txt
	$(OLDEST_PYTHON) -m venv .venv-oldest
	$(OLDEST)/python -m pip install --quiet --disable-pip-version-check --constraint constraints-oldest.txt \
		--editable '.[all]' beartype build hatchling hypothesis pandas pytest pytest-xdist scikit-learn scipy
	touch $@

clean:
	rm -rf .venv .venv-oldest kleash-runs dist build
