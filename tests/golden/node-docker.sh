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

# shellcheck disable=SC2174 # the folders above it keep the usual mode
mkdir -p -m 700 -- '/shared/my work/runs/.cache-UID' || true

number=DRAY_NODE name=DRAY_NODE_NAME read_only=readonly
# What a node must have, and what the container sees of it. node.sh contains this file, after the data that it reads:
# `number` and `name` are the names of the variables with this node's number and name, `read_only` is the engine's word.
# shellcheck disable=SC2154,SC2034

declare -a binds=() mounts=()

node::host() { echo "${!name:-$(</proc/sys/kernel/hostname)}"; }

node::record() { # WHY, as JSON: what the runner would write, had the container started; and the end of this node
  local -r record="failures/node-${!number:-unknown}.json"
  # A disk that is full must not hide the exit code as well.
  printf '{"time": %s, "node": "%s", "rank": null, "code": 69, "why": %s, "log": null, "last_lines": []}\n' \
    "$(date +%s.%N)" "$(node::host)" "$1" >"$record.part" || exit 69
  mv -- "$record.part" "$record" || true
  exit 69
}

node::unfit() { # PATH WANTED WHY
  printf 'dray: %s does not exist\n  wanted: %s\n  where:  node %s\n' "$1" "$2" "$(node::host)" >&2
  node::record "$3"
}

node::need() { # PATH WANTED WHY
  [[ -e "$1" ]] || node::unfit "$@"
}

# shellcheck disable=SC2317 # only a node with an adopted image calls it
node::same() { # FILE WANTED WHY: an adopted image is used where it is, and its owner may have changed it
  local found
  found="$(stat --dereference --format='owner %u, inode %i, %s bytes, changed %.9Y' -- "$1" 2>&1)" || true
  [[ "$found" == "$2" ]] && return
  printf 'dray: %s was changed since it was adopted\n  where:  node %s\n  wanted: %s\n  found:  %s\n' \
    "$1" "$(node::host)" "$2" "$found" >&2
  node::record "$3"
}

node::bind() { # PATH ro|rw: also where a link leads to, since programs ask for a file's real path
  local path real
  real="$(realpath -- "$1"; echo .)" # the dot keeps what a line break at the end would lose
  for path in "$1" "${real%$'\n.'}"; do
    binds+=("$path"$'\t'"$2")
  done
}

node::mounts() { # fills `mounts`, the engine's options, as CSV, so that commas and quotes in a path survive
  local entry path quoted mode last=""
  # A folder before what lies in it: the last mount is the one that is seen. Who may write decides.
  while IFS= read -r -d '' entry; do
    path="${entry%$'\t'*}" mode=",$read_only"
    [[ "$entry" != *$'\trw' ]] || mode=""
    [[ "$path" != "$last" ]] || unset 'mounts[-1]'
    last="$path" quoted="${path//\"/\"\"}"
    mounts+=("--mount=type=bind,\"src=$quoted\",\"dst=$quoted\"$mode")
  done < <(printf '%s\0' "${binds[@]}" | LC_ALL=C sort --zero-terminated --unique)
}

cd '/shared/my work/runs/r1/attempt-1' || exit 69
node::bind '/shared/my work/runs/r1' rw
node::need /scratch 'site harbour: data lives there' '"/scratch does not exist\n  wanted: site harbour: data lives there"'
node::bind /scratch rw
node::need '/shared/my work/runs/.cache-UID' 'dray: the caches of libraries' '"/shared/my work/runs/.cache-UID does not exist\n  wanted: dray: the caches of libraries"'
node::bind '/shared/my work/runs/.cache-UID' rw
node::mounts

# Which image this node has: the first node compares it with its own.
DRAY_IMAGE_ID=$(docker image inspect '--format={{.Id}}' dray:cpu | tr --delete ' \n') || true
export DRAY_IMAGE_ID

# The fabric's devices, where this node has them.
devices=()
for device in /dev/infiniband /dev/cxi*; do
  [[ ! -e "$device" ]] || devices+=("--device=$device")
done

export DRAY_STARTED="$started" DRAY_HEARTBEATS=/tmp/dray-7-r

exec docker \
  run \
  --rm \
  --init \
  --label=dray.run=r1 \
  --network=dray-r1 \
  --hostname="$DRAY_NODE_NAME" \
  --network-alias="$DRAY_NODE_NAME" \
  --user=1000:1000 \
  --shm-size=1g \
  "${devices[@]}" \
  --env=PYTHONFAULTHANDLER \
  --env=PYTHONNOUSERSITE \
  --env=PYTHONUNBUFFERED \
  --env=DRAY_NODE \
  --env=DRAY_NODES \
  --env=DRAY_NODE_NAME \
  --env=DRAY_CPUS \
  --env=DRAY_IMAGE_ID \
  --env=DRAY_STARTED \
  --env=DRAY_HEARTBEATS \
  "${mounts[@]}" \
  '--workdir=/shared/my work/runs/r1/attempt-1' \
  dray:cpu \
  python3 \
  -m \
  dray.runner \
  '/shared/my work/runs/r1/attempt-1/plan.json'
