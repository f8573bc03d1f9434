"""The host's libraries that a site binds, compared with an image: `dray site show --image`."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, NamedTuple

from dray.clients import apptainer
from dray.config import dray_home
from dray.config.image_definition import ACCELERATORS
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
    file = _image(image)
    missing, mounts, names, sources = [], [], [], []
    for pattern in site.fabric.files:
        matches = sorted(Path("/").glob(pattern.lstrip("/")), key=_version)
        if not matches:
            missing.append(pattern)
            continue
        names.append(f"/host/{matches[-1].name}")
        sources.append(matches[-1].resolve())
        mounts.append(f'--mount=type=bind,"src={sources[-1]}","dst={names[-1]}",ro')
    names += filter(None, [site.fabric.image_plugin])
    argv = ["python3", "-m", "dray.checks.abi", *names]
    if adopted := store.described(file):
        for folder in (Path(adopted["adopted"]), Path(adopted["adopted_source"])):
            sources.append(folder)
            mounts.append(f'--mount=type=bind,"src={folder}","dst={folder}",ro')
        argv = ["env", f"PYTHONPATH={adopted['adopted_path']}", *argv]
    done = apptainer.execute(file.absolute(), argv, options=mounts, binds=dict.fromkeys(sources, False))
    try:
        return Comparison(json.loads(done.out), missing)
    except ValueError:
        raise DrayError("the image cannot read the libraries", where=file, found=done.err.strip()) from None


def _image(image: str) -> Path:
    file = store.named(dray_home.root(), image)
    if not file.exists():
        fix = f"make image-{image}" if image in ACCELERATORS else f"name a file, or one of {', '.join(ACCELERATORS)}"
        raise ConfigError("the image does not exist", wanted=str(file), fix=fix)
    return file


def _version(path: Path) -> list[tuple[int, str]]:
    """The order of `sort --version-sort`: numbers by their size."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", str(path))]
