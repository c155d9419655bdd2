#!/usr/bin/env bash
# Every check there is, in the order in which they are cheap to fail.
set -euo pipefail
cd "$(dirname "$0")"
bin=.venv/bin
# Two test processes of one thread each use two cores better than one process of two threads.
export OMP_NUM_THREADS=1 MKL_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1 KLEASH_REQUIRE_PEERS=1
hook=--jaxtyping-packages=kleash,beartype.beartype

step() { printf '\n== %s\n' "$*"; "$@"; }
step $bin/ruff format --check src tests benchmarks tools examples
step $bin/ruff check src tests benchmarks tools examples
step $bin/python tools/check_undefined_names.py
step $bin/python tools/check_names.py
step $bin/pyright
step $bin/lint-imports --no-cache
step $bin/python -m pytest -q -n 2 --dist loadfile -m 'not compiler and not browser' $hook
# Shape checks decorate functions, which a compiler cannot look through; a browser wants a core for itself.
step $bin/python -m pytest -q -m 'compiler or browser'
