"""No container: the ranks are processes of this machine's Python."""

from __future__ import annotations

from collections.abc import Sequence

from dray.engines.base import Container, Engine


class Bare(Engine):
    """Only the inner command."""

    name = "bare"
    image = "python"
    isolates_env = False
    script_mounts = False

    def python(self, image: str) -> str:
        return image

    def argv(self, _container: Container, inner: Sequence[str]) -> list[str]:
        return list(inner)
