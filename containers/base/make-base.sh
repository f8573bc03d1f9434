#!/usr/bin/env bash
# make-base.sh SUITE OUT.tar: a Debian rootfs to build images on, for machines that cannot pull one.
# It has the packages of the slim image that is pulled elsewhere, and no others. They come from where mmdebstrap takes
# them by default; APT_SOURCES names a sources.list for machines that must use a mirror of their own.
# With SOURCE_DATE_EPOCH set, the same packages give the same bytes.
# dray finds what lies in build/base:
#   containers/base/make-base.sh trixie build/base/trixie.tar
set -euo pipefail

base::usage() {
  sed -n '2,7s/^# \{0,3\}//p' "$0" >&2
  exit 78
}

base::may_map() { # whether mmdebstrap can be root in a namespace of this user
  command -v newuidmap >/dev/null || return
  local -r own="^($(id -un)|$EUID):"
  grep -Eq "$own" /etc/subuid && grep -Eq "$own" /etc/subgid
}

main() {
  [[ $# -eq 2 ]] || base::usage
  local -r suite=$1 out=$2
  if ! command -v mmdebstrap >/dev/null; then
    echo "make-base: mmdebstrap is not on this machine (Debian: apt-get install mmdebstrap)" >&2
    exit 69
  fi
  if ((EUID != 0)) && ! base::may_map; then
    printf 'make-base: %s\n  fix:    %s, and usermod --add-subuids %s --add-subgids %s USER\n' \
      "an ordinary user needs newuidmap, and ranges of user numbers in /etc/subuid and /etc/subgid" \
      "run it as root; or, as root: apt-get install uidmap" 100000-165535 100000-165535 >&2
    exit 69
  fi
  [[ "${out}" == *.tar ]] || { echo "make-base: OUT must end in .tar, found ${out}" >&2; exit 78; }
  mkdir -p "$(dirname "${out}")"
  # Nothing half-made may carry the final name: a later build would start from it.
  partial="${out%.tar}.partial.tar"
  trap 'rm -f "${partial}"' EXIT
  # mmdebstrap takes usrmerge for bookworm, which brings all of Perl; the slim image has usr-is-merged.
  local merged=()
  [[ "${suite}" != bookworm ]] || merged=(--include=usr-is-merged --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr)
  # This machine's name and resolver are nobody else's business; the container engine brings its own.
  # shellcheck disable=SC2016  # $1 is the hook's
  mmdebstrap --variant=minbase "${merged[@]}" --format=tar \
    --dpkgopt='path-exclude=/usr/share/man/*' --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    --customize-hook='truncate --size 0 "$1/etc/hostname" "$1/etc/resolv.conf"' \
    "${suite}" "${partial}" ${APT_SOURCES:+"${APT_SOURCES}"} >&2
  mv "${partial}" "${out}"
  echo "${out}"
}

main "$@"
