"""Errors of the command line as findings."""

from __future__ import annotations

import re
from typing import Any

from pydantic import ValidationError
from typer.exceptions import TyperException

from dray.contract.findings import ConfigError

# Before what pydantic says of a value, and after it.
_AROUND = re.compile(r"^(Input should be |Value error, .* is not )|, unable to parse.*$|\.$")


def error(wrong: TyperException) -> ConfigError:
    """The wrong option, argument or command, what it takes, what was typed, and the help to read."""
    context: Any = getattr(wrong, "ctx", None)
    parameter: Any = getattr(wrong, "param", None)
    help_ = f"{context.command_path} -h" if context else "dray -h"
    if isinstance(wrong.__cause__, ValidationError):
        value = wrong.__cause__.errors(include_url=False)[0]
        wanted = _AROUND.sub("", value["msg"]).replace("a valid integer", "a whole number")
        wanted = wanted.replace("greater than or equal to", "at least")
        return ConfigError(f"{_name(parameter)} has a wrong value", wanted=wanted, found=value["input"], fix=help_)
    if parameter is not None:
        return ConfigError(f"{_name(parameter)} is missing", wanted=parameter.help, fix=help_)
    text = wrong.format_message().rstrip(".")
    return ConfigError(text[:1].lower() + text[1:], fix=help_)


def _name(parameter: Any) -> str:  # noqa: ANN401  an option or an argument, whose types typer keeps to itself
    option = parameter.param_type_name == "option"
    return str(parameter.opts[0] if option else parameter.metavar or parameter.name)
