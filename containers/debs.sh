#!/usr/bin/env bash
# Runs in an image's base, before the build and with a network: every locked package that the base lacks, or has in an older
# version, goes to /srv, from the mirrors or from Debian's dated archive. Where neither has them, those of today go there.
# With ARCHITECTURE, to lock: all that debian.in asks for and needs, as if the base were empty.
# dray.images.sources.debs compares them with the lock.
set -euo pipefail
exec 2>&1

# The host's proxies.
set -a
# shellcheck source=/dev/null
source /mnt/env
set +a
# shellcheck source-path=SCRIPTDIR source=debian.sh
source /mnt/debian.sh

debs::get() {
    debian::apt -o Dir::Cache::archives=/srv install --download-only --yes --no-install-recommends "$@"
}

debs::installed() {
    # shellcheck disable=SC2016  # dpkg's
    dpkg-query --show --showformat '${db:Status-Status} ${Package} ${Version} ${Architecture}\n' |
        sed -n 's/^installed //p'
}

# The lines of the lock that the base does not fulfil, as NAME=VERSION. What it has in a newer version stays: dray refuses
# that, unless it is the base's own.
debs::missing() {
    local name version rest
    declare -A present=()
    while read -r name version rest; do
        present[$name]=$version
    done </srv/installed
    while read -r name version rest; do
        [[ -n ${present[$name]:-} ]] && dpkg --compare-versions "${present[$name]}" ge "$version" ||
            printf '%s=%s\n' "$name" "$version"
    done < <(sed '/^#/d' /mnt/debian.lock)
}

debian::setup
debs::installed >/srv/installed
mapfile -t wanted < <(sed 's/#.*//; s/[[:space:]]//g; /^$/d' /mnt/debian.in)

if [[ -n ${ARCHITECTURE:-} ]]; then
    mkdir -p /tmp/other/lists/partial
    touch /tmp/other/status
    options+=(-o "APT::Architecture=$ARCHITECTURE" -o "APT::Architectures=$ARCHITECTURE" -o Dir::Cache::pkgcache=
        -o Dir::Cache::srcpkgcache= -o Dir::State::lists=/tmp/other/lists -o Dir::State::status=/tmp/other/status)
    debian::apt update
    debs::get "${wanted[@]}"
    rm -rf /srv/partial /srv/lock
    exit 0
fi

debian::apt update
mapfile -t missing < <(debs::missing)
stamp=$(sed -n '1s/^# archive //p' /mnt/debian.lock)
echo "dray: Debian packages: ${#missing[@]} of $(sed '/^#/d' /mnt/debian.lock | wc -l) are not in the base"
if ((${#missing[@]} > 0)) && ! debs::get "${missing[@]}" &>/tmp/refused; then
    if ! debian::see_archive "$stamp" || ! debs::get "${missing[@]}" &>/tmp/refused; then
        cat /tmp/refused
        rm -f /srv/*.deb
        debs::get "${wanted[@]}"
    fi
fi
rm -rf /srv/partial /srv/lock

# What the base itself holds, with the hash that the archive gives, for the bill of materials. The archive drops what
# it has newer versions of, and then apt-cache fails for these and shows the others.
{ awk '{ print $1 "=" $2 }' /srv/installed | xargs apt-cache show 2>/dev/null || true; } |
    awk '/^Package: / { name = $2 } /^Version: / { version = $2 } /^Architecture: / { arch = $2 }
         /^SHA256: / { print name, version, arch, $2 }' | sort -u >/srv/base.sha256
unknown=$(($(wc -l </srv/installed) - $(wc -l </srv/base.sha256)))
((unknown <= 0)) || echo "dray: apt's sources do not have $unknown of the base's packages: these have no hash in the bill"
