"""List every text that dray can print, and the first line of each public docstring: `messages.py [ROOM ...]`.

A line is `file:line`, `message` or `docstring`, and the text, separated by tabs. Read the list after a change of many
messages: who knows torchrun and Slurm should understand each line at the first reading.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
WORDS = re.compile(r"[A-Za-z]{2,}[,:;.)]?\s+[`'\"(]?[A-Za-z]{2,}[,:;.)]?\s+\S")
SHELL = re.compile(r"""(?:echo|printf|::say|::fail|::refuse|--\w+)\b.*?(["'])(.+?)\1""")
TABLE = re.compile(r'^(?:why|fix|about|problem|cause|note|text|meaning)\s*=\s*"(.*)"', re.MULTILINE)


def text_of(node: ast.AST) -> str:
    """A string as a reader sees it; `{name}` is where a value stands."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "{" + ast.unparse(getattr(part, "value", part)) + "}" for part in node.values)
    return ""


def of_python(source: str) -> Iterator[tuple[int, str, str]]:
    """Texts of three words or more, and docstrings of what is public."""
    tree = ast.parse(source)
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            skipped |= {id(part) for part in ast.walk(node) if part is not node}
        if isinstance(node, DOCUMENTED) and (docstring := ast.get_docstring(node)):
            skipped.add(id(node.body[0].value))  # type: ignore[attr-defined]
            if not getattr(node, "name", "").startswith("_"):
                yield getattr(node, "lineno", 1), "docstring", docstring.splitlines()[0]
    for node in ast.walk(tree):
        if id(node) not in skipped and WORDS.search(text := text_of(node)):
            yield node.lineno, "message", " / ".join(text.split("\n"))  # type: ignore[attr-defined]


def of_lines(source: str, expression: re.Pattern[str]) -> Iterator[tuple[int, str, str]]:
    """Texts that an expression finds, line by line."""
    for number, line in enumerate(source.splitlines(), 1):
        if (found := expression.search(line)) and WORDS.search(found[found.lastindex or 0]):
            yield number, "message", found[found.lastindex or 0]


def listed(path: Path) -> list[tuple[int, str, str]]:
    """Each text of one file, in its order."""
    source = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        return sorted(of_python(source))
    return list(of_lines(source, TABLE if path.suffix == ".toml" else SHELL))


def main(rooms: list[str]) -> None:
    """Print the list of these folders and files."""
    for room in map(ROOT.joinpath, rooms or ["src/dray", "slurm"]):
        for path in sorted(room.rglob("*")) if room.is_dir() else [room]:
            if path.suffix in {".py", ".sh", ".toml"} or path.name == "dray":
                for number, kind, text in listed(path):
                    print(f"{path.relative_to(ROOT)}:{number}\t{kind}\t{text}")


if __name__ == "__main__":
    main(sys.argv[1:])
