#!/usr/bin/env bash
# Compares plans with the constructors of megatron-core 0.19.2, which needs Python 3.12, in an environment of its own
# (.venv-mcore, several GB: PyPI has torch for CUDA only). Arguments go to parity_mcore.py.
set -euo pipefail

ROOT=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
# shellcheck source=scripts/lib.sh
source "$ROOT/scripts/lib.sh"
cd "$ROOT"
unset PYTHONPATH PYTHONHOME

python=$(newest_core_python)
exec "$python" "$ROOT/scripts/parity_mcore.py" "$@"
