# shellcheck shell=bash
# Sourced by run.sh and by every step. The build's inputs lie in /mnt: bound there for Apptainer, copied into a first
# stage for Docker. dray.images.inputs says what is in them. No step needs a network.
set -euo pipefail

readonly INPUTS=/mnt
readonly VENV=/opt/dray

# Otherwise a site's umask (0007 on LUMI) makes an image that only its builder can read.
umask 022
# The same bytes every time: sorting, and the order of sets in compiled Python.
export LC_ALL=C.UTF-8 PYTHONHASHSEED=0 PYTHONDONTWRITEBYTECODE=1

# What is built.
set -a
# shellcheck source=/dev/null
source "$INPUTS/image.env"
set +a

# Where dray binds the folder of a wheel that takes minutes to compile: with that of an earlier build from the same inputs,
# or empty, to take this build's. Where nothing is bound it is the image's own folder, and stays empty.
readonly KEPT=/srv

log::line() { printf 'dray: %s\n' "$*" >&2; }

apt::get() {
    # Where Apptainer builds without root, apt can become no other user.
    DEBIAN_FRONTEND=noninteractive apt-get --quiet=2 -o APT::Sandbox::User=root "$@"
}

kept::wheel() { compgen -G "$KEPT/$1-*.whl"; }

kept::keep() { ! mountpoint --quiet "$KEPT" || cp -- "$@" "$KEPT"; }

pip::install() {
    "$VENV/bin/python3" -m pip install --isolated --quiet --no-index --no-cache-dir --no-deps --no-compile "$@"
}
