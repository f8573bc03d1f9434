#!/usr/bin/env bash
# dray itself.
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "$0")/lib.sh"

pip::install "$INPUTS"/dray/*.whl

# Where a layer is bound, its packages come after the image's own (dray image layer).
mkdir /opt/layer
echo 'import site; site.addsitedir("/opt/layer/lib")' >"$(echo "$VENV"/lib/python*/site-packages)/dray-layer.pth"
