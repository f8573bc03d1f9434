"""Bash with which a node copies the image to its own disk: once, checked, shared by all jobs of a user there."""

from __future__ import annotations

import shlex

from dray.contract import exit_codes
from dray.planning.plan import Plan

# The variable that holds the image's place from then on.
IMAGE = "image"

_SCRIPT = """\
# The image is copied to this node's own disk once, for all jobs of this user that run here, and goes with the last one.
stage() {{ # IMAGE FOLDER SHA256: sets image; it stays the shared one where there is no room
  local -r folder="$2/dray-images-$UID" size="$(stat --format=%s -- "$1")"
  local -r copy="$folder/${id}-$size.sif"
  local found making
  image="$1"
  (umask 077 && mkdir --parents -- "$folder") || return 0
  # In a folder that another user has made, another user's image may wait.
  [[ -O "$folder" && ! -L "$folder" ]] || return 0
  while :; do # until the lock is the one that others see; it is shared by all that use the copy
    exec {{staged}}>>"$copy.lock" || return 0
    flock --shared "$staged"
    [[ ! "/proc/self/fd/$staged" -ef "$copy.lock" ]] || break
    exec {{staged}}>&-
  done
  exec {{making}}>>"$copy.making"
  flock --exclusive "$making"
  if [[ ! -f "$copy" ]]; then
    part="$copy.part"
    if ! found="$(set -o pipefail; tee -- "$copy.part" <"$1" | sha256sum)"; then
      rm --force -- "$part"
      echo "dray: no room for the image in $folder: started from $1" >&2
      return 0
    fi
    if [[ -n "$3" && "${{found%% *}}" != "$3" ]]; then
      rm --force -- "$copy.part"
      printf 'dray: the image did not arrive whole\\n  where:  %s\\n  wanted: %s\\n  found:  %s\\n' \\
        "$copy" "$3" "${{found%% *}}" >&2
      exit {unfit}
    fi
    mv -- "$copy.part" "$copy"
  fi
  exec {{making}}>&-
  image="$copy" copied="$copy"
}}
# shellcheck disable=SC2317 # the trap below calls it
unstage() {{
  [[ -z "$part" ]] || rm --force -- "$part" # of a copy that was broken off
  if [[ -n "$copied" ]] && flock --exclusive --nonblock "$staged"; then
    rm --force -- "$copied" "$copied.making" "$copied.lock"
  fi
}}
copied="" part=""
trap unstage EXIT
stage {image} {folder} {sha}"""


def script(plan: Plan) -> str:
    """Define and do it."""
    names = plan.world.identity
    said = {"image": plan.image, "folder": plan.stage, "sha": plan.image_sha256}
    words = {name: shlex.quote(value) for name, value in said.items()}
    return _SCRIPT.format(id=names["image"], unfit=exit_codes.UNFIT, **words)
