"""Dockerfiles and definitions by spython's parser and writer, whose traps are fenced: what they write is read again."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from dray.contract.findings import DrayError
from dray.images.convert import definition, dockerfile
from dray.images.convert.definition import Definition
from dray.images.convert.dockerfile import Dockerfile

# A line with USER loses its instruction, one with bootstrap: ends its section; a line break ends everything.
_MARK, _BREAK = "\ufdd0", "\ufdd1"
_TRAPS = re.compile(r"(?i)(boot|us)(strap|er)")
_ORDER = ("FROM", "COPY", "RUN", "LABEL", "ENV", "WORKDIR", "ENTRYPOINT")
_UMASK = "umask 022"  # Docker's, whatever the builder's own is
_EXEC = re.compile(r"exec ([\w./:=@%+,-]+(?: [\w./:=@%+,-]+)*) \"\$@\"", re.ASCII)


def to_definition(given: Dockerfile, *, head: str, context: Path) -> str:
    """A definition that builds what the Dockerfile builds."""
    recipe = _recipe("docker", _hidden(given.normal))
    pairs = set(_hidden(f"{line}" for line in (one.removeprefix("export ") for one in given.post)))
    # It assigns variables without an export, so that no program would see them.
    recipe.install = [
        f"export {line}" if line in pairs and "=" in line.split(" ")[0] else line for line in recipe.install
    ]
    post = [_UMASK, *given.post] if given.post else []
    recipe.install = [_UMASK, *recipe.install] if given.post else []
    script = runscript(given)
    recipe.workdir = recipe.workdir if script else None
    written = _written("singularity", recipe, runscript=_hidden([script])[0] or "exec true")
    sections = re.split(r"(?m)^(?=%)", written)
    without = ["%startscript"] if script else ["%startscript", "%runscript"]  # else the base's own is kept
    kept = [section.strip("\n") for section in sections if section.split("\n")[0] not in without]
    text = _shown(head + re.sub(r"(?m)^Stage: .*\n?", "", "\n\n".join(kept)).strip() + "\n")
    again, refused = definition.read(text, Path("the definition"), context)
    expected = Definition(
        base=given.base, files=given.files, labels=given.labels, env=given.env, post="\n".join(post).splitlines(),
        runscript=[*([f"cd {given.workdir}"] if given.workdir and script else []), *script.splitlines()],
    )  # fmt: skip
    _compare(expected, again, ("base", "files", "labels", "env", "post", "runscript"), refused.found)
    return text


def to_dockerfile(given: Definition, *, head: str, context: Path) -> str:
    """A Dockerfile that builds what the definition builds."""
    recipe = _recipe("singularity", _hidden(given.normal))
    recipe.fromHeader = given.base  # it makes small letters of it
    post = ["/bin/sh", "-ec", "\n".join(given.post)]
    recipe.install = _hidden([_listed(post)] if given.post else [])  # a RUN for each line would forget what cd did
    entry = entrypoint(given)
    recipe.entrypoint = _listed(entry) if entry else None
    lines = _written("docker", recipe).splitlines()
    lines[0] = re.sub(r" AS \S+$", "", lines[0])
    lines = [re.sub(r"^ADD ", "COPY ", line) for line in lines]  # ADD would unpack archives
    lines.sort(key=lambda line: _ORDER.index(line.split()[0]))  # %environment is not there in %post
    text = _shown(head + "\n".join(lines) + "\n")
    again, refused = dockerfile.read(text, Path("the Dockerfile"), context)
    expected = Dockerfile(base=given.base, files=given.files, labels=given.labels, env=given.env, entrypoint=entry)
    expected.runs = [(0, shlex.join(post))] if given.post else []
    again.runs = [(0, command) for _, command in again.runs]
    _compare(expected, again, ("base", "files", "labels", "env", "runs", "entrypoint"), refused.found)
    return text


def runscript(given: Dockerfile) -> str:
    """What Docker starts: words that a user adds take the place of CMD's."""
    entry, default = given.entrypoint or [], given.cmd or []
    if not entry and not default:
        return ""
    if not default:
        return f'exec {shlex.join(entry)} "$@"'
    inner = f'[ $# -gt 0 ] || set -- {shlex.join(default)}; exec {f"{shlex.join(entry)} " if entry else ""}"$@"'
    return f'exec /bin/sh -c {shlex.quote(inner)} sh "$@"'


def entrypoint(given: Definition) -> list[str] | None:
    """The runscript as Docker's words; without one both keep the base's."""
    script = given.runscript
    if not script:
        return None
    if len(script) == 1 and (found := _EXEC.fullmatch(script[0].strip())):
        return found[1].split(" ")
    shell = script[0].strip()[2:].split() if script[0].strip().startswith("#!") else ["/bin/sh"]
    return [*shell, "-c", "\n".join(script), "runscript"]


def _listed(argv: list[str]) -> str:
    """Docker's JSON form."""
    return json.dumps(argv, ensure_ascii=False)


def _hidden(lines: Any) -> list[str]:  # noqa: ANN401  any lines
    return [_TRAPS.sub(rf"\1{_MARK}\2", line).replace("\n", _BREAK) for line in lines]


def _shown(text: str) -> str:
    return text.replace(_MARK, "").replace(_BREAK, "\n")


def _compare(expected: object, found: object, names: tuple[str, ...], refused: list[Any]) -> None:
    """What was written says what was read; else spython has a trap that nobody knew."""
    for name in names:
        wanted, got = getattr(expected, name), getattr(found, name)
        if wanted != got or refused:
            raise DrayError(
                "spython's writer wrote something else than the file says",
                where=name,
                wanted=str(wanted),
                found=str(refused or got),
                fix="report the file: it should have been refused by its line",
            )


def _recipe(kind: Literal["docker", "singularity"], lines: Sequence[str]) -> Any:  # noqa: ANN401  it has no types
    """What its parser reads in a Dockerfile or a definition: of one stage, in lines without a trap."""
    from spython.main.parse.parsers import get_parser  # noqa: PLC0415  only now
    from spython.main.parse.writers.base import bot  # noqa: PLC0415

    bot.level = -5  # less than its warnings, which print what dray has refused already
    parser = get_parser(kind)(None, load=False)
    parser.lines = [f"{line}\n" for line in lines]
    with _answered("read the lines"):
        (stage,) = parser.parse().values()
    return stage


def _written(kind: Literal["docker", "singularity"], stage: Any, *, runscript: str = "") -> str:  # noqa: ANN401
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
