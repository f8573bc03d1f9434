"""A user's function on rows, which `data.map` names; the plan contains the text of its file."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from dray.contract import secrets
from dray.contract.findings import ConfigError, listed, nearest


def with_text(named: str, text: str, path: Path) -> str:
    """FILE.py:FUNCTION and the file's text. The text is parsed but not run: planning runs no code of a user."""
    function = named.rpartition(":")[2]
    if secrets.is_value(text):
        raise ConfigError(
            "the file of a function on rows seems to hold a secret, and every run folder contains its text",
            where=path,
            fix="read it from a variable, such as os.environ['HF_TOKEN'], and name the variable in pass_env",
        )
    try:
        body = ast.parse(text, path.name).body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f":{error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise ConfigError(
            "the file of a function on rows is not valid Python",
            where=f"{path}{line}",
            wanted=f"Python {'.'.join(map(str, sys.version_info[:2]))}",
            found=str(error).partition(" (")[0] or type(error).__name__,
            fix="correct that file",
        ) from error
    functions = [statement.name for statement in body if isinstance(statement, ast.FunctionDef)]
    if function not in functions:
        near = nearest(function, functions)
        raise ConfigError(
            f"there is no function {function}",
            where=path,
            wanted=f"def {function}(row): at the top level of the file",
            found=listed(functions) or "no function",
            fix=f"name an existing function: {path.name}:{near or (functions or [function])[0]}",
        )
    return f"{path.name}:{function}\n{text}"
