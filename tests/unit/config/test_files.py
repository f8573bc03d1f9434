"""What a user names in the place of a file, and what is in it: read in time, or refused in one line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dray.config.load_toml import load
from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.contract import files, ranges
from dray.contract.findings import ConfigError
from dray.runs import local, prepare

pytestmark = pytest.mark.hostile("files")

PLACES = {
    "recipe": lambda path: load(Recipe, path),
    "site": lambda path: load(Site, path),
    "hostfile": local.read_hostfile,
    "secret": local.Hosts(Path("hosts"), ("a", "b"), None).secret,
    "deepspeed": lambda path: prepare.read_recipe(
        Path("recipes/smoke-cpu.toml").absolute(), [f"train.deepspeed={path}"]
    ),
}


@pytest.fixture
def ordinary_user(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Root reads everything."""
    monkeypatch.chdir(Path(__file__).parents[3])
    if os.geteuid() == 0:
        for folder in (tmp_path, *tmp_path.parents):
            if folder == tmp_path or folder.name.startswith(("pytest-", "popen-")):  # the second are of `pytest -n`
                folder.chmod(0o755)
        os.chown(tmp_path, 65534, -1)
        os.seteuid(65534)
    yield
    if os.getuid() == 0:
        os.seteuid(0)


@pytest.mark.parametrize("place", PLACES)
def test_a_file_that_may_not_be_read(place: str, tmp_path: Path, ordinary_user: None) -> None:
    path = tmp_path / "x.toml"
    path.touch(mode=0)
    with pytest.raises(ConfigError) as refused:
        PLACES[place](path)
    assert refused.value.problem.endswith("cannot be read")
    assert refused.value.details["found"] == "Permission denied"


def test_a_byte_order_mark_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_bytes("\ufeffbox1\nbox2\n".encode())
    assert local.read_hostfile(tmp_path / "hosts").names == ("box1", "box2")


def test_toml_that_is_too_deep(tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text("x = " + "[" * 100_000)
    with pytest.raises(ConfigError, match="is not valid TOML"):
        load(Recipe, tmp_path / "x.toml")


@pytest.mark.parametrize("digits", ["9" * 5000, "1" * 4301, "9" * 400, "0x" + "9" * 5000])
def test_numbers_of_thousands_of_digits(digits: str, tmp_path: Path) -> None:
    (tmp_path / "x.toml").write_text(f"name = 'x'\nnodes = {digits}\n")
    with pytest.raises(ConfigError):
        load(Recipe, tmp_path / "x.toml")
    (tmp_path / "x.toml").write_text("name = 'x'\n[command]\nargv = ['a']\n")
    with pytest.raises(ConfigError):
        load(Recipe, tmp_path / "x.toml", [f"nodes={digits}"])


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("[" * 100_000, "nested more than 64 levels deep"),
        ('{"a":' * 100 + "1" + "}" * 100, "nested more than 64 levels deep"),
        ("9" * 5000, "Exceeds the limit (4300 digits) for integer string conversion"),
        ('{"\\ud800": 1}', "surrogates not allowed"),
        ('{"a": 1, "b": {"c": 1, "c": 1}}', "a key appears twice: c"),
        ("{,}", "Expecting property name enclosed in double quotes"),
    ],
)
def test_json_that_is_none(text: str, found: str) -> None:
    with pytest.raises(ConfigError) as refused:
        files.parse_json(text, "it", "x.json")
    assert refused.value.problem == "it is not valid JSON"
    assert found in refused.value.details["found"]
    with pytest.raises(ConfigError):
        prepare.deepspeed_file.agreed(
            load(Recipe, Path(__file__).parents[3] / "recipes/smoke-cpu.toml"), text, Path("x.json")
        )


def test_half_of_a_pair_is_no_lone_surrogate() -> None:
    assert files.parse_json(r'"\ud83d\ude00"', "it", "x") == "😀"


@pytest.mark.parametrize("text", ["0-99999999999", "8192", "9" * 5000, "1-2-3", "a", "0-8191,0"])
def test_cores_that_no_machine_has(text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cores|invalid literal|digits"):
        ranges.parse(text)
    (tmp_path / "x.toml").write_text(f'name = "x"\nabout = ""\ncores = ["{text}"]\n')
    with pytest.raises(ConfigError):
        load(Site, tmp_path / "x.toml")


@pytest.mark.parametrize(
    "line",
    [
        "n[1-3]",
        "a,b",
        "fe80::1",
        "[::1] slots=2",
        "a slots=²",
        "a slots=10000",
        "é",
        "a\0b",
        "-a",
        "a slots=2 slots=2",
        "a\x1b[2J",
    ],
)
def test_lines_that_name_no_machine(line: str, tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text(line)
    with pytest.raises(ConfigError, match="the hostfile is not valid"):
        local.read_hostfile(tmp_path / "hosts")


def test_a_name_that_no_resolver_takes(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("a" * 64 + "\n" + "b" * 200 + "\n")
    with pytest.raises(ConfigError, match="it is not clear which line of the hostfile is this machine"):
        local.read_hostfile(tmp_path / "hosts").here()
