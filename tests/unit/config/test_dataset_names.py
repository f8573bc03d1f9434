"""What a recipe may call a dataset, and what it is refused for before anything runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from dray.config.recipe import Recipe
from dray.contract.findings import ConfigError
from dray.contract.trainer.dataset import Named, parse
from dray.runs.prepare import read_recipe
from helpers import ROOT


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        ("builtin", ("", "builtin", "")),
        ("my texts.jsonl", ("", "my texts.jsonl", "")),
        ("/data/2026:11/a.txt", ("", "/data/2026:11/a.txt", "")),
        ("a.jsonl:train[:1%]", ("", "a.jsonl", "train[:1%]")),
        ("s3://bucket/x/*.jsonl.zst", ("", "s3://bucket/x/*.jsonl.zst", "")),
        ("https://host:8080/a.txt:train[5:]", ("", "https://host:8080/a.txt", "train[5:]")),
        ("webdataset:s3://b/*.tar:train[:5]+train[9:]", ("webdataset", "s3://b/*.tar", "train[:5]+train[9:]")),
        ("csv:texts.db", ("csv", "texts.db", "")),
        ("hub:me/texts@v1/sub:train[:1%]+test", ("hub", "me/texts@v1/sub", "train[:1%]+test")),
    ],
)
def test_a_name_has_parts(name: str, parts: tuple[str, str, str]) -> None:
    assert parse(name) == Named(*parts)
    assert parse(name).at(parse(name).files) == name


def recipe(folder: Path, *overrides: str) -> Recipe:
    return read_recipe(ROOT / "tests/tiny.toml", ["train.steps=5", *overrides])


def test_a_relative_path_starts_beside_the_recipe_behind_its_builder_and_before_its_slice(tmp_path: Path) -> None:
    found = recipe(tmp_path, "data.train=json:a.jsonl:train[:1%]", "data.validation=s3://b/v.txt", "data.test=b.tar")
    assert found.data.train == f"json:{ROOT}/tests/a.jsonl:train[:1%]"
    assert found.data.validation == "s3://b/v.txt"
    assert found.places() == {"data.train": f"{ROOT}/tests/a.jsonl", "data.test": f"{ROOT}/tests/b.tar"}
    again = Recipe.model_validate(found.model_dump())  # as a plan is read
    assert again.data.train == found.data.train


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("webdatset:x.tar", "webdatset is not a builder that reads text (arrow, conll, csv, fasta, "),
        ("pandas:x.pkl", "pandas reads pickles, which may run code"),
        ("imagefolder:x", "imagefolder is not a builder that reads text"),
        ("a.jsonl:train[:200%]", "train[:200%]: 200% is not between -100% and 100%"),
        ("a.jsonl:train[1%]", "expected a split such as train, train[:1%]"),
        ("a.jsonl:test[:5]", "files have only the split train, not test[:5]"),
        ("hub:me/texts:train[:200%]", "is not between"),
        ("hub:me/texts:train[", "expected a split such as"),
        ("https://host/*.jsonl", "a web server cannot list files"),
        ("s3://", "expected a complete URL of files"),
        ("https://[::1", "expected a complete URL of files"),
        ("s3://$BUCKET/x.txt", "expected a complete URL of files"),
    ],
)
def test_a_wrong_name_is_refused(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        recipe(tmp_path, f"data.train={name}")
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "name",
    [
        "https://me:hunter2hunter2@host/a.jsonl",
        "s3://AKIDAKID:hunter2hunter2@bucket/a.jsonl",
        "https://hunter2hunter2@host/a.jsonl",
        "https://host/a.jsonl?X-Amz-Signature=hunter2hunter2",
        "https://host/a.jsonl?Expires=1&Signature=hunter2hunter2",
        "https://host/a.jsonl?sv=1&sig=hunter2hunter2",
        "json:https://host/a.jsonl?token=hunter2hunter2",
    ],
)
def test_a_secret_in_a_url_is_refused_and_not_shown(tmp_path: Path, name: str) -> None:
    for key in ("data.train", "data.validation"):
        with pytest.raises(ConfigError) as refused:
            recipe(tmp_path, f"{key}={name}")
        assert "hunter2" not in str(refused.value)
        assert "secret" in str(refused.value)
        assert key.partition(".")[2] in str(refused.value)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["data.config_kwargs.csv.sep=;"], "no dataset uses this builder; name one as csv:FILES"),
        (
            ["data.train=csv:a.csv", "data.config_kwargs.csv.data_files=b.csv"],
            "csv.data_files: dray sets this argument itself",
        ),
        (
            ["data.train=json:a", "data.config_kwargs.json.trust_remote_code=true"],
            "trust_remote_code: dray sets this argument itself",
        ),
        (
            ["data.train=csv:a.txt", "data.config_kwargs.csv.con=postgresql://me:pass@h/d"],
            "config_kwargs: this looks like a secret",
        ),
        (["data.train=json:a", "data.config_kwargs.json.x=https://me:hunter2hunter2@h/"], "looks like a secret"),
        (["data.train=json:a", "data.config_kwargs.pandas.x=1"], "config_kwargs"),
    ],
)
def test_wrong_config_kwargs_are_refused(tmp_path: Path, overrides: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        recipe(tmp_path, *overrides)
    assert said in str(refused.value)
    assert "hunter2" not in str(refused.value)


def test_the_page_s_recipes_are_recipes(tmp_path: Path) -> None:
    page = (ROOT / "docs/data.md").read_text()
    blocks = [block.partition("```")[0] for block in page.split("```toml\n")[1:]]
    assert len(blocks) == 4
    for number, block in enumerate(blocks):
        file = tmp_path / f"{number}.toml"
        file.write_text('name = "page"\n' + block + "\n[batch]\nglobal_size = 8\n[train]\nsteps = 9000\nlr = 1e-3\n")
        read_recipe(file)
    names = [
        line.split("`")[1] for line in page.splitlines() if line.startswith("| `s3://") or line.startswith("| `hub:")
    ]
    assert names == ["s3://BUCKET/a/*.jsonl.zst", "hub:OWNER/NAME[@REVISION][/SUBSET][:SPLIT[+SPLIT]]"]
    for name in ("csv:/data/*.txt", "hub:me/texts:train[:1%]", "a.txt:train[:5%]+train[95%:]"):
        assert name in page or name.partition(":")[2] in page
        recipe(tmp_path, f"data.train={name}")
