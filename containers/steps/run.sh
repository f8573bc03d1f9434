#!/usr/bin/env bash
# Runs the steps in their order. This folder is the one list of them.
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "$0")/lib.sh"

# One stream keeps the lines in the order in which they were written.
exec 2>&1

for step in "$(dirname "$0")"/[0-9][0-9]-*.sh; do
    name=$(basename "$step" .sh)
    started=$SECONDS
    log::line "step $name"
    bash "$step"
    log::line "step $name done in $((SECONDS - started)) s"
done
