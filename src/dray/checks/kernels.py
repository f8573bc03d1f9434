"""A Triton kernel: run where there is a GPU, else compiled for the image's GPUs, else interpreted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from importlib import import_module

import torch

from dray.checks import declared
from dray.checks.result import Result, Unfit, attempt

_FIX = "no model that uses Triton runs in this image; build it again"
_COUNT, _BLOCK = 1000, 256


def results() -> Iterator[Result]:
    """The best proof that this machine allows."""
    architectures = declared.read().architectures
    if torch.cuda.device_count():
        yield attempt("triton", partial(runs, "cuda"), fix=_FIX)
    elif architectures:
        for architecture in architectures:
            yield attempt(f"triton for {architecture}", partial(compiles, architecture), fix=_FIX)
    else:
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernel is defined
        yield attempt("triton", partial(runs, "cpu"), fix=_FIX)


def runs(device: str) -> str:
    """Run it and compare."""
    add = import_module("dray.checks.kernel").add
    left, right = torch.randn(2, _COUNT, device=device)
    out = torch.empty_like(left)
    add[(-(-_COUNT // _BLOCK),)](left, right, out, _COUNT, block=_BLOCK)
    if not torch.equal(out, left + right):
        raise Unfit(f"a sum differs by {(out - left - right).abs().max().item()}", wanted="what torch gets", fix=_FIX)
    return "a kernel, compiled and run, agrees with torch" if device == "cuda" else "a kernel, interpreted, agrees"


def compiles(architecture: str) -> str:
    """Compile it for a GPU that need not be here."""
    compiler = import_module("triton.compiler")
    kernel = import_module("dray.checks.kernel")
    target_of = import_module("triton.backends.compiler").GPUTarget
    if architecture.startswith("gfx"):
        target = target_of("hip", architecture, 64)  # CDNA's wavefront; no image is for a consumer's GPU
    else:
        target = target_of("cuda", int(architecture.replace(".", "")), 32)
    source = compiler.ASTSource(kernel.add, kernel.SIGNATURE, constexprs={"block": _BLOCK})
    made = compiler.compile(source, target=target).asm
    binary = made.get("cubin") or made.get("hsaco") or b""
    if not binary.startswith(b"\x7fELF"):
        raise Unfit(f"made {', '.join(made)}", wanted="a binary for the GPU", fix=_FIX)
    return f"a kernel compiled to {len(binary)} bytes of {'cubin' if 'cubin' in made else 'hsaco'}; not run, no device"
