#!/usr/bin/env bash
# Every check of the project, in an environment of its own (.venv-test). Stops at the first stage that fails.
set -euo pipefail

ROOT=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
# shellcheck source=scripts/lib.sh
source "$ROOT/scripts/lib.sh"
cd "$ROOT"
unset PYTHONPATH PYTHONHOME

# What the tests need from Debian beside Python: add a package here and a fresh machine gets it.
DEBIAN_PACKAGES=(slurm-wlm munge g++)

debian_packages() {
  local package
  local missing=()
  for package in ${DEBIAN_PACKAGES[@]+"${DEBIAN_PACKAGES[@]}"}; do
    dpkg -s "$package" >/dev/null 2>&1 || missing+=("$package")
  done
  [ "${#missing[@]}" -gt 0 ] || return 0
  if [ "$(id -u)" -ne 0 ]; then
    say "needs, once, as root: apt-get install ${missing[*]}"
    return 2
  fi
  apt-get update -q &&
    DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends "${missing[@]}"
}

times=''
report() {
  local status=$?
  printf '\nStage times\n%s' "$times"
  if [ "$status" -eq 0 ]; then printf 'All stages passed.\n'; else printf 'FAILED at stage: %s\n' "$stage"; fi
}
trap report EXIT

# stage NAME COMMAND...
stage() {
  local start=$SECONDS status=0
  stage=$1
  shift
  printf '\n== %s\n' "$stage"
  "$@" || status=$?
  times+=$(printf '%6d s  %s' $((SECONDS - start)) "$stage")$'\n'
  [ "$status" -eq 0 ] || exit "$status"
}

bin=$ROOT/.venv-test/bin
stage 'Debian packages' debian_packages
stage 'environment' environment fresh "$ROOT/.venv-test" -e '.[dev]'
stage 'ruff check' "$bin/ruff" check .
stage 'ruff format' "$bin/ruff" format --check .
stage 'mypy' "$bin/mypy"
stage 'pytest' "$bin/python" -m pytest -n auto
stage 'integrations' bash scripts/test_integrations.sh
stage 'matrix' bash scripts/test_matrix.sh
