#!/usr/bin/env bash
# Lets apt see Debian sid, on the mirror that the base image already uses, at a priority where only what exists
# nowhere else comes from it. Wants `apt-get update` before and after.
set -euo pipefail

sid::mirror() {
  local suite
  # shellcheck disable=SC1091  # the image's own
  suite=$(. /etc/os-release && echo "${VERSION_CODENAME}")
  # Asking apt reads both formats of its sources; the base may have either.
  # shellcheck disable=SC2016  # apt's placeholder, not the shell's
  apt-get indextargets --format '$(REPO_URI)' "Created-By: Packages" "Release: ${suite}" | head -n 1
}

main() {
  local mirror
  mirror=$(sid::mirror)
  [[ -n "${mirror}" ]] || { echo "add-sid: the base image's apt sources name no mirror for its own suite" >&2; exit 78; }
  # Mirrors that cache or snapshot serve a Release file past its date.
  cat >/etc/apt/sources.list.d/sid.sources <<SOURCE
Types: deb
URIs: ${mirror}
Suites: sid
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
Check-Valid-Until: no
SOURCE
  printf 'Package: *\nPin: release n=sid\nPin-Priority: 100\n' >/etc/apt/preferences.d/sid
}

main "$@"
