"""Checks what is compiled at run time: kernels and C by Triton, C++ by torch.compile."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from functools import partial
from importlib import import_module

import torch

from dray.checks import image
from dray.checks.run_check import Skip, check, skipped
from dray.contract.findings import Finding, UnfitError

_TRITON = "build the image again: no model that uses Triton runs in it"
_HEADERS = "install gcc and Python's headers: Triton starts kernels with them"
_EAGER = "train without compilation on a CPU"
_COUNT, _BLOCK = 1000, 256
_ANSWER = """
#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *none) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "dray_answer", NULL, -1, methods};
PyMODINIT_FUNC PyInit_dray_answer(void) { return PyModule_Create(&module); }
"""


def results() -> Iterator[Finding]:
    """The results of the three compilers."""
    if image.absent("triton"):
        yield skipped("triton", "not installed")
    else:
        yield from _triton()
        yield check("C extension", _c, fix=_HEADERS)
    yield check("torch.compile", _cpp, fix=_EAGER)


def _triton() -> Iterator[Finding]:
    """Run a kernel on a GPU; without one compile it for the image's GPUs, or interpret it."""
    architectures = image.declared().architectures
    if torch.cuda.device_count():
        yield check("triton", partial(run_kernel, "cuda"), fix=_TRITON)
    elif architectures:
        for architecture in architectures:
            yield check(f"triton for {architecture}", partial(compile_kernel, architecture), fix=_TRITON)
    else:
        os.environ["TRITON_INTERPRET"] = "1"  # read when the kernel is defined
        yield check("triton", partial(run_kernel, "cpu"), fix=_TRITON)


def run_kernel(device: str) -> str:
    """Run a kernel and compare its result with torch's."""
    add = import_module("dray.checks.triton_kernel").add
    left, right = torch.randn(2, _COUNT, device=device)
    out = torch.empty_like(left)
    add[(-(-_COUNT // _BLOCK),)](left, right, out, _COUNT, block=_BLOCK)
    if not torch.equal(out, left + right):
        raise UnfitError("a sum is wrong", wanted="what torch computes", fix=_TRITON)
    return "a kernel, compiled and run, agrees with torch" if device == "cuda" else "a kernel, interpreted, agrees"


def compile_kernel(architecture: str) -> str:
    """Compile dray's own kernel for an architecture; no such GPU is needed."""
    target_of = import_module("triton.backends.compiler").GPUTarget
    if architecture.startswith("gfx"):
        target = target_of("hip", architecture, 64)  # CDNA's wavefront; no image is for a consumer's GPU
    else:
        target = target_of("cuda", int(architecture.replace(".", "")), 32)
    made = import_module("triton.compiler").compile(import_module("dray.checks.triton_kernel").source(), target=target)
    return f"1 kernel compiled to {len(made.asm.get('cubin') or made.asm['hsaco'])} bytes; not run, no device"


def _c() -> str:
    import_module("triton.runtime.build").compile_module_from_src(_ANSWER, "dray_answer").answer()
    return "gcc and Python.h compile one that loads"


def _cpp() -> str:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        raise Skip(f"{compiler}, the compiler for the CPU, is not installed", fix=_EAGER)
    numbers = torch.linspace(0, 1, 1000)
    try:
        compiled = torch.compile(_curve)(numbers)
    except Exception as error:  # many kinds; the cause comes first, then advice for torch's developers
        raise UnfitError(str(error).splitlines()[0], fix=_EAGER) from None
    if not torch.allclose(compiled, _curve(numbers)):
        raise UnfitError("a compiled function returns another result", wanted="the result without compilation")
    return "a function compiled for the CPU agrees"


def _curve(numbers: torch.Tensor) -> torch.Tensor:
    return torch.sin(numbers) * 2 + 1
