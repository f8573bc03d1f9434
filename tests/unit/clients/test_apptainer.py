"""The client over spython's: each of its traps, and every verb with a real Apptainer."""

from __future__ import annotations

import os
import time
from functools import partial
from pathlib import Path

import pytest

from dray.clients import apptainer
from dray.contract.findings import ConfigError, UnfitError
from dray.fitness import doctor
from helpers import python, runs, until

PULLED = "docker://registry.example/team/image:1"
pull = partial(apptainer.pull, what="the image", instead="or copy the file", say=print)


@pytest.fixture
def tool(tmp_path, monkeypatch):
    """Put a tool of this name on the machine, the only one; what it is called with."""

    def put(does: str, *, name: str = "apptainer") -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        calls = tmp_path / "calls"
        calls.touch()
        script = folder / name
        logged = "    print(os.path.basename(sys.argv[0]), *sys.argv[1:], file=file)"
        script.write_text(
            f"#!{python()}\nimport sys, os, time, subprocess\n"
            f"with open({str(calls)!r}, 'a') as file:\n{logged}\n{does}\n"
        )
        for forbidden in ("sudo", "docker"):
            (folder / forbidden).write_text(f"#!/bin/sh\necho {forbidden} >>'{calls}'\nexit 9\n")
        for path in folder.iterdir():
            path.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))
        return calls

    return put


@pytest.fixture
def image(tmp_path) -> Path:
    path = tmp_path / "an image.sif"
    path.touch()
    return path


@pytest.mark.parametrize("name", ["apptainer", "singularity"])
def test_it_finds_the_program_by_both_names(tool, image, name):
    calls = tool("print('hello')", name=name)
    assert apptainer.execute(image, ["echo", "a b"], options=["--nv"]).out == "hello\n"
    assert calls.read_text().splitlines() == [
        f"{name} --quiet exec --cleanenv --no-eval --no-mount=home,cwd --nv {image} echo a b"
    ]


def test_a_megabyte_of_errors_does_not_hang(tool, image):
    tool("sys.stderr.write('x' * (1 << 20)); sys.stderr.flush(); print('done')")
    done = apptainer.execute(image, ["true"], seconds=20)
    assert (done.out, len(done.err)) == ("done\n", 1 << 20)


def test_the_two_streams_stay_apart(tool, image):
    """spython hands out the errors as the output, where there is no output."""
    tool("sys.stderr.write('only an error'); sys.exit(3)")
    done = apptainer.execute(image, ["true"])
    assert (done.code, done.out, done.err) == (3, "", "only an error")


@pytest.mark.seconds
def test_what_hangs_is_killed_with_all_that_it_started(tool, image, tmp_path):
    child = f"import time, os; open({str(tmp_path / 'child')!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    tool(f"subprocess.Popen([sys.executable, '-c', {child!r}])\n"
         f"while not os.path.exists({str(tmp_path / 'child')!r}): time.sleep(0.01)\ntime.sleep(600)")  # fmt: skip
    began = time.monotonic()
    with pytest.raises(UnfitError, match="apptainer gave no answer in 5 s") as late:
        apptainer.execute(image, ["true"], seconds=5)
    assert time.monotonic() - began < 60
    assert late.value.details["where"].startswith("apptainer --quiet exec ")
    until(lambda: not runs((tmp_path / "child").read_text()))


@pytest.mark.parametrize("source", ["", "ubuntu", "docker://", "ftp://x/y", "--help", "docker:x", "oci:", "shub://x"])
def test_a_source_that_none_is_does_not_exit(tool, tmp_path, source):
    calls = tool("pass")
    with pytest.raises(ConfigError, match="not the address of an image"):
        pull(source, tmp_path / "out.sif")
    assert calls.read_text() == ""


def test_an_archive_that_is_not_there(tool, tmp_path):
    tool("pass")
    with pytest.raises(ConfigError, match="the source of the image does not exist"):
        pull(f"oci:{tmp_path}/none:latest", tmp_path / "out.sif")


@pytest.mark.parametrize(
    ("said", "reason", "fix"),
    [
        (
            "FATAL:   unauthorized: access denied",
            ": the registry requires a login, or limits the number of pulls",
            "docker login",
        ),
        (
            "FATAL: x509: certificate signed by unknown authority",
            ": the registry's certificate is not trusted",
            "set SSL_CERT",
        ),
        (
            "FATAL: dial tcp: lookup r on 10.0.0.1:53: no such host",
            ": the registry cannot be reached",
            "set http_proxy",
        ),
        (
            "FATAL: Get https://r/v2/: net/http: TLS handshake timeout",
            ": the registry cannot be reached",
            "set http_proxy",
        ),
        ("FATAL: reading manifest: manifest unknown", ": the registry does not have this image", "correct the name"),
        ("FATAL: open /home/me/x: permission denied", "", "or copy the file"),
        ("FATAL: something else", "", "or copy the file"),
        ("FATAL: write x: no space left on device", ": the disk is full", "make room"),
    ],
)
def test_a_pull_that_fails_says_whose_fault_it_was(tool, tmp_path, said, reason, fix):
    """spython hands out the name of the file that is not there."""
    calls = tool(f"sys.stderr.write('WARNING: fuse2fs not found\\n{said}\\n'); sys.exit(255)")
    with pytest.raises(UnfitError) as refused:
        pull(PULLED, tmp_path / "out.sif")
    assert refused.value.problem == f"the image cannot be pulled{reason}"
    assert refused.value.details["found"] == said
    assert refused.value.details["fix"].startswith(fix)
    assert refused.value.details["fix"].endswith("or copy the file")
    verb, option, part, source = calls.read_text().split()[1:]
    assert (verb, option, source) == ("pull", "--name", PULLED)
    assert Path(part).parents[1] == tmp_path
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".pull")] == []


def test_a_pull_writes_beside_what_it_makes(tool, tmp_path):
    tool("open(sys.argv[3], 'w').write(os.environ['APPTAINER_TMPDIR'] + ' ' + os.environ['APPTAINER_DISABLE_CACHE'])")
    pull(PULLED, tmp_path / "out.sif")
    scratch, uncached = (tmp_path / "out.sif").read_text().rsplit(" ", 1)
    assert (Path(scratch).parent, uncached) == (tmp_path, "1")


def test_a_build_asks_for_no_sudo(tool, tmp_path):
    calls = tool("open(sys.argv[2], 'w').close()")
    (tmp_path / "layout").mkdir()
    pull(f"oci:{tmp_path}/layout:1", tmp_path / "out.sif")
    verb, part, source = calls.read_text().split()[1:]
    assert (verb, Path(part).name, source) == ("build", "out.sif", f"oci:{tmp_path}/layout:1")


def test_spython_starts_no_program_itself(tool, image, monkeypatch, tmp_path):
    """Nor `singularity --version`, which it starts before each verb."""
    writes = "if sys.argv[1] == 'pull': open(sys.argv[3], 'w').close()"
    calls = tool(writes)
    from spython.utils import terminal

    monkeypatch.delattr(terminal.subprocess, "Popen")
    monkeypatch.setattr("dray.process.run", lambda argv, **_: subprocess_run(argv))
    apptainer.execute(image, ["true"])
    pull(PULLED, tmp_path / "out.sif")
    assert len(calls.read_text().splitlines()) == 2


def subprocess_run(argv):
    """Without subprocess."""
    from dray.process import Done

    reader, writer = os.pipe()
    child = os.posix_spawnp(argv[0], argv, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, writer, 1)])
    os.close(writer)
    with os.fdopen(reader) as out:
        text = out.read()
    return Done(argv=tuple(argv), code=os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), out=text, err="")


@pytest.mark.seconds
def test_doctor_does_not_wait_for_a_program_that_hangs(tool, monkeypatch):
    tool("time.sleep(600)")
    monkeypatch.setattr(doctor, "_ANSWER_S", 1)
    (found,) = [finding for finding in doctor._engines() if "apptainer" in finding.found]
    assert (found.level, found.found) == ("error", "apptainer gave no answer in 1 s")
