#!/usr/bin/env bash
# Runs in an image's base, before the build and with a network: every package that debian.in asks for and the base has
# not got goes to /srv, in the versions of debian.lock where the sources still have them. dray.images.sources.debs reads it.
# With ARCHITECTURE those of such a machine, as if this base were its own.
set -euo pipefail

exec 2>&1

# The host's proxies and certificates; a base image's own bundle does not do behind a proxy with certificates of its own.
set -a
# shellcheck source=/dev/null
source /mnt/env
set +a
options=(--quiet=2 -o APT::Sandbox::User=root -o Acquire::Retries=3 -o Dir::Cache::archives=/srv)
[[ ! -e /mnt/ca.crt ]] || options+=(-o Acquire::https::CAInfo=/mnt/ca.crt)
[[ ! -e /mnt/sources.list ]] || cp /mnt/sources.list /etc/apt/sources.list

debs::get() { apt-get "${options[@]}" install --download-only --yes --no-install-recommends "$@"; }

own=$(dpkg --print-architecture)
if [[ ${ARCHITECTURE:=$own} == "$own" ]]; then
    apt-get "${options[@]}" update
else # what is installed here is installed there, as the archive has it
    mkdir -p /tmp/other/lists/partial
    touch /tmp/other/status
    options+=(-o "APT::Architecture=$ARCHITECTURE" -o "APT::Architectures=$ARCHITECTURE" -o Dir::Cache::pkgcache=
        -o Dir::Cache::srcpkgcache= -o Dir::State::lists=/tmp/other/lists -o Dir::State::status=/tmp/other/status)
    apt-get "${options[@]}" update
    dpkg-query --show --showformat '${Package}\n' | xargs apt-cache "${options[@]}" show --no-all-versions |
        sed '/^Package: /a Status: install ok installed' >/tmp/other/installed
    mv /tmp/other/installed /tmp/other/status
fi
mapfile -t wanted < <(sed 's/#.*//; s/[[:space:]]//g; /^$/d' /mnt/debian.in)
mapfile -t locked < <(awk '{ print $1 "=" $2 }' /mnt/debian.lock)
if ((${#locked[@]} == 0)) || ! debs::get "${wanted[@]}" "${locked[@]}" ; then
    rm -f /srv/*.deb
    debs::get "${wanted[@]}"
fi
rm -rf /srv/partial /srv/lock
[[ $ARCHITECTURE == "$own" ]] || exit 0

# What the base itself holds, with the hash that the archive gives, for the bill of materials. The archive drops what
# it has newer versions of, and then apt-cache fails for these and shows the others.
dpkg-query --show --showformat '${Package}=${Version}\n' >/tmp/base
{ xargs apt-cache show </tmp/base 2>/dev/null || true; } |
    awk '/^Package: / { name = $2 } /^Version: / { version = $2 } /^Architecture: / { arch = $2 }
         /^SHA256: / { print name, version, arch, $2 }' | sort -u >/srv/base.sha256
unknown=$(($(wc -l </tmp/base) - $(wc -l </srv/base.sha256)))
((unknown == 0)) || echo "dray: apt's sources do not have $unknown of the base's packages: these have no hash in the bill"
