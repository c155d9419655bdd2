#!/usr/bin/env bash
# Every check there is, in the order in which they are cheap to fail.
set -euo pipefail
cd "$(dirname "$0")"
bin=.venv/bin
export KLEASH_REQUIRE_PEERS=1
# Tests that run with runtime checks of annotated shapes and types, which make a test two to five times slower.
checked=(tests/{divergences,estimators,losses} tests/linear/test_linear_{core,edges}.py)
hook=--jaxtyping-packages=kleash,beartype.beartype
# Tests whose work is done by processes of their own, which need no share of what a worker imports.
processes=(tests/house/test_wheel.py tests/integrations/test_{in_ray,sharded_models,zero3}.py tests/measuring/test_ray_run.py)

step() { printf '\n== %s\n' "$*"; "$@"; }
step $bin/ruff format --check src tests benchmarks tools examples
step $bin/ruff check src tests benchmarks tools examples
step $bin/pyrefly check
step $bin/python tools/check_names.py

# Beside two workers, so that two cores are never idle: counts, imports, shapes, and then tests of processes, with what compiles,
# which runtime checks keep from being compiled. The browser wants a core, so that the tests of pages come before the workers.
log=$(mktemp)
(
  step $bin/python tools/count.py # a report, no check
  step $bin/lint-imports --no-cache
  step $bin/python -m pytest -q -m 'not compiler and not browser' $hook "${checked[@]}"
  step $bin/python -m pytest -q -m compiler "${checked[@]}"
  step $bin/python -m pytest -q "${processes[@]}"
) >"$log" 2>&1 &
beside=$!
trap 'pkill -P $beside 2>/dev/null || true; rm -f "$log"' EXIT
step $bin/python -m pytest -q -m browser tests/reports
verdict=0
step $bin/python -m pytest -q -n 2 -m 'not browser' \
  "${checked[@]/#/--ignore=}" "${processes[@]/#/--ignore=}" || verdict=$?
wait $beside || verdict=$?
cat "$log"
exit $verdict
