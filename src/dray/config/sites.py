"""The site files, and which one a job uses: by path, by name, or the one that names this cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

from dray.config import dray_home
from dray.config.load_toml import load
from dray.config.site import Site
from dray.contract.findings import ConfigError, nearest
from dray.facts import Facts

GENERIC = "generic"
NAMED = "chosen by name"


class Choice(NamedTuple):
    """A site, and the reason for it."""

    site: Site
    reason: str


def user_folder() -> Path:
    """The folder of the user's own site files, which override dray's files of the same name."""
    return Path(os.environ.get("DRAY_SITES") or dray_home.configuration() / "sites")


def files() -> dict[str, Path]:
    """Every site's file by its name."""
    folders = (dray_home.root() / "slurm" / "sites", user_folder())
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.toml"))}


def find(name: str) -> Site:
    """The site with this name, or in the file with this path."""
    if name.endswith(".toml"):
        return load(Site, Path(name))
    by_name = files()
    if name not in by_name:
        near = nearest(name, by_name)
        raise ConfigError(
            f"there is no site {name!r}",
            where=f"{dray_home.root() / 'slurm' / 'sites'} and {user_folder()}",
            wanted="a name that `dray site list` prints, or the path of a site file (*.toml)",
            fix=f"--site {near}" if near else "dray site list",
        )
    site = load(Site, by_name[name])
    if site.name != name:
        raise ConfigError(
            "the name in a site file differs from the file's name", where=by_name[name], wanted=name, found=site.name
        )
    return site


def detect(cluster: str, host: str) -> Choice:
    """The site that names this cluster or host; the user's own files come first."""
    for name, path in sorted(files().items(), key=lambda item: item[1].parent != user_folder()):
        site = load(Site, path)
        if cluster in site.clusters:
            return Choice(find(name), f"Slurm calls this cluster {cluster}")
        for pattern in site.hosts:
            if host and fnmatchcase(host, pattern):
                return Choice(find(name), f"the host name {host} matches {pattern}")
    return Choice(find(GENERIC), f"no site file names the {f'cluster {cluster}' if cluster else f'host {host}'}")


def portable(name: str) -> str:
    """A site's name for a job; a path for the user's own files, since a job may lack this shell's variables."""
    path = files().get(name)
    return str(path) if path and path.parent == user_folder() else name


def path_variables(site: Site, environ: Mapping[str, str]) -> dict[str, str]:
    """The values of the variables in the site's paths."""
    return {variable: environ[variable] for variable in site.variables() if variable in environ}


def choose(facts: Facts) -> Choice:
    """The site that the facts name, else the one that matches them."""
    if facts.site:
        return Choice(find(facts.site), NAMED)
    if facts.scheduler != "slurm":
        return Choice(find(GENERIC), "this run does not use Slurm")
    return detect(facts.cluster, facts.login or facts.hosts()[0])
