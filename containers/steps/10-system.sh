#!/usr/bin/env bash
# Debian's packages, which the fetch before the build has brought: debian.in says which and why.
# shellcheck source-path=SCRIPTDIR source=lib.sh
source "$(dirname "$0")/lib.sh"

apt::get install --yes --no-install-recommends "$INPUTS"/debs/*.deb

# Where a site's apptainer.conf binds one of these, a build on top of this image breaks without it ("destination ...
# doesn't exist in container"): a build has no underlay to make it in.
mkdir -p /appl /flash /opt/cray /pfs /project /projappl /scratch /var/spool/slurmd
