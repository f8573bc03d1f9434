"""The checks of dray.checks that need no image: their results, and that no check takes another down with it."""

from __future__ import annotations

import json
import os
import select
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from dray.checks import __main__ as program
from dray.checks import drivers
from dray.checks import image as packages
from dray.checks.run_check import Skip, check, passed, skipped
from dray.contract import node
from dray.contract.findings import DrayError, Finding, UnfitError

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.26  Release Build  (builder)  Thu Jan 16\n"
CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:17:51 UTC 2025\nGCC version: 14.2.0\n"
)
PRESENT, ABSENT = "libc.so.6", "libabsent.so.1"


def module(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> str:
    """A group of checks for a child to import."""
    lines = [
        "import os, signal, sys, threading",
        "from dray.checks.run_check import passed, skipped, Finding",
        "def results():",
    ]
    (folder / "made_up.py").write_text("\n".join([*lines, *(f"    {line}" for line in body.splitlines())]))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return "made_up"


FIRST = 'yield passed("first", "fine")\n'
FINE = passed("first", "fine")


def bad(found: str) -> Finding:
    return Finding("made_up", found=found, code=69)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("ending", "last"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", bad("killed by SIGSEGV")),
        ("print('no room', file=sys.stderr); os._exit(3)", bad("ended with code 3\nno room")),
        ("raise ValueError('one\\n  two  \\n')", bad("ValueError: two")),
        ("import torch_of_another_world", bad("ModuleNotFoundError: No module named 'torch_of_another_world'")),
        ("import deepspeed", skipped("made_up", "needs deepspeed, which is not installed")),
        ("threading.Event().wait()", bad("not done after 5 s")),
    ],
)
def test_a_group_that_ends_badly_keeps_its_results(
    ending: str, last: Finding, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "deepspeed" in ending and find_spec("deepspeed"):
        pytest.skip("deepspeed is installed")
    name = module(tmp_path, monkeypatch, FIRST + ending)
    assert list(program.run_group(name, tmp_path, limit=5)) == [FINE, last]


def test_what_libraries_print_is_not_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = 'os.system("echo noise"); print("more", flush=True)\n' + FIRST
    body += 'print("why", file=sys.stderr)\nyield Finding("second", found="bad", code=69)'
    seen = list(program.run_group(module(tmp_path, monkeypatch, body), tmp_path, limit=60))
    assert seen == [FINE, Finding("second", found="bad\nnoise\nmore\nwhy", code=69)]


def test_what_a_group_leaves_running_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    body = f"""import subprocess
subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], stdout=open({str(pipe)!r}, "w"))
{FIRST}"""
    assert list(program.run_group(module(tmp_path, monkeypatch, body), tmp_path, limit=60)) == [FINE]
    ready, _, _ = select.select([reader], [], [], 30)
    assert ready, "the process still holds the pipe"
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_checks_write_to_the_scratch_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = 'import tempfile\nyield passed("at", tempfile.gettempdir() + os.environ["HF_HOME"])'
    [at] = program.run_group(module(tmp_path, monkeypatch, body), tmp_path, limit=60)
    assert at.found == f"{tmp_path}{tmp_path}"


def run(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> int:
    """The whole program with one made-up group, its own scratch folder gone afterwards."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    name = module(tmp_path, monkeypatch, body)
    monkeypatch.setattr(program, "run_group", lambda _, where, limit: RUN(name, where, limit=limit))
    monkeypatch.setattr(program, "GROUPS", ("made_up",))
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    monkeypatch.setattr(sys, "argv", ["dray.checks", *arguments])
    code = program.main()
    assert list(scratch.iterdir()) == []
    return code


def test_each_group_is_a_module() -> None:
    assert [name for name in program.GROUPS if find_spec(f"dray.checks.{name}") is None] == []


RUN = program.run_group
NO_DEVICE = 'yield skipped("device", "none", fix="use one")\n'


def test_without_a_device_nothing_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([], tmp_path, monkeypatch, FIRST + NO_DEVICE) == 0
    *lines, summary = capsys.readouterr().out.splitlines()
    assert lines == ["ok      first: fine", "skip    device: none", "        fix:    use one"]
    assert summary.startswith("1 ok, 1 skipped, 0 failed, in ")


def test_json_has_the_same_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--json"], tmp_path, monkeypatch, FIRST + NO_DEVICE) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["ok"], report["skip"], report["error"]) == (1, 1, 0)
    assert report["results"] == [
        {"level": "ok", "problem": "first", "found": "fine"},
        {"level": "skip", "problem": "device", "found": "none", "fix": "use one"},
    ]


def test_a_finding_in_a_list_of_checks() -> None:
    finding = Finding("C", found="bad\na\nb", wanted="good", fix="build it again", code=69)
    assert finding.line() == (
        "error   C: bad\n        a\n        b\n        wanted: good\n        fix:    build it again"
    )


def of(error: Exception) -> Finding:
    def work() -> str:
        raise error

    return check("it", work, fix="build it again")


def test_a_check_that_raises() -> None:
    assert of(Skip("none", fix="use one")) == skipped("it", "none", fix="use one")
    unfit = of(UnfitError("old", wanted="new"))
    assert (unfit.problem, unfit.found, unfit.wanted, unfit.level) == ("it", "old", "new", "error")
    assert of(OSError("first\nlast")) == Finding("it", found="OSError: last", fix="build it again", code=69)
    assert of(KeyError()) == Finding("it", found="KeyError", fix="build it again", code=69)


@pytest.mark.parametrize(("content", "version"), [(OPEN, "570.26"), (CLOSED, "580.65.06"), ("rubbish", None)])
def test_the_nvidia_driver_s_version(content: str, version: str | None, tmp_path: Path) -> None:
    (tmp_path / "version").write_text(content)
    assert node.nvidia_driver(tmp_path / "version") == version
    assert node.nvidia_driver(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("driver", "library", "wanted", "why"),
    [
        (None, ABSENT, "580", Skip("this machine has no NVIDIA driver")),
        ("570.26", ABSENT, "580", Skip(f"this machine has NVIDIA driver 570.26, but the container lacks {ABSENT}")),
        ("570.26", PRESENT, "580.65.06", UnfitError("NVIDIA driver 570.26")),
        ("580.65.06", PRESENT, "580.65.06", None),
        ("570.26", PRESENT, "570.26", None),
        (None, PRESENT, "580", None),
        ("570.26", PRESENT, None, None),
    ],
)  # fmt: skip
def test_why_there_is_no_nvidia_device(
    driver: str | None, library: str, wanted: str | None, why: DrayError | None
) -> None:
    if why is None:
        drivers.explain_nvidia(wanted, driver, library)
        return
    with pytest.raises(type(why)) as raised:
        drivers.explain_nvidia(wanted, driver, library)
    assert raised.value.problem == why.problem


@pytest.mark.parametrize(("content", "version"), [("6.10.5\n", "6.10.5"), ("6.12.12", "6.12.12"), ("x", None)])
def test_amd_s_driver_s_version(content: str, version: str | None, tmp_path: Path) -> None:
    (tmp_path / "version").write_text(content)
    assert node.amdgpu_driver(tmp_path / "version") == version
    assert node.amdgpu_driver(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("variant", "accelerator", "found", "other"),
    [
        ("cuda12", "cuda", "525.60.13", None),  # CUDA 12.8 with the oldest driver of CUDA 12
        ("cuda12", "cuda", "550.54.15", None),
        ("cuda12", "cuda", "525.60", ""),
        ("cuda12", "cuda", "470.256.02", ""),
        ("cuda", "cuda", "580", None),
        ("cuda", "cuda", "580.65.06", None),
        ("cuda", "cuda", "575.57.08", "cuda12"),
        ("cuda", "cuda", "470.256.02", ""),
        ("rocm", "rocm", "6.12.12", None),  # of ROCm 6.4
        ("rocm", "rocm", "6.16.6", None),  # of ROCm 7.1
        ("rocm", "rocm", "6.10.5", "rocm6"),  # of ROCm 6.3, as LUMI has it
        ("rocm", "rocm", "6.3.6", ""),
        ("rocm6", "rocm", "6.7.0", None),  # of ROCm 6.1
        ("rocm6", "rocm", "6.12.12", None),  # not a number of two digits
        ("rocm6", "rocm", "6.3.6", ""),
    ],
)
def test_a_driver_is_compared_where_a_gpu_is_seen(
    root: Path,
    image: Path,
    monkeypatch: pytest.MonkeyPatch,
    variant: str,
    accelerator: str,
    found: str,
    other: str | None,
) -> None:
    """By image.toml, in whose CUDA all minor versions are compatible; `other` is the image for an older driver."""
    fits = other is None
    torch = pytest.importorskip("torch")
    from dray.checks import device

    definition = tomllib.loads((root / "containers" / variant / "image.toml").read_text())
    image.write_text(json.dumps({"variant": variant, "accelerator": accelerator, "driver": definition["driver"]}))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(device, "accelerator", lambda: accelerator)
    monkeypatch.setattr(device, "works", lambda _: "it works")
    monkeypatch.setattr(device, "right", lambda _: "right")
    monkeypatch.setattr(device, "memory", lambda _: "free")
    monkeypatch.setattr(device, "_matmul", lambda _: "fast")
    monkeypatch.setattr(device, "ceiling", lambda _: 1.0)
    monkeypatch.setattr(node, "driver", lambda _: found)
    monkeypatch.setattr(drivers, "health", lambda _: [])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: None)
    driver, works, *_ = device.results()
    assert (driver.level, works.level) == ("ok" if fits else "error", "ok")
    told: list[Finding] = []
    plan = {"variant": variant, "world": {"ranks_per_node": 1}}
    device.of_rank(SimpleNamespace(plan=plan, local=0, tell=lambda **_: None, report=told.append))
    assert bool(told) != fits
    for one in told:
        assert (one.problem[:7], one.code, one.wanted) == ("GPU 0: ", 69, f"{definition['driver']} or newer")
        named = f", or image={other}, which runs with this one" if other else ""
        assert one.fix == f"use a node with a newer driver{named}"


@pytest.mark.parametrize(("accelerator", "variant"), [("cuda", "cuda12"), ("rocm", "rocm6")])
def test_the_image_for_an_older_driver_is_known_by_its_own_description(
    root: Path, accelerator: str, variant: str
) -> None:
    oldest = tomllib.loads((root / "containers" / variant / "image.toml").read_text())["driver"]
    assert node.image_for(accelerator, oldest) == variant
    assert node.image_for(accelerator, f"{int(oldest.split('.')[0]) - 1}.99") == ""


def test_a_driver_whose_version_nobody_tells_is_tried() -> None:
    with pytest.raises(Skip, match="the version of the amdgpu driver is not known here"):
        drivers.require_version("6.7", None, "rocm")
    assert drivers.require_version(None, "1.0", "cuda") == "NVIDIA driver 1.0"


def test_why_there_is_no_amd_device(tmp_path: Path) -> None:
    (tmp_path / "kfd").touch()
    drivers.explain_amd(tmp_path / "kfd")
    with pytest.raises(Skip, match="/none is missing"):
        drivers.explain_amd(tmp_path / "none")


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An image.json where this Python looks for it."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    packages.declared.cache_clear()
    yield tmp_path / "image.json"
    packages.declared.cache_clear()


@pytest.mark.seconds
def test_the_image_declares_what_it_is(image: Path) -> None:
    declared = {"variant": "cuda", "accelerator": "cuda", "driver": "580.65.06", "architectures": ["8.0", "9.0"]}
    image.write_text(json.dumps({**declared, "packages": {"deep_speed": "1", "dray": "0"}, "of_tomorrow": 1}))
    assert packages.declared().lists("x", "deep-speed")
    first, _, *rest = packages.results()
    assert first.found == "cuda, for cuda 8.0 9.0, driver 580.65.06 or newer"
    [dray] = [result for result in rest if result.problem == "dray"]
    assert (dray.level, dray.wanted) == ("error", f"a file under {image.parent}"), "it is not the image's own"


def test_no_image_and_a_damaged_one(image: Path) -> None:
    assert packages.declared() == packages.Image()
    image.write_text("{")
    packages.declared.cache_clear()
    first, *_ = packages.results()
    assert (first.level, first.found[:16]) == ("error", "JSONDecodeError:")


@pytest.mark.seconds
@pytest.mark.torch
@pytest.mark.triton
@pytest.mark.parametrize("architecture", ["7.0", "9.0", "gfx90a"])
def test_a_kernel_is_compiled_for_gpus_that_this_machine_lacks(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dray.checks import compilers

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert compilers.compile_kernel(architecture).startswith("1 kernel compiled to ")
