"""First on PYTHONPATH: dray's trainer takes the numbers of kernels that have not run.

The host still reads them, so that a wait is seen; what it reads counts as 1, and no loss ends the run.
"""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any


def _host(module: Any) -> None:
    read = module.read
    module.read = lambda *numbers: [1.0] * len(read(*numbers))


def _loop(module: Any) -> None:
    module.Loop._not_finite = lambda *_: None


def _scaler(module: Any) -> None:
    module.refuse = lambda *_: None


def _generation(module: Any) -> None:
    """Tokens that no kernel has computed are no tokens: a model writes nothing."""
    module.GenerationMixin.generate = lambda _, inputs=None, **options: options.get("input_ids", inputs)


CHANGES = {
    "transformers.generation.utils": _generation,
    "dray.train.runtime.device_sync": _host,
    "dray.train.loop.loop": _loop,
    "dray.train.parallel.scaler": _scaler,
}


class Finder(MetaPathFinder):
    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        change = CHANGES.get(name)
        spec = PathFinder.find_spec(name, path, target) if change else None
        if change is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def changed(module: ModuleType) -> None:
            execute(module)
            change(module)

        spec.loader.exec_module = changed  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, Finder())
