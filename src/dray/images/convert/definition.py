"""A definition of Apptainer read line by line: what a Dockerfile can say as well, and every line that it cannot."""

from __future__ import annotations

import posixpath
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from dray.images.convert import lines
from dray.images.convert.lines import Refusals

_HEAD = re.compile(r"([A-Za-z]+)\s*:\s*(.*?)\s*(#.*)?")
_SECTION = re.compile(r"\s*%(\w+)(.*)")
_CARRIED = ("environment", "files", "labels", "post", "runscript")
# Why, and what to write in its place.
_NEVER = {
    "setup": ("it runs on the machine that builds", "do it in %post"),
    "pre": ("it runs on the machine that builds", "run it before the build"),
    "arguments": ("Docker has other variables", "write the values out"),
    "test": ("Docker runs no test when it builds", "run it at the end of %post"),
    "help": ("Docker has nothing for it", "make a label of it"),
    "startscript": ("Docker has no instances", "delete the section"),
}
_SHELLS = ("/bin/sh", "/bin/bash", "/usr/bin/bash", "/bin/dash", "/usr/bin/env bash", "/usr/bin/env sh")
_OWN = re.compile(r"\b(APPTAINER|SINGULARITY)_(ROOTFS|ENVIRONMENT|CONTAINER|NAME|LABELS)\b")
_EXPORT = re.compile(r"export\s+([A-Za-z_]\w*=.*)")


@dataclass
class Definition:
    """What it says."""

    base: str = ""
    files: list[tuple[str, str]] = field(default_factory=list)
    copies: list[tuple[int, tuple[str, str]]] = field(default_factory=list)
    """The same files with the lines that copy them."""
    labels: dict[str, str] = field(default_factory=dict)
    env: list[tuple[str, str]] = field(default_factory=list)
    post: list[str] = field(default_factory=list)
    runscript: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    rest: list[tuple[int, str]] = field(default_factory=list)
    """The lines that belong neither to the base nor to %post."""
    runs: list[tuple[int, str]] = field(default_factory=list)
    """The lines of %post with their numbers."""

    @property
    def normal(self) -> list[str]:
        """The same definition in lines that spython reads as Apptainer does, without its scripts."""
        return [
            "Bootstrap: docker",
            f"From: {self.base}",
            *(["%files", *(f"{name} {place}" for name, place in self.files)] if self.files else []),
            *(["%labels", *(lines.assignment(*pair) for pair in self.labels.items())] if self.labels else []),
            *(
                ["%environment", *(f"export {lines.assignment(name, value)}" for name, value in self.env)]
                if self.env
                else []
            ),
        ]


def is_one(text: str) -> bool:
    """Whether the file is a definition, and no Dockerfile."""
    first = next((line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")), "")
    return bool(re.match(r"\s*(bootstrap\s*:|%\w)", first, re.IGNORECASE))


def read(text: str, path: Path, context: Path, into: str = "a Dockerfile") -> tuple[Definition, Refusals]:
    """What it says, and what of it cannot be carried."""
    refusals = Refusals(path, into)
    reader = _Reader(context, refusals)
    for number, line in enumerate(text.splitlines(), 1):
        try:
            reader.take(number, line)
        except ValueError as why:
            refusals.add(number, line.strip(), str(why), "write it without")
    reader.end()
    return reader.made, refusals


class _Reader:
    def __init__(self, context: Path, refusals: Refusals) -> None:
        self.made, self._context, self._refusals = Definition(), context, refusals
        self._section = ""
        self._bootstrap = ""
        self._first: dict[str, int] = {}

    def take(self, number: int, line: str) -> None:
        section = _SECTION.fullmatch(line)
        if re.search(r"\{\{.*\}\}", line):
            self._refusals.add(number, line.strip(), "a value that the build is given", "write the value out")
        elif re.match(r"\s*bootstrap\s*:", line, re.IGNORECASE) and self._bootstrap:
            self._refusals.add(number, line.strip(), "a second stage", "build one stage alone")
            self._section = "-"
        elif section:
            self._begin(number, line.strip(), section[1].lower(), section[2].strip())
        elif self._section in ("post", "runscript"):
            self._script(number, line)
        elif self._section in _CARRIED and line.strip() and not line.lstrip().startswith("#"):
            getattr(self, f"_{self._section}")(number, line.strip())
            self.made.rest.append((number, line.strip()))
        elif not self._section and line.strip() and not line.lstrip().startswith("#"):
            self._head(number, line.strip())

    def end(self) -> None:
        for script in (self.made.post, self.made.runscript):
            while script and not script[-1].strip():
                script.pop()
            while script and not script[0].strip():
                script.pop(0)
        first = self.made.runscript[0].strip() if self.made.runscript else ""
        if first.startswith("#!") and first[2:].strip() not in _SHELLS:
            self._refusals.add(self._first["runscript"], first, "a script of no shell", "call a file of the image")
        if not self.made.base and not self._refusals.found:
            self._refusals.add(1, "", "no From: with an image", "Bootstrap: docker, and From: debian:bookworm")

    def _head(self, number: int, line: str) -> None:
        found = _HEAD.fullmatch(line)
        key, value = (found[1].lower(), found[2]) if found else ("", "")
        if key == "bootstrap":
            self._bootstrap = value
            if value.lower() != "docker":
                fix = "push the image to a registry, and name it: Bootstrap: docker"
                self._refusals.add(number, line, "a Dockerfile begins with an image of a registry", fix)
        elif key == "from" and not self.made.base:
            self.made.base = lines.image(value.removeprefix("//"))
        elif key != "stage":
            self._refusals.add(
                number, line, "nothing that a Dockerfile has", "name the whole image: From: HOST/NAME:TAG"
            )

    def _begin(self, number: int, line: str, name: str, rest: str) -> None:
        rest = rest.partition("#")[0].strip()
        self._section = name if name in _CARRIED else "-"
        if name.startswith("app"):
            self._refusals.add(number, line, "Docker has no apps in an image", "an image for each app")
        elif name in _NEVER:
            self._refusals.add(number, line, *_NEVER[name])
        elif name not in _CARRIED:
            self._refusals.add(number, line, "no section that dray knows", f"one of %{', %'.join(_CARRIED)}")
        elif rest and name == "files":
            self._refusals.add(number, line, "files of another stage", "build one stage alone")
            self._section = "-"
        elif rest:
            self._refusals.add(number, line, "options of the section", "write the shell into the script: bash -c '...'")
        elif name in self._first:
            self._refusals.add(number, line, "a section that comes twice", "join the two")
        self._first.setdefault(name, number)

    def _script(self, number: int, line: str) -> None:
        if own := _OWN.search(line):
            self._refusals.add(number, line.strip(), f"{own[0]} is Apptainer's own", "use %environment or %labels")
        getattr(self.made, self._section).append(line)
        if self._section == "post" and line.strip() and not line.lstrip().startswith("#"):
            self.made.runs.append((number, line.strip()))
        if self._section == "runscript" and line.strip():
            self.made.rest.append((number, line.strip()))

    def _environment(self, _number: int, line: str) -> None:
        found = _EXPORT.fullmatch(line)
        if not found:
            raise ValueError("no export NAME=VALUE")
        for word in lines.tokens(found[1]):
            name, given, value = word.partition("=")
            if not given or not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise ValueError("no export NAME=VALUE")
            lines.public(name, value)
            if unknown := lines.referred(value) - set(dict(self.made.env)) - {lines.INHERITED}:
                raise ValueError(f"${min(unknown)} is the host's, or the base's")
            self.made.env.append((name, value))

    def _labels(self, _number: int, line: str) -> None:
        name, _, value = line.partition(" ")
        if re.search(r"[\"\\$`]", value):
            raise ValueError("a mark that Docker replaces")
        self.made.labels[name] = lines.label(name, value)

    def _files(self, number: int, line: str) -> None:
        name, *place = shlex.split(line)
        if len(place) > 1 or any(re.search(r"[\s\"'\\$%]", word) for word in (name, *place)):
            raise ValueError("not a source and a place, without spaces, quotes or variables")
        if name.startswith("/"):
            raise ValueError("Docker copies nothing from outside its context")
        path = lines.source(self._context, name)
        target = posixpath.normpath("/" + (place[0] if place else name).lstrip("/"))
        if place and place[0].endswith("/") and path.is_file():
            target = posixpath.join(target, path.name)
        relative = posixpath.normpath(name)
        if path.is_dir():
            if not name.endswith("/."):
                self.made.notes.append(f"%files {line}: taken as {target} not being in the base image")
            relative = f"{relative}/."
        self.made.files.append((relative, target))
        self.made.copies.append((number, (relative, target)))
