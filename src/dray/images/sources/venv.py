"""venv.lock: the hash of every file that `make` installs into .venv, or that builds dray's own wheel."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from tempfile import TemporaryDirectory

from dray import process
from dray.images.sources import lock
from dray.images.sources.lock import Pin

NAME = "venv"
_EXTRAS = ("train", "check", "dev", "docs", "cotainr")
_OLDEST = "3.11"


def path(checkout: Path) -> Path:
    """The path of the lock."""
    return checkout / "containers" / f"{NAME}.lock"


def require_fresh(checkout: Path) -> None:
    """Refuse a lock that is out of date, or was changed by hand."""
    lock.require_made_from(path(checkout), _origins(checkout))


def update(checkout: Path, *, upgrade: bool = False) -> list[str]:
    """Resolve again for every Python and system, in the versions of the cpu image's lock. Returns what changed."""
    target, build = path(checkout), checkout / "build"
    before = target.read_text(encoding="utf-8") if target.exists() else ""
    build.mkdir(exist_ok=True)
    with TemporaryDirectory(dir=build, prefix=".lock-") as made:
        out = Path(made, target.name)
        out.write_text(before)
        project, cpu = (os.path.relpath(file, made) for file in (checkout / "pyproject.toml", _cpu(checkout)))
        argv = [*lock.compiler(), "--universal", "--python-version", _OLDEST, "--constraint", cpu]
        argv += [word for extra in _EXTRAS for word in ("--extra", extra)]
        argv += [*(["--upgrade"] if upgrade else []), "--output-file", out.name, project]
        done = process.run(argv, cwd=Path(made), env=lock.UV_ENVIRONMENT, check=False)
        if done.code != 0:
            raise lock.unsolved("pyproject.toml", done.err)
        lines = _with_vendors(out.read_text(encoding="utf-8"), lock.read(_cpu(checkout)))
        day = lock.about(target)[0] if before.endswith(lines) else ""
        out.write_text(lock.head(NAME, _origins(checkout), lines, day=day) + lines)
        changes = list(lock.changes(lock.read(target) if before else [], lock.read(out)))
        out.replace(target)
    return changes


def _with_vendors(lines: str, cpu: list[Pin]) -> str:
    """Add the vendor's torch for the CPU to the registry's: pip's own configuration decides which one it finds."""
    (torch,) = (pin for pin in cpu if pin.name == "torch")
    first = f"torch=={torch.version} \\\n"
    ours = "".join(f"    --hash=sha256:{one} \\\n" for one in torch.hashes if one not in lines)
    return lines.replace(first, first + ours)


def _cpu(checkout: Path) -> Path:
    return checkout / "containers" / "cpu" / "requirements.lock"


def _origins(checkout: Path) -> dict[str, str]:
    project = tomllib.loads((checkout / "pyproject.toml").read_text(encoding="utf-8"))
    asked = [project["build-system"], project["project"]["dependencies"], project["project"]["optional-dependencies"]]
    texts = {"pyproject.toml": json.dumps(asked), "cpu/requirements.lock": str(lock.read(_cpu(checkout)))}
    return {name: lock.digest(text) for name, text in texts.items()}
