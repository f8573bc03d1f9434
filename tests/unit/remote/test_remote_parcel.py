"""What goes along with a recipe to a remote."""

from __future__ import annotations

import io
import tarfile
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest

from dray.cli import submit_on
from dray.cli.args import Chosen
from dray.contract.findings import ConfigError
from dray.remote import parcel
from dray.remote.parcel import Parcel
from dray.runs.prepare import read_recipe
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


def test_a_folder_that_has_the_name_of_something_else_stays(tmp_path: Path) -> None:
    for name in ("gpt2", "kept", "tiny-kept", "tokens", "mine"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").write_text("x")
    (tmp_path / "data.jsonl").write_text("{}")
    (tmp_path / "r.toml").write_text(
        'name = "gpt2"\n[model]\ntype = "gpt2"\ntokenizer = "mine"\n[data]\ntrain = "data.jsonl"\n'
        'cache_dir = "tokens"\n[train]\nsteps = 5\nlr = 1e-3\n[batch]\nglobal_size = 8\nper_device = 8\n'
        '[checkpoint]\nfolder = "kept"\n'
        '[tiny.checkpoint]\nfolder = "tiny-kept"\n'
    )
    expected = [".dray-sums", "data.jsonl", "mine/file", "r.toml"]
    assert unpacked(along(tmp_path / "r.toml", "checkpoint.folder=kept"), tmp_path / "to") == expected


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
    "value",
    [
        "{" + "x" * 300 + "}",
        "a" * 5000,
        "a\0b",
        "\udc80",
        "a/" * 3000,
        "gpt2",
        "",
        ".",
        "./",
        "~",
        "s3://b/x",
        "[",
        "no/*.x",
        "***",
    ],
)
def test_a_text_that_is_no_file_s_name_brings_nothing(value: str, tmp_path: Path) -> None:
    assert parcel.recipe(None, [value], None, tmp_path, None) == parcel.recipe(None, [], None, tmp_path, None)


@pytest.mark.parametrize("value", ["rows.jsonl", "rows.jsonl:train[:5%]", "json:rows.jsonl", "json:rows.jsonl:train"])
def test_a_dataset_as_a_recipe_names_it(value: str, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text("{}")
    assert unpacked(parcel.recipe(None, [value], None, tmp_path, None), tmp_path) == [".dray-sums", "rows.jsonl"]


@pytest.mark.parametrize("value", ["code/*.jsonl", "**/*.jsonl", "json:code/?.jsonl", "code/[ab].jsonl:train"])
def test_a_pattern_as_a_recipe_names_it(value: str, tmp_path: Path) -> None:
    (tmp_path / "code").mkdir()
    for name in ("a.jsonl", "b.jsonl", "other.txt"):
        (tmp_path / "code" / name).write_text("{}")
    found = unpacked(parcel.recipe(None, [value], None, tmp_path, None), tmp_path)
    assert found == [".dray-sums", "code/a.jsonl", "code/b.jsonl"]


def test_the_one_reserved_name(tmp_path: Path) -> None:
    (tmp_path / ".dray-sums").write_text("mine")
    with pytest.raises(ConfigError, match="dray cannot copy a file with this name to a remote"):
        parcel.recipe(None, [".dray-sums"], None, tmp_path, None)


def work(tmp_path: Path, **links: str) -> Path:
    """A command's folder, with links; beside it what nobody has named."""
    folder = tmp_path / "work"
    for name in ("work/train.py", "work/sets/v2/a.jsonl", "work/runs/1/log", "secret", "elsewhere/b.jsonl"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    for name, target in links.items():
        (folder / name).symlink_to(target.format(work=folder))
    return folder


def test_a_link_in_the_folder_goes_along_as_a_link_and_is_not_walked(tmp_path: Path) -> None:
    folder = work(tmp_path, data="sets/v2", loop=".", absolute="{work}/sets", latest="runs/1", main="train.py")
    for values in ([], ["data/a.jsonl"], ["loop/loop/data/a.jsonl"]):
        there = tmp_path / "there" / str(len(str(values)))
        names = unpacked(parcel.recipe(None, values, folder, folder, None), there)
        assert names == [
            ".dray-sums", "absolute", "data", "latest", "loop", "main", "sets/v2/a.jsonl", "train.py",
        ]  # fmt: skip
        links = {path.name: str(path.readlink()) for path in there.iterdir() if path.is_symlink()}
        assert links == {"absolute": "sets", "data": "sets/v2", "latest": "runs/1", "loop": "."}
        assert (there / "absolute" / "v2" / "a.jsonl").read_text() == "work/sets/v2/a.jsonl"
        assert (there / "main").read_text() == "work/train.py"


def test_a_named_file_under_a_link_has_its_place_and_the_link(tmp_path: Path) -> None:
    folder = work(tmp_path, data="sets/v2")
    names = unpacked(parcel.recipe(None, ["data/a.jsonl"], None, folder, None), tmp_path / "there")
    assert names == [".dray-sums", "data", "sets/v2/a.jsonl"]
    assert (tmp_path / "there" / "data" / "a.jsonl").read_text() == "work/sets/v2/a.jsonl"


@pytest.mark.parametrize(
    "link", ["../secret", "{work}/../secret", "../elsewhere", "/", "/etc/passwd", "/nowhere", "../.."]
)
@pytest.mark.parametrize("values", [None, ["out"], ["out/b.jsonl"], ["out:train"]], ids=str)
def test_a_link_that_leads_out(tmp_path: Path, link: str, values: list[str] | None) -> None:
    folder = work(tmp_path, out=link)
    target = (folder / link.format(work=folder)).resolve()
    if values is not None and not (folder / values[0].partition(":")[0]).exists():
        assert unpacked(parcel.recipe(None, values, None, folder, None), tmp_path / "there") == [".dray-sums"]
        return
    with pytest.raises(ConfigError) as refused:
        parcel.recipe(None, values or [], None if values else folder, folder, None)
    assert str(refused.value).splitlines() == [
        "a link points outside the folder that dray copies to a remote",
        f"  where:  {folder}/out",
        f"  wanted: a link to something in {folder}",
        f"  found:  {target}",
        "  fix:    replace it by a copy, or remove it and give an absolute path on the remote",
    ]


def test_a_link_to_what_is_not_brought(tmp_path: Path) -> None:
    """It is in the recipe's folder, and not in the command's."""
    folder = work(tmp_path)
    (folder / "code").mkdir()
    (folder / "code" / "lib").symlink_to("../sets")
    with pytest.raises(ConfigError, match=f"a link to something in {folder}/code\n"):
        parcel.recipe(None, [], folder / "code", folder, None)


def test_a_folder_reached_by_a_link(tmp_path: Path) -> None:
    """As a home that is a link to a disk."""
    folder = work(tmp_path)
    (tmp_path / "home").symlink_to("work")
    own = parcel.recipe(None, ["sets"], folder, folder, None)
    assert parcel.recipe(None, ["sets"], tmp_path / "home", tmp_path / "home", None) == own


def test_too_many_files_end_the_walk_at_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def endless(path: Path) -> Iterator[Path]:
        for number in count():
            seen.append(number)
            yield path / str(number)

    monkeypatch.setattr(parcel, "_below", endless)
    with pytest.raises(ConfigError, match="the recipe's files are too many or too large"):
        parcel.recipe(None, [], tmp_path, tmp_path, None)
    assert len(seen) == parcel.FILES + 1


def test_a_limit_that_is_met_exactly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parcel, "FILES", 3)
    for number in range(3):
        (tmp_path / str(number)).touch()
    parcel.recipe(None, [], tmp_path, tmp_path, None)
    (tmp_path / "more").touch()
    with pytest.raises(ConfigError, match="found:  more than 3 files"):
        parcel.recipe(None, [], tmp_path, tmp_path, None)
