#!/usr/bin/env bash
# dray itself.
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "$0")/lib.sh"

pip::install "$INPUTS"/dray/*.whl
