"""An automatic choice returns its reason with its value."""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

T = TypeVar("T")


class Choice(NamedTuple, Generic[T]):
    """A value, and why it is this one."""

    value: T
    why: str
