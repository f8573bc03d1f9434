"""docs/reference holds the JSON schemas of our files, made from the models. DRAY_GOLDEN=write writes them anew."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import jsonschema
import pytest
from pydantic import BaseModel
from referencing import Registry, Resource

from dray.config.describe_keys import Schema
from dray.config.image_definition import Image
from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.planning.plan import Plan
from dray.runs.capsule import Capsule
from dray.runs.result import Result
from helpers import GOLDEN, ROOT, golden

MODELS: dict[str, type[BaseModel]] = {
    "capsule": Capsule, "image": Image, "plan": Plan, "recipe": Recipe, "result": Result, "site": Site,
}  # fmt: skip
DIALECT = "https://json-schema.org/draft/2020-12/schema"
FILES = [
    *(("recipe", path) for path in sorted((ROOT / "recipes").glob("*.toml"))),
    *(("site", path) for path in sorted((ROOT / "slurm" / "sites").glob("*.toml"))),
    *(("image", path) for path in sorted((ROOT / "containers").glob("*/image.toml"))),
    ("plan", GOLDEN / "plan.json"),
    ("capsule", GOLDEN / "capsule.json"),
]


def schema(kind: str) -> dict:
    made = MODELS[kind].model_json_schema()
    if kind == "plan":
        made = referring(made)
    version = made["properties"].get("version", {}).get("const", 1)
    return {"$schema": DIALECT, "$id": f"urn:dray:{kind}:{version}", "version": version, **made}


def referring(made: dict) -> dict:
    """The plan's schema with a reference to the recipe's, so that a new key of a recipe changes one schema."""
    made["$defs"]["Recipe"] = {"$ref": schema("recipe")["$id"]}
    before: set[str] = set()
    while before != {*made["$defs"]}:
        before = {*made["$defs"]}
        named = re.findall(r"#/\$defs/(\w+)", json.dumps(made))
        made["$defs"] = {name: made["$defs"][name] for name in named}
    return made


def file(kind: str) -> Path:
    return ROOT / "docs" / "reference" / f"{kind}.schema.json"


@pytest.mark.parametrize("kind", MODELS)
def test_the_schema_is_that_of_the_model(kind: str) -> None:
    jsonschema.Draft202012Validator.check_schema(schema(kind))
    golden(file(kind), json.dumps(schema(kind), indent=1, sort_keys=True, ensure_ascii=False) + "\n")


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_every_key_has_a_text(model: type[BaseModel]) -> None:
    described = Schema(model).describe()
    assert [key for key, _, _, text in described if not re.fullmatch(r"[^ ].*[.;]", text, re.DOTALL)] == []


@pytest.mark.seconds
@pytest.mark.parametrize(("kind", "path"), FILES, ids=lambda value: value.name if isinstance(value, Path) else value)
def test_our_files_are_valid(kind: str, path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    content = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    published = json.loads(file(kind).read_text(encoding="utf-8"))
    recipes = Resource.from_contents(json.loads(file("recipe").read_text(encoding="utf-8")))
    validator = jsonschema.Draft202012Validator(published, registry=recipes @ Registry())
    validator.validate(content)
    with pytest.raises(jsonschema.ValidationError, match="stesp"):
        validator.validate({**content, "stesp": 1})
