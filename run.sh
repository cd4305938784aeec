#!/usr/bin/env bash
# The door. Needs only Python >= 3.10 (with venv) and a network for the first start; works from any folder.
#
#   ./run.sh                     set up, then train the demo drafter end to end and print its tau
#   ./run.sh setup               set up only
#   ./run.sh test [PYTEST ARGS]  set up, then ruff, mypy and the tests
#   ./run.sh train CONFIG ...    train (one JSON, one DeepSpeed launch)
#   ./run.sh VERB ...            python -m recipe VERB ... inside the environment that set-up made; VERB is demo, prepare,
#                                regenerate, train, evaluate, export, status, report, plan, bench or fetch-smollm2
#   ./run.sh VERB --help         what one verb takes
#
# Set-up makes .venv from pyproject.toml and constraints.txt. It runs again only when one of them, or Python, has changed;
# one that was cut short is made anew. Nothing is compiled. PYTHON=... picks the interpreter.
set -euo pipefail

root="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd -P)"
venv="$root/.venv"
stamp="$venv/.setup-done"   # holds the hash of what the environment was made from
unfinished="$venv/.setup-unfinished"

say() { printf '[setup] %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

is_recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' >/dev/null 2>&1; }

find_python() {
  local candidate
  if [ -n "${PYTHON:-}" ]; then
    is_recent "$PYTHON" || die "PYTHON=$PYTHON is not a Python >= 3.10"
    printf '%s' "$PYTHON"
    return
  fi
  for candidate in python3 python3.13 python3.12 python3.11 python3.10; do
    if is_recent "$candidate"; then printf '%s' "$candidate"; return; fi
  done
  die "no Python >= 3.10 found. Install it (Debian/Ubuntu: apt-get install python3 python3-venv), or set PYTHON=/path/to/python"
}

# What the environment depends on: our two files and the interpreter's version.
wanted_hash() {
  "$1" - "$root/pyproject.toml" "$root/constraints.txt" <<'PY'
import hashlib, sys
digest = hashlib.sha256(sys.version.encode())
for path in sys.argv[1:]:
    digest.update(open(path, "rb").read())
print(digest.hexdigest())
PY
}

is_ready() { [ -x "$venv/bin/python" ] && [ "$(cat "$stamp" 2>/dev/null || true)" = "$1" ]; }

pip_install() { "$venv/bin/python" -m pip install --disable-pip-version-check --no-input -c "$root/constraints.txt" "$@"; }

install() {
  local python="$1" wanted="$2" started=$SECONDS
  "$python" -c 'import ensurepip, venv' >/dev/null 2>&1 ||
    die "this Python has no venv module. Debian/Ubuntu: apt-get install python3-venv"
  if [ -e "$unfinished" ] || ! "$venv/bin/python" -m pip --version >/dev/null 2>&1; then
    if [ -e "$venv" ]; then say "an earlier set-up was cut short or its Python is gone: making .venv anew"; fi
    "$python" -m venv --clear "$venv" || die "could not make $venv (see above)"
  fi
  rm -f "$stamp"
  touch "$unfinished"
  export DS_BUILD_OPS=0   # DeepSpeed's kernels stay unbuilt
  say "1/2 torch (the largest part; about a minute on a CPU machine, some minutes with CUDA libraries)"
  pip_install "torch==2.13.0" || die "could not install torch (see above). Mend the cause and start again."
  say "2/2 the other packages"
  pip_install -e "$root[test]" || die "could not install the packages (see above). Mend the cause and start again."
  # The reference client, which the tests compare with. Its own pins are older than ours, so it comes without them.
  pip_install --no-deps "dflash==0.1.0" || die "could not install dflash (see above). Mend the cause and start again."
  printf '%s' "$wanted" >"$stamp"
  rm -f "$unfinished"
  say "done in $((SECONDS - started)) s"
}

setup() {
  local python wanted
  python="$(find_python)"
  wanted="$(wanted_hash "$python")"
  if is_ready "$wanted"; then return; fi
  if command -v flock >/dev/null 2>&1; then
    exec 9<"$root/run.sh"   # the lock is on this file, so that none is left behind
    flock -n 9 || { say "another set-up of this folder is at work; waiting for it"; flock 9; }
  fi
  if ! is_ready "$wanted"; then install "$python" "$wanted"; fi
  exec 9<&-
}

run_tests() {
  cd "$root"
  export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}"
  "$venv/bin/ruff" check .
  "$venv/bin/ruff" format --check .
  "$venv/bin/mypy" recipe tools
  local pytest=("$venv/bin/python" -m pytest -m "not slow and not gpu")
  if [ $# -gt 0 ]; then exec "${pytest[@]}" "$@"; fi
  # One-process tests two at a time; those that start processes of their own one after the other, as they time them.
  "${pytest[@]}" -n 2 --dist loadfile --cov --cov-report= tests/unit tests/numerics tests/servers
  echo "lines of recipe/ run by these tests, without the processes that they start: $("$venv/bin/coverage" report --format=total) %"
  exec "${pytest[@]}" --durations=15 tests/integration
}

case "${1:-}" in
  -h | --help) sed -n '2,/^set -/{/^set -/d;s/^# \{0,1\}//;p;}' "${BASH_SOURCE[0]}" ;;
  setup) setup; say "ready: $venv" ;;
  test) shift; setup; run_tests "$@" ;;
  "") setup; exec "$venv/bin/python" -m recipe demo ;;
  *) setup; exec "$venv/bin/python" -m recipe "$@" ;;
esac
