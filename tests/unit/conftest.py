"""Fixtures that several unit tests share."""

from nodes import plan, start

__all__ = ["plan", "start"]
