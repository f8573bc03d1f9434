#!/usr/bin/env bash
# Debian's packages: a Python, and what torch's wheels expect a system to have.
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "$0")/lib.sh"

apt::get update
apt::get install --yes --no-install-recommends ca-certificates libgomp1 "python$DRAY_PYTHON" "python$DRAY_PYTHON-venv"

# Where a site's apptainer.conf binds one of these, a build on top of this image breaks without it ("destination ...
# doesn't exist in container"): a build has no underlay to make it in.
mkdir -p /appl /flash /opt/cray /pfs /project /projappl /scratch /var/spool/slurmd
