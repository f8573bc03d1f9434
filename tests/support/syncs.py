"""Trainings in which nothing may wait for the device: `python syncs.py PLAN.json ...`, one rank, one after another.

On a CPU nothing waits. So all that would on a GPU is refused while steps and evaluations run: reading a number of a
tensor, shapes that follow from values, and what copies Python numbers to a device out of memory that is not pinned.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

READS = {
    f"aten::{name}"
    for name in ("_local_scalar_dense", "item", "is_nonzero", "equal", "nonzero", "masked_select", "_unique2")
}
METHODS = {"item", "tolist", "numpy", "cpu", "cuda", "new_tensor", "__bool__", "__int__", "__float__", "__index__"}
FROM_NUMBERS = {torch.tensor, torch.as_tensor, torch.asarray}
_open: list[bool] = []


class WaitError(AssertionError):
    """It would wait on a GPU."""


def check(name: str, waits: bool) -> None:
    if waits and not _open:
        raise WaitError(name)


class Operators(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        # An index of booleans has as many results as are true.
        by_truth = name == "aten::index" and any(one is not None and one.dtype == torch.bool for one in args[1])
        check(name, name in READS or by_truth)
        return func(*args, **(kwargs or {}))


class Calls(TorchFunctionMode):
    """What operators do not show: `tolist` reads memory itself, and `torch.tensor` copies behind their back."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        method = name in METHODS and func is getattr(torch.Tensor, name, None)
        check(name, method or (func in FROM_NUMBERS and kwargs.get("device") is not None))
        return func(*args, **kwargs)


@contextmanager
def guard() -> Iterator[None]:
    with Operators(), Calls():
        yield


def guarded(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with guard():
            return function(*args, **kwargs)

    return call


def may_wait(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        _open.append(True)
        try:
            return function(*args, **kwargs)
        finally:
            _open.pop()

    return call


def main(*plans: str) -> None:
    from dray.train import __main__ as train
    from dray.train.checkpoint import checkpoints as checkpoint
    from dray.train.loop import evaluate, loop
    from dray.train.objectives import base
    from dray.train.runtime import device_sync

    device_sync.read = may_wait(device_sync.read)
    base._labelled = may_wait(base._labelled)  # a batch that is on the host still
    # Ranks tell one another how a checkpoint went, as JSON, by gloo on CPUs; its copies have a test of their own.
    checkpoint.Checkpoints.save = may_wait(checkpoint.Checkpoints.save)
    if find_spec("aihwkit_lightning"):  # its own backward pass picks by booleans, without the library's Triton kernels
        from aihwkit_lightning.nn.modules.torch_utils.torch_linear import InputRangeForward

        InputRangeForward.backward = staticmethod(may_wait(InputRangeForward.backward))
    loop.Loop.run = guarded(loop.Loop.run)
    evaluate.Evaluator._measure = guarded(evaluate.Evaluator._measure)
    for plan in plans:
        train.main(plan)
        dist.destroy_process_group()
        print(f"nothing waited: {plan}", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
