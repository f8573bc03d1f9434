"""What goes along with a recipe to a remote."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from dray.cli import submit_on
from dray.cli.chosen import Chosen
from dray.contract.findings import ConfigError
from dray.remote import parcel
from dray.remote.parcel import Parcel
from dray.runs.write import read_recipe
from helpers import ROOT

OWN = """
name = "own"
image = "cpu"
launcher = "accelerate"
accelerate = "launch/own.yaml"

[command]
argv = ["python3", "train.py"]
folder = "code"

[tiny]
accelerate = "launch/tiny.yaml"
"""


def unpacked(sent: Parcel, folder: Path) -> list[str]:
    with tarfile.open(fileobj=io.BytesIO(sent.data)) as tar:
        tar.extractall(folder, filter="data")
        return sorted(tar.getnames())


def along(path: Path, *overrides: str) -> Parcel:
    asked = Chosen(path, overrides, (), None)
    return submit_on.along(asked, asked.recipe(), None)


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_each_of_our_recipes_has_its_files_there(recipe: Path, tmp_path: Path) -> None:
    names = unpacked(along(recipe), tmp_path)
    written = recipe.read_text()
    files = {f"deepspeed/{file.name}" for file in (ROOT / "recipes/deepspeed").iterdir() if f'{file.name}"' in written}
    assert {recipe.name, *files} <= {*names}
    for overrides in ([], ["scale=tiny"]) if "\n[tiny]" in written else ([],):
        here = read_recipe(recipe, overrides).model_dump_json()
        there = read_recipe(tmp_path / recipe.name, overrides).model_dump_json()
        assert there.replace(str(tmp_path), "") == here.replace(str(recipe.parent), "")


def test_accelerate_s_file_goes_along_also_that_of_a_scale(tmp_path: Path) -> None:
    work = tmp_path / "work"
    for name in ("launch/own.yaml", "launch/tiny.yaml", "launch/other.yaml", "code/train.py"):
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text("mixed_precision: 'no'\n")
    (work / "own.toml").write_text(OWN)
    expected = [".dray-sums", "code/train.py", "launch/own.yaml", "launch/tiny.yaml", "own.toml"]
    assert unpacked(along(work / "own.toml"), tmp_path / "there") == expected
    assert read_recipe(tmp_path / "there" / "own.toml", ["scale=tiny"]).accelerate


@pytest.mark.parametrize(
    "value", ["{" + "x" * 300 + "}", "a" * 5000, "a\0b", "\udc80", "a/" * 3000, "gpt2", "", ".", "./", "~", "s3://b/x"]
)
def test_a_text_that_is_no_file_s_name_brings_nothing(value: str, tmp_path: Path) -> None:
    assert parcel.recipe(None, [value], None, tmp_path, None) == parcel.recipe(None, [], None, tmp_path, None)


@pytest.mark.parametrize("value", ["rows.jsonl", "rows.jsonl:train[:5%]", "json:rows.jsonl", "json:rows.jsonl:train"])
def test_a_dataset_as_a_recipe_names_it(value: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    assert unpacked(parcel.recipe(None, [value], None, tmp_path, None), tmp_path) == [".dray-sums", "rows.jsonl"]


def test_the_one_reserved_name(tmp_path: Path) -> None:
    (tmp_path / ".dray-sums").write_text("mine")
    with pytest.raises(ConfigError, match="a file with this name is not brought"):
        parcel.recipe(None, [".dray-sums"], None, tmp_path, None)
