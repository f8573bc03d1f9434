"""Reading TOML into a model: what is accepted, and the whole message when it is not."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import Field, ValidationError, field_validator, model_validator

from dray.config.describe_keys import Schema
from dray.config.load_toml import Spec, explained, load
from dray.contract import exit_codes
from dray.contract.findings import ConfigError, listed, nearest


class Axle(Spec):
    load: Annotated[float, Field(gt=0, lt=12)]
    """Tonnes on it."""


class Engine(Spec):
    power: Annotated[int, Field(ge=1)]
    """Kilowatts."""
    fuel: Literal["diesel", "gas"] = "diesel"
    """What it burns."""
    tuned: bool = False
    """Whether someone touched it."""

    @model_validator(mode="after")
    def _honest(self) -> Engine:
        if self.tuned and self.power == 1:
            raise ValueError("an engine of 1 kW was never tuned; leave out `tuned`")
        return self


class Truck(Spec):
    plate: Annotated[str, Field(max_length=8)]
    """What the police read."""
    engine: Engine
    axles: tuple[Axle, ...] = ()
    """From front to back."""
    wheels: int | str | None = None
    """How many, or in words."""
    garage: Path | None = None
    """Where it sleeps."""
    stops: tuple[str, ...] = ()
    """Where it goes."""
    papers: dict[Annotated[str, Field(pattern="^[a-z]+$")], int] = Field(default={})
    """Numbers of its papers."""

    @field_validator("stops")
    @classmethod
    def _no_loop(cls, stops: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(stops)) < len(stops):
            raise ValueError("a stop comes twice")
        return stops


GOOD = 'plate = "DR 1"\nengine.power = 200\n'


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A good file, named relative to the working folder so that messages are the same everywhere."""
    monkeypatch.chdir(tmp_path)
    Path("truck.toml").write_text(GOOD)
    return Path("truck.toml")


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as refused:
        load(Truck, path, overrides)
    assert refused.value.exit_code == exit_codes.CONFIG
    return str(refused.value)


def test_a_full_file_becomes_the_model(file: Path) -> None:
    file.write_text(
        "\ufeff"  # as some editors start a file
        'plate = "DR 1"\nwheels = "six"\ngarage = "/srv/my garage"\nstops = ["port", "yard"]\n'
        "papers = {tax = 7}\n"
        '[engine]\npower = 200\nfuel = "gas"\n[[axles]]\nload = 6\n[[axles]]\nload = 8.5\n'
    )
    assert load(Truck, file) == Truck(
        plate="DR 1",
        engine=Engine(power=200, fuel="gas"),
        axles=(Axle(load=6), Axle(load=8.5)),
        wheels="six",
        garage=Path("/srv/my garage"),
        stops=("port", "yard"),
        papers={"tax": 7},
    )


def test_a_spec_is_frozen_and_strict(file: Path) -> None:
    truck = load(Truck, file)
    with pytest.raises(ValidationError, match="Instance is frozen"):
        truck.plate = "DR 2"  # type: ignore[misc]
    with pytest.raises(ValidationError, match="valid integer"):
        Engine(power="200")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("plate=5", {"plate": "5"}),
        ("plate=true", {"plate": "true"}),
        ("plate=1e-3", {"plate": "1e-3"}),
        ("plate='it = 5'", {"plate": "it = 5"}),
        ("plate=a=b", {"plate": "a=b"}),
        ("plate=", {"plate": ""}),
        ("plate=01:30:00", {"plate": "01:30:00"}),
        ("wheels=1\nx=2", {"wheels": "1\nx=2"}),
        ("plate = x ", {"plate": "x"}),
        ("wheels=5", {"wheels": 5}),
        ("wheels=five", {"wheels": "five"}),
        ("garage=/a b/$HOME;", {"garage": Path("/a b/$HOME;")}),
        ('stops=["a", "b"]', {"stops": ("a", "b")}),
        ("axles=[{load=1e-3}]", {"axles": (Axle(load=0.001),)}),
        ("papers.tax=5", {"papers": {"tax": 5}}),
        ("engine.power=50", {"engine": Engine(power=50)}),
        ("engine.tuned=true", {"engine": Engine(power=200, tuned=True)}),
        ("engine={power=3}", {"engine": Engine(power=3)}),
    ],
)
def test_an_override_is_typed_by_the_model(file: Path, override: str, expected: dict[str, object]) -> None:
    assert load(Truck, file, [override]) == load(Truck, file).model_copy(update=expected)


def test_the_last_override_wins_and_may_mend_the_file(file: Path) -> None:
    file.write_text('plate = 5\nengine = "big"\n')
    truck = load(Truck, file, ["plate=A", "engine.power=2", "plate=B"])
    assert truck == Truck(plate="B", engine=Engine(power=2))


def test_all_errors_come_at_once(file: Path) -> None:
    file.write_text(
        'plate = "DR 123456"\nengin = {a = 1}\nwheels = 4.5\nstops = ["port", "port"]\ngarage = false\n'
        'papers = {Tax = 1, toll = "x"}\naxles = [{load = 12}, {load = inf}, {laod = 1}]\n'
        '[engine]\nfuel = "petrol"\ntuned = "yes"\ncolour = "green"\n'
    )
    assert refusal(file) == (
        "truck truck.toml has 15 errors\n"
        '  found:  plate = "DR 123456"        expected text of at most 8 characters\n'
        "          engine.power               missing: expected a whole number of at least 1\n"
        '          engine.fuel = "petrol"     expected one of "diesel", "gas"\n'
        '          engine.tuned = "yes"       expected true or false\n'
        '          engine.colour = "green"    unknown key: valid in [engine]: power, fuel, tuned\n'
        "          axles.0.load = 12          expected a number above 0 and below 12\n"
        "          axles.1.load = Infinity    expected a finite number\n"
        "          axles.2.load               missing: expected a number above 0 and below 12\n"
        "          axles.2.laod = 1           unknown key: did you mean `load`?\n"
        "          wheels = 4.5               expected a whole number or text\n"
        "          garage = false             expected a path\n"
        '          stops = ["port", "port"]   a stop comes twice\n'
        "          papers.Tax                 expected a name that matches ^[a-z]+$\n"
        '          papers.toll = "x"          expected a whole number\n'
        '          engin = {"a": 1}           unknown key: did you mean `engine`? '
        "also valid here: plate, axles, wheels, garage, stops and 1 more"
    )


def test_errors_of_the_command_line_say_so_and_stand_with_the_files(file: Path) -> None:
    file.write_text(GOOD + "doors = 2\n")
    overrides = ("engine.power=0", "engine.powr=5", "engin.power=5", "axles=[{load=x}]", "fast", "a..b=1")
    assert refusal(file, *overrides) == (
        "truck truck.toml has 7 errors\n"
        "  found:  fast               expected key=value, such as a.b=1 (command line)\n"
        "          a..b=1             expected key=value, such as a.b=1 (command line)\n"
        "          engine.power=0     expected a whole number of at least 1 (command line)\n"
        "          engine.powr=5      unknown key: did you mean `power`? "
        "also valid in [engine]: fuel, tuned (command line)\n"
        "          axles=[{load=x}]   expected a list, each a table (command line)\n"
        "          doors = 2          unknown key: "
        "valid here: plate, engine, axles, wheels, garage and 2 more\n"
        "          engin.power=5      unknown key: did you mean `engine`? "
        "also valid here: plate, axles, wheels, garage, stops and 1 more (command line)"
    )


def test_a_validator_of_a_table_speaks_for_itself(file: Path) -> None:
    said = "truck truck.toml has 1 error\n"
    said += "  found:  engine   an engine of 1 kW was never tuned; leave out `tuned`"
    assert refusal(file, "engine={power=1, tuned=true}") == f"{said} (command line)"
    file.write_text("plate = 'A'\nengine = {power = 1, tuned = true}\n")
    assert refusal(file, "engine.fuel=gas") == said


def test_an_error_names_the_override_that_came_last(file: Path) -> None:
    assert refusal(file, "engine.power=0", "engine={power=-1}", "engine.power=-2") == (
        "truck truck.toml has 1 error\n  found:  engine.power=-2   expected a whole number of at least 1 (command line)"
    )


def test_a_long_value_is_cut(file: Path) -> None:
    file.write_text(GOOD.replace("DR 1", "x" * 500))
    assert refusal(file) == (
        f'truck truck.toml has 1 error\n  found:  plate = "{"x" * 59}...   expected text of at most 8 characters'
    )


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            b"plate = 1\nengine power = 2\n",
            "truck truck.toml is not valid TOML\n"
            "  where:  truck.toml\n"
            "  found:  Expected '=' after a key in a key/value pair (at line 2, column 8)",
        ),
        (
            b"plate = 1\r\nstops = [",
            "truck truck.toml is not valid TOML\n  where:  truck.toml\n  found:  Invalid value (at end of document)",
        ),
        (
            b"plate = " + b"9" * 5000,
            "truck truck.toml is not valid TOML\n"
            "  where:  truck.toml\n"
            "  found:  Exceeds the limit (4300 digits) for integer string conversion: value has 5000 digits; "
            "use sys.set_int_max_str_digits() to increase the limit",
        ),
        (
            "plate = 'x'\n# ü ".encode() + b"\xfc\n",
            "truck truck.toml is not UTF-8 text\n"
            "  where:  truck.toml:2:5\n"
            "  found:  byte 0xfc\n"
            "  fix:    save the file as UTF-8",
        ),
    ],
)
def test_a_file_that_is_not_toml(file: Path, content: bytes, message: str) -> None:
    file.write_bytes(content)
    assert refusal(file) == message


def test_a_missing_file_names_its_neighbours(file: Path) -> None:
    Path("tram.toml").touch()
    Path("notes.txt").touch()
    assert refusal(Path("truk.toml")) == (
        "truck truk.toml does not exist\n  fix:    did you mean `truck.toml`? also in .: tram.toml"
    )
    assert refusal(Path("zzz")) == "truck zzz does not exist\n  fix:    in .: tram.toml, truck.toml"
    Path("empty").mkdir()
    assert refusal(Path("empty/a.toml")) == "truck empty/a.toml does not exist"
    assert refusal(Path("none/a.toml")) == "truck none/a.toml does not exist\n  found:  the folder none does not exist"


def test_a_path_that_cannot_be_read(file: Path) -> None:
    Path("loop.toml").symlink_to("loop.toml")
    assert refusal(Path("loop.toml")) == (
        "truck loop.toml cannot be read\n  where:  loop.toml\n  wanted: a readable TOML file\n"
        "  found:  Too many levels of symbolic links"
    )
    assert refusal(Path()) == "truck . cannot be read\n  where:  .\n  wanted: a readable TOML file\n  found:  a folder"


def test_describe_lists_every_key_with_its_documentation() -> None:
    assert Schema(Truck).describe() == [
        ("plate", "text of at most 8 characters", "required", "What the police read."),
        ("engine.power", "a whole number of at least 1", "required", "Kilowatts."),
        ("engine.fuel", 'one of "diesel", "gas"', '"diesel"', "What it burns."),
        ("engine.tuned", "true or false", "false", "Whether someone touched it."),
        ("axles", "a list, each a table", "[]", "From front to back."),
        ("axles[].load", "a number above 0 and below 12", "required", "Tonnes on it."),
        ("wheels", "a whole number or text", "", "How many, or in words."),
        ("garage", "a path", "", "Where it sleeps."),
        ("stops", "a list, each text", "[]", "Where it goes."),
        ("papers", "a table, each a whole number", "{}", "Numbers of its papers."),
    ]


@pytest.mark.parametrize(
    ("name", "known", "near"),
    [
        ("stesp", ["epochs", "steps"], "steps"),
        ("trian", {"train": 1, "tiny": 2}, "train"),
        ("xyz", ["epochs", "steps"], ""),
        ("steps", [], ""),
        ("", ["steps"], ""),
    ],
)
def test_the_nearest_name(name: str, known: Iterable[str], near: str) -> None:
    assert nearest(name, known) == near


@pytest.mark.parametrize(
    ("names", "text"),
    [
        ("", ""),
        ("a", "a"),
        ("abcde", "a, b, c, d, e"),
        ("abcdef", "a, b, c, d, e and 1 more"),
        (map(str, range(33)), "0, 1, 2, 3, 4 and 28 more"),
    ],
)
def test_five_names_of_many(names: Iterable[str], text: str) -> None:
    assert listed(names) == text


def test_another_user_s_file_does_not_flood_the_terminal() -> None:
    with pytest.raises(ValidationError) as wrong:
        Truck.model_validate({f"{number}{'x' * 10_000}": 1 for number in range(1000)})
    lines = explained(wrong.value).splitlines()
    assert (len(lines), max(map(len, lines))) == (60, 200)
