"""docs/status.toml says what was run, and what never: docs/reference/status.md is made of it."""

from __future__ import annotations

import datetime
import os
import re
import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dray.runs.prepare import read_recipe
from helpers import ROOT

Text = Annotated[str, Field(min_length=1, pattern=r"^[^|\n]+$")]
SCALES = ("whole", "tiny")
PAGE = ROOT / "docs/reference/status.md"
HEAD = """# What was run, and what never was

dray has only been run on CPUs: on machines with two cores, and on a Slurm cluster in containers on such a machine. CI
runs on each commit. This page is made from [docs/status.toml](../status.toml).

| part | run | never run |
|---|---|---|
"""
RECIPES = """
## Recipes

The whole recipe, and its small form (`scale=tiny`). Hardware, command and what to expect are in the same file.

| recipe | whole | `scale=tiny` |
|---|---|---|
"""


class Part(BaseModel):
    """Something that dray promises; `run` is where and when it was seen to work."""

    model_config = ConfigDict(extra="forbid")

    name: Text
    run: Text | None = None
    never: Text | None = None

    @model_validator(mode="after")
    def _one_of_both(self) -> Part:
        if not self.run and not self.never:
            raise ValueError("say where it was run, or what never was")
        return self


class Card(BaseModel):
    """One way to run a recipe, and what came of it."""

    model_config = ConfigDict(extra="forbid")

    recipe: Text
    scale: Literal["whole", "tiny"] = "whole"
    hardware: Text
    image_digest: str = ""
    commit: str = ""
    command: Text
    expected: Text
    seen: str = Field(default="", pattern=r"^[^|\n]*$")
    date: datetime.date | None = None
    source: str = ""
    """A page or a test of this checkout."""

    @model_validator(mode="after")
    def _seen_somewhere(self) -> Card:
        if bool(self.seen) != bool(self.date and self.source):
            raise ValueError("what was seen has a date and a source; what is unverified has neither")
        return self

    def text(self) -> str:
        return f"{self.seen} ([{self.date}](../../{self.source}))" if self.seen else "never"


class Status(BaseModel):
    """The whole file."""

    model_config = ConfigDict(extra="forbid")

    part: list[Part]
    card: list[Card]


def status() -> Status:
    return Status.model_validate(tomllib.loads((ROOT / "docs/status.toml").read_text(encoding="utf-8")))


def cards() -> list[Card]:
    return status().card


def test_each_recipe_has_a_card_of_the_whole() -> None:
    assert {card.recipe for card in cards() if card.scale == "whole"} == {
        path.stem for path in (ROOT / "recipes").glob("*.toml")
    }


def test_a_card_names_what_is_there() -> None:
    for card in cards():
        recipe = read_recipe(ROOT / "recipes" / f"{card.recipe}.toml", ["scale=tiny"] if card.scale == "tiny" else [])
        assert recipe.scale == card.scale or not recipe.scale
        assert not card.source or Path(ROOT / card.source).is_file(), card.source


def row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |\n"


def test_the_page_is_made_of_the_file() -> None:
    """DRAY_GOLDEN=write writes it."""
    parts = [row(part.name, part.run or "", part.never or "") for part in status().part]
    rows = []
    for recipe in dict.fromkeys(card.recipe for card in cards()):
        own = [card for card in cards() if card.recipe == recipe]
        cells = ["; ".join(card.text() for card in own if card.scale == scale) or "in CI" for scale in SCALES]
        cells[1] = cells[1] if "[tiny]" in (ROOT / f"recipes/{recipe}.toml").read_text() else "it is tiny"
        rows.append(row(recipe, *cells))
    text = HEAD + "".join(parts) + RECIPES + "".join(rows)
    if os.environ.get("DRAY_GOLDEN") == "write":
        PAGE.write_text(text, encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == text


def test_no_other_page_says_it() -> None:
    """README has one line and a link."""
    pages = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/reference").glob("*.md")]
    claim = re.compile(
        r"\b(?:never|not yet|only|was) (?:been )?(?:run|tested|measured) on|\b(?:is|are|was) (?:untested|unverified)"
    )
    found = [f"{page.name}: {hit[0]}" for page in pages if page != PAGE for hit in claim.finditer(page.read_text())]
    assert found == []
