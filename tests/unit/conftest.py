"""Fixtures that several unit tests share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from nodes import plan, start

if TYPE_CHECKING:
    from trainings import Forks

__all__ = ["plan", "start"]


@pytest.fixture(scope="session")
def forks() -> Iterator[Forks]:
    """Ranks without their start."""
    from trainings import Forks  # it imports torch

    forks = Forks()
    yield forks
    forks.close()
