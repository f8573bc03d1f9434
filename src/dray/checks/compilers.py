"""What is compiled at run time: C by Triton, C++ by torch.compile."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib import import_module
from subprocess import CalledProcessError

import torch

from dray.checks import declared
from dray.checks.result import Result, Skip, Unfit, attempt

_HEADERS = "install gcc and Python's headers: Triton starts kernels with them"
_EAGER = "train without compilation on a CPU"
_ANSWER = """
#include <Python.h>
static PyObject *answer(PyObject *self, PyObject *none) { return PyLong_FromLong(42); }
static PyMethodDef methods[] = {{"answer", answer, METH_NOARGS, NULL}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, "dray_answer", NULL, -1, methods};
PyMODINIT_FUNC PyInit_dray_answer(void) { return PyModule_Create(&module); }
"""


def results() -> Iterator[Result]:
    """Both ways, on the CPU alone."""
    yield attempt("C extension", _c, fix=_HEADERS)
    yield attempt("torch.compile", _cpp, fix=_EAGER)


def _c() -> str:
    build = import_module("triton.runtime.build")
    try:
        answer = build.compile_module_from_src(_ANSWER, "dray_answer").answer()
    except CalledProcessError as error:
        raise Unfit(f"{error.cmd[0]} ended with code {error.returncode}", fix=_HEADERS) from None
    if answer != 42:
        raise Unfit(f"compiled, but answers {answer}", wanted="42")
    return "gcc and Python.h make one that loads"


def _cpp() -> str:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        refuse = Unfit if declared.read().variant else Skip  # every image has one
        raise refuse(f"needs {compiler} for the CPU, which is not here", fix=_EAGER)
    numbers = torch.linspace(0, 1, 1000)
    try:
        made = torch.compile(_curve)(numbers)
    except Exception as error:  # many kinds; the cause comes first, then advice for torch's developers
        raise Unfit(str(error).splitlines()[0], fix=_EAGER) from None
    if not torch.allclose(made, _curve(numbers)):
        raise Unfit("a compiled function differs", wanted="what it is without compilation")
    return "a function compiled for the CPU agrees"


def _curve(numbers: torch.Tensor) -> torch.Tensor:
    return torch.sin(numbers) * 2 + 1
