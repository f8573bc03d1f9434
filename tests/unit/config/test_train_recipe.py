"""train/recipe_schema.py is made from the recipe's models: one definition, and no pydantic in images."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from dray.config.data import Data, Source
from dray.config.load_toml import Spec
from dray.config.recipe import Checkpoint
from dray.config.training import Analog, Evaluation, Lora, Model, Train
from helpers import ROOT, golden

MODULE = ROOT / "src/dray/train/recipe_schema.py"
HEAD = '''"""The recipe's sections as dataclasses; tests/unit/config/test_train_recipe.py writes this file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
'''


def written(kind: Any) -> str:
    """A type without pydantic's limits: what is in a plan is valid."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return written(inner[0])
    if origin is Literal:
        return " | ".join(sorted({type(one).__name__ for one in inner}))
    if origin in (UnionType, Union):
        return " | ".join("None" if one is NoneType else written(one) for one in inner)
    if origin is None:
        return "Any" if kind is Any else kind.__name__
    return f"{origin.__name__}[{', '.join('...' if one is ... else written(one) for one in inner)}]"


def lines(model: type[Spec]) -> Iterator[str]:
    yield from ("", "", "@dataclass(frozen=True, kw_only=True)", f"class {model.__name__}:")
    yield from (f'    """{(model.__doc__ or "").strip()}"""', "")
    for name, field in model.model_fields.items():
        yield f"    {name}: {of_field(field)}"


def of_field(field: FieldInfo) -> str:
    if get_origin(field.annotation) is not dict:
        return written(field.annotation)
    kind = get_args(field.annotation)[1]
    return f"dict[str, {kind.__name__ if isinstance(kind, type) and issubclass(kind, Spec) else 'Any'}]"


def test_the_trainers_dataclasses_are_those_of_the_recipes_models() -> None:
    models = (Source, Data, Model, Train, Lora, Evaluation, Checkpoint, Analog)
    golden(MODULE, HEAD + "\n".join(line for model in models for line in lines(model)) + "\n")


def test_they_need_the_standard_library_alone() -> None:
    loaded = "import sys, dray.train.recipe_schema; sys.exit('pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], check=False).returncode == 0
