#!/usr/bin/env bash
# AMD's devices for Apptainer without --rocm, which would bind the host's ROCm libraries over those of the wheels.
# node.sh contains this file.

declare -a devices=()

node::amd() { # ENGINE: names the devices where its `mount dev` is minimal; else it binds all of /dev, and a bind of one
  # device over that would have nodev, and nobody could open it
  local config device
  config="$("$1" buildcfg | sed --quiet 's/^[A-Z]*_CONF_FILE=//p')" || true
  grep --quiet --extended-regexp --no-messages '^[[:space:]]*mount dev[[:space:]]*=[[:space:]]*minimal' "$config" || return 0
  for device in /dev/kfd /dev/dri; do
    [[ ! -e "$device" ]] || devices+=("--bind=$device")
  done
}
