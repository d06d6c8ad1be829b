#!/usr/bin/env bash
# The tests against the real megatron-core, nemo-run and Slurm, in an environment of their own. A component that is
# missing is a failure. Slurm and munge come from Debian's packages (scripts/test.sh installs them).
set -euo pipefail

ROOT=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)
# shellcheck source=scripts/lib.sh
source "$ROOT/scripts/lib.sh"
cd "$ROOT"
unset PYTHONPATH PYTHONHOME

# The newest megatron-core that Python 3.11 can have; nemo-run is held to the release whose insides the plugin meets.
PACKAGES=('torch==2.13.0' 'megatron-core==0.16.1' 'nemo-run==0.11.1' numpy)
folder=$ROOT/.venv-integrations

python=$(python_of 3.11)
environment_of "$python" "$folder" -e '.[dev,megatron,nemo-run]' "${PACKAGES[@]}"
exec "$folder/bin/python" -m pytest -n auto --integrations tests/integrations "$@"
