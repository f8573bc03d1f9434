"""Check a capsule's files against its record, and show the capsule in half a page."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from dray.contract.findings import counted
from dray.planning.schema import Plan
from dray.runs import capsule, source
from dray.runs.capsule_schema import Capsule, Node
from dray.runs.store import RunPaths

State = Literal["same", "changed", "missing", "unknown"]
_SHOWN = 6


class Checked(BaseModel):
    """A file compared with its record."""

    path: str
    state: State
    why: str = ""


class Verified(BaseModel):
    """An attempt's checked files, and its image if it is on this machine."""

    run: str
    attempt: int
    finished: bool
    files: list[Checked]
    image: Checked | None = None

    @property
    def same(self) -> bool:
        """Whether all files are as recorded."""
        return all(one.state == "same" for one in self.files) and (self.image is None or self.image.state != "changed")


def verify(paths: RunPaths) -> Verified:
    """Check every file that the attempt's capsule names."""
    made = capsule.read(paths)
    return Verified(
        run=made.run,
        attempt=made.attempt,
        finished=made.finished is not None,
        files=[_checked(paths.folder / one.path, one.path, one.sha256) for one in made.files],
        image=_image(made),
    )


def verified(found: Verified) -> Iterator[str]:
    """A line for each file."""
    wrong = sum(one.state != "same" for one in found.files)
    told = f"{counted(wrong, 'file')} not as recorded" if wrong else "all as recorded"
    ended = "" if found.finished else "; the attempt has not ended, so these are the planned files"
    yield f"{found.run}, attempt {found.attempt}: {counted(len(found.files), 'file')}, {told}{ended}"
    for one in (*found.files, *([found.image] if found.image else [])):
        yield f"  {one.state:<8} {one.path}{f' ({one.why})' if one.why else ''}"


def _checked(path: Path, name: str, sha256: str) -> Checked:
    if name.startswith("/") or ".." in Path(name).parts:
        return Checked(path=name, state="missing", why="outside of the folder")
    try:
        found, _ = capsule.digest(path)
    except FileNotFoundError:
        return Checked(path=name, state="missing")
    except OSError as error:
        return Checked(path=name, state="changed", why=error.strerror or str(error))
    if found != sha256:
        return Checked(path=name, state="changed", why=f"recorded {sha256[:12]}, found {found[:12]}")
    return Checked(path=name, state="same")


def _image(made: Capsule) -> Checked | None:
    """Check the image's file, which may have been rebuilt since."""
    file = made.image.file
    if not made.image.sha256 or not file.startswith("/"):
        return None
    checked = _checked(Path(file), Path(file).name, made.image.sha256)
    state: State = "unknown" if checked.state == "missing" else checked.state
    why = checked.why or "not here" * (state == "unknown")
    return checked.model_copy(update={"path": file, "state": state, "why": why})


def page(made: Capsule, plan: Plan | None) -> Iterator[str]:
    """The capsule in half a page."""
    status = made.status or ("not ended" if made.files else "no capsule; from plan and metrics")
    yield f"{made.run}, attempt {made.attempt}: {status}"
    yield f"planned:   {made.planned}{f', ended {made.finished}' if made.finished else ''}"
    yield f"software:  dray {made.dray}{f', torch {made.torch}' if made.torch else ''}, {_packages(made)}"
    known = f" sha256:{made.image.sha256[:12]}" if made.image.sha256 else ""
    layer = f", layer {made.image.layer[:19]}" if made.image.layer else ""
    yield f"image:     {made.image.variant} by {made.image.engine}, {made.image.file}{known}{layer}"
    yield f"source:    {source.text(made.source) if made.source else 'not in git'}"
    yield f"site:      {made.site}; {counted(made.world_size, 'rank')}{f', job {made.job}' if made.job else ''}"
    for like, group in groupby(made.nodes, key=node):
        names = [one.name for one in group]
        shown = " ".join(names[:_SHOWN]) + " ..." * (len(names) > _SHOWN)
        yield f"nodes:     {shown}: {like}"
    if not made.nodes:
        yield "nodes:     no node has recorded itself"
    yield from (f"data:      {name} {sha256[:16]}" for name, sha256 in made.data.items())
    if made.preflight:
        yield f"preflight: {made.preflight}"
    if plan:
        secret = f"; passed by name only: {' '.join(plan.pass_env)}" if plan.pass_env else ""
        yield f"variables: {len(plan.env)}, with their sources in plan.json{secret}"
    for one in made.attempts:
        steps = f", step {one.steps}" if one.steps else ""
        yield f"attempt {one.attempt}: {one.status}{f', {one.why}' if one.why else ''}{steps}"
    if made.files:
        yield f"files:     {len(made.files)}; dray capsule verify checks them"


def node(one: Node) -> str:
    """The node's hardware and software in one line."""
    numa = f", {counted(len(one.numa), 'NUMA node')}" if one.numa else ""
    memory = f", {one.memory_gb:g} GB" if one.memory_gb else ""
    threads = f", {counted(one.threads, 'thread')} a rank" if one.threads else ""
    kinds = [f"{len(list(same))} x {name}" for name, same in groupby(sorted(one.gpus))]
    gpus = f", {', '.join(kinds)}{f', driver {one.driver}' if one.driver else ''}" if kinds else ""
    return f"{one.cpu}, {one.cpus} CPUs{numa}{memory}{gpus}, {one.kernel}, {one.libc}, Python {one.python}{threads}"


def _packages(made: Capsule) -> str:
    count, digest = len(made.image.packages), made.image.packages_sha256
    return f"{count} packages sha256:{digest[:12]}" if count else "packages unknown"
