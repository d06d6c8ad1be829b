# shellcheck shell=bash
# Shared by the scripts in this folder: find a Python, make a virtual environment, install into it.
# The caller sets ROOT, the checkout's physical path. Whatever is said here goes to stderr. Runs on bash 3.2 too.

say() { printf '%s: %s\n' "${0##*/}" "$*" >&2; }

# Runs a command without input, its output kept in OUTPUT for whoever reports a failure.
quietly() { OUTPUT=$("$@" 2>&1 </dev/null); }

show_output() { [ -z "${OUTPUT:-}" ] || printf '%s\n' "$OUTPUT" >&2; }

# checksum: of stdin, with whichever tool this system has.
checksum() {
  if command -v sha256sum >/dev/null 2>&1; then sha256sum
  elif command -v shasum >/dev/null 2>&1; then shasum -a 256
  else cksum
  fi
}

# python_candidates MAJOR.MINOR|'': one line "MAJOR.MINOR executable" for each CPython of that version, or of any from
# 3.10 on, best first: the newest of 3.10 to 3.13, which are tested, then newer ones. Each is run to ask its version,
# since a pyenv shim has a name and may have no Python behind it.
python_candidates() {
  local name path
  local probe='
import os, sys
major, minor, micro = sys.version_info[:3]
name = f"{major}.{minor}"
if sys.implementation.name == "cpython" and (3, 10) <= (major, minor) and sys.argv[1] in ("", name):
    rank = minor * 1000 + micro if minor <= 13 else -minor
    print(rank, name, os.path.realpath(sys.executable))
'
  {
    for name in python3 python3.13 python3.12 python3.11 python3.10; do type -aP "$name" || true; done
    for path in "${PYENV_ROOT:-${HOME:-~}/.pyenv}"/versions/*/bin/python; do printf '%s\n' "$path"; done
  } | while IFS= read -r path; do
    if [ -x "$path" ]; then "$path" -I -c "$probe" "$1" </dev/null 2>/dev/null || true; fi
  done | sort -s -k1,1nr | cut -d' ' -f2- | awk '!seen[$0]++'
}

has_pip() { quietly "$1/bin/python" -m pip --version; }

# make_venv PYTHON FOLDER: a new environment that has pip, by whichever way works with this Python.
make_venv() {
  local python=$1 folder=$2 reason
  rm -rf "$folder"
  quietly "$python" -m venv "$folder" && has_pip "$folder" && return 0
  reason=$OUTPUT
  # From here on: Debian without python3-venv, or another Python without ensurepip.
  rm -rf "$folder"
  quietly "$python" -m virtualenv "$folder" && has_pip "$folder" && return 0
  rm -rf "$folder"
  quietly "$python" -m venv --without-pip "$folder" &&
    quietly "$python" -m pip --python "$folder/bin/python" install pip && has_pip "$folder" && return 0
  rm -rf "$folder"
  quietly uv venv --seed --python "$python" "$folder" && has_pip "$folder" && return 0
  rm -rf "$folder"
  OUTPUT=$reason
  return 1
}

# new_environment FOLDER: made with the best Python that can make one, or status 2 after saying what to install.
new_environment() {
  local folder=$1 candidates version python without_venv=''
  candidates=$(python_candidates '')
  if [ -z "$candidates" ]; then
    say "needs Python 3.10 or newer; found none on PATH or in ~/.pyenv/versions"
    return 2
  fi
  while read -r version python; do
    say "making ${folder##*/} with Python $version"
    make_venv "$python" "$folder" && return 0
    quietly "$python" -m ensurepip --version || without_venv="$version ($python)"
  done <<<"$candidates"
  if [ -n "$without_venv" ]; then
    say "Python $without_venv cannot make a virtual environment; on Debian or Ubuntu: apt-get install python3-venv"
  else
    show_output
    say "could not make a virtual environment at $folder"
  fi
  return 2
}

# usable FOLDER: an environment there runs, is new enough, and has pip or can be given it.
usable() {
  quietly "$1/bin/python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || return 1
  has_pip "$1" || quietly "$1/bin/python" -m ensurepip || quietly uv pip install --python "$1/bin/python" pip
}

# stamp PIP_ARGUMENT...: what an environment was installed from; a checkout that has moved needs a new one.
stamp() { printf '%s\n' "$(checksum <"$ROOT/pyproject.toml")" "$ROOT" "$*"; }

# up_to_date FOLDER PIP_ARGUMENT...
up_to_date() {
  local folder=$1
  shift
  [ -x "$folder/bin/python" ] && [ -x "$folder/bin/overlapkit" ] && [ -r "$folder/overlapkit-stamp" ] &&
    [ "$(<"$folder/overlapkit-stamp")" = "$(stamp "$@")" ]
}

# with_lock FILE COMMAND...: one process at a time, in a subshell. flock frees itself when its holder dies; where it
# or its file system support is missing, a folder is the lock.
with_lock() {
  local lock=$1 status=0
  shift
  if ! (: >>"$lock") 2>/dev/null; then
    say "cannot write to ${lock%/*}"
    return 2
  fi
  if command -v flock >/dev/null 2>&1; then
    (
      flock -n 9 2>/dev/null || { say "waiting for another start to finish" && flock 9 2>/dev/null; } || exit 99
      "$@"
    ) 9>>"$lock" || status=$?
    [ "$status" -eq 99 ] || return "$status"
  fi
  (
    waited=0
    until mkdir "$lock.d" 2>/dev/null; do
      [ "$waited" -gt 0 ] || say "waiting for another start to finish (if there is none, remove $lock.d)"
      if [ "$waited" -ge 600 ]; then
        say "gave up after ten minutes; if no other start is running, remove $lock.d"
        exit 2
      fi
      waited=$((waited + 1))
      sleep 1
    done
    trap 'rmdir "$lock.d"' EXIT
    trap 'exit 130' INT TERM HUP
    "$@"
  )
}

pip_install() {
  local folder=$1
  shift
  PIP_USER=0 "$folder/bin/python" -m pip install --quiet --disable-pip-version-check --no-input "$@"
}

# install FOLDER PIP_ARGUMENT...: into that environment, and stamp it.
install() {
  local folder=$1
  shift
  rm -f "$folder/overlapkit-stamp"
  # The pip that came with Python 3.10.0 cannot install a project like this one as editable: it is renewed first.
  if ! quietly pip_install "$folder" 'pip>=22.3' || ! quietly pip_install "$folder" "$@"; then
    show_output
    say "could not install into $folder"
    return 2
  fi
  # An editable install compiles nothing by itself, and never where PYTHONDONTWRITEBYTECODE is set: every start would.
  quietly "$folder/bin/python" -m compileall -q "$ROOT/overlapkit" || true
  stamp "$@" >"$folder/overlapkit-stamp"
}

# set_up keep|fresh FOLDER PIP_ARGUMENT...: called under the lock. An outdated environment is installed into again
# (keep), or made anew (fresh).
set_up() {
  local mode=$1 folder=$2
  shift 2
  up_to_date "$folder" "$@" && return 0 # another start has just done it
  unset PYTHONPATH PYTHONHOME           # what a cluster's modules put there belongs to another Python
  cd "$ROOT" || return 2
  if [ "$mode" = fresh ] || ! usable "$folder"; then new_environment "$folder" || return; fi
  say "installing into ${folder##*/}"
  install "$folder" "$@"
}

# environment keep|fresh FOLDER PIP_ARGUMENT...: afterwards FOLDER is an environment installed with these arguments.
environment() {
  local folder=$2
  up_to_date "$folder" "${@:3}" || with_lock "$folder.lock" set_up "$@" >&2
}

# --- environments of a certain Python -------------------------------------------------------------

# uv_command: the machine's uv, else the one that scripts/test.sh installs with the development tools; maybe none.
uv_command() { command -v uv || { [ -x "$ROOT/.venv-test/bin/uv" ] && printf '%s\n' "$ROOT/.venv-test/bin/uv"; }; }

# python_of MAJOR.MINOR: its executable, downloaded by uv where the machine has none.
python_of() {
  local found uv
  found=$(python_candidates "$1" | head -n 1 | cut -d' ' -f2-)
  if [ -z "$found" ] && uv=$(uv_command); then
    "$uv" python install --quiet "$1" >&2 || true
    found=$("$uv" python find "$1" 2>/dev/null || true)
  fi
  if [ -z "$found" ]; then
    say "Python $1 is missing: not on PATH, not in ~/.pyenv/versions, and not to be had through uv"
    return 2
  fi
  printf '%s\n' "$found"
}

# prepare PYTHON FOLDER PIP_ARGUMENT...: called under the lock. uv does in a second what takes pip ten; it is told where
# pip finds wheels.
prepare() {
  local python=$1 folder=$2 uv
  shift 2
  up_to_date "$folder" "$@" && return 0
  say "installing into ${folder##*/}"
  if uv=$(uv_command); then
    rm -rf "$folder"
    if quietly "$uv" venv --seed --python "$python" "$folder" &&
      quietly env UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}" "$uv" pip install --python "$folder/bin/python" "$@"; then
      stamp "$@" >"$folder/overlapkit-stamp"
      return 0
    fi
    say "uv could not; trying pip"
  fi
  if ! make_venv "$python" "$folder"; then
    show_output
    return 2
  fi
  install "$folder" "$@"
}

# environment_of PYTHON FOLDER PIP_ARGUMENT...: afterwards FOLDER is an environment of PYTHON with these arguments.
environment_of() { with_lock "$2.lock" prepare "$@" >&2; }

# --- environments with the real packages ----------------------------------------------------------
# Each prints the Python of its environment. Megatron-Core's optimizer instances need einops, which it does not require.

# core_python: the newest megatron-core that Python 3.11 can have; nemo-run is held to the release whose insides the
# plugin meets.
core_python() {
  local python folder=$ROOT/.venv-integrations
  python=$(python_of 3.11) || return
  environment_of "$python" "$folder" -e '.[dev,megatron,nemo-run]' \
    'torch==2.13.0' 'megatron-core==0.16.1' 'nemo-run==0.11.1' numpy einops || return
  printf '%s\n' "$folder/bin/python"
}

# newest_core_python: megatron-core 0.19.2, which needs Python 3.12; several GB: PyPI has torch for CUDA only.
newest_core_python() {
  local python folder=$ROOT/.venv-mcore
  python=$(python_of 3.12) || return
  environment_of "$python" "$folder" -e . torch 'megatron-core==0.19.2' numpy einops || return
  printf '%s\n' "$folder/bin/python"
}
