#!/usr/bin/env bash
# The locked Python packages, from wheels that the host has fetched: no network, no index, no pip configuration.
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "$0")/lib.sh"

"python$DRAY_PYTHON" -m venv "$VENV"
pip::install --require-hashes --find-links "$INPUTS/wheels" --requirement "$INPUTS/requirements.lock"

# Compiled here, since an image is read-only at run time and every rank would compile again. Unchecked hashes, since
# copies between layers may change times, and since a stat of each source is a lookup in a mounted image. As with pip,
# sources for other Pythons may fail.
"$VENV/bin/python3" -m compileall -qq -j 0 --invalidation-mode unchecked-hash "$VENV/lib" || true
