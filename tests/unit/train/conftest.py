"""Fixtures that tests of the trainer share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from trainings import Forks


@pytest.fixture(scope="session")
def image_forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    """Ranks in one container of the image, for tests of DeepSpeed, peft or analog layers where these are not here."""
    from trainings import in_image  # it imports torch

    forks = in_image(tmp_path_factory.getbasetemp())
    yield forks
    forks.close()
