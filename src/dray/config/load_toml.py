"""Read a TOML file and overrides into a frozen model, and report all errors at once."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Annotated, Any, ClassVar, NoReturn, Self, TypeVar, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    ValidationError,
    model_validator,
)
from pydantic_core import ErrorDetails

from dray.config.describe_keys import Keys, Schema
from dray.contract import files, secrets
from dray.contract.findings import ConfigError, counted, listed, nearest

S = TypeVar("S", bound="Spec")
Table = dict[str, Any]

Natural = NonNegativeInt
Count = Annotated[int, Field(ge=1)]
NotNegative = NonNegativeFloat
Positive = PositiveFloat
Variable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
"""The name of an environment variable."""
_SHOWN = 60
_LONGEST = 200  # characters of a line
_LIMIT = 256 << 10
_MODEL_PARALLEL = re.compile("(tensor|context|sequence|expert|pipeline)_parallel|(tp|cp|ep|pp)(_size)?$")


class SecretError(ValueError):
    """An error whose value no message may show."""


def _texts(value: object) -> Iterator[str]:
    """The texts in a value, except in nested models, which check their own."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from (text for pair in value.items() for part in pair for text in _texts(part))
    elif isinstance(value, tuple | list):
        yield from (text for part in value for text in _texts(part))


class Spec(BaseModel):
    """A table of a TOML file; the docstring under each field is its documentation."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    selects: ClassVar[str] = ""  # the key whose value names a table of the file that overrides all others
    lists: ClassVar[str] = ""  # the verb that prints all keys

    @model_validator(mode="after")
    def _is_valid(self) -> Self:
        names = [name for name, value in self if any(map(secrets.is_value, _texts(value)))]
        if names:
            shown = "this looks like a secret, which plans and run folders would show"
            raise ValueError(f"{', '.join(names)}: {shown}; export it where you submit, and name it in pass_env")
        for problem in self.contradictions():
            raise ValueError(problem)
        return self

    def contradictions(self) -> Iterable[str]:
        """What its values cannot be together; only the first is reported."""
        return ()


def load(model: type[S], path: Path, overrides: Sequence[str] = ()) -> S:
    """Read the file with the `key=value` overrides on top. One ConfigError has all errors."""
    kind = model.__name__.lower()
    try:
        text = files.text(path, f"{kind} {path}", wanted="a readable TOML file", limit=_LIMIT)
    except ConfigError as refused:
        if isinstance(refused.__cause__, FileNotFoundError):
            _missing(path, kind)
        raise
    try:
        written = parse_toml(text)
    except ValueError as wrong:
        raise ConfigError(f"{kind} {path} is not valid TOML", where=path, found=wrong) from wrong
    return validate(model, _layered(model, written, overrides), overrides, what=f"{kind} {path}")


def validate(model: type[S], written: Table, overrides: Sequence[str] = (), *, what: str) -> S:
    """Validate the table with the overrides on top, as `load` does."""
    data = written
    typed: list[tuple[Keys, str]] = []
    lines: dict[str, str] = {}
    for override in overrides:
        key, equals, raw = override.partition("=")
        keys = tuple(part.strip() for part in key.split("."))
        if not equals or not all(keys):
            lines[secrets.redacted(override)[:_SHOWN]] = "expected key=value, such as a.b=1 (command line)"
        elif model.selects and keys[0] in get_args(model.model_fields[model.selects].annotation):
            rest = ".".join(keys[1:]) or "KEY"
            lines[override] = f"has no effect: the command line overrides [{keys[0]}]; set {rest}={raw}"
        else:
            typed.append((keys, override))
            data = _apply(model, data, keys, raw.strip())
    spec, errors = _validate(model, data)
    if spec and not lines:
        return spec
    # Each branch of a union reports on its own, and a file of another kind may have thousands.
    lines.update(_line(error, model, written, typed) for error in errors[:_SHOWN])
    width = max(map(len, lines))
    shown = [f"{label:<{width}}   {text}".strip() for label, text in lines.items()]
    more = f" and {len(errors) - _SHOWN} more" if len(errors) > _SHOWN else ""
    raise ConfigError(f"{what} has {counted(len(lines), 'error')}{more}", found="\n".join(shown))


@cache
def _schema(model: type[Spec]) -> Schema:
    return Schema(model)  # milliseconds each


def explained(wrong: ValidationError) -> str:
    """The errors in data that no user wrote by hand, one per line; another user's file may have any number."""
    errors = wrong.errors(include_url=False, include_input=False)[:_SHOWN]
    lines = (f"{'.'.join(map(str, error['loc']))}: {error['msg']}" for error in errors)
    return "\n".join(line.removeprefix(": ")[:_LONGEST] for line in lines)


def _missing(path: Path, kind: str) -> NoReturn:
    folder = path.parent
    names = sorted(other.name for other in folder.glob("*.toml"))
    raise ConfigError(
        f"{kind} {path} does not exist",
        found=None if folder.is_dir() else f"the folder {folder} does not exist",
        fix=_suggest(path.name, names, f"in {folder}", folder) or None,
    ) from None


def parse_toml(text: str) -> Table:
    """Parse TOML; ValueError if it is not valid."""
    try:
        table = tomllib.loads(text)
        json.dumps(table, default=str)  # else an integer of thousands of digits fails later, where nobody expects it
    except RecursionError:
        raise ValueError("too many nested tables or lists") from None
    return table


def _apply(model: type[Spec], data: Table, keys: Keys, raw: str) -> Table:
    """The data with the override: `raw` as TOML reads it if the model accepts that, else as text, or as a list."""
    candidates = [put(data, keys, value) for value in (_value(raw), raw, [raw])]
    for candidate in candidates:
        if not any(error["loc"][: len(keys)] == keys for error in _validate(model, candidate)[1]):
            return candidate
    return candidates[0]


def _value(raw: str) -> object:
    try:
        parsed = parse_toml(f"value = {raw}")
    except ValueError:
        return raw
    return parsed["value"] if len(parsed) == 1 else raw  # a line break starts another key


def _layered(model: type[Spec], written: Table, overrides: Sequence[str]) -> Table:
    pairs = [override.partition("=") for override in overrides]
    named = [raw.strip() for key, _, raw in pairs if key.strip() == model.selects]
    over = written.get(named[-1] if named else str(written.get(model.selects)))
    return _laid(written, over) if isinstance(over, dict) else written


def _laid(under: Table, over: Table) -> Table:
    """Merge tables key by key; replace anything else."""
    both = [key for key in over if isinstance(over[key], dict) and isinstance(under.get(key), dict)]
    return {**under, **over, **{key: _laid(under[key], over[key]) for key in both}}


def put(table: Table, keys: Keys, value: object) -> Table:
    """The table with another value at the place that the keys name."""
    head, rest = str(keys[0]), keys[1:]
    if not rest:
        return {**table, head: value}
    inner = table.get(head)
    return {**table, head: put(inner if isinstance(inner, dict) else {}, rest, value)}


def _validate(model: type[S], data: Table) -> tuple[S | None, list[ErrorDetails]]:
    """Validate as JSON, whose strict mode fits TOML: "5" is not a number, but a list may become a tuple."""
    try:
        return model.model_validate_json(json.dumps(data, default=str)), []
    except ValidationError as wrong:
        return None, wrong.errors(include_url=False)


def _line(error: ErrorDetails, model: type[Spec], written: Table, typed: list[tuple[Keys, str]]) -> tuple[str, str]:
    """What was set, and what is wrong with it."""
    schema, loc, value = _schema(model), error["loc"], error["input"]
    keys, text, shown = schema.keys(loc), "", True
    match error["type"]:
        case "extra_forbidden":
            keys = (*schema.keys(loc[:-1]), loc[-1])
            place = f"valid in [{'.'.join(map(str, keys[:-1]))}]" if keys[1:] else "valid here"
            text = f"unknown key: {_suggest(str(keys[-1]), schema.names(keys[:-1]), place)}"
            if _MODEL_PARALLEL.match(str(keys[-1])):
                text = (
                    "unknown key: dray's trainer has ddp, fsdp and zero1 to zero3; for tensor, context, expert and "
                    "pipeline parallelism start torchtitan or Megatron-Bridge by [command]"
                )
            if model.lists and text.endswith(" more"):
                text += f"; all: {' '.join([model.lists, *map(str, keys[:-1][:1])])}"
        case "missing":
            text, shown = f"missing: expected {schema.expected(keys)}", False
        case "value_error":
            # A validator of a whole table names what it checked; the table may hold a secret.
            wrong = error["ctx"]["error"]
            text, shown = str(wrong), not isinstance(value, dict) and not isinstance(wrong, SecretError)
        case _ if loc[-1:] == ("[key]",):
            pattern = error.get("ctx", {}).get("pattern")
            text = f"expected a name that matches {pattern}" if pattern else error["msg"]
            keys, shown = (*schema.keys(loc[:-2]), loc[-2]), False
        case "finite_number":
            text = "expected a finite number"
        case _:
            wanted = schema.expected(keys)
            text = f"expected {wanted}" if wanted else error["msg"]
    override, label = _origin(keys, written, typed), ".".join(map(str, keys))
    if shown:
        label = override or f"{label} = {_cut(json.dumps(value, ensure_ascii=False), _SHOWN)}"
    return _cut(secrets.redacted(label), 2 * _SHOWN), f"{text} (command line)" if override else text


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[:most]}..."


def _suggest(name: str, valid: list[str], place: str, folder: Path = Path()) -> str:
    near = nearest(name, valid)
    others = [other for other in valid if other != near]
    parts = [f"did you mean `{folder / near}`?"] * bool(near)
    if others:
        parts.append(f"{'also ' if near else ''}{place}: {listed(others)}")
    return " ".join(parts)


def _origin(keys: Keys, written: Table, typed: list[tuple[Keys, str]]) -> str | None:
    """The last override that set this key, something around it, or a table that the file does not have."""
    here: Any = written
    for key in keys:
        here = here.get(key) if isinstance(here, dict) else None
    for override, text in reversed(typed):
        below = keys[: len(override)] == override
        if below or (override[: len(keys)] == keys and not isinstance(here, dict)):
            return text
    return None
