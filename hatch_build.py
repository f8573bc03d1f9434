"""The wheel carries what `dray init` lays out: containers/, recipes/, slurm/ and the files beside them."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class Checkout(BuildHookInterface):
    """Puts the files named in pyproject.toml into dray/checkout/."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Leave them out of an editable install, and of an image, which would change with every recipe."""
        if version == "editable" or os.environ.get("DRAY_WHEEL") == "image":
            return
        for name in self.config["files"]:
            build_data["force_include"][str(Path(self.root, name))] = f"dray/checkout/{name}"
