"""`dray image lock`: pin every file of an image by its hash."""

from __future__ import annotations

from typing import Annotated

import typer

from dray import checkout
from dray.images import inputs
from dray.images import lock as locks


def lock(
    variant: Annotated[str | None, typer.Argument(help="A folder of containers/, such as cpu; else all.")] = None,
    check: Annotated[bool, typer.Option("--check", help="Only say whether the lock is fresh; asks no index.")] = False,
    upgrade: Annotated[bool, typer.Option("--upgrade", help="Take the newest versions that fit.")] = False,
) -> None:
    """Resolve requirements.in to requirements.lock, with the hash of every file."""
    root = checkout.root()
    all_ = sorted(path.parent.name for path in (root / "containers").glob("*/image.toml"))
    for name in [variant] if variant else all_:
        image = inputs.image(root, name)
        if check:
            locks.require_fresh(root, image)
            print(f"{name}: the lock is fresh")
        else:
            changes = locks.update(root, image, upgrade=upgrade)
            print("\n".join(f"{name}: {change}" for change in changes or ["nothing has changed"]))
