"""What the documentation's site is made of: each site file, verb and key has an entry, and the menu has each page."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from dray import cli
from dray.config.describe_keys import Schema
from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.runs.result import Result
from helpers import PYTHON, ROOT

MODELS = {"recipe": Recipe, "site": Site, "result": Result}
SCRIPT = """
import json, keys, commands, sites
from pathlib import Path
print(json.dumps({**keys.pages(), **commands.pages(), **sites.pages(Path('docs/sites.md').read_text())}))
"""


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    env = {**PYTHON, "PYTHONPATH": str(ROOT / "docs/site")}
    argv = [sys.executable, "-c", SCRIPT]
    return json.loads(subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, check=True).stdout)


@pytest.mark.seconds
def test_every_site_has_a_page_with_each_value(pages: dict[str, str]) -> None:
    names = {f"sites/{path.stem}.md" for path in (ROOT / "slurm/sites").glob("*.toml")}
    assert names <= set(pages)
    lumi = pages["sites/lumi.md"]
    assert "| [gpu_memory_gb](../reference/site.md#gpu-memory-gb) | `64.0` | Half of a MI250X's 128 GB" in lumi
    assert "| `/flash` | yes | goes without it | the projects' data on flash |" in lumi
    assert "- **Uncertain**: the cluster's name in Slurm." in lumi


@pytest.mark.seconds
def test_every_verb_has_a_page(pages: dict[str, str]) -> None:
    names = {*cli.SHOWN, *cli.HIDDEN} - {"finish"}
    assert {name for name in names if f"# dray {name}\n" in pages.get(f"reference/commands/{name}.md", "")} == names
    assert "## dray image lock\n" in pages["reference/commands/image.md"]


@pytest.mark.parametrize("name", MODELS)
def test_every_key_has_an_entry(pages: dict[str, str], name: str) -> None:
    entries = set(re.findall(r"^\[`([^`]+)`\]\{#", pages[f"reference/{name}.md"], re.MULTILINE))
    assert entries == {key for key, *_ in Schema(MODELS[name]).describe()}


def test_every_page_of_docs_is_in_the_menu() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    docs = ROOT / "docs"
    names = {path.relative_to(docs).as_posix() for path in [*docs.glob("*.md"), *docs.glob("reference/*.md")]} - {
        "index.md"
    }
    assert {name for name in names if f"]({name})" not in index} == set()
