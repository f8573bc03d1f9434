"""The checks of dray.checks that need no image: what is told, and that no check takes another down with it."""

from __future__ import annotations

import json
import os
import select
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from dray.checks import __main__ as program
from dray.checks import declared, drivers, group, versions
from dray.checks.result import Result, Skip, Unfit, attempt

OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.26  Release Build  (builder)  Thu Jan 16\n"
CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.65.06  Sun Jul 27 07:17:51 UTC 2025\nGCC version: 14.2.0\n"
)
PRESENT, ABSENT = "libc.so.6", "libabsent.so.1"


def module(folder: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> str:
    """A group of checks for a child to import."""
    lines = ["import os, signal, sys, threading", "from dray.checks.result import Result", "def results():"]
    (folder / "made_up.py").write_text("\n".join([*lines, *(f"    {line}" for line in body.splitlines())]))
    monkeypatch.setenv("PYTHONPATH", str(folder))
    return "made_up"


FIRST = 'yield Result(check="first", state="ok", found="fine")\n'
FINE = Result(check="first", state="ok", found="fine")


def bad(found: str, said: str | None = None) -> Result:
    return Result(check="made_up", state="FAIL", found=found, said=said)


@pytest.mark.parametrize(
    ("ending", "last"),
    [
        ("os.kill(os.getpid(), signal.SIGSEGV)", bad("died by SIGSEGV")),
        ("print('no room', file=sys.stderr); os._exit(3)", bad("ended with code 3", "no room")),
        ("raise ValueError('one\\n  two  \\n')", bad("ValueError: two")),
        ("import torch_of_another_world", bad("ModuleNotFoundError: No module named 'torch_of_another_world'")),
        ("import deepspeed", Result(check="made_up", state="skip", found="needs deepspeed, which is not here")),
        ("threading.Event().wait()", bad("not done after 5 s")),
    ],
)
def test_a_group_that_ends_badly_keeps_what_it_saw(
    ending: str, last: Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if "deepspeed" in ending and find_spec("deepspeed"):
        pytest.skip("deepspeed is here")
    name = module(tmp_path, monkeypatch, FIRST + ending)
    assert list(group.run(name, tmp_path, limit=5)) == [FINE, last]


def test_what_libraries_print_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = 'os.system("echo noise"); print("more", flush=True)\n' + FIRST
    body += 'print("why", file=sys.stderr)\nyield Result(check="second", state="FAIL", found="bad")'
    seen = list(group.run(module(tmp_path, monkeypatch, body), tmp_path, limit=60))
    assert seen == [FINE, Result(check="second", state="FAIL", found="bad", said="why")]


def test_what_a_group_leaves_running_ends_with_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    body = f"""import subprocess
subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], stdout=open({str(pipe)!r}, "w"))
{FIRST}"""
    assert list(group.run(module(tmp_path, monkeypatch, body), tmp_path, limit=60)) == [FINE]
    ready, _, _ = select.select([reader], [], [], 30)
    assert ready, "the process still holds the pipe"
    assert os.read(reader, 1) == b""
    os.close(reader)


def test_checks_write_to_the_scratch_folder_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    body = 'import tempfile\nyield Result(check="at", state="ok", found=tempfile.gettempdir() + os.environ["HF_HOME"])'
    [at] = group.run(module(tmp_path, monkeypatch, body), tmp_path, limit=60)
    assert at.found == f"{tmp_path}{tmp_path}"


def run(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str) -> int:
    """The whole program with one made-up group, its own scratch folder gone afterwards."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    name = module(tmp_path, monkeypatch, body)
    monkeypatch.setattr(program.group, "run", lambda _, where, limit: RUN(name, where, limit=limit))
    monkeypatch.setattr(program, "GROUPS", ("made_up",))
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    monkeypatch.setattr(sys, "argv", ["dray.checks", *arguments])
    code = program.main()
    assert list(scratch.iterdir()) == []
    return code


RUN = group.run
NO_DEVICE = 'yield Result(check="device", state="skip", found="none", fix="take one")\n'


def test_without_a_device_nothing_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([], tmp_path, monkeypatch, FIRST + NO_DEVICE) == 0
    *lines, summary = capsys.readouterr().out.splitlines()
    assert lines == ["ok    first: fine", "skip  device: none", "      fix:    take one"]
    assert summary.startswith("1 ok, 1 skipped, 0 failed, in ")


def test_programs_get_it_as_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["--json"], tmp_path, monkeypatch, FIRST + NO_DEVICE) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["skip"], told["fail"]) == (1, 1, 0)
    assert [(result["check"], result["state"]) for result in told["results"]] == [("first", "ok"), ("device", "skip")]


def test_a_result_is_told_in_lines() -> None:
    result = Result(check="C", state="FAIL", found="bad", wanted="good", fix="mend", seconds=1.26, said="a\nb")
    assert str(result) == (
        "FAIL  C: bad (1.3 s)\n      wanted: good\n      fix:    mend\n      said:   a\n              b"
    )


def told(error: Exception) -> Result:
    def work() -> str:
        raise error

    return attempt("it", work, fix="mend")


def test_an_attempt_says_what_came_in_its_way() -> None:
    assert told(Skip("none", fix="take")) == Result(check="it", state="skip", found="none", fix="take")
    assert told(Unfit("old", wanted="new")) == Result(check="it", state="FAIL", found="old", wanted="new")
    assert told(OSError("first\nlast")) == Result(check="it", state="FAIL", found="OSError: last", fix="mend")
    assert told(KeyError()) == Result(check="it", state="FAIL", found="KeyError", fix="mend")


@pytest.mark.parametrize(
    ("kernel", "library", "wanted", "why"),
    [
        (None, ABSENT, "580", Skip("this machine has no NVIDIA driver")),
        (CLOSED, ABSENT, "580", Skip(f"the machine has NVIDIA driver 580.65.06, but {ABSENT} is not in the container")),
        (OPEN, PRESENT, "580.65.06", Unfit("NVIDIA driver 570.26")),
        (CLOSED, PRESENT, "580.65.06", None),
        (OPEN, PRESENT, "570.26", None),
        ("rubbish", PRESENT, "580", None),
        (OPEN, PRESENT, None, None),
    ],
)
def test_why_there_is_no_nvidia_device(
    kernel: str | None, library: str, wanted: str | None, why: Exception | None, tmp_path: Path
) -> None:
    version = tmp_path / "version"
    if kernel is not None:
        version.write_text(kernel)
    if why is None:
        drivers.explain_nvidia(wanted, version, library)
        return
    with pytest.raises(type(why)) as told:
        drivers.explain_nvidia(wanted, version, library)
    assert str(told.value) == str(why)


def test_why_there_is_no_amd_device(tmp_path: Path) -> None:
    (tmp_path / "kfd").touch()
    drivers.explain_amd(tmp_path / "kfd")
    with pytest.raises(Skip, match="/none is not here"):
        drivers.explain_amd(tmp_path / "none")


@pytest.fixture
def image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An image.json where this Python looks for it."""
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    declared.read.cache_clear()
    yield tmp_path / "image.json"
    declared.read.cache_clear()


def test_the_image_says_what_it_is(image: Path) -> None:
    said = {"variant": "cuda", "accelerator": "cuda", "driver": "580.65.06", "architectures": ["8.0", "9.0"]}
    image.write_text(json.dumps({**said, "packages": {"deep_speed": "1", "dray": "0"}, "of_tomorrow": 1}))
    assert declared.read().lists("x", "Deep.Speed")
    first, _, *packages = versions.results()
    assert first.found == "cuda, for cuda 8.0 9.0, driver 580.65.06 or newer"
    [dray] = [result for result in packages if result.check == "dray"]
    assert (dray.state, dray.wanted) == ("FAIL", f"a file under {image.parent}"), "it is not the image's own"


def test_no_image_and_a_damaged_one(image: Path) -> None:
    assert declared.read() == declared.Declared()
    image.write_text("{")
    declared.read.cache_clear()
    first, *_ = versions.results()
    assert (first.state, first.found) == ("FAIL", f"{image} is damaged")


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("architecture", ["7.0", "8.0", "9.0", "gfx90a"])
def test_a_kernel_is_compiled_for_gpus_that_are_not_here(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dray.checks import kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    assert "bytes of" in kernels.compiles(architecture)
