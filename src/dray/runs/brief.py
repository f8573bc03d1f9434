"""The keys of a plan that a list of runs needs; making no objects of the others saves half of the time."""

from __future__ import annotations

from pathlib import Path

from pydantic_core import SchemaValidator, core_schema

from dray.contract import files
from dray.runs.reading import LIMIT, Table, table


def plan(path: Path | str, warnings: list[str]) -> Table | None:
    """The plan as `table` reads it, with only these keys; a value of the wrong type is None."""
    try:
        found: Table = _PLAN.validate_json(files.read(path, limit=LIMIT))
    except (OSError, ValueError):
        return table(path, warnings)  # which adds the warning
    return found


def _table(**fields: core_schema.CoreSchema) -> core_schema.CoreSchema:
    return core_schema.typed_dict_schema(
        {name: core_schema.typed_dict_field(one, required=False) for name, one in fields.items()}
    )


def _or_none(schema: core_schema.CoreSchema) -> core_schema.CoreSchema:
    return core_schema.with_default_schema(schema, default=None, on_error="default")


_ANY = core_schema.any_schema()
_RECIPE = _table(name=_ANY, command=_ANY, train=_or_none(_table(steps=_ANY)), checkpoint=_or_none(_table(folder=_ANY)))
_WORLD = _table(size=_ANY, nodes=_or_none(core_schema.list_schema(_or_none(_table(name=_ANY)))))
_PLAN = SchemaValidator(
    _table(job=_ANY, scratch=_ANY, run_folder=_ANY, recipe=_or_none(_RECIPE), world=_or_none(_WORLD))
)
