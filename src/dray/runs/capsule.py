"""capsule.json: what is needed to repeat an attempt, and to see what would differ.

One part is written when the attempt is planned, and what only the nodes know when it has ended. The plan holds recipe,
environment and reasons; the capsule holds the plan's digest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from dray.config.site import NAME
from dray.contract import files, run_folder
from dray.contract.findings import DrayError
from dray.images.sif import record
from dray.planning.schema import Plan
from dray.runs import source as sources
from dray.runs.metrics import first
from dray.runs.result import Attempt, Result
from dray.runs.source import Source
from dray.runs.stop import utc
from dray.runs.store import RunPaths, load, read_json, reason, written

# Secret files, files that change after the run has ended, and the capsule itself.
NOT_RECORDED = {run_folder.CAPSULE, run_folder.SECRET, run_folder.STOP, run_folder.NEXT, run_folder.RENDEZVOUS}


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)


class File(_Model):
    """A recorded file of the attempt's folder."""

    path: str
    """The file's path in the attempt's folder."""
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    """SHA-256 of its bytes."""
    size: Annotated[int, Field(ge=0)]
    """Its size in bytes."""


class Image(_Model):
    """What started the run."""

    engine: str
    """What started the container."""
    variant: str
    """The variant of the image: cpu, cuda, cuda12, rocm or rocm6."""
    file: str
    """Its file or reference; for bare, the Python with the training packages."""
    sha256: str
    """SHA-256 of the file, from its record; empty if unknown."""
    inputs: str = ""
    """Digest of everything that the image was built from, including its lock."""
    layer: str = ""
    """Digest of the layer's file; empty without a layer."""
    packages: dict[str, str] = {}
    """Versions of the Python packages that the first node had."""
    packages_sha256: str = ""
    """SHA-256 of these packages, as lines of `name==version`."""


class Node(_Model):
    """A node, as its runner recorded it."""

    node: Annotated[int, Field(ge=0)]
    """The node's number in the run, from 0."""
    name: str
    """Its name in Slurm or in the hostfile."""
    host: str = ""
    """The host name that the node itself has."""
    cpu: str = ""
    """The processor's model."""
    cpus: int = 0
    """Logical processors of the machine."""
    usable_cpus: str = ""
    """The processors that the run was allowed to use."""
    cores_of_ranks: str = ""
    """The processors that each rank was bound to; empty without binding."""
    threads: int | None = None
    """OMP_NUM_THREADS of each rank."""
    numa: tuple[str, ...] = ()
    """The processors of each NUMA node."""
    memory_gb: float | None = None
    """Memory of the machine, in GB."""
    kernel: str = ""
    """Name and version of its kernel."""
    libc: str = ""
    """The C library that the runner's Python uses, with its version."""
    python: str = ""
    """Version of the runner's Python."""
    gpus: tuple[str, ...] = ()
    """Models of the machine's GPUs."""
    driver: str = ""
    """Version of the GPUs' kernel module."""


class Capsule(_Model):
    """One attempt at a run."""

    version: Literal[1] = 1
    """Version of the capsule's format; dray reads only this one."""
    dray: str
    """The version of dray that planned the attempt."""
    run: str
    """The run's name."""
    attempt: Annotated[int, Field(ge=1)]
    """The number of the attempt; the first is 1."""
    job: int = 0
    """Slurm's job number; 0 without Slurm."""
    planned: str
    """When the attempt was planned."""
    finished: str | None = None
    """When its result was written; null until then."""
    status: str | None = None
    """The attempt's status, as in result.json."""
    site: Annotated[str, Field(pattern=NAME)]
    """The name of the site, never the path of its file."""
    world_size: int
    """The number of ranks on all nodes."""
    image: Image
    source: Source | None = None
    """The user's own code; null if the folder of the command or the recipe is not in a git repository."""
    torch: str = ""
    """Version of torch, as the trainer saw it."""
    nodes: tuple[Node, ...] = ()
    """The nodes that took part, by number."""
    data: dict[str, str] = {}
    """SHA-256 of each dataset's tokens; for a stream, a text that identifies it."""
    preflight: str | None = None
    """What the nodes proved before the launch, in a line."""
    attempts: tuple[Attempt, ...] = ()
    """All attempts up to this one."""
    files: tuple[File, ...]
    """The files of the attempt, the plan first."""


def begun(paths: RunPaths, plan: Plan, beside: Path | None) -> None:
    """Write the capsule of a planned attempt, after all files that a node needs. `beside` is the recipe's folder."""
    folder = Path(plan.recipe.command.folder) if plan.recipe.command else beside
    _write(paths, planned(paths, plan), sources.look(folder) if folder else None)


def planned(paths: RunPaths, plan: Plan) -> Capsule:
    """The capsule that can be made from the plan alone."""
    inputs = ""
    with suppress(DrayError, OSError):
        known = record.read(Path(plan.image)) if plan.image_sha256 else None
        inputs = known.inputs if known and known.sif.sha256 == plan.image_sha256 else ""
    return Capsule(
        dray=plan.dray, run=plan.run, attempt=paths.attempt, job=plan.job,
        planned=utc(written(paths.plan) or 0.0), site=plan.site.removeprefix("site "), world_size=plan.world.size,
        image=Image(
            engine=plan.engine, variant=plan.variant, file=plan.image, sha256=plan.image_sha256, inputs=inputs,
            layer=plan.layer.digest if plan.layer else "",
        ),
        files=(),
    )  # fmt: skip


def ended(paths: RunPaths, plan: Plan | None, result: Result) -> str:
    """Add what nodes, trainer and result tell; the error in one line, empty if there was none."""
    if plan is None:
        return ""
    try:
        attempts = (*result.history, Attempt.of(result, paths.attempt))
        told = {"finished": result.finished, "status": result.status, "preflight": result.preflight}
        _write(paths, seen(paths, of(paths, plan)).model_copy(update={**told, "attempts": attempts}), None)
    except Exception as error:  # the result is printed whatever is in the run folder
        return f"{paths.capsule} cannot be written: {reason(error)}"
    return ""


def _write(paths: RunPaths, made: Capsule, code: tuple[Source, str] | None) -> None:
    """Write the capsule, with the user's code as git sees it now, or as it was when the run was submitted."""
    if code := code or (None if made.source else sources.kept(paths.run)):
        source, diff = code
        made = made.model_copy(update={"source": source})
        if diff:
            files.write_atomic(paths.source_diff, diff, mode=0o600)
    made = made.model_copy(update={"files": tuple(_files(paths))})
    files.write_atomic(paths.capsule, made.model_dump_json(indent=1) + "\n")


def of(paths: RunPaths, plan: Plan) -> Capsule:
    """The capsule, with what is known so far of an active run."""
    made = read(paths) if paths.capsule.exists() else planned(paths, plan)
    return made if made.finished else seen(paths, made)


def read(paths: RunPaths) -> Capsule:
    """The capsule of an attempt; ConfigError if it is missing, damaged or of another version."""
    return load(Capsule, paths.capsule, "run's capsule", fix="name an attempt that has one: RUN/attempt-N")


def seen(paths: RunPaths, made: Capsule) -> Capsule:
    """The capsule with what nodes and trainer have written so far."""
    nodes, packages = list[Node](), dict[str, str]()
    for path in paths.nodes.glob("node-*.json"):
        with suppress(ValueError):  # a damaged record leaves the others
            told = read_json(path, []) or {}
            packages |= _texts(told.pop("packages", None))
            nodes.append(Node.model_validate(told))
    update: dict[str, Any] = {"nodes": tuple(sorted(nodes, key=lambda node: node.node))} if nodes else {}
    if packages:
        lines = "".join(f"{name}=={version}\n" for name, version in sorted(packages.items()))
        digest = hashlib.sha256(lines.encode()).hexdigest()
        update["image"] = made.image.model_copy(update={"packages": packages, "packages_sha256": digest})
    with suppress(OSError):
        start = first(paths.metrics)
        if start.get("event") == "start":
            update |= {"torch": str(start.get("torch", "")), "data": _texts(start.get("data"))}
    return made.model_copy(update=update)


def _texts(table: object) -> dict[str, str]:
    if not isinstance(table, dict):
        return {}
    return {name: value for name, value in table.items() if isinstance(value, str)}


def _files(paths: RunPaths) -> Iterator[File]:
    """The plan, then the other files; no logs, because the batch script still writes to them."""
    others = [path for path in paths.folder.iterdir() if path.name not in NOT_RECORDED and ".part-" not in path.name]
    for path in [
        paths.plan,
        *sorted({*others} - {paths.plan}),
        *sorted(paths.nodes.glob("node-*.json")),
        paths.preflight_report,
    ]:
        with suppress(OSError):
            sha256, size = _digest(path)
            yield File(path=path.relative_to(paths.folder).as_posix(), sha256=sha256, size=size)


def _digest(path: Path) -> tuple[str, int]:
    """SHA-256 and size of a file, which is not a link; else OSError."""
    with files.open_regular(path, link=False) as file:
        sha256 = hashlib.file_digest(file, "sha256").hexdigest()
        return sha256, file.tell()


class Checked(NamedTuple):
    """A file compared with its record."""

    path: str
    state: str
    """same, changed or missing"""


def verify(paths: RunPaths) -> list[Checked]:
    """Compare every file that the capsule names with its record, and the image if it is on this machine."""
    made = read(paths)
    recorded = {file.path: file.sha256 for file in made.files}
    if made.image.sha256 and Path(made.image.file).exists():
        recorded[made.image.file] = made.image.sha256
    return [Checked(name, _state(paths.folder / name, sha256)) for name, sha256 in recorded.items()]


def _state(path: Path, sha256: str) -> str:
    try:
        return "same" if _digest(path)[0] == sha256 else "changed"
    except FileNotFoundError:
        return "missing"
    except OSError:  # a link, or no file
        return "changed"
