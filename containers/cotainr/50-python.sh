#!/usr/bin/env bash
# The environment that cotainr has made, in the place where every image of dray has its Python. In the steps it takes the
# place of the one that makes a virtual environment.
# shellcheck source-path=SCRIPTDIR/../steps source=lib.sh
source "$(dirname "$0")/lib.sh"

readonly MADE=/opt/cotainr/conda/envs/conda_container_env

if [[ ! -x $MADE/bin/python$DRAY_PYTHON ]]; then
    log::line "wanted: $MADE/bin/python$DRAY_PYTHON, which cotainr's environment should have; found: $(echo "$MADE"/bin/python*)"
    exit 69
fi
# cotainr has written a script that activates it by its old name each time that the image starts.
mv "$MADE" "$VENV"
ln -s "$VENV" "$MADE"
