#!/usr/bin/env bash
# Every check there is, in the order in which they are cheap to fail.
set -euo pipefail
cd "$(dirname "$0")"
bin=.venv/bin
# Two test processes of one thread each use two cores better than one process of two threads.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 KLEASH_REQUIRE_PEERS=1
# The shapes in annotations are checked where tensors are computed. Checks of every call double the time of a test, so
# that they leave out the floors whose annotations pyright checks well enough.
checked=(kleash.{masking,divergences,estimators,linear,losses,models})
hook=--jaxtyping-packages=$(IFS=,; echo "${checked[*]}"),beartype.beartype

step() { printf '\n== %s\n' "$*"; "$@"; }
step $bin/ruff format --check src tests benchmarks tools examples
step $bin/ruff check src tests benchmarks tools examples
step $bin/python tools/check_undefined_names.py
step $bin/python tools/check_names.py
step $bin/lint-imports --no-cache
# Types are checked beside the tests that use one process. Shape checks decorate functions, which a compiler cannot look
# through, and a browser wants a core for itself.
types=$(mktemp)
$bin/pyright >"$types" 2>&1 &
pyright=$!
trap 'kill $pyright 2>/dev/null || true; rm -f "$types"' EXIT
step $bin/python -m pytest -q -m 'compiler or browser'
verdict=0
wait $pyright || verdict=$?
step cat "$types"
((verdict == 0))
step $bin/python -m pytest -q -n 2 --dist loadfile -m 'not compiler and not browser' $hook
