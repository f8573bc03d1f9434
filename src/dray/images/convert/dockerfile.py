"""A Dockerfile read line by line: what Apptainer's definitions can say as well, and every line that they cannot."""

from __future__ import annotations

import posixpath
import re
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from dray.images.convert import lines
from dray.images.convert.lines import Refusals

# Why, and what to write in its place.
_NEVER = {
    "SHELL": ("%post has one shell", "name the shell in each RUN: RUN bash -c '...'"),
    "ONBUILD": ("a definition has nothing for the images that are built from it", "write it into their Dockerfile"),
    "HEALTHCHECK": ("Apptainer checks no health", "delete the line"),
    "STOPSIGNAL": ("Apptainer has none", "delete the line"),
    "EXPOSE": ("a container of Apptainer has the host's ports", "delete the line"),
    "VOLUME": ("Apptainer has none", "delete the line, and bind a folder: apptainer run --bind"),
    "USER": ("a container of Apptainer runs as its caller", "delete the line"),
}
_KNOWN = ("FROM", "ARG", "ENV", "LABEL", "MAINTAINER", "RUN", "COPY", "ADD", "WORKDIR", "CMD", "ENTRYPOINT")
_SIMPLE = re.compile(r"[\w./:=@%+,-]+( [\w./:=@%+,-]+)*", re.ASCII)
# They change the shell itself, and every RUN has a shell of its own.
_STATEFUL = re.compile(
    r"(\.|:|alias|break|cd|continue|eval|exec|exit|export|read|readonly|return|set|shift|source|times|trap|ulimit|umask|"
    r"unalias|unset|USER\S*|%\S*|(?i:bootstrap):\S*|\w+=.*)( |$)"
)


@dataclass
class Dockerfile:
    """What it says, in its order."""

    base: str = ""
    files: list[tuple[str, str]] = field(default_factory=list)
    copies: list[tuple[int, tuple[str, str]]] = field(default_factory=list)
    """The same files with the lines that copy them."""
    labels: dict[str, str] = field(default_factory=dict)
    env: list[tuple[str, str]] = field(default_factory=list)
    post: list[str] = field(default_factory=list)
    """The lines that a %post has for it."""
    runs: list[tuple[int, str]] = field(default_factory=list)
    """The commands of its RUNs with their lines."""
    workdir: str = ""
    entrypoint: list[str] | None = None
    cmd: list[str] | None = None
    normal: list[str] = field(default_factory=list)
    """The same Dockerfile in lines that spython reads as Docker does."""
    notes: list[str] = field(default_factory=list)
    rest: list[tuple[int, str]] = field(default_factory=list)
    """The lines that no FROM, ARG or RUN is."""


def instructions(text: str) -> list[tuple[int, str]]:
    """Each instruction on one line, with the number of its first line; comments and escaped line ends are gone."""
    found: list[tuple[int, str]] = []
    first, joined = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or (not line.strip()):
            continue  # also within an instruction: Docker leaves them out there
        first = first or number
        ended = re.fullmatch(r"(.*?)\\[ \t]*", line, re.DOTALL)
        joined += ended[1] if ended else line
        if not ended:
            found.append((first, joined.strip()))
            first, joined = 0, ""
    if joined.strip():
        found.append((first, joined.strip()))
    return found


def read(text: str, path: Path, context: Path, into: str = "a definition") -> tuple[Dockerfile, Refusals]:
    """What it says, and what of it cannot be carried."""
    refusals = Refusals(path, into)
    reader = _Reader(context, refusals)
    for number, line in enumerate(text.splitlines(), 1):
        if not line.startswith("#"):
            break
        if re.match(r"#\s*escape\s*=", line, re.IGNORECASE):
            refusals.add(number, line, "another escape character", "write the file with \\ at line ends")
    for number, line in instructions(text):
        keyword, _, rest = line.partition(" ")
        reader.take(number, line, keyword.upper(), rest.strip())
    if not reader.made.base and not refusals.found:
        refusals.add(1, "", "no FROM with an image", "FROM debian:bookworm")
    return reader.made, refusals


class _Reader:
    def __init__(self, context: Path, refusals: Refusals) -> None:
        self.made, self._context, self._refusals = Dockerfile(), context, refusals
        self._global: dict[str, str] = {}
        self._known: dict[str, str] = {}
        self._args: set[str] = set()

    def take(self, number: int, line: str, keyword: str, rest: str) -> None:
        flag = re.match(r"--[a-z]+(=\S*)?", rest)
        try:
            if keyword in _NEVER:
                self._refusals.add(number, line, *_NEVER[keyword])
            elif keyword not in _KNOWN:
                self._refusals.add(number, line, "no instruction that dray knows", f"one of {', '.join(_KNOWN)}")
            elif keyword not in ("ARG", "FROM") and not self.made.base and not self._refusals.found:
                self._refusals.add(number, line, "before FROM", "begin with FROM")
            elif keyword in ("RUN", "COPY", "ADD") and not lines.as_list(rest) and re.search(r"<<-?\s*[\"']?\w", rest):
                self._refusals.add(number, line, "a here-document", "write the lines with && and \\, or COPY a file")
            elif flag and keyword in ("FROM", "RUN", "COPY", "ADD"):
                self._refusals.add(number, line, f"the option {flag[0].partition('=')[0]}", _without(flag[0]))
            elif "{{" in line:
                self._refusals.add(number, line, "two braces, which a definition replaces", "write it without")
            elif not rest:
                self._refusals.add(number, line, "nothing after it")
            else:
                getattr(self, f"_{keyword.lower()}")(number, line, rest)
        except ValueError as why:
            self._refusals.add(number, line, str(why), "write it without")
        if keyword not in ("FROM", "ARG", "RUN"):
            self.made.rest.append((number, line))

    def _from(self, number: int, line: str, rest: str) -> None:
        image, *name = rest.split()
        if self.made.base:
            self._refusals.add(number, line, "a second stage", "build one stage alone, or COPY what the other makes")
            return
        if image.lower() == "scratch":
            self._refusals.add(number, line, "an empty base", "FROM an image")
            return
        if name and (len(name) != 2 or name[0].upper() != "AS"):
            raise ValueError("more than an image")
        self.made.base = lines.image(lines.expanded(image, self._global))
        self.made.normal.append(f"FROM {self.made.base}")

    def _arg(self, number: int, line: str, rest: str) -> None:
        for word in lines.tokens(rest):
            name, given, value = word.partition("=")
            lines.public(name, value)
            if not given and name in self._global and self.made.base:
                value = self._global[name]
            elif not given:
                self._refusals.add(number, line, "no value of its own", f"ARG {name}=VALUE")
                continue
            if not self.made.base:
                self._global[name] = lines.expanded(value, self._global)
            elif name not in dict(self.made.env):  # an ENV of this name wins
                self._known[name] = lines.expanded(value, self._known)
                self._args.add(name)
                self._set("ARG", name, self._known[name])

    def _env(self, _number: int, _line: str, rest: str) -> None:
        pairs = [word.partition("=") for word in lines.tokens(rest)]
        if not pairs[0][1]:  # the old form: ENV NAME VALUE
            name, given, value = rest.partition(" ")
            pairs = [(name, given, " ".join(lines.tokens(value)))]
        if odd := [name for name, given, _ in pairs if not given or not re.fullmatch(r"[A-Za-z_]\w*", name)]:
            raise ValueError(f"{odd[0]} is no NAME=VALUE")
        here: set[str] = set()
        for name, _, value in pairs:
            lines.public(name, value)
            refers = lines.referred(value)
            if refers & here:
                raise ValueError(f"${min(refers & here)} is set in the same line: Docker takes the value before it")
            here.add(name)
            args = {known: self._known[known] for known in refers & self._args}  # the container has no ARG
            value = lines.REFERENCE.sub(lambda match: args.get(match[1] or match[2], match[0]), value)  # noqa: B023,PLW2901
            if unknown := refers - self._args - set(dict(self.made.env)) - {lines.INHERITED}:
                raise ValueError(f"${min(unknown)} is the base's, and would be the host's in Apptainer")
            self._args.discard(name)
            self._known[name] = value
            self.made.env.append((name, value))
            self._set("ENV", name, value)

    def _set(self, keyword: str, name: str, value: str) -> None:
        self.made.normal.append(f"{keyword} {lines.assignment(name, value)}")
        self.made.post.append(f"export {lines.assignment(name, value)}")

    def _label(self, _number: int, _line: str, rest: str) -> None:
        pairs = [word.partition("=") for word in lines.tokens(rest)]
        if not pairs[0][1]:
            name, _, value = rest.partition(" ")
            pairs = [(name, "=", " ".join(lines.tokens(value)))]
        for name, given, value in pairs:
            text = lines.expanded(value, self._known)
            self.made.labels[name] = lines.label(name if given else "", text)
            self.made.normal.append(f"LABEL {name} {text.strip()}")

    def _maintainer(self, number: int, line: str, rest: str) -> None:
        self._label(number, line, f"maintainer={shlex.quote(rest)}")

    def _run(self, number: int, _line: str, rest: str) -> None:
        listed = lines.as_list(rest)
        command = shlex.join(listed) if listed else rest
        lines.public("", command)
        self.made.runs.append((number, command))
        # In %post a && b goes on where a fails, and cd, set and export stay for the next RUN.
        plain = _SIMPLE.fullmatch(rest) and not _STATEFUL.match(rest)
        text = rest if plain else command if listed else shlex.join(["/bin/sh", "-c", rest])
        self.made.post.append(text)
        self.made.normal.append(f"RUN {text}")

    def _copy(self, number: int, _line: str, rest: str) -> None:
        *sources, place = lines.as_list(rest) or rest.split()
        if not sources:
            raise ValueError("a source without a place")
        for name in [*sources, place]:
            if re.search(r"[\s\"'\\%]", name):
                raise ValueError("a space, a quote, a % or a backslash in a path")
        place = lines.expanded(place, self._known)
        many = len(sources) > 1 or place.endswith("/") or posixpath.normpath(place) == "."
        target = posixpath.normpath(posixpath.join(self._where(place), place))
        for name in sources:
            given = lines.expanded(name, self._known)
            path = lines.source(self._context, given)
            relative = posixpath.normpath(given.lstrip("/") or ".")
            if path.is_dir():
                pair = (f"{relative}/.", target)
            else:
                pair = (relative, posixpath.join(target, path.name) if many else target)
            if earlier := [run for run, text in self.made.runs if target != "/" and target in text]:
                raise ValueError(f"the RUN of line {earlier[0]} names {target}, and %files come before all of %post")
            self.made.files.append(pair)
            self.made.copies.append((number, pair))
            self.made.normal.append(f"COPY {pair[0]} {pair[1]}")

    def _add(self, number: int, line: str, rest: str) -> None:
        for name in (lines.as_list(rest) or rest.split())[:-1]:
            if "://" in name or name.startswith("git@"):
                self._refusals.add(number, line, "ADD fetches it", f"RUN curl --output FILE {name}")
                return
            if lines.is_archive(lines.source(self._context, lines.expanded(name, self._known))):
                self._refusals.add(number, line, "ADD unpacks it, %files do not", "COPY it, and RUN tar --extract")
                return
        self._copy(number, line, rest)

    def _workdir(self, _number: int, _line: str, rest: str) -> None:
        (folder,) = lines.tokens(rest) if len(lines.tokens(rest)) == 1 else [""]
        if not folder or not re.fullmatch(r"[\w./$@+,-]+|\$\{\w+\}[\w./-]*", folder):
            raise ValueError("a folder's name with a space or another mark")
        self.made.workdir = posixpath.normpath(posixpath.join(self._where(folder), lines.expanded(folder, self._known)))
        self.made.post += [f"mkdir -p {self.made.workdir}", f"cd {self.made.workdir}"]
        self.made.normal.append(f"WORKDIR {self.made.workdir}")

    def _where(self, place: str) -> str:
        """What a relative path begins at."""
        if not place.startswith("/") and not self.made.workdir and not lines.REFERENCE.match(place):
            self.made.notes.append(f"{place} is taken from /, since no WORKDIR comes before it")
        return self.made.workdir or "/"

    def _cmd(self, _number: int, _line: str, rest: str) -> None:
        self.made.cmd = lines.as_list(rest) or ["/bin/sh", "-c", rest]

    def _entrypoint(self, _number: int, _line: str, rest: str) -> None:
        self.made.entrypoint = lines.as_list(rest) or ["/bin/sh", "-c", rest]


def _without(flag: str) -> str:
    known = {
        "--mount": "RUN without it; COPY what it mounts, or fetch it anew",
        "--chown": "COPY without it: everything in an image of Apptainer is readable by its caller",
        "--from": "COPY from the context",
        "--platform": "FROM without it",
    }
    return known.get(flag.partition("=")[0], f"write it without {flag.partition('=')[0]}")
