"""Text of models and verbs as Markdown."""

from __future__ import annotations

import re


def plain(text: str) -> str:
    """Text in which only `code` means something."""
    parts = re.split(r"(`[^`]*`)", " ".join(text.split()))
    return "".join(part if part.startswith("`") else re.sub(r"([\\*_<>\[\]{}$|#~])", r"\\\1", part) for part in parts)


def code(text: str) -> str:
    """Text as it is typed, whatever is in it."""
    ticks = "`" * (1 + max((len(run) for run in re.findall("`+", text)), default=0))
    space = " " if "`" in (text[:1], text[-1:]) else ""
    return f"{ticks}{space}{text}{space}{ticks}"


def cell(text: str) -> str:
    """Text of a table's cell."""
    return text.replace("|", "\\|")


def slug(text: str) -> str:
    """An anchor."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def entry(term: str, anchor: str, text: str) -> str:
    """One definition, which a link can name."""
    return f"[{code(term)}]{{#{anchor}}}\n: {text}\n"
