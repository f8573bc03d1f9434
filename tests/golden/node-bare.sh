#!/usr/bin/env bash
# Run r1 on one node. dray 0.0.0 wrote it from plan.json: change the recipe instead.
set -euo pipefail

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

# plan.json says who has set them, and why.
export PYTHONFAULTHANDLER=1
export PYTHONNOUSERSITE=1
export PYTHONUNBUFFERED=1

export DRAY_STARTED="$started" DRAY_HEARTBEATS=/tmp/dray-7-r

cd '/shared/my work/runs/r1/attempt-1'

exec /home/me/.venv/bin/python \
  -m \
  dray.runner \
  '/shared/my work/runs/r1/attempt-1/plan.json'
