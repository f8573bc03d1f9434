"""Apptainer or SingularityCE on this machine by spython's client, which writes arguments and reads replies.

dray starts every program itself, with a deadline: spython would hang, exit or start `sudo` (docs/adr/0004).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import spython.utils

from dray.clients import apptainer, builder, progress, registry
from dray.contract.findings import ConfigError, DrayError, UnfitError
from dray.process import Done

ANSWER_S = 60.0
"""A command that only reads an image answers in seconds; a cold network disk takes longer."""
FETCH_S = 4 * 3600.0
"""An image of a registry may have tens of gigabytes."""
_SILENT = -5
"""Less than its warnings, which print what dray has refused already."""
_REGISTRIES = re.compile(r"(docker|oras|https|library|shub)://.+")
_ARCHIVES = re.compile(r"(oci|oci-archive|docker-archive|docker-daemon):.+")


@dataclass
class _Call:
    """What `_door` needs to know of one call of spython, and the programs that it ran."""

    binds: Mapping[Path, bool]
    env: Mapping[str, str]
    seconds: float
    network: bool
    say: Callable[[str], None]
    done: list[Done] = field(default_factory=list)


_CALL: ContextVar[_Call] = ContextVar("call")


def _door(cmd: Sequence[str], **_: object) -> dict[str, Any]:
    """Replaces `spython.utils.run_command`. The message is standard output alone, without stderr."""
    call = _CALL.get()
    done = builder.tool(
        cmd, binds=call.binds, env=call.env, seconds=call.seconds, network=call.network, on_line=call.say
    )
    call.done.append(done)
    return {"message": [done.out], "return_code": done.code}


@cache
def _spython() -> Any:  # noqa: ANN401  it has no types
    """spython's client. Its modules take these two functions when they are loaded, and start programs only by them."""
    spython.utils.run_command = _door
    spython.utils.check_install = lambda *_args, **_options: True  # it starts `singularity --version`, and ignores it
    from spython.main import get_client  # noqa: PLC0415  only now

    client = get_client(quiet=True)
    client._init_command = _command
    return client


def recipe(kind: Literal["docker", "singularity"], lines: Sequence[str]) -> Any:  # noqa: ANN401  it has no types
    """What its parser reads in a Dockerfile or a definition: of one stage, in lines without a trap."""
    _spython()
    from spython.main.parse.parsers import get_parser  # noqa: PLC0415  only now
    from spython.main.parse.writers.base import bot  # noqa: PLC0415

    bot.level = _SILENT
    parser = get_parser(kind)(None, load=False)
    parser.lines = [f"{line}\n" for line in lines]
    with _answered("read the lines"):
        (stage,) = parser.parse().values()
    return stage


def written(kind: Literal["docker", "singularity"], stage: Any, *, runscript: str = "") -> str:  # noqa: ANN401
    """What its writer makes of it."""
    from spython.main.parse.writers import get_writer  # noqa: PLC0415

    with _answered("write the lines"):
        return str(get_writer(kind)({"stage": stage}).convert(runscript=runscript, force=bool(runscript)))


@contextmanager
def _answered(what: str) -> Iterator[None]:
    try:
        yield
    except (SystemExit, NotImplementedError, LookupError, TypeError, ValueError, AttributeError) as wrong:
        raise DrayError(f"spython cannot {what}", found=repr(wrong)) from wrong


def name() -> str:
    """Apptainer's name on this machine, or in the builder's container."""
    return apptainer.program() or builder.APPTAINER


def here() -> str:
    """This machine's own Apptainer, for commands at the user's terminal."""
    found = apptainer.program()
    if not found:
        raise UnfitError("Apptainer is not on this machine", wanted="apptainer or singularity on PATH")
    return found


def _command(action: str | list[str], flags: Sequence[str] | None = None) -> list[str]:
    return [name(), *(flags or []), *([action] if isinstance(action, str) else action)]


def run(
    argv: Sequence[str],
    *,
    binds: Mapping[Path, bool] | None = None,
    env: Mapping[str, str] | None = None,
    seconds: float = ANSWER_S,
) -> Done:
    """Run a command that spython lacks, such as verify. `binds` has the paths in argv, and whether it writes them."""
    return builder.tool(_command([*argv]), binds=binds or {}, env=env, seconds=seconds)


def execute(
    image: Path,
    command: Sequence[str],
    *,
    options: Sequence[str] = (),
    binds: Mapping[Path, bool] | None = None,
    seconds: float = ANSWER_S,
) -> Done:
    """Run a command in the image, with any exit code. It sees only `binds` of this machine, which `options` mount."""
    for path in binds or {}:
        if not path.exists():  # spython would end the process
            raise ConfigError("a path that the image must see does not exist", found=path)
    with _call(binds={image: False, **(binds or {})}, seconds=seconds, what=f"start {image}") as call:
        plain = ["--cleanenv", "--no-eval", "--no-mount=home,cwd", *options]
        _spython().execute(str(image), [*command], options=plain, singularity_options=["--quiet"], return_result=True)
        return call.done[-1]


def instances() -> list[dict[str, Any]]:
    """This user's instances on this machine, as Apptainer lists them."""
    with _call(binds={}, what="list the instances") as call:
        found = _spython().instances(return_json=True, quiet=True)
        _require(call, None)
        return list(found)


def pull(source: str, out: Path, *, what: str, instead: str, say: Callable[[str], None]) -> None:
    """Make a SIF from a registry, an OCI folder or an archive. A failure leaves nothing.

    Temporary files are written beside it: /tmp is small on many machines.
    """
    archive = _archive(source)
    with TemporaryDirectory(prefix=".pull-", dir=out.parent) as made:
        scratch, part = Path(made), Path(made) / out.name
        tmp = {"APPTAINER_TMPDIR": made, "SINGULARITY_TMPDIR": made}
        made_by = _call(
            binds={scratch: True, **archive},
            env=tmp,
            seconds=FETCH_S,
            network=not archive,
            what=f"fetch {source}",
            say=say,
        )
        with progress.watch(scratch, what, say=say), made_by as call:
            if not _REGISTRIES.fullmatch(source):
                _spython().build(source, str(part), sudo=False, quiet=True)
                _require(call, source)
            else:
                _spython().pull(source, name=str(part), quiet=True)
                done = call.done[-1]
                if done.code:
                    raise registry.refused(what, source, done.err or done.out, instead=instead)
        part.replace(out)


def _archive(source: str) -> dict[Path, bool]:
    """The file or folder that the source names, if any."""
    if _REGISTRIES.fullmatch(source):
        return {}
    if not _ARCHIVES.fullmatch(source):
        raise ConfigError(
            "not the address of an image",
            wanted="docker://, oras://, library://, https://, oci:FOLDER, oci-archive:FILE or docker-archive:FILE",
            found=source,
        )
    kind, _, rest = source.partition(":")
    if kind == "docker-daemon":
        return {}
    path = Path(os.path.abspath(rest.partition(":")[0]))  # noqa: PTH100  without following links
    if not path.exists():
        raise ConfigError("the source of the image does not exist", where=source, found=path)
    return {path: False}


@contextmanager
def _call(
    *,
    binds: Mapping[Path, bool],
    what: str,
    env: Mapping[str, str] | None = None,
    seconds: float = ANSWER_S,
    network: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Iterator[_Call]:
    """One call of spython. Its exceptions, and its exit of the process, become dray's errors."""
    uncached = {"APPTAINER_DISABLE_CACHE": "1", "SINGULARITY_DISABLE_CACHE": "1"} if network else {}
    call = _Call(binds=binds, env={**uncached, **(env or {})}, seconds=seconds, network=network, say=say)
    before = _CALL.set(call)
    try:
        yield call
    except (SystemExit, LookupError, TypeError, ValueError, AttributeError) as wrong:
        last = call.done[-1] if call.done else None
        found = (last.err or last.out).strip() if last else ""
        raise DrayError(
            f"dray cannot read the answer of {name()}, which it asked to {what}", found=found or repr(wrong)
        ) from wrong
    finally:
        _CALL.reset(before)


def _require(call: _Call, where: object) -> None:
    """The program's own words for what went wrong: spython drops them."""
    done = call.done[-1]
    if done.code:
        raise DrayError(
            f"{Path(done.argv[0]).name} {done.argv[1]} failed with exit code {done.code}",
            where=where,
            found="\n".join((done.err or done.out).strip().splitlines()[-5:]) or None,
        )
