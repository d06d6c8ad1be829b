#!/usr/bin/env bash
# The tests with the core dependencies alone, on the oldest and the newest Python and OmegaConf that are supported.
# Tests marked build, network or slow are left to scripts/test.sh. A Python that is missing is a failure.
set -euo pipefail

ROOT=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
# shellcheck source=scripts/lib.sh
source "$ROOT/scripts/lib.sh"
cd "$ROOT"
unset PYTHONPATH PYTHONHOME

PYTHONS=(3.10 3.13)
OMEGACONFS=(2.3 2.4)
TEST_PACKAGES=('pytest>=8' pytest-xdist hypothesis packaging jsonschema markdown-it-py)

# The machine's uv, else the one that scripts/test.sh installs with the development tools; maybe none.
UV=$(command -v uv || true)
[ -n "$UV" ] || UV=$ROOT/.venv-test/bin/uv

# python_of MAJOR.MINOR: its executable, downloaded by uv where the machine has none.
python_of() {
  local found
  found=$(python_candidates "$1" | head -n 1 | cut -d' ' -f2-)
  if [ -z "$found" ] && [ -x "$UV" ]; then
    "$UV" python install --quiet "$1" >&2 || true
    found=$("$UV" python find "$1" 2>/dev/null || true)
  fi
  [ -n "$found" ] && printf '%s\n' "$found"
}

# prepare FOLDER PYTHON PIP_ARGUMENT...: called under the lock. uv does in a second what takes pip ten.
# shellcheck disable=SC2317 # reached through with_lock
prepare() {
  local folder=$1 python=$2
  shift 2
  up_to_date "$folder" "$@" && return 0
  if [ -x "$UV" ]; then
    rm -rf "$folder"
    if quietly "$UV" venv --seed --python "$python" "$folder" &&
      quietly "$UV" pip install --python "$folder/bin/python" "$@"; then
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

# combination PYTHON_VERSION PYTHON OMEGACONF_VERSION; PYTHON is empty where there is none.
combination() {
  local python=$2 folder=$ROOT/.venv-matrix/py$1-omegaconf$3
  [ -n "$python" ] || return
  with_lock "$folder.lock" prepare "$folder" "$python" -e . "omegaconf==$3.*" "${TEST_PACKAGES[@]}" || return
  "$folder/bin/python" -c 'import omegaconf, platform; print("Python", platform.python_version(), "OmegaConf", omegaconf.__version__)'
  "$folder/bin/python" -m pytest -n auto -q -m 'not build and not network and not slow'
}

mkdir -p "$ROOT/.venv-matrix"
results=''
failed=0
for version in "${PYTHONS[@]}"; do
  python=$(python_of "$version") ||
    say "Python $version is missing: not on PATH, not in ~/.pyenv/versions, and not to be had through uv"
  for omegaconf in "${OMEGACONFS[@]}"; do
    printf '\n-- Python %s, OmegaConf %s\n' "$version" "$omegaconf"
    start=$SECONDS
    if combination "$version" "$python" "$omegaconf"; then result=passed; else result=FAILED failed=1; fi
    results+=$(printf '%6d s  Python %s, OmegaConf %s: %s' $((SECONDS - start)) "$version" "$omegaconf" "$result")$'\n'
  done
done
printf '\nCombinations\n%s' "$results"
exit "$failed"
