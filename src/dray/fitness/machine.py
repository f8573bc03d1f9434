"""The build that is checked, and what its checks read from this machine. Standard library only."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dray.config import checkout as checkouts
from dray.fitness import namespaces


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What the checks read from this machine; a test gives another."""

    root: Path = Path("/")
    environment: Mapping[str, str] = field(default_factory=lambda: os.environ)
    home: Path = field(default_factory=checkouts.home)
    uid: int = field(default_factory=os.geteuid)
    system: str = platform.system()
    processor: str = platform.machine()
    python: tuple[int, ...] = sys.version_info[:3]
    has_module: Callable[[str], object] = importlib.util.find_spec
    free: Callable[[Path], int] = lambda folder: shutil.disk_usage(folder).free
    namespaces: Callable[[], str] = namespaces.tried


@dataclass(frozen=True, kw_only=True)
class Build:
    """The build that is checked."""

    checkout: Path
    variant: str
    formats: Sequence[str] = ("sif",)
    out: Path | None = None
    wheels: Path | None = None
    bundled: bool = False

    @property
    def sif(self) -> Path:
        """The image's file, beside which the build has its scratch folder."""
        return (self.out or self.checkout / "build" / f"dray-{self.variant}.sif").absolute()

    @property
    def locks(self) -> list[Path]:
        """The locks of the variant."""
        return list((self.checkout / "containers" / self.variant).glob("*.lock"))
