#!/usr/bin/env bash
# dray itself, after all that changes less often: Docker keeps the layers of the steps before.
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "$0")/lib.sh"

pip::install "$INPUTS"/dray/*.whl
"$VENV/bin/python3" -m compileall -q --invalidation-mode unchecked-hash "$VENV"/lib/python*/site-packages/dray
