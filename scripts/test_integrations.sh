#!/usr/bin/env bash
# The tests against the real megatron-core, nemo-run and Slurm, in an environment of their own. A component that is
# missing is a failure. Slurm, munge and a C++ compiler come from Debian's packages (scripts/test.sh installs them).
set -euo pipefail

ROOT=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
# shellcheck source=scripts/lib.sh
source "$ROOT/scripts/lib.sh"
cd "$ROOT"
unset PYTHONPATH PYTHONHOME

python=$(core_python)
[[ " $* " == *" tests/"* ]] || set -- tests/integrations "$@"  # unless the arguments name files
exec "$python" -m pytest -n auto --integrations "$@"
