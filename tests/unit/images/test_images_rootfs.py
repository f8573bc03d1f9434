"""The root filesystem: Apptainer's whole command, what a base becomes, and the bytes that it is packed into."""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from docker.errors import ImageNotFound

from dray.clients import builder, builder_container, docker
from dray.clients.builder import BuildError
from dray.config import mirrors
from dray.contract.findings import ConfigError, DrayError, UnfitError
from dray.images import build
from dray.images.build_output import build_log
from dray.images.fetch import base_image as bases
from dray.images.rootfs import docker_layer, squashfs
from dray.images.rootfs import make as rootfs
from dray.images.sif import format as sif_format
from helpers import ROOT

DIGEST = f"sha256:{'a' * 64}"
EPOCH = 1_700_000_000


def _rootfs(folder: Path) -> Path:
    """The least that is taken for a root filesystem."""
    (folder / "usr" / "bin").mkdir(parents=True)
    (folder / "usr" / "bin" / "env").write_bytes(Path(sys.executable).read_bytes()[:20])
    return folder


def _tar(folder: Path) -> Path:
    out = folder.with_suffix(".tar")
    with tarfile.open(out, "w") as tar:
        tar.add(folder, ".")
    return out


@pytest.mark.parametrize(
    ("base", "expected"),
    [
        (f"debian:bookworm-slim@{DIGEST}", f"docker://debian@{DIGEST}"),
        (f"docker://reg.invalid:5000/a/b:1@{DIGEST}", f"docker://reg.invalid:5000/a/b@{DIGEST}"),
        (f"reg.invalid:5000/a/b@{DIGEST}", f"docker://reg.invalid:5000/a/b@{DIGEST}"),
        ("debian:bookworm-slim", "docker://debian:bookworm-slim"),
        ("oras://reg.invalid/a:1", "oras://reg.invalid/a:1"),
    ],
)
def test_references(base, expected):
    assert bases.reference(base) == expected


def test_a_base_of_the_user_s_own(tmp_path):
    tar = tmp_path / "a base.tar"
    tar.write_text("tar")
    assert bases.fetched(tmp_path, str(tar), say=print) == tar
    assert bases.identity(str(tar), tar) == f"sha256:{hashlib.sha256(b'tar').hexdigest()}"
    pinned = f"debian:x@{DIGEST}"
    assert bases.identity(pinned, tar) == pinned


def test_a_base_that_was_made_is_found(tmp_path, monkeypatch):
    """make-base.sh puts both where its usage says; nobody has to name them again."""
    monkeypatch.delenv("DRAY_CLUSTER_BASE", raising=False)
    (tmp_path / "containers" / "cluster").mkdir(parents=True)
    (tmp_path / "containers" / "cluster" / "Containerfile").write_text(
        "ARG BASE=debian:trixie@sha256:0\nFROM ${BASE}\n"
    )
    lines = []
    assert builder.trixie(tmp_path) == "debian:trixie@sha256:0"
    assert bases.default(tmp_path, "debian:bookworm", say=lines.append) == "debian:bookworm"
    folder = tmp_path / "build" / "base"
    folder.mkdir(parents=True)
    for suite in ("bookworm", "trixie"):
        (folder / f"{suite}.tar").touch()
    assert builder.trixie(tmp_path) == str(folder / "trixie.tar")
    assert bases.default(tmp_path, "debian:bookworm", say=lines.append) == str(folder / "bookworm.tar")
    assert lines == [f"dray: base {folder}/bookworm.tar, made by make-base.sh (--base names another)"]
    monkeypatch.setenv("DRAY_CLUSTER_BASE", "named")
    assert builder.trixie(tmp_path) == "named"


def _puts_apptainer(folder, monkeypatch, does):
    """A program of its name; the calls of it."""
    folder.mkdir()
    (folder / "apptainer").write_text(f'#!/bin/sh\necho "$*" >>"{folder}/calls"\n{does}\n')
    (folder / "apptainer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:/usr/bin:/bin")
    return folder / "calls"


def test_a_reference_is_pulled_once(tmp_path, monkeypatch):
    calls = _puts_apptainer(tmp_path / "bin", monkeypatch, 'echo "$APPTAINER_DISABLE_CACHE" >"$3"')
    found = {bases.fetched(tmp_path, f"debian:x@{DIGEST}", say=print) for _ in range(2)}
    (pulled,) = (tmp_path / "build" / "base").iterdir()
    assert (found, pulled.suffix, pulled.read_text()) == ({pulled}, ".sif", "1\n")
    verb, option, part, named = calls.read_text().splitlines()[0].split()
    assert (verb, option, named) == ("pull", "--name", f"docker://debian@{DIGEST}")
    assert Path(part).parent.parent == pulled.parent
    assert len(calls.read_text().splitlines()) == 1


def test_a_base_that_no_registry_has(tmp_path, monkeypatch):
    _puts_apptainer(tmp_path / "bin", monkeypatch, "echo 'INFO: looks' >&2\necho 'FATAL:   no such name' >&2\nexit 255")
    with pytest.raises(UnfitError, match="the base cannot be pulled\n") as refused:
        bases.fetched(tmp_path, "debian:x", say=print)
    assert refused.value.details == {
        "wanted": "docker://debian:x",
        "found": "FATAL:   no such name",
        "fix": "or make one: containers/base/make-base.sh bookworm build/base/bookworm.tar",
    }
    assert not [*(tmp_path / "build" / "base").iterdir()]


@pytest.mark.parametrize("saved", [False, True], ids=["text", "docker save"])
def test_what_is_no_root_filesystem(saved, tmp_path):
    (tmp_path / "base.tar").write_text("# Notes\n")
    if saved:
        (tmp_path / "base").mkdir()
        (tmp_path / "base" / "manifest.json").touch()
        _tar(tmp_path / "base")
    (tmp_path / "scratch").mkdir()
    with pytest.raises(ConfigError, match="the base is not a root filesystem") as refused:
        rootfs.start_from(tmp_path / "base.tar", tmp_path / "scratch")
    assert ("no /usr/bin/env in it" if saved else "tar: ") in refused.value.details["found"]


def test_tar_is_unpacked_without_devices(tmp_path):
    (tmp_path / "scratch").mkdir()
    with tarfile.open(tmp_path / "a base.tar", "w") as tar:
        tar.add(_rootfs(tmp_path / "made") / "usr", "./usr")
        null = tarfile.TarInfo("./dev/null")
        null.type = tarfile.CHRTYPE
        tar.addfile(null)
    assert rootfs.start_from(tmp_path / "a base.tar", tmp_path / "scratch") == "base"
    found = sorted(str(path.relative_to(tmp_path / "scratch")) for path in (tmp_path / "scratch").rglob("*"))
    assert found == ["base", "base/usr", "base/usr/bin", "base/usr/bin/env"]


@pytest.mark.parametrize(
    ("here", "theirs", "names"),
    [("x86_64", "aarch64", ("amd64", "arm64")), ("aarch64", "x86_64", ("arm64", "amd64"))],
)
def test_a_sif_for_another_architecture(here, theirs, names, tmp_path, monkeypatch):
    """Apptainer would end in `exec format error` after minutes; a bundle has its base from another machine."""
    (tmp_path / "squashfs").write_bytes(b"hsqs" + bytes(200))
    (tmp_path / "scratch").mkdir()
    base = tmp_path / "base.sif"
    monkeypatch.setattr(platform, "machine", lambda: theirs)
    sif_format.write(tmp_path / "squashfs", base, epoch=1, definition=b"a\n")
    assert bases.local(str(base)) == base
    monkeypatch.setattr(platform, "machine", lambda: here)
    for refuse in (lambda: bases.local(str(base)), lambda: rootfs.start_from(base, tmp_path / "scratch")):
        with pytest.raises(ConfigError, match="the base is for another architecture") as refused:
            refuse()
        details = refused.value.details
        assert (details["where"], details["wanted"], details["found"]) == (str(base), *names)
        assert "containers/base/make-base.sh" in details["fix"]


@pytest.mark.parametrize("program", [b"\x7fELF" + bytes(14) + b"\x15\x00", b"#!/bin/sh\n"], ids=["ppc64le", "a script"])
def test_a_tar_for_another_architecture(program, tmp_path):
    (_rootfs(tmp_path / "made") / "usr/bin/env").write_bytes(program)
    (tmp_path / "scratch").mkdir()
    base = _tar(tmp_path / "made")
    if program.startswith(b"#"):  # it tells nothing
        assert rootfs.start_from(base, tmp_path / "scratch") == "base"
    else:
        with pytest.raises(ConfigError, match="the base is for another architecture"):
            rootfs.start_from(base, tmp_path / "scratch")


@pytest.mark.parametrize(
    ("made", "problem", "fix"),
    [
        (False, "the base does not exist", "make one: containers/base/make-base.sh bookworm build/base/bookworm.tar"),
        (True, "the base is a folder", "tar --create --file base.tar --directory {base} ."),
    ],
)
def test_what_is_no_base(made, problem, fix, tmp_path):
    base = tmp_path / "no.tar"
    if made:
        base.mkdir()
    with pytest.raises(ConfigError) as raised:
        bases.fetched(tmp_path, str(base), say=print)
    assert raised.value.problem == problem
    assert raised.value.details == {
        "wanted": "an image reference, a SIF, or the tar of a root filesystem",
        "found": str(base),
        "fix": fix.format(base=base),
    }


def test_apptainer_runs_in_the_scratch_folder_with_the_lock_s_date(tmp_path, monkeypatch, capfd):
    tool = tmp_path / "bin" / "singularity"
    tool.parent.mkdir()
    tool.write_text('#!/bin/bash\necho "$PWD $SOURCE_DATE_EPOCH $SINGULARITY_TMPDIR"; printf "%s|" "$@"\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:/usr/bin:/bin")
    scratch = tmp_path / "my scratch"
    scratch.mkdir()
    base = _tar(_rootfs(tmp_path / "made"))
    definition = Path("/my work/inputs/dray.def")
    made = rootfs.build(definition=definition, out=Path("/out"), base=base, scratch=scratch, epoch=EPOCH)
    assert made == scratch / "rootfs"
    argv = [
        *("singularity", "build", "--sandbox", "--no-cleanup"),
        *("--bind", "/my work/inputs:/mnt", "--bind", "/out:/srv"),
        *("--build-arg", "BASE=base"),
        *(str(made), str(definition)),
    ]
    assert capfd.readouterr().out == f"{shlex.join(argv)}\n{scratch} {EPOCH} {scratch}\n{'|'.join(argv[1:])}|"


@pytest.mark.parametrize(
    ("second", "difference"),
    [
        ("1", "Files {0}/one/rootfs/opt/now and {0}/two/rootfs/opt/now differ"),
        (None, "Only in {0}/one/rootfs/opt: now"),
    ],
)
def test_two_builds_that_differ(second, difference, tmp_path):
    """The first file that differs is named, and both images are kept."""
    for name, content in (("one", "0"), ("two", second)):
        tree = tmp_path / name / "rootfs"
        (tree / "opt").mkdir(parents=True)
        (tree / "a").symlink_to("opt")
        (tree / "z").write_text(name)
        if content:
            (tree / "opt" / "now").write_text(content)
        (tmp_path / name / "image.sif").write_text(name)
    with pytest.raises(DrayError) as raised:
        build._need_same(tmp_path / "failed", tmp_path / "one", tmp_path / "two")
    assert str(raised.value) == (
        "two builds from the same inputs differ\n"
        f"  where:  {difference.format(tmp_path)}\n"
        f"  found:  sha256:{hashlib.sha256(b'one').hexdigest()}  {tmp_path}/failed/1-image.sif\n"
        f"          sha256:{hashlib.sha256(b'two').hexdigest()}  {tmp_path}/failed/2-image.sif"
    )


def test_squashfs_command(tmp_path):
    assert squashfs.argv(tmp_path / "rootfs", tmp_path / "out", epoch=EPOCH) == [
        *("mksquashfs", f"{tmp_path}/rootfs", f"{tmp_path}/out"),
        *("-noappend", "-no-progress", "-quiet", "-no-xattrs", "-no-exports"),
        *("-all-root", "-root-mode", "0755", "-all-time", f"{EPOCH}", "-mkfs-time", f"{EPOCH}"),
        *squashfs.COMPRESSION,
    ]


class TestLayer:
    @pytest.fixture
    def tree(self, tmp_path) -> Path:
        tree = tmp_path / "rootfs"
        for name in ("opt/b", "opt/a", ".singularity.d/env", "usr/.singularity.d"):
            (tree / name).mkdir(parents=True)
        (tree / "opt" / "b" / "two").write_text("2")
        (tree / "opt" / "b" / "two").chmod(0o4755)
        os.link(tree / "opt" / "b" / "two", tree / "opt" / "b" / "three")
        (tree / "opt" / "a" / "one").write_text("1")
        (tree / "bin").symlink_to("usr")
        (tree / "environment").symlink_to(".singularity.d/env")
        (tree / "usr" / "environment").touch()
        return tree

    @pytest.fixture
    def inputs(self, tmp_path) -> Path:
        folder = tmp_path / "inputs"
        folder.mkdir()
        (folder / "environment").write_text("A='1 2'\nB=3\n")
        return folder

    def test_what_is_in_it(self, tree):
        out = io.BytesIO()
        docker_layer._write(tree, out, epoch=EPOCH)
        out.seek(0)
        with tarfile.open(fileobj=out) as tar:
            found = [(entry.name, entry.type, oct(entry.mode), entry.linkname) for entry in tar]
            owners = {(entry.uid, entry.gid, entry.uname, entry.gname, entry.mtime) for entry in tar}
        assert [name for name, *_ in found] == [
            *("bin", "opt", "opt/a", "opt/a/one", "opt/b", "opt/b/three", "opt/b/two"),
            *("usr", "usr/.singularity.d", "usr/environment"),
        ]
        assert ("bin", tarfile.SYMTYPE, "0o777", "usr") in found
        assert ("opt/b/three", tarfile.REGTYPE, "0o4755", "") in found
        assert ("opt/b/two", tarfile.LNKTYPE, "0o4755", "opt/b/three") in found
        assert owners == {(0, 0, "", "", EPOCH)}

    def test_the_archive(self, tree, inputs, tmp_path):
        out = tmp_path / "image.tar"
        docker_layer.pack(tree, out, epoch=EPOCH, inputs=inputs, tag="dray:x", labels={"a.b": "c d", "made": "here"})
        with tarfile.open(out) as tar:
            read = {entry.name: tar.extractfile(entry).read() for entry in tar}
        manifest = json.loads(read["manifest.json"])[0]
        config = read[manifest["Config"]]
        (whole,) = manifest["Layers"]
        digest = hashlib.sha256(read[whole]).hexdigest()
        assert manifest == {
            "Config": f"{hashlib.sha256(config).hexdigest()}.json",
            "RepoTags": ["dray:x"],
            "Layers": ["layer.tar"],
        }
        assert json.loads(config) == {
            "architecture": docker_layer.MACHINES[os.uname().machine],
            "os": "linux",
            "created": "2023-11-14T22:13:20Z",
            "config": {
                "Env": ["A=1 2", "B=3"],
                "Cmd": ["dray", "--help"],
                "Labels": {"a.b": "c d", "made": "here"},
            },
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
            "history": [{"created": "2023-11-14T22:13:20Z", "created_by": "dray image build"}],
        }
        assert sorted(path.name for path in tmp_path.iterdir()) == ["image.tar", "inputs", "rootfs"]

    def test_the_same_bytes_whatever_the_files_times_and_order(self, tree, inputs, tmp_path):
        copy = tmp_path / "copy"
        for path in sorted(tree.rglob("*"), reverse=True):
            if path.is_dir() and not path.is_symlink():
                (copy / path.relative_to(tree)).mkdir(parents=True, exist_ok=True)
        shutil.copytree(tree, copy, symlinks=True, dirs_exist_ok=True)
        (copy / "opt" / "b" / "two").unlink()
        os.link(copy / "opt" / "b" / "three", copy / "opt" / "b" / "two")
        os.utime(copy / "opt" / "a" / "one", (1, 1))
        for folder in (tree, copy):
            docker_layer.pack(folder, folder.with_suffix(".tar"), epoch=EPOCH, inputs=inputs, tag="dray:x", labels={})
        assert tree.with_suffix(".tar").read_bytes() == copy.with_suffix(".tar").read_bytes()


class TestMksquashfs:
    """What it must be able to do."""

    def test_this_machine_s_or_the_builder_s(self, tmp_path, monkeypatch):
        said = "\n".join(f"{word:<20} what it does" for word in (*squashfs.argv(tmp_path, tmp_path, epoch=0), "-b"))
        _program(tmp_path / "mksquashfs", f"cat <<'END'\n{said}\nEND")
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        squashfs.require()

    def test_an_old_one(self, tmp_path, monkeypatch):
        """As 4.3 and older are, and builds without zstd."""
        _program(tmp_path / "mksquashfs", "echo '-all-root  -no-xattrs  -comp <gzip, zstd-not-really>' >&2; exit 1")
        monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
        with pytest.raises(UnfitError) as raised:
            squashfs.require()
        assert str(raised.value) == (
            "this mksquashfs cannot write the same bytes every time\n"
            "  wanted: squashfs-tools 4.4 or newer, with zstd\n"
            "  found:  a version without -root-mode -all-time -mkfs-time zstd\n"
            "  fix:    load or install a newer one (module load squashfs-tools; conda install squashfs-tools)\n"
            "          or build with a Docker Engine"
        )


def _program(path: Path, script: str) -> None:
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_paths_in_the_container():
    inside = {"/my work/in": "/dray/100", "/my work/in.tar": "/dray/101.tar"}
    argv = ["--bind", "/my work/in", "/mnt", "/my work/in/a/b", "src=/my work/in.tar,dst=/x"]
    assert [builder_container.renamed(word, inside) for word in argv] == [
        *("--bind", "/dray/100", "/mnt", "/dray/100/a/b", "src=/dray/101.tar,dst=/x"),
    ]
    outside = {name: path for path, name in inside.items()}
    assert builder_container.renamed("cannot read /dray/101.tar", outside) == "cannot read /my work/in.tar"


class TestWays:
    """Which of them this machine has."""

    @pytest.fixture(autouse=True)
    def _no_engine(self, tmp_path, monkeypatch):
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
        monkeypatch.setattr(os, "geteuid", lambda: 0)

    def test_nothing(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(UnfitError) as raised, build.builder.engine():
            pass
        assert str(raised.value) == (
            "this machine has no Apptainer, and no Docker Engine to run it in\n"
            "  found:  no Docker Engine runs on this machine\n"
            "  fix:    install apptainer and squashfs-tools\n"
            "          or install Docker Engine and start it, or set DOCKER_HOST"
        )

    def test_docker_is_there_and_refuses(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        refuse = PermissionError(13, "Permission denied")
        monkeypatch.setattr(docker, "_knock", lambda _: (_ for _ in ()).throw(refuse))
        with pytest.raises(UnfitError) as raised, build.builder.engine():
            pass
        assert str(raised.value).splitlines()[-3:] == [
            "  found:  the Docker Engine refuses this user",
            "  fix:    install apptainer and squashfs-tools",
            "          or add yourself to the docker group (sudo usermod -aG docker $USER) and log in again",
        ]

    def test_root_with_apptainer_only(self, tmp_path, monkeypatch):
        (tmp_path / "apptainer").touch(mode=0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        with pytest.raises(UnfitError) as raised, build.builder.engine():
            pass
        assert str(raised.value) == (
            "this machine has no Apptainer for root, and no Docker Engine to run it in\n"
            "  found:  no Docker Engine runs on this machine\n"
            "  fix:    run it as an ordinary user: Apptainer as root needs more rights than containers grant\n"
            "          or install Docker Engine and start it, or set DOCKER_HOST"
        )


def test_ca_bundle_that_is_not_there(monkeypatch, tmp_path):
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "ca.crt"))
    with pytest.raises(ConfigError) as raised:
        build.builder.certificates()
    assert str(raised.value) == (
        "the CA bundle does not exist\n"
        "  where:  SSL_CERT_FILE\n"
        f"  found:  {tmp_path}/ca.crt\n"
        "  fix:    correct it, or unset SSL_CERT_FILE"
    )


class TestLog:
    """What becomes of a build's errors."""

    def _failed(self, path: Path, error: Exception, *lines: str) -> DrayError:
        with pytest.raises(DrayError) as raised, build_log(path) as line:
            self._fail(line, error, *lines)
        return raised.value

    def _fail(self, line: Callable[[str], None], error: Exception, *lines: str) -> None:
        for each in lines:
            line(each)
        raise error

    def test_a_failure_shows_the_last_lines(self, tmp_path, capsys):
        path = tmp_path / "logs" / "cpu.log"
        error = self._failed(path, BuildError("the build failed"), "dray: step 10-system", "something else")
        assert str(error) == (
            f"the build failed\n  where:  {path}\n  found:  dray: step 10-system\n          something else"
        )
        assert capsys.readouterr() == ("", "dray: step 10-system\n")
        assert path.read_text() == "dray: step 10-system\nsomething else\n"
        # What dray says by itself has nothing to do with the lines before.
        assert str(self._failed(path, ConfigError("wrong"), "dray: wheels")) == "wrong"

    def test_two_builds_at_once(self, tmp_path):
        path = tmp_path / "cpu.log"
        with build_log(path) as first:
            first("first")
            with pytest.raises(DrayError) as raised, build_log(path):
                pass
        assert str(raised.value) == (
            f"another build of this image is running\n  where:  {path}\n  fix:    wait for it, or end it"
        )
        assert path.read_text() == "first\n"
        with build_log(path) as after:
            after("after")
        assert path.read_text() == "after\n"

    @pytest.mark.parametrize(
        ("error", "lines"),
        [
            (OSError(28, "No space left on device"), ()),
            (DrayError("x"), ("dpkg: error: cannot copy: No space left on device",)),
            (DrayError("pip", found="[Errno 28] No space left on device"), ()),
        ],
    )
    def test_a_full_disk(self, error, lines, tmp_path):
        full = self._failed(tmp_path / "logs" / "cpu.log", error, *lines)
        assert str(full).startswith(f"the disk is full\n  where:  {tmp_path}\n  found:  ")
        assert full.exit_code == 69


@pytest.mark.skipif(os.geteuid() != 0, reason="root becomes an ordinary user")
def test_a_base_without_root(tmp_path):
    """mmdebstrap's own words are: unable to pick chroot mode automatically."""
    script = (ROOT / "containers" / "base" / "make-base.sh").read_text()
    argv = ["/bin/bash", "-s", "bookworm", str(tmp_path / "base.tar")]
    env = {"PATH": "/nonexistent", "BASH_FUNC_mmdebstrap%%": "() { :; }"}
    ended = subprocess.run(argv, input=script, env=env, user=65534, group=65534, extra_groups=[], capture_output=True,
                           text=True, check=False)  # fmt: skip
    assert (ended.returncode, ended.stderr) == (
        69,
        "make-base: an ordinary user needs newuidmap, and ranges of user numbers in /etc/subuid and /etc/subgid\n"
        "  fix:    run it as root; or, as root: apt-get install uidmap, and usermod --add-subuids 100000-165535 "
        "--add-subgids 100000-165535 USER\n",
    )


def test_what_the_builder_is_made_from(root, tmp_path, monkeypatch):
    """Every file that the Containerfile copies, with the user's mirrors; its key changes with each but those."""
    shutil.copytree(root / "containers", tmp_path / "a checkout" / "containers", symlinks=True)
    mirror = tmp_path / "mirrors.toml"
    mirror.write_text('[mirrors]\n"http://mirror.example/debian" = "https://site.example/debian"\n')
    mirror.chmod(0o600)
    monkeypatch.setenv("DRAY_MIRRORS", str(mirror))
    folder = tmp_path / "context"
    folder.mkdir()
    builder.lay_out(tmp_path / "a checkout", folder)
    found = {path.name: path.read_text() for path in folder.iterdir()}
    text = found["Containerfile"]
    copied = {name for line in re.findall(r"^COPY ((?!--).*) \S+$", text, re.MULTILINE) for name in line.split()}
    assert found.keys() == copied | {"Containerfile"}
    assert found["mirrors.sed"] == mirrors.sed() != ""
    assert [path.name for path in builder._read(root)] == ["debian.sh", "Containerfile", "tools.sh", "tools.lock"]


def test_the_builders_tools_are_pinned(root):
    head, *lines = (root / "containers" / "cluster" / "tools.lock").read_text().splitlines()
    assert re.fullmatch(r"# archive \d{8}T\d{6}Z", head)
    rows = [line.split() for line in lines]
    assert [(name, machine) for name, _, machine, _, _ in rows] == [
        (name, machine) for name in ("apptainer", "squashfs-tools") for machine in ("amd64", "arm64")
    ]
    for name, version, machine, digest, path in rows:
        assert re.fullmatch("[0-9a-f]{64}", digest)
        assert path.endswith(f"/{name}_{version.rpartition(':')[2]}_{machine}.deb")


def test_the_builder_is_what_this_checkout_has_built(root, tmp_path, monkeypatch):
    """And no image of anybody's that has its label or its tag."""
    shutil.copytree(root / "containers", tmp_path / "containers", symlinks=True)
    there: set[str] = set()
    asked: list[str] = []

    class Images:
        def get(self, name: str) -> SimpleNamespace:
            asked.append(name)
            if name not in there:
                raise ImageNotFound(name)
            return SimpleNamespace(id=name)

    def build(*_, **__):
        there.add(f"sha256:{len(there)}")
        return f"sha256:{len(there) - 1}"

    monkeypatch.setattr(builder.docker, "build", build)
    monkeypatch.setattr(builder.docker, "base_image", lambda *_, **__: "base")
    client = SimpleNamespace(images=Images())
    assert [builder.image(client, tmp_path, print) for _ in range(2)] == ["sha256:0", "sha256:0"]
    there.clear()  # docker image prune
    there.add("dray:builder")
    assert builder.image(client, tmp_path, print) == "sha256:1"
    assert set(asked) == {"sha256:0"}
    with (tmp_path / "containers" / "cluster" / "tools.sh").open("a") as tools:
        tools.write("# newer\n")
    assert builder.image(client, tmp_path, print) == "sha256:2"
