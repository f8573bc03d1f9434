"""The differences between two runs, most important first."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import BaseModel

from dray.contract.control_characters import printable
from dray.planning.schema import Plan
from dray.runs.capsule_schema import Capsule

# In the order of their likely effect. A difference often causes those after it: another image has other versions,
# another number of nodes another gradient accumulation.
KINDS = (
    "image", "versions", "code", "model", "training", "environment", "nodes", "transport", "batch", "data", "seed",
    "launch", "keeping",
)  # fmt: skip
ABSENT = "(none)"
_OF_NODES = (
    "cpu", "gpus", "driver", "threads", "cpus", "cores_of_ranks", "memory_gb", "numa", "kernel", "libc", "python",
)  # fmt: skip
_LONGEST = 200
# The kind of each plan key, by its beginning; the first match decides. None: it differs in every run, or another key
# shows it.
_PLAN: tuple[tuple[str, str | None], ...] = (
    *((key, None) for key in (
        "run", "run_folder", "folder", "scratch", "stage", "attempt", "job", "user", "left_outside", "where", "sbatch",
        "site", "launcher", "command", "version", "world.port", "world.master", "world.nodes", "world.spares",
        "world.identity", "world.task", "world.interfaces", "world.rendezvous_timeout_s", "world.max_restarts",
        "recipe.version", "recipe.name", "recipe.about", "recipe.scale", "recipe.tiny", "recipe.image",
        "recipe.image_digest", "recipe.image_signers", "recipe.adopted", "recipe.layer", "recipe.layer_digest",
        "recipe.env", "recipe.pass_env", "recipe.nodes", "recipe.ranks_per_node", "recipe.port", "recipe.batch",
        "recipe.launcher", "recipe.preflight",
    )),
    *((key, "image") for key in ("variant", "engine", "image_sha256", "layer", "signers")),
    ("dray", "versions"),
    *((key, "code") for key in ("recipe.command", "recipe.accelerate")),
    *((key, "model") for key in ("recipe.model", "recipe.lora", "recipe.analog")),
    ("recipe.train.seed", "seed"),
    ("recipe.train.log_every", "keeping"),
    ("recipe.train.eval_every", "keeping"),
    ("recipe.train.profile", "keeping"),
    ("recipe.train.trackers", "keeping"),
    ("recipe.train", "training"),
    ("pass_env", "environment"),
    ("world", "nodes"),
    *((key, "transport") for key in ("fabric", "annotations", "preflight")),
    ("batch", "batch"),
    *((key, "data") for key in ("recipe.data", "recipe.evaluate")),
    ("recipe", "keeping"),
    ("grace_s", "keeping"),
)  # fmt: skip


class Difference(BaseModel):
    """One difference between two runs."""

    kind: str
    name: str
    a: str
    b: str


def differences(a: tuple[Plan, Capsule], b: tuple[Plan, Capsule]) -> list[Difference]:
    """All differences, most important first."""
    found = [
        *_of_capsules(a[1], b[1]),
        *_environment(a[0], b[0]),
        *_hosts(a[0], b[0]),
        *_of_plans(a[0], b[0]),
    ]
    return sorted(found, key=lambda one: KINDS.index(one.kind))  # stable


def _of_plans(a: Plan, b: Plan) -> Iterator[Difference]:
    ours, theirs = _flat(_plain(a)), _flat(_plain(b))
    whole = {*_tables(ours, theirs), *_tables(theirs, ours)}
    for key in [*ours, *(key for key in theirs if key not in ours)]:
        if (kind := _kind(key)) and key in whole:
            yield from _one(
                kind, key.removeprefix("recipe."), *(None if key in one else "given" for one in (ours, theirs))
            )
        elif kind and not any(key.startswith(f"{table}.") for table in whole):
            yield from _one(kind, key.removeprefix("recipe."), ours.get(key), theirs.get(key))
    argv = [one.launcher[0].rpartition("/")[2] + " " + " ".join(one.launcher[1:]) for one in (a, b)]
    if a.recipe.launcher != b.recipe.launcher:
        yield from _one("launch", "launcher", a.recipe.launcher, b.recipe.launcher)
    elif (a.engine, a.world.size, len(a.world.nodes)) == (b.engine, b.world.size, len(b.world.nodes)):
        yield from _one("launch", "launcher's options", argv[0], argv[1])
    if (a.image, a.image_sha256) != (b.image, b.image_sha256) and not (a.image_sha256 and b.image_sha256):
        yield from _one("image", "image", a.image, b.image)
    yield from _one("nodes", "site", a.site.removeprefix("site "), b.site.removeprefix("site "))
    for name in sorted({*a.files, *b.files}):  # such as DeepSpeed's
        ours_, theirs_ = (_own(one, one.files.get(name)) for one in (a, b))
        yield from _one("training", name, ours_, theirs_)


def _of_capsules(a: Capsule, b: Capsule) -> Iterator[Difference]:
    """Differences in what both capsules have."""
    yield from _told("image", "inputs", a.image.inputs, b.image.inputs)
    yield from _told("versions", "torch", a.torch, b.torch)
    packages = (a.image.packages, b.image.packages)
    if all(packages):
        for name in sorted({*a.image.packages, *b.image.packages}):
            if name != "torch" or not (a.torch and b.torch):
                yield from _one("versions", name, *(one.get(name) for one in packages))
    if a.source and b.source:
        yield from _one("code", "commit", a.source.commit, b.source.commit)
        diffs = [next((one.sha256 for one in made.files if one.path == "source.diff"), None) for made in (a, b)]
        yield from _one("code", "source.diff", *diffs)
        if a.source.commit == b.source.commit:
            yield from _one(
                "code", "untracked files", *(" ".join(made.source.untracked) or None for made in (a, b) if made.source)
            )
    for what in _OF_NODES:
        kinds = [{getattr(node, what) for node in made.nodes} - {None, ""} for made in (a, b)]
        if all(kinds):
            kind = "versions" if what in ("libc", "python") else "nodes"
            yield from _one(kind, what, *(", ".join(sorted(map(_text, found))) for found in kinds))
    yield from _told("transport", "preflight", *(_transport(made.preflight) for made in (a, b)))
    for name in sorted({*a.data} & {*b.data}):
        yield from _one("data", f"tokens of {name}", a.data[name], b.data[name])


def _environment(a: Plan, b: Plan) -> Iterator[Difference]:
    ours, theirs = ({one.name: _own(plan, one.value) for one in plan.env} for plan in (a, b))
    for name in sorted({*ours, *theirs}):
        yield from _one("environment", name, ours.get(name), theirs.get(name))


def _hosts(a: Plan, b: Plan) -> Iterator[Difference]:
    counts = (len(a.world.nodes), len(b.world.nodes))
    yield from _one("nodes", "nodes", *counts)
    if counts[0] == counts[1]:
        yield from _one("nodes", "names", *(" ".join(node.name for node in one.world.nodes) for one in (a, b)))
    yield from _one("nodes", "started by", *("Slurm" if one.by_slurm else "dray run" for one in (a, b)))


def _told(kind: str, name: str, a: str | None, b: str | None) -> Iterator[Difference]:
    if a and b:
        yield from _one(kind, name, a, b)


def _one(kind: str, name: str, *values: Any) -> Iterator[Difference]:  # noqa: ANN401  any JSON value
    a, b = values
    if a != b:
        yield Difference(kind=kind, name=str(printable(name)), a=_text(a), b=_text(b))


def _transport(line: str | None) -> str:
    """The preflight's line without its measurements."""
    return re.sub(r", [\d.]+ GB/s of bus bandwidth.*", "", line or "", flags=re.DOTALL)


def _text(value: Any) -> str:  # noqa: ANN401  any JSON value
    if value is None or value == "":
        return ABSENT
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return " ".join(str(printable(text)).split())[:_LONGEST]


def _tables(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[str]:
    """The tables that only the other plan has."""
    missing = (key for key, value in one.items() if value is None)
    yield from (key for key in missing if any(name.startswith(f"{key}.") for name in other))


def _kind(key: str) -> str | None:
    return next((kind for part, kind in _PLAN if key == part or key.startswith(f"{part}.")), None)


def _plain(plan: Plan) -> dict[str, Any]:
    return plan.model_dump(mode="json", exclude={"env", "files", "reasons", "findings", "binds"})


def _flat(table: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    """Dotted keys and their values; a list is one value."""
    found: dict[str, Any] = {}
    for name, value in table.items():
        found |= _flat(value, f"{above}{name}.") if isinstance(value, dict) else {f"{above}{name}": value}
    return found


def _own(plan: Plan, text: str | None) -> str | None:
    """The text without paths that differ in every run."""
    caches = f"{plan.run_folder.rpartition('/')[0]}/.cache-{plan.user.partition(':')[0]}"
    for own, name in ((plan.run_folder, "RUN"), (plan.scratch, "SCRATCH"), (caches, "CACHES")):
        text = text and text.replace(own, name)
    return text
