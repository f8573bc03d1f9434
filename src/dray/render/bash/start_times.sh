#!/usr/bin/env bash
# When each part of this node's start began, by a clock that nobody sets: the runner makes durations of them. node.sh
# contains this file.

node::now() { # NAME
  local now
  { read -r now _ </proc/uptime; } 2>/dev/null || return 0
  started+=" $1=$now"
}

{ read -r started </proc/sys/kernel/random/boot_id; } 2>/dev/null || started=""
started="boot=$started ${DRAY_ASKED:-}"
node::now began
