#!/usr/bin/env bash
# tools.sh apptainer|builder|node: what the Containerfile beside it installs, in Debian trixie.
# tools.sh lock: tools.lock anew. In the checkout's containers/:
#   docker run --rm -v "$PWD:/mnt:ro" -w /mnt/cluster debian:trixie-slim bash tools.sh lock >tools.new && mv tools.new cluster/tools.lock
# Apptainer writes a SIF's metadata and squashfs-tools its bytes, so both are pinned: by version, hash and place in the
# archive. Debian keeps apptainer out of its stable releases; sid's runs on trixie.
set -euo pipefail

lock=$(dirname "${BASH_SOURCE[0]}")/tools.lock
# shellcheck source-path=SCRIPTDIR source=../debian.sh
source /mnt/debian.sh

tools::install() { debian::apt install --yes --no-install-recommends "$@"; }

tools::mirror() {
    local suite
    # shellcheck disable=SC1091  # the image's own
    suite=$(. /etc/os-release && echo "$VERSION_CODENAME")
    # Asking apt reads both formats of its sources; the base may have either.
    # shellcheck disable=SC2016  # apt's placeholder, not the shell's
    apt-get indextargets --format '$(REPO_URI)' "Created-By: Packages" "Release: $suite" | head -n 1
}

# Of sid, on the base's own mirror, comes only what exists nowhere else.
tools::see_sid() {
    printf '%s: %s\n' Types deb URIs "$(tools::mirror)" Suites sid Components main \
        Signed-By /usr/share/keyrings/debian-archive-keyring.gpg >/etc/apt/sources.list.d/sid.sources
    printf 'Package: *\nPin: release n=sid\nPin-Priority: 100\n' >/etc/apt/preferences.d/sid
    debian::apt "$@" update
}

# tools::fetch NAME SHA256 PATH: from the mirror, else from Debian's dated archive.
tools::fetch() {
    local address
    for address in "$(tools::mirror)" "$archive"; do
        [[ -z $address ]] || ! /usr/lib/apt/apt-helper "${options[@]}" -o Acquire::Retries=0 \
            -o Acquire::http::ConnectionTimeout=10 download-file "${address%/}/$3" "/var/cache/dray/$1.deb" "SHA256:$2" ||
            return 0
    done
    return 1
}

tools::apptainer() {
    local name version architecture digest path archive files=() gone=()
    archive=$(debian::archived "$(sed -n '1s/^# archive //p' "$lock")" | sed -n 's/^URIs: //p' | head -n 1)
    while read -r name version architecture digest path; do
        [[ $architecture == "$(dpkg --print-architecture)" ]] || continue
        if tools::fetch "$name" "$digest" "$path"; then
            files+=("/var/cache/dray/$name.deb")
        else
            echo "dray: neither the mirror nor Debian's archive has $name $version: the builder gets today's"
            gone+=("$name")
        fi
    done < <(sed '/^#/d' "$lock")
    [[ " ${gone[*]} " != *" apptainer "* ]] || tools::see_sid
    tools::install "${files[@]}" "${gone[@]}" fuse-overlayfs fuse2fs squashfuse uidmap
    # shellcheck disable=SC2016  # dpkg's
    dpkg-query --show --showformat 'dray: the builder has ${Package} ${Version}\n' apptainer squashfs-tools
}

tools::lock() {
    local name architecture version
    {
        dpkg --add-architecture amd64
        dpkg --add-architecture arm64
        # A mirror that caches may serve sid's Release past its date; what is locked here is checked by its hash.
        tools::see_sid -o Acquire::Check-Valid-Until=false
    } >&2
    echo "# archive $(date --utc +%Y%m%dT%H%M%SZ)"
    for name in apptainer squashfs-tools; do
        for architecture in amd64 arm64; do
            version=$(apt-cache policy "$name:$architecture" | awk '/Candidate:/ { print $2 }')
            apt-cache show "$name:$architecture=$version" | awk -v "line=$name $version $architecture" '
                /^SHA256: / { digest = $2 } /^Filename: / { path = $2 } END { print line, digest, path }'
        done
    done
}

[[ $1 == lock ]] || exec 2>&1
cp -a /etc/apt /var/cache/dray-apt
mkdir -p /var/cache/dray
debian::setup
debian::apt update >&2
case $1 in
    apptainer) tools::apptainer ;;
    builder) tools::install python3 ;;
    node) tools::install munge openssh-server rsync slurm-wlm ;;
    lock) tools::lock ;;
esac
# Nothing of the host's mirrors stays, nor what was fetched.
rm -rf /etc/apt /var/cache/dray "$WORK" /var/lib/apt/lists/*
mv /var/cache/dray-apt /etc/apt
apt-get clean
