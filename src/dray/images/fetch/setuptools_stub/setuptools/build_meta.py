"""A stand-in for setuptools that builds nothing: pip asks a source archive for its name, and would run its code."""

from __future__ import annotations

import email
from pathlib import Path


class __legacy__:  # noqa: N801  what pip calls where a package does not name its build system
    """Answers pip from PKG-INFO, which has the name and the version."""

    @staticmethod
    def prepare_metadata_for_build_wheel(folder: str, *_: object) -> str:
        """Write the metadata, when pip asks for it in the folder of the sources."""
        text = Path("PKG-INFO").read_text(encoding="utf-8")
        about = email.message_from_string(text)
        info = Path(folder, f"{about['Name']}-{about['Version']}.dist-info")
        info.mkdir()
        (info / "METADATA").write_text(text, encoding="utf-8")
        return info.name
