#!/usr/bin/env bash
# Runs all layouts of the oracle again and compares them with overlapkit.volume: with the megatron-core of the
# integration tests, then with 0.19.2 on Python 3.12 (.venv-mcore, several GB), each in an environment of its own.
# Arguments go to parity_volume_megatron.py.
set -euo pipefail

ROOT=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
# shellcheck source=scripts/lib.sh
source "$ROOT/scripts/lib.sh"
cd "$ROOT"
unset PYTHONPATH PYTHONHOME

status=0
for environment in core_python newest_core_python; do
  python=$("$environment")
  "$python" "$ROOT/scripts/parity_volume_megatron.py" "$@" || status=1
done
exit "$status"
