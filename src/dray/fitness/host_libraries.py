"""The host's libraries that a site binds, compared with an image: `dray site show --image`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from dray.clients import apptainer
from dray.config import dray_home
from dray.config.site import Site
from dray.contract.findings import ConfigError, DrayError
from dray.images import store


class Comparison(NamedTuple):
    """One entry for each library as `python -m dray.checks.abi` prints it, and the patterns that match no file."""

    libraries: list[dict[str, Any]]
    missing: list[str]

    @property
    def fits(self) -> bool:
        return not self.missing and not any(library["problems"] for library in self.libraries)


def compare(site: Site, image: str) -> Comparison:
    """Bind the libraries into the image, and compare their ELF headers, and its plugin's, with its own libraries."""
    file = store.named(dray_home.root(), image).absolute()
    if not file.exists():
        raise ConfigError(
            "the image does not exist", wanted=file, fix="name a file, or the variant of an image in build/"
        )
    missing = []
    binds: dict[str, Path] = {}  # of each name inside, the source
    names = []
    for pattern in site.fabric.files:
        matches = sorted(Path("/").glob(pattern.lstrip("/")), key=_version)
        if matches:
            names.append(f"/host/{matches[-1].name}")
            binds[names[-1]] = matches[-1].resolve()
        else:
            missing.append(pattern)
    if site.fabric.image_plugin:
        names.append(site.fabric.image_plugin)
    argv = ["python3", "-m", "dray.checks.abi", *names]
    if adopted := store.described(file):
        binds |= {folder: Path(folder) for folder in (adopted["adopted"], adopted["adopted_source"])}
        argv = ["env", f"PYTHONPATH={adopted['adopted_path']}", *argv]
    mounts = [f'--mount=type=bind,"src={source}","dst={name}",ro' for name, source in binds.items()]
    done = apptainer.execute(file, argv, options=mounts, binds=dict.fromkeys(binds.values(), False))
    try:
        return Comparison(json.loads(done.out), missing)
    except ValueError:
        raise DrayError("the image cannot read the libraries", where=file, found=done.err.strip()) from None


def _version(path: Path) -> list[tuple[int, str]]:
    """The order of `sort --version-sort`: numbers by their size."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]
