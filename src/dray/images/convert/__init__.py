"""A Dockerfile or a definition of somebody's, converted into the other, or into packages for an image of dray's."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from dray.clients import apptainer
from dray.contract import files
from dray.contract.findings import ConfigError
from dray.images.convert import definition, dockerfile, write
from dray.images.convert.packages import requirements
from dray.images.sources import debs, inputs

_BUILDKIT = (1, 5)


class Converted(NamedTuple):
    """A file's text, and what the user should know of it."""

    text: str
    notes: tuple[str, ...]


def convert(path: Path, context: Path | None = None) -> Converted:
    """The definition of a Dockerfile, or the Dockerfile of a definition; ConfigError names each other line."""
    text, folder = _read(path, context)
    head = f"# dray image convert {_name(path)}\n"
    if definition.is_one(text):
        given, refused = definition.read(text, path, folder)
        refused.refuse()
        return Converted(write.to_dockerfile(given, head=head, context=folder), tuple(given.notes))
    read, refused = dockerfile.read(text, path, folder)
    refused.refuse()
    notes = [*read.notes]
    if read.cmd and not read.entrypoint:
        notes.append("an ENTRYPOINT of the base image is not carried: CMD alone is what starts")
    if read.workdir and (read.cmd or read.entrypoint):
        notes.append(f"WORKDIR {read.workdir} holds for apptainer run; apptainer exec starts where you stand")
    elif read.workdir:
        notes.append(f"WORKDIR {read.workdir} holds for the build: without a CMD the base's own start stands elsewhere")
    return Converted(write.to_definition(read, head=head, context=folder), tuple(notes))


def packages(path: Path, variant: str, checkout: Path, context: Path | None = None) -> Converted:
    """Requirements for `dray image layer VARIANT`, of what the file installs beside its base."""
    image = inputs.image(checkout, variant)
    text, folder = _read(path, context)
    reader = definition.read if definition.is_one(text) else dockerfile.read
    given, refused = reader(text, path, folder, f"packages for the image {variant}")
    locked = debs.lock_file(checkout).read_text(encoding="utf-8").splitlines()
    has = {line.split()[0] for line in locked if line} - set(image.without)
    found = requirements(given, refused, folder, has)
    if not found and not refused.found:
        refused.add(1, "", "it installs no package with pip", "dray image convert FILE, for the whole image")
    refused.refuse()
    head = f"# dray image convert {_name(path)} --variant {variant}"
    note = f"the base {given.base} is not carried: these come beside the packages of the image {variant}"
    return Converted("\n".join([head, *found]) + "\n", (note,))


def buildkit(path: Path, context: Path | None = None) -> Converted:
    """A definition by which Apptainer 1.5 has BuildKit build the Dockerfile as it is."""
    text, folder = _read(path, context)
    if definition.is_one(text):
        raise ConfigError("buildkit builds Dockerfiles", found=path, fix=f"dray image convert {path}")
    version_text = apptainer.run(["--version"]).out.strip()
    version = re.search(r"apptainer version (\d+)\.(\d+)", version_text)
    if not version or (int(version[1]), int(version[2])) < _BUILDKIT:
        raise ConfigError(
            "Bootstrap: buildkit needs a newer Apptainer", wanted="Apptainer 1.5 or newer", found=version_text,
            fix=f"dray image convert {path}",
        )  # fmt: skip
    if path.name != "Dockerfile" or path.parent.absolute() != folder:
        raise ConfigError("Bootstrap: buildkit names a folder with a Dockerfile", found=path, fix="name it Dockerfile")
    return Converted(f"Bootstrap: buildkit\nFrom: {folder}\n", ("buildkitd must run, and BUILDKIT_HOST name it",))


def _name(path: Path) -> str:
    """For a comment, which a line break would end."""
    return path.name if re.fullmatch(r"[\w.+-]+", path.name, re.ASCII) else "FILE"


def _read(path: Path, context: Path | None) -> tuple[str, Path]:
    text = files.text(
        path, "the file to convert", wanted="a Dockerfile or a definition", fix="dray image convert Dockerfile"
    )
    if odd := [character for character in text if not character.isprintable() and character not in "\n\t\r"]:
        raise ConfigError("the file to convert has a control character", where=path, found=ascii(odd[0]))
    folder = (context or path.parent).absolute()
    if not folder.is_dir():
        raise ConfigError("the context is no folder", found=folder, fix="--context FOLDER, from which files are copied")
    return text.replace("\r\n", "\n"), folder
