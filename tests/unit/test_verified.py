"""Verification cards: docs/verified.toml says what was run of each recipe, and README shows it."""

from __future__ import annotations

import datetime
import os
import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from dray.runs.write import read_recipe
from helpers import ROOT

Text = Annotated[str, Field(min_length=1, pattern=r"^[^|\n]+$")]
SCALES = ("whole", "tiny")
BEGIN, END = "<!-- made from docs/verified.toml -->\n", "<!-- end -->\n"


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
        return f"{self.seen} ([{self.date}]({self.source}))" if self.seen else "unverified"


def cards() -> list[Card]:
    return [Card.model_validate(one) for one in tomllib.loads((ROOT / "docs/verified.toml").read_text())["card"]]


def test_each_recipe_has_a_card_of_the_whole() -> None:
    assert {card.recipe for card in cards() if card.scale == "whole"} == {
        path.stem for path in (ROOT / "recipes").glob("*.toml")
    }


def test_a_card_names_what_is_there() -> None:
    for card in cards():
        recipe = read_recipe(ROOT / "recipes" / f"{card.recipe}.toml", ["scale=tiny"] if card.scale == "tiny" else [])
        assert recipe.scale == card.scale or not recipe.scale
        assert not card.source or Path(ROOT / card.source).is_file(), card.source


def test_readme_shows_the_cards() -> None:
    """DRAY_GOLDEN=write writes its table."""
    path = ROOT / "README.md"
    before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    rows = ["| recipe | whole | `scale=tiny` |", "|---|---|---|"]
    for recipe in dict.fromkeys(card.recipe for card in cards()):
        own = [card for card in cards() if card.recipe == recipe]
        cells = ["; ".join(one.text() for one in own if one.scale == scale) or "run in CI" for scale in SCALES]
        cells[1] = cells[1] if "[tiny]" in (ROOT / f"recipes/{recipe}.toml").read_text() else "it is tiny"
        rows.append(f"| {recipe} | {' | '.join(cells)} |")
    text = before + BEGIN + "".join(f"{row}\n" for row in rows) + END + after
    if os.environ.get("DRAY_GOLDEN") == "write":
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text
