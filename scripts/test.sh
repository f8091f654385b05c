#!/usr/bin/env bash
# Environment, lint, types, tests. The last line is pytest's.
#   scripts/test.sh [--all] [pytest arguments]      --all: with the tests marked slow
# Two tests run at a time: one of those that start processes of their own, which wait for each other much of the time, and
# one of the rest (tests/conftest.py). `pytest PATH` runs a single one.
# Settings: those of scripts/setup_env.sh.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
markers=(-m "not slow")
if [[ ${1:-} == --all ]]; then markers=(); shift; fi

scripts/setup_env.sh test || exit
export PATH=$PWD/${MEGARL_VENV:-.venv}/bin:$PATH
# A fresh environment holds no bytecode: it is compiled once, not by each of the many processes.
unset PYTHONDONTWRITEBYTECODE
export OMP_WAIT_POLICY=passive OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

failed=()
check() { # name, command
  local name=$1
  shift
  echo "== $name"
  "$@" || failed+=("$name")
}
check "ruff check" ruff check --quiet .
check "ruff format" ruff format --check .
check "mypy" mypy --no-error-summary
# Standard input is closed so that no test waits for a person.
[[ ${#failed[@]} == 0 ]] || echo "== failed before the tests: ${failed[*]}"
echo "== pytest"
pytest "${markers[@]}" --numprocesses 2 "$@" </dev/null
rc=$?
[[ ${#failed[@]} == 0 || $rc != 0 ]] || rc=1
exit $rc
