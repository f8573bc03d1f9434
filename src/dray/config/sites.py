"""Which site this is: a file, a name, or what Slurm calls the cluster."""

from __future__ import annotations

import os
import re
from fnmatch import fnmatchcase
from pathlib import Path

from dray.config import checkout
from dray.config.model import load
from dray.config.site import Site
from dray.contract.findings import ConfigError
from dray.facts import Facts

GENERIC = "generic"


def own() -> Path:
    """The user's own files, which beat ours of the same name."""
    config = Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return Path(os.environ.get("DRAY_SITES") or config / "dray" / "sites")


def known() -> dict[str, Path]:
    """Every site's file by its name."""
    folders = (checkout.root() / "slurm" / "sites", own())
    return {path.stem: path for folder in folders for path in sorted(folder.glob("*.toml"))}


def find(name: str) -> Site:
    """The site of this name, or of the file that `name` is the path of."""
    if name.endswith(".toml"):
        return load(Site, Path(name))
    files = known()
    if name not in files:
        raise ConfigError(
            f"there is no site {name!r}",
            where=f"{checkout.root() / 'slurm' / 'sites'} and {own()}",
            wanted=", ".join(sorted(files)),
            fix="name one of these, or give the path of your own site file (ending in .toml)",
        )
    site = load(Site, files[name])
    if site.name != name:
        raise ConfigError("a site has its file's name", where=files[name], wanted=name, found=site.name)
    return site


def detect(cluster: str, host: str) -> tuple[str, str]:
    """The site's name and why it is this one. A user's own file that names the cluster comes before ours."""
    files = sorted(known().items(), key=lambda item: item[1].parent != own())
    for name, path in files:
        try:
            site = load(Site, path)
        except ConfigError:
            if path.parent == own():  # it may be about this very cluster, and leaving it out would be a silent fallback
                raise
            continue
        if cluster in site.clusters:
            return name, f"Slurm calls this cluster {cluster}"
        pattern = next((one for one in site.hosts if host and fnmatchcase(host, one)), None)
        if pattern:
            return name, f"{host} is one of {pattern}"
    return GENERIC, f"no site file names the {f'cluster {cluster}' if cluster else f'host {host}'}"


def handed_on(name: str) -> str:
    """A site as a job is told of it, which may have none of this shell's variables: the user's own files by path."""
    path = known().get(name)
    return str(path) if path and path.parent == own() else name


def variables(name: str) -> dict[str, str]:
    """This process's values of the variables that the site's paths name."""
    named = {word for bind in find(name or GENERIC).binds for word in re.findall(r"\$(\w+)", bind.path)}
    return {word: os.environ[word] for word in sorted(named) if word in os.environ}


def choose(facts: Facts) -> tuple[Site, str]:
    """The site that the facts name, or the one that they look like."""
    if facts.site:
        return find(facts.site), "it was named"
    name, why = (
        detect(facts.cluster, facts.login or facts.hosts()[0])
        if facts.scheduler == "slurm"
        else (GENERIC, "no Slurm here")
    )
    return find(name), why
