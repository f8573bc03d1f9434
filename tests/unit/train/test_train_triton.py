"""The head and the loss as Triton kernels: in Triton's interpreter beside float64, and compiled for GPUs.

Triton reads TRITON_INTERPRET where it is imported: one process of its own computes all cases, and this file is its
script. No GPU has run the kernels.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import traceback
from collections.abc import Callable
from itertools import compress
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.torch, pytest.mark.triton]

CASES: dict[str, Callable[[], None]] = {}
ALL = (True, True, True)
NEAR = {"float32": 1e-6, "float16": 1e-3, "bfloat16": 1e-2}
MODELS = ("gpt2", "llama", "bert")


def compare(
    dtype: str, rows: int, words: int, width: int, wanted: tuple[bool, ...] = ALL, ignored: float = 0.3
) -> list[Any]:
    """Loss, likely words and gradients beside those of float64; the inputs are numbers of the products' type."""
    import torch
    from torch.nn import functional

    from dray.train.kernels.head import HeadLoss, head_loss

    chance = torch.Generator().manual_seed(rows * words + width)
    shapes = ((rows, width), (words, width), (words,))
    given = [torch.randn(shape, generator=chance).to(getattr(torch, dtype)).float() for shape in shapes]
    given = [tensor.requires_grad_(one) for tensor, one in zip(given, wanted, strict=True)]
    labels = torch.randint(0, words, (rows,), generator=chance)
    labels[torch.rand(rows, generator=chance) < ignored] = -100
    hidden, weight, bias = (tensor.detach().double().requires_grad_() for tensor in given)
    biased = wanted[2]
    logits = functional.linear(hidden, weight, bias if biased else None)
    expected = functional.cross_entropy(logits, labels, reduction="sum")
    loss, likely, *found = head_loss(
        given[0], given[1], given[2] if biased else None, labels, "triton", getattr(torch, dtype), wanted, True
    )
    torch.testing.assert_close(loss.double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(likely, logits.argmax(1))
    exact = torch.autograd.grad(expected, (hidden, weight, bias), allow_unused=True)
    for change, one, asked in zip(found, exact, wanted, strict=True):
        if not asked:
            assert change.numel() == 0
            continue
        assert float((change - one).detach().norm()) <= NEAR[dtype] * float(one.norm())
    if any(wanted):
        inputs = given[0], given[1], given[2] if biased else None
        again, _ = HeadLoss.apply(*inputs, labels, "triton", getattr(torch, dtype), wanted, False, False)
        scaled = torch.autograd.grad(again * 0.25, [tensor for tensor in given if tensor.requires_grad])
        for change, made in zip(scaled, compress(found, wanted), strict=True):
            assert torch.equal(change, made * 0.25)
    return [loss, *found]


def sizes(dtype: str) -> None:
    """None is a multiple of a tile, and each is once less than one."""
    compare(dtype, 5, 300, 48)
    compare(dtype, 150, 61, 17, (True, True, False))


def parts() -> None:
    """Words shared by several programs, and gradients in several slices, give what one of each does."""
    import torch

    from dray.train.kernels import triton as kernels

    one = compare("float32", 70, 333, 16)
    kernels._PROGRAMS, kernels._SLICE = 2 * 3, 70 * 64 * 2
    several = compare("float32", 70, 333, 16)
    torch.testing.assert_close(several, one, rtol=1e-5, atol=1e-5)
    assert all(map(torch.equal, several, compare("float32", 70, 333, 16))), "the same bits again"


def not_finite() -> None:
    """The loop stops at it."""
    import torch

    from dray.train.kernels.head import head_loss

    for bad in (float("nan"), float("inf")):
        hidden = torch.ones(3, 16)
        hidden[1, 2] = bad
        weight, labels = torch.ones(200, 16), torch.tensor([1, 2, -100])
        loss, *_ = head_loss(hidden, weight, None, labels, "triton", torch.float32, (False, False, False), False)
        assert not loss.isfinite()
        labels[1] = -100
        loss, *_ = head_loss(hidden, weight, None, labels, "triton", torch.float32, (False, False, False), False)
        assert loss.isfinite(), "an ignored row counts for nothing"


def excluded() -> None:
    """Words that a bias of -inf excludes fill a tile, the first or a later one."""
    import torch
    from torch.nn import functional

    from dray.train.kernels.head import head_loss

    hidden, weight, labels = torch.randn(5, 16), torch.randn(300, 16), torch.full((5,), 150)
    for out in (slice(0, 128), slice(172, 300)):
        bias = torch.zeros(300)
        bias[out] = -torch.inf
        inputs = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        expected = functional.cross_entropy(functional.linear(*inputs, bias), labels, reduction="sum")
        loss, _, *found = head_loss(*inputs, bias, labels, "triton", torch.float32, (True, True, False), True)
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(found[:2], [*torch.autograd.grad(expected, inputs)], rtol=1e-4, atol=1e-5)


def model(kind: str) -> None:
    """A model's gradients, and what it predicts in evaluation; its embedding may be its head, or have a bias."""
    import test_train_head as whole
    import torch

    from dray.train.kernels import head

    made, given = whole.network(kind).float(), whole.batch()
    expected_loss, logits = whole.plain(made, given)
    expected = whole.gradients(made, expected_loss)
    head.check(made, "triton")
    module = whole.LossModule(made, "triton")
    loss, _ = module(*given.inputs)
    torch.testing.assert_close(loss, expected_loss)
    found = whole.gradients(made, loss)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-4)
    made.eval()
    given.labels[0] = torch.where(given.labels[0] == whole.IGNORE_INDEX, whole.IGNORE_INDEX, logits[0].argmax(1))
    with torch.no_grad():
        assert module(*given.inputs)[1].tolist()[0] == int((logits.argmax(2) == given.labels).sum())


def memory() -> None:
    """No tensor is larger than the weight and its gradient: none has tokens x vocabulary."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from dray.train.kernels import triton as kernels

    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            nonlocal largest
            found = func(*args, **(kwargs or {}))
            for one in found if isinstance(found, tuple | list) else (found,):
                if isinstance(one, torch.Tensor) and one.is_floating_point():  # the interpreter's are bytes
                    largest = max(largest, one.numel())
            return found

    kernels._SLICE = 200 * 64
    hidden, weight, labels = torch.randn(200, 16), torch.randn(1000, 16), torch.arange(200)
    outputs = [torch.zeros_like(hidden), torch.zeros_like(weight), torch.zeros(0)]
    with Sizes():
        kernels.compute(hidden, weight, None, labels, predicted=torch.zeros_like(labels), changes=tuple(outputs))
    assert largest == weight.numel()


CASES |= {f"sizes, {dtype}": lambda dtype=dtype: sizes(dtype) for dtype in NEAR}
CASES |= {f"a model, {kind}": lambda kind=kind: model(kind) for kind in MODELS}
CASES |= {
    "all rows ignored": lambda: [compare(dtype, 9, 70, 16, ignored=1.0) for dtype in NEAR],
    "the weight frozen": lambda: compare("float32", 9, 70, 16, (True, False, False)),
    "hidden states without a gradient": lambda: compare("float32", 9, 70, 16, (False, True, True)),
    "no gradient": lambda: compare("bfloat16", 9, 70, 16, (False, False, False)),
    "parts": parts,
    "no row": lambda: compare("bfloat16", 0, 70, 16),
    "words excluded": excluded,
    "not finite": not_finite,
    "memory": memory,
}


@pytest.fixture(scope="module")
def interpreted() -> dict[str, str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, __file__], env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_compute_what_float64_does(case: str, interpreted: dict[str, str]) -> None:
    assert interpreted[case] == ""


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("architecture", ["8.0", "9.0", "gfx90a"])
def test_the_kernels_fit_into_the_gpus_that_images_are_for(
    architecture: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With tensor cores and out of registers; test_checks.py compiles them in bf16, as the image's checks do."""
    import torch

    from dray.checks import compilers
    from dray.train.kernels import triton as kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    for source, options in kernels.sources(architecture, getattr(torch, dtype)):
        made = compilers.compiled(source, options, architecture).asm
        assert {"8.0": "mma.sync", "9.0": "wgmma", "gfx90a": "v_mfma"}[architecture] in (
            made.get("ptx") or made["amdgcn"]
        )
        assert spilled(made, tmp_path) == {"0"}


def spilled(made: dict[str, Any], folder: Path) -> set[str]:
    """Of registers or bytes of the stack."""
    if "amdgcn" in made:
        return set(re.findall(r"\.vgpr_spill_count: *(\d+)", made["amdgcn"]))
    import triton

    (folder / "cubin").write_bytes(made["cubin"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    argv = [tool, "--dump-resource-usage", folder / "cubin"]
    return set(re.findall(r"STACK:(\d+)", subprocess.run(argv, capture_output=True, text=True, check=True).stdout))


def _multiply_bf16() -> None:
    """Triton 3.7's interpreter multiplies the bits of bf16 numbers as if they were integers."""
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, tl

    usual = InterpreterBuilder.create_dot

    def widened(tensor: Any) -> Any:
        if tensor.dtype.scalar != tl.bfloat16:
            return tensor
        return TensorHandle((tensor.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    InterpreterBuilder.create_dot = lambda self, left, right, *rest: usual(self, widened(left), widened(right), *rest)


def _tried(case: Callable[[], None]) -> str:
    from dray.train.kernels import triton as kernels

    usual = kernels._PROGRAMS, kernels._SLICE
    try:
        case()
    except Exception:
        return traceback.format_exc()
    finally:
        kernels._PROGRAMS, kernels._SLICE = usual
    return ""


if __name__ == "__main__":
    _multiply_bf16()
    print(json.dumps({name: _tried(case) for name, case in CASES.items()}))
