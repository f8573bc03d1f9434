"""The packages that a Dockerfile or a definition installs, as requirements of a layer beside an image of dray's."""

from __future__ import annotations

import posixpath
import re
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path

from dray.contract import files
from dray.images.convert.definition import Definition
from dray.images.convert.dockerfile import Dockerfile
from dray.images.convert.lines import Refusals

_PIP = re.compile(r"(pip[\d.]*|python[\d.]* -m pip) install( |$)")
_APT = re.compile(r"apt(-get)? ")
_CLEAN = re.compile(r"(rm -rf? /var/lib/apt/lists/?\*?|apt(-get)? (clean|autoclean|autoremove)( .*)?|set -\w+)")
# They change how packages are fetched, and not which.
_IDLE = {
    *("--no-cache-dir", "--no-cache", "-q", "-qq", "--quiet", "-U", "--upgrade", "--no-input", "-y", "--yes"),
    *("--disable-pip-version-check", "--break-system-packages", "--no-install-recommends", "--assume-yes", "--user"),
}
_IDLE_LINES = {"WORKDIR", "LABEL", "MAINTAINER"}
_INSTALLERS = {"pip", "setuptools", "wheel"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(\[[\w,. -]+\])?\s*([<>=!~]=?.*)?")
_ELSEWHERE = "build the whole image: dray image convert FILE --out X.def, apptainer build, and dray image adopt X.sif"
_FIXES = {
    "ENV": 'set it in the recipe: env.NAME = "..."',
    "EXPORT": 'set it in the recipe: env.NAME = "..."',
    "COPY": "delete the line: a run sees the folder that it is started in",
    "ADD": "delete the line: a run sees the folder that it is started in",
    "CMD": "delete the line: the recipe, or the words after --, say what starts",
    "ENTRYPOINT": "delete the line: the recipe, or the words after --, say what starts",
}


def requirements(given: Dockerfile | Definition, refusals: Refusals, context: Path, has: set[str]) -> list[str]:
    """A line for each package; `has` are Debian's packages in the image. Every other line is refused."""
    read: set[str] = set()
    found: list[str] = []
    for number, line in given.runs:
        for command in re.split(r"\s*&&\s*", line.strip()):
            try:
                found += _packages(command, lambda name: _listed(name, given, context, read), has)
            except ValueError as why:
                refusals.add(number, command, str(why), _ELSEWHERE)
    seen = {number for number, *_ in refusals.found}
    for number, line in given.rest:
        keyword = line.split()[0].upper()
        copied = {name for copy, (name, _) in given.copies if copy == number}
        if number not in seen and keyword not in _IDLE_LINES and not (copied and copied <= read):
            refusals.add(number, line, "a layer has packages alone", _FIXES.get(keyword, "delete the line"))
    return list(dict.fromkeys(found))


def _packages(command: str, listed: Callable[[str], list[str]], has: set[str]) -> Iterator[str]:
    if re.search(r"[;|<>&`$]|\|\|", re.sub(r"'[^']*'|\"[^\"$`]*\"", "", command)):
        raise ValueError("more than a plain pip install or apt-get install")
    if _PIP.match(command):
        argv = iter(shlex.split(_PIP.sub("", command, count=1)))
        for word in argv:
            name, _, value = word.partition("=") if word.startswith("--") else (word, "", "")
            if name in ("-r", "--requirement"):
                yield from listed(value or next(argv, ""))
            elif word not in _IDLE and word not in _INSTALLERS:
                yield _requirement(word)
    elif _APT.match(command) and not _CLEAN.fullmatch(command):
        verb, *names = [word for word in shlex.split(command)[1:] if word not in _IDLE]
        if verb not in ("update", "install") or (odd := [name for name in names if name.startswith("-")]):
            raise ValueError(f"{verb if verb not in ('update', 'install') else odd[0]} of apt-get")
        if missing := [name for name in names if name not in has]:
            raise ValueError(f"the image has no Debian package {missing[0]}: a layer cannot bring it")
    elif not _CLEAN.fullmatch(command) and command:
        raise ValueError("more than a plain pip install or apt-get install")


def _requirement(word: str) -> str:
    if "://" in word or word.startswith(("-", ".", "/")) or not _NAME.fullmatch(word):
        raise ValueError(f"{word} is no package by its name, such as trl or trl==1.0")
    return word


def _listed(name: str, given: Dockerfile | Definition, context: Path, read: set[str]) -> list[str]:
    """The lines of a requirements.txt that the build has copied."""
    workdir = given.workdir if isinstance(given, Dockerfile) and given.workdir else "/"
    for source, target in given.files:
        if target == posixpath.join(workdir, name) and (context / source).is_file():
            read.add(source)
            kept = (
                line.split(" #")[0].strip() for line in files.text(context / source, "the requirements").splitlines()
            )
            return [_requirement(line) for line in kept if line and not line.startswith("#")]
    raise ValueError(f"no line before it copies {name or 'a file'} alone")
