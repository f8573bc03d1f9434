"""What counts as a secret: the one place that recipes, sites, plans and reports ask."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping

# Parts of a name, between `_`, `-` and `.`. The first ones hold nothing but secrets; the others also other things, such
# as --pad-token, so that an option with such a name counts only where its value looks random.
_SURE = {"PASSWORD", "PASSWD", "PASSPHRASE", "PWD", "SECRET", "SECRETS", "APIKEY", "CREDENTIAL", "CREDENTIALS"}
_LIKELY = {"TOKEN", "KEY", "PASS", "PAT", "AUTH", "COOKIE", "WEBHOOK"}
_ENDINGS = ("PASS", "PASSWORD", "PASSWD", "SECRET", "TOKEN", "APIKEY", "WEBHOOK")  # SSHPASS, PGPASSWORD
# What names the place of a secret is none: AWS_SHARED_CREDENTIALS_FILE, SSH_AUTH_SOCK.
_PLACES = {"FILE", "PATH", "DIR", "FOLDER", "SOCK", "TYPE"}
_NOT = {"PWD", "OLDPWD"}
_NOTHING = {"", "true", "false", "none", "null", "yes", "no", "auto"}
_SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\b(?:gh[opsur]_|github_pat_|glpat-|npm_|pypi-)\w{16,}|\bsk-(?=[\w-]{0,99}\d)[\w-]{16,}"
    r"|\b(?:AKIA|ASIA)[A-Z0-9]{16}\b|\bxox[abeprs]-[\w-]{10,}|\bAIza[\w-]{30,}"
    r"|\beyJ[\w-]{10,999}\.eyJ[\w-]{10,999}\.[\w-]*"  # a JSON web token
    r"|\b[Aa]uthorization:\s*\w+\s+[^\s$'\"]+|\b[Bb]earer\s+[\w.~+/=-]{16,}"
    r"|\b[a-z][a-z0-9+.-]{1,20}://[^\s/:@'\"]*:[^\s/@$'\"][^\s/@'\"]*@"  # a URL with a password
    r"|[?&](?:[\w-]*token|api_?key|key|sig|signature|password|X-Amz-Signature)=[^\s&$'\"]{8,}"
    r"|https://(?:hooks\.slack\.com/\w+|(?:\w+\.)?discord(?:app)?\.com/api/webhooks|[\w.-]*webhook\.office\.com)/[^\s'\"]+"
    r"|-----BEGIN [A-Z ]*PRIVATE KEY-----(?:[\s\S]{0,8192}?-----END [A-Z ]*PRIVATE KEY-----)?"
)
# What code, a shell script or a table gives a name: NAME = "value", ["NAME"] = "value", name="value", NAME=value.
_GIVEN = re.compile(
    r"""(?<![\w-])(?P<name>[A-Za-z_][\w-]{0,60})["']?\]?\s*[:=]\s*(?:[bfru]{0,2}(?P<quote>["'])(?P<text>[^"'\\\n]+)(?P=quote)"""
    r"|(?P<bare>[\w.+=~:/-]+))"
)
_ATTRIBUTE = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+")
_BEGINNINGS = ("hf_", "sk-", "ghp_", "github_pat_")
_OPTION = re.compile(r"-{0,2}[A-Za-z][\w.-]{0,60}")
_RANDOM = re.compile(r"(?=.*\d)(?=.*[A-Za-z])[\w.+=~:-]{20,}")
_PLAIN = re.compile(r"/|https?://[^\s@?]*$")
_SHORTEST = 8  # a shorter value, such as 1 or offline, is in too many lines that are not about it


def is_name(name: str) -> bool:
    """Whether a variable or an option of this name holds a secret."""
    parts = _parts(name)
    if name.upper() in _NOT or parts[-1] in _PLACES:
        return False
    return not (_SURE | _LIKELY).isdisjoint(parts) or parts[-1].endswith(_ENDINGS)


def _parts(name: str) -> list[str]:
    return re.split("[_.-]", name.upper().strip("-"))


def is_value(value: str) -> bool:
    """Whether a text has a secret in it, by its shape alone."""
    return _SHAPES.search(value) is not None


def is_variable(name: str, value: str) -> bool:
    """Whether a variable with this value holds a secret."""
    return is_name(name) or is_value(value) or value.startswith(_BEGINNINGS)


def in_command(argv: Iterable[str]) -> list[str]:
    """The arguments that hold a secret, named without it: `--token`, or `argument 3`."""
    places: dict[str, None] = {}
    before = ""
    for number, text in enumerate(argv, start=1):
        known = len(places)
        for word in text.split():  # what a shell is given to run is a command too
            name, equals, value = word.partition("=")
            if not equals:
                name, value = before, word
            before = word if word.startswith("-") and not equals else ""
            if is_value(word) or _is_option(name, value.strip("'\"")):
                places[name if _OPTION.fullmatch(name) and not is_value(name) else f"argument {number}"] = None
        if is_value(text) and len(places) == known:
            places[f"argument {number}"] = None
    return [*places]


def _is_option(name: str, value: str) -> bool:
    """Whether this is an option, or an assignment, that holds a secret: `--password hunter2`, `HF_TOKEN=...`."""
    if not _OPTION.fullmatch(name) or not is_name(name) or value.lower() in _NOTHING or value[0] in "$/.<[{-":
        return False
    parts = _parts(name)
    sure = not _SURE.isdisjoint(parts) or {"API", "KEY"} <= set(parts)
    return bool(_RANDOM.fullmatch(value)) or (sure and not (value.isdigit() and len(value) < _SHORTEST))


def passed(names: Iterable[str], environ: Mapping[str, str]) -> dict[str, str]:
    """The secret values of these variables, each with its name; no log or report may show them.

    A short value, the path of a folder or a plain address is in too many lines that are not about it.
    """
    lines: dict[str, str] = {}
    for name in names:
        value = environ.get(name, "")
        if is_variable(name, value) or not _PLAIN.match(value):
            lines |= dict.fromkeys([value, *value.splitlines()], name)
    return {line: lines[line] for line in sorted(lines, key=len, reverse=True) if len(line) >= _SHORTEST}


def of_environment(more: Iterable[str] = ()) -> dict[str, str]:
    """The secret values of this process's environment, and the values of `more` variables, as `passed` gives them."""
    return passed([*(name for name, value in os.environ.items() if is_variable(name, value)), *more], os.environ)


def redacted_code(text: str, values: Mapping[str, str] | None = None) -> str:
    """As `redacted`, and with `[secret]` for each value that code assigns to a secret's name."""

    def replaced(given: re.Match[str]) -> str:
        name, value = given["name"], given["text"] or given["bare"]
        # What is not in quotes is an expression, mostly; a shell's variable has a name in capitals and no space.
        written = given["text"] or (f"{name}={value}" in given[0] and name.isupper()) or _RANDOM.fullmatch(value)
        if not written or _ATTRIBUTE.fullmatch(value) or not _is_option(name, value):
            return given[0]
        return given[0].replace(value, "[secret]")

    return _GIVEN.sub(replaced, redacted(text, values))


def redacted(text: str, values: Mapping[str, str] | None = None) -> str:
    """The text with `[HF_TOKEN]` for that variable's value, and `[secret]` for what looks like a secret."""
    for value, name in (values or {}).items():
        text = text.replace(value, f"[{name}]")
    return _SHAPES.sub("[secret]", text)
