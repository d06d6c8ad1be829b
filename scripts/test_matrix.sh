#!/usr/bin/env bash
# The tests with the core dependencies alone, on the oldest and the newest Python and OmegaConf that are supported.
# Tests marked build or network are left to scripts/test.sh. A Python that is missing is a failure.
set -euo pipefail

ROOT=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
# shellcheck source=scripts/lib.sh
source "$ROOT/scripts/lib.sh"
cd "$ROOT"
unset PYTHONPATH PYTHONHOME

PYTHONS=(3.10 3.13)
OMEGACONFS=(2.3 2.4)
TEST_PACKAGES=('pytest>=8' pytest-xdist hypothesis packaging jsonschema)

# python_of MAJOR.MINOR: its executable, installed by uv where there is a uv and it can.
python_of() {
  local found
  found=$(python_candidates "$1" | head -n 1 | cut -d' ' -f2-)
  if [ -z "$found" ] && command -v uv >/dev/null 2>&1; then
    uv python install --quiet "$1" >&2 || true
    found=$(uv python find "$1" 2>/dev/null || true)
  fi
  [ -n "$found" ] && printf '%s\n' "$found"
}

# prepare FOLDER PYTHON PIP_ARGUMENT...: called under the lock. uv does in a second what takes pip ten.
# shellcheck disable=SC2317 # reached through with_lock
prepare() {
  local folder=$1 python=$2
  shift 2
  up_to_date "$folder" "$@" && return 0
  if command -v uv >/dev/null 2>&1; then
    rm -rf "$folder"
    if quietly uv venv --seed --python "$python" "$folder" &&
      quietly uv pip install --python "$folder/bin/python" "$@"; then
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

# combination PYTHON_VERSION OMEGACONF_VERSION
combination() {
  local python folder=$ROOT/.venv-matrix/py$1-omegaconf$2
  if ! python=$(python_of "$1"); then
    say "Python $1 is missing: not on PATH, not in ~/.pyenv/versions, and not to be had through uv"
    return 2
  fi
  with_lock "$folder.lock" prepare "$folder" "$python" -e . "omegaconf==$2.*" "${TEST_PACKAGES[@]}" || return
  "$folder/bin/python" -c 'import omegaconf, platform; print("Python", platform.python_version(), "OmegaConf", omegaconf.__version__)'
  "$folder/bin/python" -m pytest -n auto -q -m 'not build and not network'
}

mkdir -p "$ROOT/.venv-matrix"
results=''
failed=0
for version in "${PYTHONS[@]}"; do
  for omegaconf in "${OMEGACONFS[@]}"; do
    printf '\n-- Python %s, OmegaConf %s\n' "$version" "$omegaconf"
    start=$SECONDS
    if combination "$version" "$omegaconf"; then result=passed; else result=FAILED failed=1; fi
    results+=$(printf '%6d s  Python %s, OmegaConf %s: %s' $((SECONDS - start)) "$version" "$omegaconf" "$result")$'\n'
  done
done
printf '\nCombinations\n%s' "$results"
exit "$failed"
