#!/usr/bin/env bash
# The locked Python packages, from wheels that the host has fetched: no network, no index, no pip configuration.
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "$0")/lib.sh"

"python$DRAY_PYTHON" -m venv "$VENV"
# DeepSpeed has no wheel; the next step makes one.
awk '!/^ / { skip = /^deepspeed==/ } !skip' "$INPUTS/requirements.lock" >"$VENV/requirements.lock"
pip::install --require-hashes --find-links "$INPUTS/wheels" --requirement "$VENV/requirements.lock"
rm "$VENV/requirements.lock"
