#!/usr/bin/env bash
# The tests with the core dependencies alone, on the oldest and the newest Python and OmegaConf that are supported: the
# oldest together, and the newest together. scripts/test.sh has the newest Python with the oldest OmegaConf.
# Generated inputs are fewer here. Tests marked build, network or slow are left to scripts/test.sh. A Python that is missing is a failure.
set -euo pipefail

ROOT=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
# shellcheck source=scripts/lib.sh
source "$ROOT/scripts/lib.sh"
cd "$ROOT"
unset PYTHONPATH PYTHONHOME

COMBINATIONS=('3.10 2.3' '3.13 2.4')
TEST_PACKAGES=('pytest>=8' pytest-xdist hypothesis packaging jsonschema markdown-it-py)

# combination PYTHON_VERSION PYTHON OMEGACONF_VERSION; PYTHON is empty where there is none.
combination() {
  local python=$2 folder=$ROOT/.venv-matrix/py$1-omegaconf$3
  [ -n "$python" ] || return
  environment_of "$python" "$folder" -e . "omegaconf==$3.*" "${TEST_PACKAGES[@]}" || return
  "$folder/bin/python" -c 'import omegaconf, platform; print("Python", platform.python_version(), "OmegaConf", omegaconf.__version__)'
  "$folder/bin/python" -m pytest -n auto -q -m 'not build and not network and not slow' --hypothesis-profile few
}

mkdir -p "$ROOT/.venv-matrix"
results=''
failed=0
for pair in "${COMBINATIONS[@]}"; do
  read -r version omegaconf <<<"$pair"
  python=$(python_of "$version") || python=''
  printf '\n-- Python %s, OmegaConf %s\n' "$version" "$omegaconf"
  start=$SECONDS
  if combination "$version" "$python" "$omegaconf"; then result=passed; else result=FAILED failed=1; fi
  results+=$(printf '%6d s  Python %s, OmegaConf %s: %s' $((SECONDS - start)) "$version" "$omegaconf" "$result")$'\n'
done
printf '\nCombinations\n%s' "$results"
exit "$failed"
