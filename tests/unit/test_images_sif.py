"""The SIF: Apptainer's whole command, what a base becomes, and that a failure leaves the old image."""

from __future__ import annotations

import os
import shlex
import sys
import tarfile
from pathlib import Path

import pytest

from dray.errors import ConfigError, DrayError, UnfitError
from dray.images import build, sif
from dray.images.log import BuildLog

DIGEST = f"sha256:{'a' * 64}"


def _tool(folder: Path, body: str, name: str = "apptainer") -> Path:
    """A stand-in for Apptainer on PATH."""
    folder.mkdir(exist_ok=True)
    tool, script = folder / name, folder / f"{name}.py"
    script.write_text(f"import os, pathlib, sys\n{body}\n")
    # Not as the first line's interpreter: that line ends at a space, which the checkout's path may hold.
    tool.write_text(f'#!/bin/bash\nexec {shlex.quote(sys.executable)} {shlex.quote(str(script))} "$@"\n')
    tool.chmod(0o755)
    return folder


@pytest.fixture
def only(monkeypatch):
    """PATH with nothing of this machine but what a base needs."""

    def _set(*folders: Path) -> None:
        monkeypatch.setenv("PATH", os.pathsep.join(map(str, (*folders, "/usr/bin", "/bin"))))

    return _set


def test_command():
    argv = sif.build_argv(
        tool="apptainer",
        inputs=Path("/my work/inputs"),
        bootstrap="localimage",
        source="rootfs",
        image=Path("/my work/.new/image.sif"),
    )
    assert argv == [
        *("apptainer", "build", "--bind", "/my work/inputs:/mnt"),
        *("--build-arg", "BOOTSTRAP=localimage", "--build-arg", "BASE=rootfs"),
        *("/my work/.new/image.sif", "/my work/inputs/dray.def"),
    ]


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        (f"debian:bookworm-slim@{DIGEST}", ("docker", f"debian@{DIGEST}")),
        (f"docker://reg.invalid:5000/a/b:1@{DIGEST}", ("docker", f"reg.invalid:5000/a/b@{DIGEST}")),
        (f"reg.invalid:5000/a/b@{DIGEST}", ("docker", f"reg.invalid:5000/a/b@{DIGEST}")),
        ("debian:bookworm-slim", ("docker", "debian:bookworm-slim")),
        ("oras://reg.invalid/a:1", ("oras", "reg.invalid/a:1")),
    ],
)
def test_references(base, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert sif.start_from(base, tmp_path) == expected


def test_local_bases(tmp_path):
    image, folder = tmp_path / "a base.sif", tmp_path / "a folder"
    image.touch()
    folder.mkdir()
    assert sif.start_from(str(image), tmp_path) == ("localimage", str(image))
    assert sif.start_from(str(folder), tmp_path) == ("localimage", str(folder))


def test_tar_is_unpacked_without_devices(tmp_path):
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "os-release").write_text("ID=debian\n")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    with tarfile.open(tmp_path / "a base.tar", "w") as tar:
        tar.add(tmp_path / "etc", "./etc")
        null = tarfile.TarInfo("./dev/null")
        null.type = tarfile.CHRTYPE
        tar.addfile(null)
    assert sif.start_from(str(tmp_path / "a base.tar"), scratch) == ("localimage", "rootfs")
    assert sorted(str(path.relative_to(scratch)) for path in scratch.rglob("*")) == [
        *("rootfs", "rootfs/etc", "rootfs/etc/os-release")
    ]


def test_missing_base(tmp_path):
    base = str(tmp_path / "no.tar")
    with pytest.raises(ConfigError) as raised:
        sif.local_base(base)
    assert raised.value.details == {
        "wanted": "an image reference, a SIF, a folder, or the tar of a root filesystem",
        "found": base,
        "fix": f"make one: containers/base/make-base.sh bookworm {base}",
    }


def test_apptainer_runs_in_the_scratch_folder(tmp_path, only):
    only(_tool(tmp_path / "bin", "print(os.getcwd(), sys.argv[1:]); print('warned', file=sys.stderr)", "singularity"))
    (tmp_path / "base.sif").touch()
    scratch = tmp_path / "my scratch"
    scratch.mkdir()
    lines: list[str] = []
    sif.build(inputs=Path("/in"), base=str(tmp_path / "base.sif"), scratch=scratch, on_line=lines.append)
    argv = sif.build_argv(
        tool="singularity",
        inputs=Path("/in"),
        bootstrap="localimage",
        source=str(tmp_path / "base.sif"),
        image=scratch / "image.sif",
    )
    assert lines[0] == shlex.join(argv)
    assert sorted(lines[1:]) == sorted([f"{scratch} {argv[1:]}", "warned"])


def test_much_output_on_both_streams_does_not_stop_it(tmp_path, only):
    body = "for i in range(20000):\n    print('out', i)\n    print('err', i, file=sys.stderr)"
    only(_tool(tmp_path / "bin", body))
    (tmp_path / "base.sif").touch()
    lines: list[str] = []
    sif.build(inputs=Path("/in"), base=str(tmp_path / "base.sif"), scratch=tmp_path, on_line=lines.append)
    assert len(lines) == 1 + 40000


def test_a_failed_build_leaves_the_old_image(tmp_path, only, capsys):
    body = (
        "pathlib.Path(sys.argv[-2]).write_text('half'); print('dray: step 10-system'); print('disk full'); sys.exit(3)"
    )
    only(_tool(tmp_path / "bin", body))
    (tmp_path / "base.sif").touch()
    out = tmp_path / "build" / "dray-cpu.sif"
    out.parent.mkdir()
    out.write_text("old")
    log = tmp_path / "build.log"
    with (
        pytest.raises(DrayError) as raised,
        BuildLog(log) as said,
        said.explaining(),
        sif.replacing(out) as scratch,
    ):
        sif.build(inputs=Path("/in"), base=str(tmp_path / "base.sif"), scratch=scratch, on_line=said.line)
    command, *rest = log.read_text().splitlines()
    assert rest == ["dray: step 10-system", "disk full"]
    assert str(raised.value) == (
        "apptainer build failed with exit code 3\n"
        f"  found:  {command}\n"
        "          dray: step 10-system\n"
        "          disk full\n"
        f"  where:  {log}"
    )
    assert capsys.readouterr() == ("", "dray: step 10-system\n")
    assert out.read_text() == "old"
    assert list(out.parent.iterdir()) == [out]


def test_a_finished_build_replaces_the_old_image(tmp_path):
    out = tmp_path / "new folder" / "dray-cpu.sif"
    with sif.replacing(out) as scratch:
        (scratch / "image.sif").write_text("new")
    assert out.read_text() == "new"
    assert list(out.parent.iterdir()) == [out]


@pytest.mark.parametrize("name", ["a,b", "a:b"])
def test_a_folder_that_apptainer_cannot_bind(name, tmp_path, only):
    only(_tool(tmp_path / "bin", ""))
    with pytest.raises(ConfigError) as raised:
        sif.build(inputs=tmp_path / name, base="x", scratch=tmp_path, on_line=print)
    assert raised.value.details == {"found": str(tmp_path / name), "fix": "move the checkout to another folder"}


class TestWays:
    """Which of them this machine has."""

    @pytest.fixture(autouse=True)
    def _no_engine(self, tmp_path, monkeypatch, root):
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
        monkeypatch.setattr(os, "geteuid", lambda: 0)

    def test_nothing(self, root, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(UnfitError) as raised:
            build.as_sif(root, "cpu", base="debian:x", out=tmp_path / "x.sif")
        assert str(raised.value) == (
            "nothing here can build a SIF\n"
            "  wanted: Apptainer, or a Docker Engine to run it in\n"
            "  found:  no apptainer on PATH; no Docker Engine runs on this machine\n"
            "  fix:    install apptainer (Debian: from sid; elsewhere: from its project's releases), or docker.io"
        )

    def test_root_with_apptainer_only(self, root, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(_tool(tmp_path / "bin", "")))
        with pytest.raises(UnfitError) as raised:
            build.as_sif(root, "cpu", base="debian:x", out=tmp_path / "x.sif")
        assert str(raised.value) == (
            "root's own Apptainer builds need more rights than containers and shared machines grant\n"
            "  wanted: apptainer as an ordinary user, or a Docker Engine\n"
            "  found:  apptainer as root; no Docker Engine runs on this machine\n"
            "  fix:    run the same command as an ordinary user"
        )
