"""What both ways of a conversion share: refusals by line, values that mean the same in both, and files to copy."""

from __future__ import annotations

import json
import re
import shlex
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from dray.contract import secrets
from dray.contract.findings import ConfigError

REFERENCE = re.compile(r"\$(?:(\w+)|\{(\w+)\})")
INHERITED = "PATH"
"""The one variable of a base image that a value may refer to: every other would be the host's in Apptainer."""
_PLAIN = re.compile(r"[\w./:=@%+,$-]*", re.ASCII)
_DROPPED = "delete the line"


@dataclass
class Refusals:
    """Every line that cannot be carried, with what to do about it: the user sees all of them at once."""

    path: Path
    into: str
    found: list[tuple[int, str, str, str]] = field(default_factory=list)

    def add(self, number: int, line: str, why: str, fix: str = _DROPPED) -> None:
        """A line of the file, why it is not carried, and the fix; a log may have it, so that it shows no secret."""
        line = secrets.redacted(line)
        if found := next((name for name in re.finditer(r"[\w-]+(?=[= ])", line) if secrets.is_name(name[0])), None):
            line = f"{line[: found.end() + 1]}[secret]"
        self.found.append((number, line if len(line) < 80 else f"{line[:76]} ...", why, fix))

    def refuse(self) -> None:
        """ConfigError, if there is any."""
        if not self.found:
            return
        found = sorted(self.found)
        lines = len({number for number, *_ in found})
        raise ConfigError(
            f"{lines} line{'s' if lines > 1 else ''} cannot be carried into {self.into}",
            where=self.path,
            found="\n".join(f"line {number}: {line}: {why}" for number, line, why, _ in found),
            fix="\n".join(f"line {number}: {fix}" for number, _, _, fix in found),
        )


def tokens(text: str) -> list[str]:
    """The words of a line whose quotes mean the same to Docker and to a shell; ValueError says why they do not."""
    if "\\" in text:
        raise ValueError("a backslash, which means other things in the two")
    if "'" in text and "$" in text:
        raise ValueError("single quotes and a $ in one line")
    if "`" in text or "$(" in text or "$$" in text:
        raise ValueError("what a shell would run or replace")
    found = shlex.split(text)
    if any('"' in word or not word.isprintable() for word in found):
        raise ValueError("quotes within quotes, or a control character")
    return found


def public(name: str, value: str) -> None:
    """ValueError if the variable looks like a secret."""
    if secrets.is_variable(name, value) and value:
        raise ValueError("looks like a secret, which everybody who has the image could read")


def assignment(name: str, value: str) -> str:
    """NAME=VALUE as both languages read it."""
    return f"{name}={value}" if _PLAIN.fullmatch(value) else f'{name}="{value}"'


def referred(value: str) -> set[str]:
    """The variables that a value refers to; ValueError for other forms, such as ${X:-y}."""
    if "$" in REFERENCE.sub("", value):
        raise ValueError("a reference other than $NAME or ${NAME}")
    return {plain or braced for plain, braced in REFERENCE.findall(value)}


def expanded(text: str, known: Mapping[str, str]) -> str:
    """The text with its variables' values; ValueError for one that the file does not set."""
    if unknown := sorted(name for name in referred(text) if "$" in known.get(name, "$")):
        raise ValueError(f"${unknown[0]} has no value that this file sets")
    return REFERENCE.sub(lambda match: known[match[1] or match[2]], text)


def as_list(text: str) -> list[str] | None:
    """The words of Docker's JSON form; None for the shell's form."""
    if not text.startswith("["):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        if "'" in text and re.match(r"\[\s*'", text):
            raise ValueError("a list with single quotes, which Docker takes for a command") from None
        return None
    if not isinstance(value, list) or not value or not all(isinstance(one, str) for one in value):
        raise ValueError("a list that is not one of texts")
    if any(re.search(r"(?i)\n\s*(%|bootstrap:)", one) for one in value):
        raise ValueError("a line that begins as a section of a definition")
    return value


def image(name: str) -> str:
    """The name of an image, as a registry has it."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.:/@-]*", name, re.ASCII):
        raise ValueError("no name of an image")
    return name


def label(name: str, text: str) -> str:
    """The text of a label; ValueError where one of the two cannot be said in the other language."""
    if not re.fullmatch(r"[A-Za-z0-9][\w./-]*", name, re.ASCII) or not text.strip():
        raise ValueError("a label without a name of letters, or without a text")
    return text.strip()


def source(context: Path, name: str) -> Path:
    """A file or folder of the context that both copy alike; ValueError says why they do not."""
    if re.search(r"[*?\[\]]", name):
        raise ValueError("a pattern, which the two read differently")
    path = context / name.lstrip("/")
    if ".." in Path(name).parts or not path.exists():
        raise ValueError(f"{name} is not in {context}")
    if (context / ".dockerignore").exists():
        raise ValueError("a .dockerignore decides what Docker copies, and a definition has none")
    inside = [path, *path.rglob("*")] if path.is_dir() and not path.is_symlink() else [path]
    if links := [one for one in inside if one.is_symlink()]:
        raise ValueError(f"{links[0].relative_to(context)} is a link: Docker copies links, %files what they lead to")
    return path


def is_archive(path: Path) -> bool:
    """Whether Docker's ADD would unpack it."""
    return path.is_file() and tarfile.is_tarfile(path)
