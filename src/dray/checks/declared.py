"""What the image says of itself: image.json, written next to its Python when it was sealed."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from dray.checks.result import Unfit


@dataclass(frozen=True, kw_only=True)
class Declared:
    """Empty where this Python is in no image."""

    variant: str | None = None
    dray: str | None = None
    accelerator: str | None = None
    driver: str | None = None
    architectures: list[str] = field(default_factory=list)
    packages: dict[str, str] = field(default_factory=dict)

    def lists(self, *distributions: str) -> bool:
        """Whether one of these is in the image by its own account."""
        return bool({_plain(name) for name in distributions} & {_plain(name) for name in self.packages})


@cache
def read() -> Declared:
    """The file's words; keys of a newer dray are let be."""
    try:
        said = json.loads(path().read_text(encoding="utf-8"))
    except FileNotFoundError:
        return Declared()
    except ValueError:
        raise Unfit(f"{path()} is damaged", fix="build the image again") from None
    return Declared(**{name: said[name] for name in Declared.__dataclass_fields__ if name in said})


def path() -> Path:
    """In an image sys.prefix is /opt/dray."""
    return Path(sys.prefix) / "image.json"


def _plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()
