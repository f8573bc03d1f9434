# shellcheck shell=bash
# Sourced by run.sh and by every step. The build's inputs lie in /mnt: bound there for Apptainer, copied into a first
# stage for Docker. dray.images.inputs says what is in them.
set -euo pipefail

readonly INPUTS=/mnt
readonly VENV=/opt/dray

# Otherwise a site's umask (0007 on LUMI) makes an image that only its builder can read.
umask 022

# What is built, and the host's proxies. Nothing of either file stays in the image.
set -a
# shellcheck source=/dev/null
source "$INPUTS/image.env"
# shellcheck source=/dev/null
source "$INPUTS/host/env"
set +a

log::line() { printf 'dray: %s\n' "$*" >&2; }

apt::get() {
    # Where Apptainer builds without root, apt can become no other user.
    local options=(-o APT::Sandbox::User=root -o Acquire::Retries=3)
    # Behind a proxy with certificates of its own, the base image's bundle does not do for https sources.
    [[ ! -e $INPUTS/host/ca.crt ]] || options+=(-o "Acquire::https::CAInfo=$INPUTS/host/ca.crt")
    DEBIAN_FRONTEND=noninteractive apt-get --quiet=2 "${options[@]}" "$@"
}

pip::install() {
    "$VENV/bin/python3" -m pip install --isolated --quiet --no-index --no-cache-dir --no-deps --no-compile "$@"
}
