"""What each image locks: our sources use no name of torch that one of these versions lacks, and no argument.

Only one version is installed. Of the others mypy reads the Python files, with torch's stubs of what is compiled.
"""

from __future__ import annotations

import ast
import re
import sys
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest
from conftest import ALL

from dray import process
from dray.images.locks import lock
from helpers import ROOT

WHEELS = ROOT / "build/torch"
VARIANTS = sorted(path.parent.name for path in ROOT.glob("containers/*/image.toml"))
# In the environment or in dray:cpu they are imported and run, so every variant must have the same.
SAME = {"accelerate", "datasets", "deepspeed", "peft", "tokenizers", "transformers"}
# Errors that say a name, an argument or a module is not there; `make check` looks for others.
CODES = "attr-defined|call-arg|call-overload|import-not-found"
ROOMS = ("checks", "contract", "runner", "tcp_store", "train")
# Modules of torch that no source names: mypy would take as long for them as for all the rest.
UNUSED = [
    *("_dynamo", "_export", "_functorch", "_higher_order_ops", "_inductor", "_subclasses", "ao", "distributions"),
    *("export", "fx", "jit", "onnx", "package", "quantization", "sparse", "testing"),
]
CONFIG = f"""[mypy]
mypy_path = .
follow_imports = skip
ignore_missing_imports = true
check_untyped_defs = true
[mypy-dray.*,probe]
follow_imports = normal
[mypy-torch.*]
follow_imports = silent
ignore_errors = true
ignore_missing_imports = false
[mypy-{",".join(f"torch.{name}.*" for name in UNUSED)}]
follow_imports = skip
"""
# A name that torch has since 2.13, and a module, an argument and a method that none has: mypy must find each.
PROBE = """import torch
from torch.nn.functional import linear_cross_entropy
import torch.distributed._dist2.absent
torch.optim.AdamW([], absent=1)
torch.cuda.Event().absent()
"""


def locked(variant: str) -> dict[str, str]:
    pins = lock.read(ROOT / f"containers/{variant}/requirements.lock")
    return {pin.name: pin.version.partition("+")[0] for pin in pins}


def wheel(release: str) -> Path:
    pinned = re.findall(r"^torch==(\S+) --hash", (ROOT / "tests/torch.lock").read_text(), re.MULTILINE)
    assert release in pinned, f"an image locks torch {release}; add its wheel for macOS to tests/torch.lock"
    found = list(WHEELS.glob(f"torch-{release}-*.whl"))
    if not found and not ALL:
        pytest.skip(f"there is no build/torch/torch-{release}-*.whl (make torch-versions)")
    assert found, "make torch-versions"
    return found[0]


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("variant", VARIANTS)
def test_names_and_arguments_of_its_torch(variant, tmp_path):
    release = locked(variant)["torch"]
    if release == version("torch").partition("+")[0]:
        return  # the other tests import and run it
    with zipfile.ZipFile(wheel(release)) as packed:
        files = [name for name in packed.namelist() if re.match(r"torch/.*(\.pyi?|py\.typed)$", name)]
        packed.extractall(tmp_path, files)
    for path in (ROOT / "src/dray").rglob("*.py"):
        copy = tmp_path / path.relative_to(ROOT / "src")
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text().replace("# type: ignore", "#"))  # it could hide a missing name
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "mypy.ini").write_text(CONFIG)
    argv = [sys.executable, "-m", "mypy", "--cache-dir=/dev/null", "--no-error-summary", "-m", "probe"]
    done = process.run([*argv, *(word for room in ROOMS for word in ("-p", f"dray.{room}"))], cwd=tmp_path, check=False)
    found = [line for line in done.out.splitlines() if re.search(rf"\[({CODES})\]$", line)]
    assert [line for line in found if not line.startswith("probe.py")] == []
    assert [line.split(":")[1] for line in found] == ["2", "3", "4", "5"], done


@pytest.mark.torch
@pytest.mark.parametrize("variant", VARIANTS)
def test_its_torch_tells_when_it_compiles(variant):
    """mypy reads no other module of torch._dynamo; both functions hand on to `begin` and `end` what they like."""
    release = locked(variant)["torch"]
    if release == version("torch").partition("+")[0]:
        from torch._dynamo import callback, config

        names, settings = set(vars(callback)), set(config._config)
    else:
        with zipfile.ZipFile(wheel(release)) as packed:
            read = ast.parse(packed.read("torch/_dynamo/callback.py"))
            text = packed.read("torch/_dynamo/config.py").decode()
        names = {one.name for one in read.body if isinstance(one, ast.FunctionDef)}
        settings = set(re.findall(r"^(\w+)\b.*=", text, re.MULTILINE))
    used = set(re.findall(r"\bcallback\.(\w+)\(", (ROOT / "src/dray/train/runtime/compiled.py").read_text()))
    assert used == {"on_compile_start", "on_compile_end"}
    assert used <= names
    used = set(re.findall(r"\bconfig\.(\w+) = ", (ROOT / "src/dray/train/model/layers.py").read_text()))
    assert used == {"recompile_limit", "suppress_errors"}
    assert used <= settings


def test_every_module_that_is_named_is_read():
    named = re.compile(rf"\btorch\.({'|'.join(UNUSED)})\b(?! import callback| import config| *\")")
    files = [path for room in ROOMS for path in (ROOT / "src/dray" / room).rglob("*.py")]
    assert [(path, found[0]) for path in files if (found := named.search(path.read_text()))] == []


@pytest.mark.parametrize("name", sorted(SAME))
def test_all_variants_have_the_version_that_is_tested(name):
    assert len({locked(variant)[name] for variant in VARIANTS}) == 1
