"""A page for each cluster: its section of docs/sites.md, and each value of its file with reason and source."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from text import cell, code, plain

from dray.config import dray_home
from dray.config.load_toml import load
from dray.config.site import Site

_SECTION = re.compile(r"^## ([a-z0-9._-]+)\n(.*?)(?=^## |\Z)", re.MULTILINE | re.DOTALL)
_APART = ("name", "about", "why", "binds", "env", "fabric")
_NODES = {"any": "any number of nodes", "one": "one node", "several": "several nodes"}


def pages(overview: str) -> dict[str, str]:
    """The pages, and docs/sites.md with a link to a cluster's page in the place of its section."""
    files = sorted((dray_home.root() / "slurm" / "sites").glob("*.toml"))
    known = {path.stem: load(Site, path) for path in files}
    prose = {name: text for name, text in _SECTION.findall(overview) if name in known}
    made = {f"sites/{name}.md": page(site, prose.get(name, "")) for name, site in known.items()}

    def shortened(section: re.Match[str]) -> str:
        site = known.get(section[1])
        return f"## {site.name}\n\n{plain(site.about)} [Its page](sites/{site.name}.md)\n\n" if site else section[0]

    tree = "\n".join(f"sites/{name}" for name in [*prose, *sorted({*known} - {*prose})])
    made["sites.md"] = _SECTION.sub(shortened, overview) + f"\n```{{toctree}}\n:hidden:\n\n{tree}\n```\n"
    return made


def page(site: Site, prose: str) -> str:
    """What is known, then the file."""
    typed = f"```text\ndray site show {site.name}\ndray plan RECIPE --site {site.name}\n```"
    parts = [f"# {site.name}\n\n{plain(site.about)}\n", re.sub(r"\]\((?!https?:)", "](../", prose), typed]
    return "\n".join([*parts, *_values(site), *_binds(site), *_variables(site), *_fabric(site)]) + "\n"


def _values(site: Site) -> Iterator[str]:
    keys = [key for key in type(site).model_fields if key in site.model_fields_set and key not in _APART]
    if keys:
        rows = [(f"[{key}]({_of(key)})", _value(getattr(site, key)), plain(site.why.get(key, ""))) for key in keys]
        yield _table("Values", "", ("key", "value", "why"), rows)


def _binds(site: Site) -> Iterator[str]:
    if site.binds:
        heads = ("path", "ranks may write", "a node without it", "why", "source")
        rows = [
            (code(one.path), "yes" if one.write else "no", "is unfit" if one.required else "goes without it",
             plain(one.why), plain(one.source))
            for one in site.binds
        ]  # fmt: skip
        yield _table("Binds", site.why.get("binds", ""), heads, rows)


def _variables(site: Site) -> Iterator[str]:
    if site.env:
        heads = ("variable", "value", "in jobs of", "why", "source")
        rows = [
            (code(one.name), code(one.value), _NODES[one.nodes], plain(one.why), plain(one.source)) for one in site.env
        ]
        yield _table("Environment variables", site.why.get("env", ""), heads, rows)


def _fabric(site: Site) -> Iterator[str]:
    rows = [(f"[{key}]({_of('fabric.' + key)})", _value(value)) for key, value in site.fabric]
    if site.fabric.model_fields_set:
        shown = [row for row, (key, _) in zip(rows, site.fabric, strict=True) if key in site.fabric.model_fields_set]
        yield _table("Fabric", site.why.get("fabric", ""), ("key", "value"), shown)


def _table(title: str, about: str, heads: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [heads, ("---",) * len(heads), *(tuple(map(cell, row)) for row in rows)]
    return f"\n## {title}\n\n{plain(about)}\n\n" + "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _of(key: str) -> str:
    return f"../reference/site.md#{re.sub(r'[^a-z0-9]+', '-', key)}"


def _value(value: Any) -> str:  # noqa: ANN401  whatever a site file holds
    if isinstance(value, dict):
        value = [f"{key} = {one}" for key, one in value.items()]
    if isinstance(value, bool):
        value = str(value).lower()
    texts = [str(one) for one in value] if isinstance(value, (tuple, list)) else [str(value)]
    return ", ".join(code(one) for one in texts if one)
