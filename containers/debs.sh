#!/usr/bin/env bash
# Runs in an image's base, before the build and with a network: every locked package that the base lacks, or has in an older
# version, goes to /srv, from the mirrors or from Debian's dated archive. Where neither has them, or with CURRENT, those of
# today go there. With ARCHITECTURE, to lock: all that debian.in asks for and needs, and what the base has, as if it were
# empty. dray.images.fetch.debs compares them with the lock.
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

# The packages on top of the base that it has not, or in an older version, as NAME=VERSION. What it has in a newer version
# stays: dray refuses that.
debs::missing() {
    local name version of_base
    declare -A present=()
    while read -r name version _; do
        present[$name]=$version
    done </srv/installed
    while read -r name version _ _ of_base; do
        [[ -n $of_base ]] || { [[ -n ${present[$name]:-} ]] && dpkg --compare-versions "${present[$name]}" ge "$version"; } ||
            printf '%s=%s\n' "$name" "$version"
    done < <(sed '/^#/d' /mnt/debian.lock)
}

# Where a package on top needs a newer one of the base's own, that is the locked one too.
debs::prefer_locked() {
    awk '$5 { printf "Package: %s\nPin: version %s\nPin-Priority: 990\n\n", $1, $2 }' /mnt/debian.lock \
        >/etc/apt/preferences.d/locked
}

# debs::get_locked NAME=VERSION...: these, and with them nothing in another version than the lock's.
debs::get_locked() {
    local file name version
    debs::get "$@" || return
    for file in /srv/*.deb; do
        IFS=_ read -r name version _ <<<"$(basename "$file")"
        grep --quiet --fixed-strings "$name ${version//%3a/:} " /mnt/debian.lock ||
            { echo "dray: the mirrors have $name ${version//%3a/:}, and not the locked one"; return 1; }
    done
}

debian::setup
debs::installed >/srv/installed
mapfile -t wanted < <(sed 's/#.*//; s/[[:space:]]//g; /^$/d' /mnt/debian.in)

if [[ -n ${ARCHITECTURE:-} ]]; then
    mapfile -t own < <(awk '{ print $1 }' /srv/installed)
    mkdir -p "$WORK/other/lists/partial"
    touch "$WORK/other/status"
    options+=(-o "APT::Architecture=$ARCHITECTURE" -o "APT::Architectures=$ARCHITECTURE" -o Dir::Cache::pkgcache=
        -o Dir::Cache::srcpkgcache= -o "Dir::State::lists=$WORK/other/lists" -o "Dir::State::status=$WORK/other/status")
    debian::apt update
    debs::get "${wanted[@]}" "${own[@]}"
    rm -rf /srv/partial /srv/lock
    exit 0
fi

debian::apt update
mapfile -t missing < <(debs::missing)
stamp=$(sed -n '1s/^# archive //p' /mnt/debian.lock)
if [[ -n ${CURRENT:-} ]]; then
    debs::get "${wanted[@]}"
elif ((${#missing[@]} > 0)); then
    echo "dray: ${#missing[@]} of Debian's packages are not in the base"
    debs::prefer_locked
    if ! debs::get_locked "${missing[@]}" && ! { debian::see_archive "$stamp" && debs::get_locked "${missing[@]}"; }; then
        # Those of today, so that dray can name both versions.
        rm -f /srv/*.deb /etc/apt/preferences.d/locked
        debs::get "${wanted[@]}"
    fi
fi
rm -rf /srv/partial /srv/lock

# What the base itself holds, with its hash where it is locked in that version: for the bill of materials.
awk 'NR == FNR { if ($5) locked[$1 " " $2 " " $3] = $4; next } ($0 in locked) { print $0, locked[$0] }' \
    /mnt/debian.lock /srv/installed | LC_ALL=C sort >/srv/base.sha256
unknown=$(($(wc -l </srv/installed) - $(wc -l </srv/base.sha256)))
((unknown == 0)) || echo "dray: $unknown of the base's packages are not as locked, and have no hash in the bill of materials"
