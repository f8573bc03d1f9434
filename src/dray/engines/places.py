"""Bash with which a node looks for what it must have, and lays out what the container sees of it."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator

from dray.contract import exit_codes
from dray.planning.binds import Bind
from dray.planning.plan import Plan

MOUNTS = "mounts"
_READ_ONLY = {"docker": "readonly", "podman": "readonly"}

# The record is what the runner would write, had the container started.
_NEED = """\
# An engine's own words about a missing place are hard to read.
unfit() {{ # PLACE WANTED RECORD
  local -r node="${{{name}:-$(</proc/sys/kernel/hostname)}}"
  printf 'dray: %s is not there\\n  wanted: %s\\n  where:  node %s\\n' "$1" "$2" "$node" >&2
  local -r record="failures/node-${{{node}:-unknown}}.json"
  # A disk that is full must not hide the exit code as well.
  if printf '{{"time": %s, "node": "%s", %s}}\\n' "$(date +%s.%N)" "$node" "$3" >"$record.part"; then
    mv -- "$record.part" "$record"
  fi || true
  exit {code}
}}
need() {{ # PLACE WANTED RECORD
  [[ -e "$1" ]] || unfit "$@"
}}
cd {folder} || exit {code}"""

_BIND = """\
binds=()
bind() { # PLACE ro|rw: also where a link leads to, since programs ask for a file's real path
  local place real
  real="$(realpath -- "$1"; echo .)" # the dot keeps what a line break at the end would lose
  for place in "$1" "${real%$'\\n.'}"; do
    binds+=("$place"$'\\t'"$2")
  done
}"""

_MOUNTS = """\
# A folder before what lies in it: the last mount is the one that is seen. Who may write decides.
{mounts}=() last=""
while IFS= read -r -d '' entry; do
  place="${{entry%$'\\t'*}}" quoted="${{entry%$'\\t'*}}" mode=""
  quoted="${{quoted//\\"/\\"\\"}}"
  [[ "$entry" == *$'\\t'rw ]] || mode=,{read_only}
  [[ "$place" != "$last" ]] || unset '{mounts}[-1]'
  {mounts}+=("--mount=type=bind,\\"src=$quoted\\",\\"dst=$quoted\\"$mode")
  last="$place"
done < <(printf '%s\\0' "${{binds[@]}}" | LC_ALL=C sort --zero-terminated --unique)"""

_LIBRARIES = """\
# The fabric's libraries are the host's: the engine puts these into the container's library path.
libraries=()
newest() { # PATTERN WANTED RECORD: sets newest
  newest="$(compgen -G "$1" | sort --version-sort | tail --lines=1)" || true
  [[ -n "$newest" ]] || unfit "$@"
}"""


def script(plan: Plan) -> Iterator[str]:
    """The lines of node.sh up to `mounts`, whose words the engine is given."""
    yield _NEED.format(**plan.world.identity, code=exit_codes.UNFIT, folder=shlex.quote(plan.folder))
    if plan.engine in ("apptainer", "singularity"):
        yield _call("need", plan.image, "the image")
    yield _BIND
    for bind in plan.binds:
        yield from _bind(bind, plan)
    if plan.fabric.strategy == "host":
        yield from _fabric(plan)
    yield _MOUNTS.format(mounts=MOUNTS, read_only=_READ_ONLY.get(plan.engine, "ro"))


def _bind(bind: Bind, plan: Plan) -> Iterator[str]:
    place, mode = shlex.quote(bind.path), "rw" if bind.write else "ro"
    if not bind.required:
        yield f"[[ ! -e {place} ]] || bind {place} {mode}"
        return
    if bind.made:
        yield f"mkdir -p -- {place} || true"
    if bind.path != plan.run_folder:
        yield _call("need", bind.path, f"{bind.source}: {bind.why}")
    yield f"bind {place} {mode}"


def _fabric(plan: Plan) -> Iterator[str]:
    yield _LIBRARIES
    wanted = f"a part of the fabric ({plan.site}); without it ranks would fall back to TCP and say nothing"
    for pattern in plan.fabric.libraries:
        yield _call("newest", pattern, wanted)
        yield 'libraries+=("$newest")'
    if plan.fabric.plugin:
        yield _call("newest", plan.fabric.plugin, wanted)
        yield 'bind "$newest" ro'
        if "NCCL_NET_PLUGIN" not in {variable.name for variable in plan.env}:  # the recipe's, or the site's own
            for prefix in ("APPTAINERENV_", "SINGULARITYENV_"):
                yield f'export {prefix}NCCL_NET_PLUGIN="$newest"'
    if plan.fabric.libraries:
        yield 'printf -v joined %s, "${libraries[@]}"'
        yield 'export APPTAINER_CONTAINLIBS="${joined%,}" SINGULARITY_CONTAINLIBS="${joined%,}"'


def _call(function: str, path: str, wanted: str) -> str:
    record: dict[str, object] = {
        "rank": None,
        "code": exit_codes.UNFIT,
        "why": f"{path} is not there\n  wanted: {wanted}",
        "log": None,
        "last_lines": [],
    }
    return shlex.join([function, path, wanted, json.dumps(record)[1:-1]])
