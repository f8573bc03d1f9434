"""The user's mirrors: what dray contacts instead of a container registry, a vendor's index or an archive."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from pydantic import Field

from dray.config.dray_home import configuration
from dray.config.load_toml import Spec, load
from dray.contract import files
from dray.contract.findings import ConfigError

_REGISTRY = "docker.io"
_MARK = "\x01"
# No blank and no quote, which apt's sources could not hold; no user or password, which logs and commands would show.
_PLACE = r"^(https?://)?[A-Za-z0-9._-]+(:\d+)?(/[A-Za-z0-9._/~+-]*)?$"
Place = Annotated[str, Field(pattern=_PLACE)]


class Mirrors(Spec):
    """The file ~/.config/dray/mirrors.toml."""

    mirrors: dict[Place, Place] = {}
    """For a registry ("docker.io", "nvcr.io/nvidia") or URL: what dray contacts instead. The longest match wins."""

    def contradictions(self) -> Iterator[str]:
        for name, mirror in self.mirrors.items():
            if ("://" in name) != ("://" in mirror):
                yield f"{name} = {mirror}: of different kinds; expected two URLs, or two registries without https://"


def path() -> Path:
    """The file's path: DRAY_MIRRORS, else in the user's configuration."""
    named = os.environ.get("DRAY_MIRRORS")
    return Path(named).expanduser() if named else configuration() / "mirrors.toml"


def table() -> dict[str, str]:
    """All mirrors, the longest name first; empty without a file."""
    file = path()
    if not os.environ.get("DRAY_MIRRORS") and not file.exists():
        return {}
    try:
        trouble = files.open_to_others(os.path.realpath(file))  # as it is of a loop
    except FileNotFoundError:
        raise ConfigError("the file of mirrors does not exist", where="DRAY_MIRRORS", found=file) from None
    if trouble:
        fix = f"chmod go-w {file}, as its owner: it decides what an image is made from"
        raise ConfigError("other users may change the file of mirrors", where=file, found=trouble, fix=fix)
    if re.search(r"""=\s*["'][^"'\n]*@""", files.text(file, "the file of mirrors")):
        fix = "keep it in ~/.netrc, or use docker login"
        raise ConfigError(
            "a mirror's address contains a login, which commands and logs would show", where=file, fix=fix
        )
    entries = load(Mirrors, file).mirrors
    trimmed = {name.rstrip("/"): mirror.rstrip("/") for name, mirror in entries.items()}
    return {name: trimmed[name] for name in sorted(trimmed, key=len, reverse=True)}


def url(address: str) -> str:
    """The URL to contact for a URL: its mirror, else itself."""
    for name, mirror in table().items():
        if address == name or address.startswith(f"{name}/"):
            return mirror + address.removeprefix(name)
    return address


def image(reference: str) -> str:
    """The image to pull for debian:bookworm-slim@sha256:... or oras://ghcr.io/x: its mirror, else itself."""
    scheme, separator, name = reference.rpartition("://")
    if scheme in ("http", "https"):
        return url(reference)
    if separator:
        return f"{scheme}://{image(name)}"
    first, slash, _ = reference.partition("/")
    if not slash:
        full = f"{_REGISTRY}/library/{reference}"
    elif first == "index.docker.io":
        full = reference.replace(first, _REGISTRY, 1)
    elif re.search(r"[.:]", first) or first == "localhost":
        full = reference
    else:
        full = f"{_REGISTRY}/{reference}"
    mirrored = url(full)
    return reference if mirrored == full else mirrored


def sed() -> str:
    """A script for sed --regexp-extended that puts mirrors into apt's sources: for each URL the longest matching entry.

    Replaced text is marked until the end, so that a shorter entry does not replace it again.
    """
    urls = {re.sub(r"([.+])", r"\\\1", name): mirror for name, mirror in table().items() if "://" in name}
    lines = [
        f":a{number}\ns#(^|[^{_MARK}]){name}(/|[[:space:]]|$)#\\1{_MARK}{mirror}\\2#\nta{number}\n"
        for number, (name, mirror) in enumerate(urls.items())
    ]
    return "".join([*lines, f"s#{_MARK}##g\n"] if lines else [])
