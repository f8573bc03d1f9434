"""tune.json: what `dray tune` has measured so far, and the recipe with the best setting."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict

from dray.config.recipe import Recipe
from dray.contract import files, run_folder
from dray.contract.control_characters import printable
from dray.contract.findings import ConfigError
from dray.planning import tune_search as tunings
from dray.planning.tune_search import Candidate, Figure, applied
from dray.runs import replay, store
from dray.runs.measured import DONE, Row
from dray.runs.store import make_run_folder


def _recipe(table: dict[str, Any]) -> dict[str, Any]:
    Recipe.model_validate_json(json.dumps(table))
    return table


class Tuning(BaseModel):
    """The content of tune.json."""

    model_config = ConfigDict(frozen=True)

    version: int = 1
    path: str
    """The recipe's file."""
    recipe: Annotated[dict[str, Any], AfterValidator(_recipe)]
    """The recipe, with the settings of the command line."""
    ranks: int
    where: str
    """Where it was measured, for the reader."""
    grid: int
    """The number of candidates."""
    every: bool
    """Whether all of them are measured."""
    tolerance: float
    why: str
    """The reason for that tolerance."""
    start: dict[str, str | int | bool]
    """The recipe's own setting."""
    warm_up: int
    steps: int
    """Steps measured after the warm-up."""
    complete: bool = False
    rows: list[Row] = []

    @property
    def best(self) -> Row | None:
        """The fastest row; among rows equal within noise, the row with the fewest changes."""
        found = {candidate(row.values): row for row in self.rows if row.state == DONE}
        chosen = tunings.best(((one, figure(row)) for one, row in found.items()), candidate(self.start))
        return found[chosen] if chosen else None

    def tuned(self, row: Row) -> Recipe:
        """The recipe with a row's setting."""
        recipe = Recipe.model_validate_json(json.dumps(self.recipe))
        made = applied(recipe, candidate(row.values), candidate(self.start), ranks=self.ranks)
        assert made.batch is not None
        table = made.model_dump(mode="json", exclude_unset=True)
        # The accumulation depends on the number of ranks; the settings of [tiny] are already in the other tables.
        table["batch"].pop("gradient_accumulation_steps")
        for key in ("scale", "tiny"):
            table.pop(key, None)
        return Recipe.model_validate_json(json.dumps(table))


def candidate(values: dict[str, str | int | bool]) -> Candidate:
    """The candidate with these values."""
    return Candidate(tuple(values.items()))


def figure(row: Row) -> Figure:
    """The speed of a successful row."""
    assert row.tokens_per_s is not None
    return Figure(row.tokens_per_s, row.tokens_per_s * row.spread, row.memory_gb or 0.0)


def save(folder: Path, tuning: Tuning) -> None:
    """Write tune.json; the first time make its folder."""
    if not folder.is_dir():
        make_run_folder(folder)
    files.write_atomic(folder / run_folder.TUNE, tuning.model_dump_json(indent=1) + "\n")


def load(folder: Path) -> Tuning:
    """The table in a folder."""
    fix = f"name a folder with {run_folder.TUNE} in it: dray tune --table STUDY"
    return store.load(Tuning, folder / run_folder.TUNE, "table", fix=fix)


def as_files(tuning: Tuning, row: Row, file: Path, lines: list[str]) -> dict[Path, str]:
    """The recipe with the row's setting, under these lines as comments, and the files that it names."""
    found = replay.as_files(tuning.tuned(row), file.stem, whole=False)
    comments = "".join(f"# {line}".rstrip() + "\n" for line in printable("\n".join(lines)).split("\n"))
    return {
        file.with_name(name): (comments + "\n" + text if name == f"{file.stem}.toml" else text)
        for name, text in found.items()
    }


def require_place(file: Path, *, force: bool) -> None:
    """Check that the file can be written, before anything is measured."""
    wrong, fix = "", "name another FILE"
    if file.suffix != ".toml":
        wrong, fix = "it does not end in .toml", f"--out {file}.toml"
    elif not file.parent.is_dir():
        wrong, fix = f"{file.parent} is not a folder", f"mkdir {file.parent}"
    elif file.is_dir():
        wrong = "it is a folder"
    elif os.path.lexists(file) and not force:
        wrong, fix = "it already exists", "use --force to replace it, or name another FILE"
    elif not os.access(file.parent, os.W_OK):
        wrong = f"you may not write in {file.parent}"
    if wrong:
        raise ConfigError(
            "the best setting cannot be written to this file", where=f"--out {file}", found=wrong, fix=fix
        )
