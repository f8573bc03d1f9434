"""A stand-in for setuptools that builds nothing: pip wants to know what sources it has fetched, and would run them."""

from __future__ import annotations

import email
from pathlib import Path


class __legacy__:  # noqa: N801  what pip calls where a package does not name its build system
    """Sources say in PKG-INFO what they are."""

    @staticmethod
    def prepare_metadata_for_build_wheel(folder: str, *_: object) -> str:
        """As pip asks, in the folder of the sources."""
        text = Path("PKG-INFO").read_text(encoding="utf-8")
        about = email.message_from_string(text)
        info = Path(folder, f"{about['Name']}-{about['Version']}.dist-info")
        info.mkdir()
        (info / "METADATA").write_text(text, encoding="utf-8")
        return info.name
