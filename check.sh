#!/usr/bin/env bash
# Every check there is, in the order in which they are cheap to fail.
set -euo pipefail
cd "$(dirname "$0")"
bin=.venv/bin
# Processes of one thread use two cores better than threads; a third works while others wait for processes of their own.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TORCHINDUCTOR_COMPILE_THREADS=1
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 KLEASH_REQUIRE_PEERS=1
# Without a cache of bytecode, each process would compile kleash and each pytest all tests.
unset PYTHONDONTWRITEBYTECODE
# Inductor would build and load a program for each instruction set. Compilers know all of them but the newest AMX.
grep -qs amx /proc/cpuinfo || export TORCHINDUCTOR_VEC_ISA_OK=1
# Tests that run with runtime checks of annotated shapes and types, which make a test two to five times slower.
checked=(tests/{divergences,estimators,losses} tests/linear/test_linear_{core,edges}.py)
hook=--jaxtyping-packages=kleash,beartype.beartype

step() { printf '\n== %s\n' "$*"; "$@"; }
step $bin/ruff format --check src tests benchmarks tools examples
step $bin/ruff check src tests benchmarks tools examples
step $bin/pyrefly check
step $bin/python tools/check_names.py
step $bin/python tools/count.py # a report, no check

# Beside each other, so that two cores are never idle: imports, types, then shapes and what compiles among their tests, which
# cannot look through runtime checks; and the tests of the pages, for which the browser wants a core, then all others.
log=$(mktemp)
(
  step $bin/lint-imports --no-cache
  step $bin/python -m pytest -q -m 'not compiler and not browser' $hook "${checked[@]}"
  step $bin/python -m pytest -q -m compiler "${checked[@]}"
) >"$log" 2>&1 &
types=$!
trap 'pkill -P $types 2>/dev/null || true; rm -f "$log"' EXIT
step $bin/python -m pytest -q -m browser tests/reports
verdict=0
step $bin/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder -m 'not browser' \
  "${checked[@]/#/--ignore=}" || verdict=$?
wait $types || verdict=$?
cat "$log"
exit $verdict
