"""The keys of a pydantic model in plain English, from its JSON schema."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from pydantic import BaseModel

Node = dict[str, Any]
Keys = tuple[str | int, ...]

_TYPES = {  # without null, which TOML lacks
    "integer": "a whole number",
    "number": "a number",
    "boolean": "true or false",
    "string": "text",
    "array": "a list",
    "object": "a table",
}
_LIMITS = {
    "minimum": "of at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "maxLength": "of at most {} characters",
    "pattern": "that matches {}",
    "minItems": "of at least {} entries",
    "maxItems": "of at most {} entries",
    "exactItems": "of {} entries",
}


class Schema:
    """The keys of a model and what each one takes."""

    def __init__(self, model: type[BaseModel]) -> None:
        self._root = model.model_json_schema()

    def keys(self, loc: Keys) -> Keys:
        """The keys of a location that the user wrote, without the union branches that pydantic adds."""
        return tuple(key for key, _ in self._walk(loc))

    def names(self, keys: Keys) -> list[str]:
        """The keys that the table at `keys` may have."""
        return [name for node in self._branches(self._at(keys)) for name in node.get("properties", ())]

    def expected(self, keys: Keys) -> str:
        """The value that `keys` takes; empty if the schema does not say."""
        return self._text(self._at(keys))

    def describe(self) -> list[tuple[str, str, str, str]]:
        """Every key with its type, default and documentation; for a table its keys."""
        return list(self._described(self._root, ""))

    def _described(self, node: Node, prefix: str) -> Iterator[tuple[str, str, str, str]]:
        for name, field in node.get("properties", {}).items():
            key, inside = f"{prefix}{name}", self._branches(field)
            if any("properties" in branch for branch in inside):
                for branch in inside:
                    yield from self._described(branch, f"{key}.")
                continue
            default = field.get("default")
            shown = "" if default is None else json.dumps(default, ensure_ascii=False)
            if name in node.get("required", ()):
                shown = "required"
            yield key, self._text(field), shown, field.get("description", "")
            for branch in inside:
                for entry in self._branches(self._each(branch) or {}):
                    yield from self._described(entry, f"{key}[]." if "items" in branch else f"{key}.NAME.")

    def _walk(self, keys: Keys) -> Iterator[tuple[str | int, Node]]:
        node = self._root
        for key in keys:
            if child := self._child(node, key):
                node = child
                yield key, node

    def _at(self, keys: Keys) -> Node:
        return [self._root, *(node for _, node in self._walk(keys))][-1]

    def _child(self, node: Node, key: str | int) -> Node | None:
        for branch in self._branches(node):
            child: Node | None = branch.get("properties", {}).get(key) or self._each(branch, key)
            if child:
                return child
        return None

    def _each(self, branch: Node, key: str | int | None = None) -> Node | None:
        """The schema of every entry of a list, or of a table with free names."""
        entries = [branch.get("items")]
        if not isinstance(key, int):
            entries = [*branch.get("patternProperties", {}).values(), branch.get("additionalProperties")]
            entries += [branch.get("items")] * (key is None)
        return next((entry for entry in entries if isinstance(entry, dict)), None)

    def _branches(self, node: Node) -> list[Node]:
        """The alternatives of a union."""
        if "$ref" in node:
            return self._branches(self._root["$defs"][node["$ref"].rpartition("/")[2]])
        either = node.get("anyOf") or node.get("oneOf")
        if either:
            return [branch for option in either for branch in self._branches(option)]
        return [node]

    def _text(self, node: Node) -> str:
        return " or ".join(dict.fromkeys(filter(None, map(self._branch, self._branches(node)))))

    def _branch(self, node: Node) -> str:
        choices = [node["const"]] if "const" in node else node.get("enum")
        if choices:
            return ("one of " if len(choices) > 1 else "") + ", ".join(map(json.dumps, choices))
        kind = "a path" if node.get("format") == "path" else _TYPES.get(node.get("type", ""), "")
        if "minItems" in node and node["minItems"] == node.get("maxItems"):
            node = {"exactItems": node["minItems"], "type": node["type"], "items": node.get("items")}
        limits = " and ".join(text.format(node[name]) for name, text in _LIMITS.items() if name in node)
        each = self._each(node)
        return f"{kind} {limits}".strip() + (f", each {self._text(each)}" if each else "")
