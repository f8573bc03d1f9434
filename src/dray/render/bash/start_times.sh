#!/usr/bin/env bash
# When each part of this node's start began, by a clock that nobody sets: the runner makes durations of them. node.sh
# contains this file.

node::now() { # NAME
  local now
  read -r now _ </proc/uptime
  started+=" $1=$now"
}

started="boot=$(</proc/sys/kernel/random/boot_id) ${DRAY_ASKED:-}"
node::now began
