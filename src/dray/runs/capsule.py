"""capsule.json: what is needed to repeat an attempt, and to see what would differ.

One part is written when the attempt is planned, and what only the nodes know when it has ended. The plan holds recipe,
environment and reasons; the capsule holds the plan's digest.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dray.config.load_toml import explained
from dray.contract import files, run_folder
from dray.contract.control_characters import printable
from dray.contract.findings import ConfigError, DrayError
from dray.images.sif import record
from dray.planning.schema import Plan
from dray.runs import again
from dray.runs import source as sources
from dray.runs.capsule_schema import Capsule, File, Image, Node
from dray.runs.metrics import Metrics
from dray.runs.result import Result
from dray.runs.source import Source
from dray.runs.stop import utc
from dray.runs.store import RunPaths, reason, written

_HASHED = 4 << 30  # bytes of the largest file that is hashed
_NODE = 1 << 20
_MOST = 65_536  # nodes, and files
# Secret files, files that change after the run has ended, and the capsule itself.
_NOT = {run_folder.CAPSULE, run_folder.SECRET, run_folder.STOP, run_folder.NEXT, run_folder.RENDEZVOUS}
_CHUNK = 1 << 20
_NAME = 256  # letters of a node's text


def begun(paths: RunPaths, plan: Plan, beside: Path | None) -> None:
    """Write the capsule of a planned attempt, after all files that a node needs. `beside` is the recipe's folder."""
    folder = Path(plan.recipe.command.folder) if plan.recipe.command else beside
    made = planned(paths, plan).model_copy(update={"source": _code(paths, sources.look(folder) if folder else None)})
    files.write_atomic(paths.capsule, _json(made.model_copy(update={"files": _files(paths)})))


def _code(paths: RunPaths, found: tuple[Source, str] | None) -> Source | None:
    """The user's code as git sees it now, or as it was when the run was submitted."""
    found = found or sources.kept(paths.run)
    if found and found[1]:
        files.write_atomic(paths.source_diff, found[1], mode=0o600)
    return found[0] if found else None


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
    try:
        made = read(paths) if paths.capsule.exists() else planned(paths, plan) if plan else None
        if made is None:
            return ""
        if made.source is None:  # the job may have been planned before `dray submit` had written it
            made = made.model_copy(update={"source": _code(paths, None)})
        attempts = (*result.history, again.attempt(result, paths.attempt))
        told = {"finished": result.finished, "status": result.status, "preflight": result.preflight}
        made = seen(paths, made).model_copy(update={**told, "attempts": attempts, "files": _files(paths)})
        files.write_atomic(paths.capsule, _json(made))
    except Exception as error:  # the result is printed whatever is in the run folder
        return f"{paths.capsule} cannot be written: {reason(error)}"
    return ""


def seen(paths: RunPaths, made: Capsule) -> Capsule:
    """The capsule with what nodes and trainer have written so far."""
    nodes, packages = _nodes(paths)
    lines = "".join(f"{name}=={version}\n" for name, version in sorted(packages.items()))
    digest = hashlib.sha256(lines.encode()).hexdigest() if packages else ""
    image = made.image.model_copy(update={"packages": packages, "packages_sha256": digest})
    start: dict[str, Any] = {}
    with suppress(OSError):
        start = next((event for event in Metrics(paths.metrics) if event.get("event") == "start"), start)
    return made.model_copy(
        update={
            "nodes": nodes or made.nodes,
            "image": image if packages else made.image,
            "torch": str(printable(str(start.get("torch") or "")))[:_NAME] or made.torch,
            "data": _texts(start.get("data")) or made.data,
        }
    )


def read(paths: RunPaths) -> Capsule:
    """The capsule of an attempt; ConfigError if it is missing, damaged or of another version."""
    what = "the run's capsule"
    fix = "use dray diff or dray replay, which work without a capsule; runs of an older dray have none"
    if not os.path.lexists(paths.capsule):
        raise ConfigError("the attempt has no capsule", where=paths.folder, wanted=run_folder.CAPSULE, fix=fix)
    content = files.parse_json(files.text(paths.capsule, what), what, paths.capsule)
    found, version = content.get("version") if isinstance(content, dict) else None, 1
    if found != version:
        raise ConfigError(
            "this capsule was written by another version of dray", where=paths.capsule,
            wanted=f"capsule version {version}", found=f"capsule version {ascii(found)[:40]}",
            fix="use that version of dray",
        )  # fmt: skip
    try:
        return Capsule.model_validate_json(json.dumps(printable(content)))
    except ValidationError as wrong:
        raise ConfigError("the run's capsule is damaged", where=paths.capsule, found=explained(wrong)) from wrong


def of(paths: RunPaths, plan: Plan) -> Capsule:
    """The capsule, or what is known so far of an active run or of a run without a capsule."""
    made = read(paths) if os.path.lexists(paths.capsule) else planned(paths, plan)
    return made if made.finished else seen(paths, made)


def digest(path: Path) -> tuple[str, int]:
    """SHA-256 and size; OSError if the file cannot be read or is too large."""
    total, sums = 0, hashlib.sha256()
    with files.open_regular(path, link=False) as file:
        if os.fstat(file.fileno()).st_size > _HASHED:
            raise OSError(0, f"more than {_HASHED:,} bytes", str(path))
        while chunk := file.read(_CHUNK):
            sums.update(chunk)
            total += len(chunk)
    return sums.hexdigest(), total


def _json(made: Capsule) -> str:
    return made.model_dump_json(indent=1) + "\n"


def _files(paths: RunPaths) -> tuple[File, ...]:
    found = []
    for path in _belonging(paths):
        with suppress(OSError):
            sha256, size = digest(path)
            found.append(File(path=path.relative_to(paths.folder).as_posix(), sha256=sha256, size=size))
    return tuple(found)


def _belonging(paths: RunPaths) -> Iterator[Path]:
    """The plan, then the other files; no logs, because the batch script still writes to them."""
    yield paths.plan
    for path in sorted(paths.folder.iterdir())[:_MOST]:
        with suppress(OSError):
            regular = stat.S_ISREG(path.lstat().st_mode)
            if regular and path != paths.plan and path.name not in _NOT and ".part-" not in path.name:
                yield path
    yield from sorted(paths.nodes.glob("node-*.json"))[:_MOST]
    if paths.preflight_report.is_file():
        yield paths.preflight_report


def _nodes(paths: RunPaths) -> tuple[tuple[Node, ...], dict[str, str]]:
    """The nodes as their runners recorded them, in order, without damaged records; and the packages."""
    nodes, packages = [], dict[str, str]()
    for text in _told(paths):
        with suppress(ValueError, RecursionError):  # ValidationError is a ValueError
            told = printable(json.loads(text))
            if isinstance(told, dict):
                packages |= _texts(told.pop("packages", None))
                nodes.append(Node.model_validate({name: _cut(value) for name, value in told.items()}))
    return tuple(sorted(nodes, key=lambda one: one.node)), packages


def _told(paths: RunPaths) -> Iterator[bytes]:
    """What each node recorded."""
    for path in sorted(paths.nodes.glob("node-*.json"))[:_MOST]:
        with suppress(OSError):
            yield files.read(path, limit=_NODE)


def _cut(value: Any) -> Any:  # noqa: ANN401  any JSON value
    return " ".join(value.split())[:_NAME] if isinstance(value, str) else value


def _texts(table: Any) -> dict[str, str]:  # noqa: ANN401  any JSON value
    if not isinstance(table, dict):
        return {}
    return {str(name)[:_NAME]: str(printable(value))[:_NAME] for name, value in table.items() if isinstance(value, str)}
