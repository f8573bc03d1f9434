"""Builds for real, of an image of one small step: the real definition, Containerfile, builder and packers."""

from __future__ import annotations

import json
import os
import re
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tarfile
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from dray.clients import builder, docker
from dray.contract.findings import UnfitError
from dray.images.fetch import debs
from dray.images.sif import format as sif_format
from helpers import ROOT, builders

# The copy has this variant only in name; no other test has an image of it.
VARIANT = "cuda12"
MARK = f"mark-{secrets.token_hex(8)}"
CONTROL = "control-word-of-the-step"
PYTHON = "/usr/bin/python3"
STEP = f"""#!/usr/bin/env bash
source "$(dirname "$0")/lib.sh"
log::line "sees $(ls "$INPUTS" | tr '\\n' ' ')and $(ls /sys/class/net)"
mkdir -p "$VENV/bin"
ln -s /bin/true "$VENV/bin/python3" # which the definition's %test calls
echo {CONTROL} >"$VENV/control"
[[ ! -e $INPUTS/steps/differ ]] || date +%N >"$VENV/now"
[[ ! -e $INPUTS/steps/fail ]] || {{ echo "it went wrong here"; exit 5; }}
"""


@dataclass(frozen=True)
class Checkout:
    """A copy of the checkout whose image has one small step of its own."""

    path: Path
    base: Path

    def dray(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.argv(*words), env=self.env(), cwd=self.path, capture_output=True, text=True, check=False
        )

    def argv(self, *words: str | Path) -> list[str | Path]:
        return [sys.executable, "-m", "dray", "image", *words]

    def env(self) -> dict[str, str]:
        # The one package of these images is in no lock.
        debian = {"DRAY_IMAGE_DEBIAN": "current"}
        return {**os.environ, "DRAY_HOME": str(self.path), "DRAY_IMAGE_BASE": str(self.base), **debian}

    def build(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        return self.dray("build", VARIANT, *words)

    @property
    def sif(self) -> Path:
        return self.path / "build" / f"dray-{VARIANT}.sif"

    def left(self) -> list[str]:
        """What lies in build/ besides what belongs there."""
        known = {"base", "debs", "wheels", "inputs", "logs", "failed", "operators"}
        return sorted(path.name for path in (self.path / "build").iterdir() if path.name not in known)


# What no step of these images reads, and every build would pack.
LEFT_OUT = re.compile(r"(\./)?usr/(share/(doc|locale|man|zoneinfo)|lib/\w+-linux-gnu/gconv)/")


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    named = os.environ.get("DRAY_IMAGE_BASE") or builder.made_base(ROOT, "bookworm")
    if not named:
        make = "containers/base/make-base.sh bookworm build/base/bookworm.tar"
        if os.environ.get("DRAY_TEST_ALL") == "1":
            pytest.fail(f"DRAY_TEST_ALL=1, and there is no base: {make}")
        pytest.skip(f"there is no base: {make}")
    small = tmp_path_factory.mktemp("base") / "small.tar"
    with tarfile.open(named) as whole, tarfile.open(small, "w") as tar:
        for member in whole:
            if not LEFT_OUT.match(member.name):
                tar.addfile(member, whole.extractfile(member) if member.isreg() else None)
    return small


@pytest.fixture(scope="module")
def client():
    with closing(docker.client()) as client:
        try:
            builder.image(client, ROOT, on_line=lambda line: None)
        except UnfitError as error:
            if os.environ.get("DRAY_TEST_ALL") == "1":
                raise
            pytest.skip(f"{error.problem} (set DRAY_CLUSTER_BASE)")
        yield client


@pytest.fixture(scope="module")
def checkout(client, base, tmp_path_factory) -> Checkout:
    """Named once, since fetching from Debian takes a moment; it asks Debian for one small package."""
    path = tmp_path_factory.mktemp("images") / "my work"
    shutil.copytree(ROOT / "containers", path / "containers")
    shutil.copytree(ROOT / "src", path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "hatch_build.py", "README.md", ".gitignore"):
        shutil.copy(ROOT / name, path)
    containers = path / "containers"
    for step in (containers / "steps").glob("[0-9]*"):
        step.unlink()
    (containers / "steps" / "30-look.sh").write_text(STEP)
    (containers / "debian.in").write_text("hello-traditional\n")
    debs.lock_file(containers.parent).write_text("")
    (containers / VARIANT / "requirements.in").write_text("")
    image = (containers / VARIANT / "image.toml").read_text()
    (containers / VARIANT / "image.toml").write_text(
        re.sub(r"\[\[(vendor|source)\]\].*?\n\n", "", image, flags=re.DOTALL)
    )
    (path / "build").mkdir()
    (path / "build" / "base").symlink_to(ROOT / "build" / "base")
    made = Checkout(path, base)
    # dray's own dependencies are in every lock; nothing here needs them.
    pyproject = (path / "pyproject.toml").read_text()
    (path / "pyproject.toml").write_text(
        re.sub(r"^dependencies = \[.*?^\]", "dependencies = []", pyproject, flags=re.DOTALL | re.MULTILINE)
    )
    locked = made.dray("lock", VARIANT)
    assert locked.returncode == 0, locked.stderr
    return made


@pytest.fixture(autouse=True)
def _nothing_stays(client, checkout):
    yield
    assert builders(client, checkout.path) == []


pytestmark = pytest.mark.docker


@pytest.mark.slow
def test_nothing_of_the_host_stays_in_an_image(checkout, client, tmp_path, monkeypatch):
    bundle = tmp_path / "ca.crt"
    shutil.copy("/etc/ssl/certs/ca-certificates.crt", bundle)
    with bundle.open("a") as file:
        file.write(f"# {MARK}\n")
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    monkeypatch.setenv("no_proxy", f"{MARK}.invalid")
    tag = f"dray:{VARIANT}"
    try:
        built = checkout.build("--format", "sif", "--format", "docker", "--twice")
        assert built.returncode == 0, built.stderr
        inputs = "Containerfile debs dray dray.def environment image.env labels requirements.lock sources steps wheels"
        assert built.stderr.splitlines().count(f"dray: sees {inputs} and lo") == 2
        image = client.images.get(tag)
        container = client.containers.create(image, name="dray-test-tiny")
        try:
            content = b"".join(container.export())
        finally:
            container.remove(force=True)
        assert content.count(CONTROL.encode()) == 1
        assert content.count(MARK.encode()) == 0
        assert MARK not in json.dumps([image.attrs, client.api.history(image.id)])
        unpacked = tmp_path / "unpacked"
        offset = str(sif_format.read(checkout.sif).system.offset)
        argv = ["unsquashfs", "-offset", offset, "-d", str(unpacked), str(checkout.sif)]
        done = builder.tool(argv, binds={tmp_path: True, checkout.sif: False})
        assert done.code == 0, done.err
        marks = [word for mark in (CONTROL, MARK, str(checkout.path)) for word in ("-e", mark)]
        grep = ["grep", "-rlaF", *marks, unpacked]
        found = subprocess.run(grep, capture_output=True, text=True, check=False)
        assert found.stdout.split() == [f"{unpacked}/opt/dray/control"]
        # What is there of the same inputs is not built again.
        again = checkout.build("--format", "sif", "--format", "docker")
        assert "the image exists, built from the same inputs" in again.stderr
        digests = re.findall(r"sha256:\w+", built.stdout)
        assert len(digests) == 2
        assert re.findall(r"sha256:\w+", again.stdout) == digests
        # A Docker image that was removed is built again, and is the same.
        client.images.remove(tag, force=True)
        alone = checkout.build("--format", "docker")
        assert alone.returncode == 0, alone.stderr
        assert re.findall(r"sha256:\w+", alone.stdout) == digests[1:]
    finally:
        if client.images.list(tag):
            client.images.remove(tag, force=True)


COMPILE = """#!/usr/bin/env bash
source "$(dirname "$0")/lib.sh"
if wheel=$(kept::wheel operators); then
    log::line "uses what was kept"
else
    log::line "compiles"
    wheel=/var/lib/operators-1-py3-none-any.whl
    echo operators >"$wheel"
    kept::keep "$wheel"
fi
cp "$wheel" "$VENV/operators"
rm -f /var/lib/operators-*
"""


@pytest.mark.slow
def test_what_was_compiled_once_is_kept(checkout):
    """The image has the same bytes, and its record says the same, whether a build compiles or finds the wheel."""

    def build(*words: str) -> tuple[list[str], bytes, bytes]:
        built = checkout.build(*words)
        assert built.returncode == 0, built.stderr
        told = [line for line in built.stderr.splitlines() if "compile" in line or line == "dray: uses what was kept"]
        return told, checkout.sif.read_bytes(), checkout.sif.with_name(f"{checkout.sif.name}.json").read_bytes()

    step = checkout.path / "containers" / "steps" / "55-compile.sh"
    step.write_text(COMPILE)
    try:
        told, image, record = build("--twice")
        assert [line for line in told if "step" not in line] == ["dray: compiles", "dray: compiles"]
        (wheel,) = (checkout.path / "build" / "operators").glob("*/*.whl")
        wheel.chmod(0o666)
        writable = "is a file that others may write, mode 0666"
        reason = f"dray: compile DeepSpeed's operators again: {wheel.parent} {writable}"
        for words, expected in (
            (("--force",), [reason, "dray: compiles"]),
            (("--force",), ["dray: uses what was kept"]),
            (("--twice",), ["dray: uses what was kept", "dray: compiles"]),
        ):
            told, again, its_record = build(*words)
            assert [line for line in told if "step" not in line] == expected
            assert (again, its_record) == (image, record)
    finally:
        step.unlink()


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="who builds is another user only for root")
def test_roots_umask_changes_nothing(checkout, tmp_path):
    """Neither what root fetches nor, once others may read it, a clone that only root reads."""
    first = checkout.build()
    assert first.returncode == 0, first.stderr
    folder, base = tmp_path / "my work", tmp_path / "base.tar"
    shutil.copytree(checkout.path, folder, symlinks=True, ignore=shutil.ignore_patterns("*.sif*", "inputs", "dray"))
    shutil.copytree(checkout.path / "src" / "dray", folder / "src" / "dray")
    shutil.copy(checkout.base, base)
    for path in (base, folder, *folder.rglob("*")):
        if not path.is_symlink():
            path.chmod(path.stat().st_mode & 0o700)
    mine = Checkout(folder, base)
    build = partial(
        subprocess.run, mine.argv("build", VARIANT), env=mine.env(), cwd=folder, umask=0o077, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    refused = build()
    assert refused.returncode == 69
    assert f"fix:    chmod -R a+rX '{folder}/src'\n" in refused.stderr
    subprocess.run(["chmod", "-R", "a+rX", folder, base], check=True)
    built = build()
    assert built.returncode == 0, built.stderr
    assert mine.sif.read_bytes() == checkout.sif.read_bytes()


def test_a_step_that_fails(checkout):
    checkout.sif.parent.mkdir(exist_ok=True)
    before = checkout.sif.read_bytes() if checkout.sif.exists() else None
    flag = checkout.path / "containers" / "steps" / "fail"
    flag.touch()
    try:
        failed = checkout.build("--force")
    finally:
        flag.unlink()
    assert failed.returncode == 1
    assert "\n          it went wrong here\n" in failed.stderr
    assert f"  where:  {checkout.path}/build/logs/{VARIANT}.log\n" in failed.stderr
    assert "  fix:    a shell where it failed: apptainer shell --writable " in failed.stderr
    assert failed.stderr.endswith(f" {shlex.quote(f'{checkout.path}/build/failed/{VARIANT}/rootfs')}\n")
    assert (
        checkout.path / "build" / "failed" / VARIANT / "rootfs" / "opt" / "dray" / "control"
    ).read_text() == f"{CONTROL}\n"
    assert (checkout.sif.read_bytes() if checkout.sif.exists() else None) == before
    assert all(not name.startswith(".dray") for name in checkout.left())


@pytest.mark.slow
def test_two_builds_that_differ_are_refused(checkout):
    flag = checkout.path / "containers" / "steps" / "differ"
    flag.touch()
    try:
        differing = checkout.build("--twice")
    finally:
        flag.unlink()
    assert differing.returncode == 1
    assert "two builds from the same inputs differ" in differing.stderr
    assert "/opt/dray/now differ\n" in differing.stderr
    for number in (1, 2):
        assert (checkout.path / "build" / "failed" / VARIANT / f"{number}-image.sif").is_file()


@pytest.mark.parametrize("number", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGTERM])
def test_interrupted_build_leaves_the_old_image_and_no_container(checkout, tmp_path, number):
    out = tmp_path / "my images" / f"dray-{VARIANT}.sif"
    out.parent.mkdir()
    out.write_text("old")
    # Where the tests run in the background, a shell has made them deaf to SIGINT.
    argv = ["env", "--default-signal", *checkout.argv("build", VARIANT, "--out", out)]
    with subprocess.Popen(argv, cwd=checkout.path, env=checkout.env(), stderr=subprocess.PIPE, text=True) as build:
        assert build.stderr
        said = []
        for line in build.stderr:
            said += [line] if line.startswith("dray: step") else []
            if said == ["dray: step 30-look\n"] and line == said[0]:  # once: the builder's last lines may come again
                build.send_signal(number)
        assert build.wait() == 130, said
    assert said[0] == "dray: step 30-look\n"
    assert out.read_text() == "old"
    assert list(out.parent.iterdir()) == [out]


@pytest.fixture(scope="module")
def bundle(checkout, tmp_path_factory) -> Path:
    out = tmp_path_factory.mktemp("bundles") / "a bundle"
    made = checkout.dray("bundle", VARIANT, "--out", out)
    assert made.returncode == 0, made.stderr
    return out


class TestBundle:
    @pytest.mark.slow
    def test_builds_the_same_image_without_a_network(self, checkout, bundle, tmp_path, client):
        first = checkout.build()
        assert first.returncode == 0, first.stderr
        away = tmp_path / "away"
        # No index and no archive: every name that is looked up is refused.
        env = {
            **checkout.env(),
            "https_proxy": "http://127.0.0.1:9",
            "http_proxy": "http://127.0.0.1:9",
        }
        argv = checkout.argv("build", VARIANT, "--bundle", bundle, "--out", away / "second.sif")
        second = subprocess.run(argv, env=env, cwd=checkout.path, capture_output=True, text=True, check=False)
        assert second.returncode == 0, second.stderr
        assert (away / "second.sif").read_bytes() == checkout.sif.read_bytes()

    @pytest.mark.slow
    def test_docker_alone_builds_from_it(self, bundle, client):
        """The commands of the bundle's README."""
        readme = (bundle / "README.md").read_text()
        lines = re.findall(r"^    (docker .*)$", readme, re.MULTILINE)
        script = "\n".join(["set -e", *lines]).replace(f"dray:{VARIANT}", "dray-test:bundle")
        try:
            done = subprocess.run(["bash", "-c", script], cwd=bundle, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout + done.stderr
            assert "dray: sees" in done.stdout
            out = client.containers.run("dray-test:bundle", ["cat", "/opt/dray/control"], remove=True)
            assert out == f"{CONTROL}\n".encode()
            assert "PYTHONNOUSERSITE=1" in client.images.get("dray-test:bundle").attrs["Config"]["Env"]
        finally:
            for tag in ("dray-test:bundle", "dray-base:bundle"):
                if client.images.list(tag):
                    client.images.remove(tag, force=True)

    def test_what_did_not_arrive_is_named(self, checkout, bundle, tmp_path):
        copy = tmp_path / "bundle"
        shutil.copytree(bundle, copy)
        (copy / "steps" / "30-look.sh").write_text("echo changed\n")
        (copy / "labels").unlink()
        (copy / "more").touch()
        refused = checkout.build("--bundle", copy)
        assert refused.returncode == 78
        assert refused.stderr.partition("dray: the bundle ")[2] == (
            "differs from its checksums\n"
            f"  where:  {copy}\n"
            "  found:  labels\n"
            "          more\n"
            "          steps/30-look.sh\n"
            "  fix:    copy it again\n"
        )

    def test_no_bundle_and_another_variant_s(self, checkout, bundle, tmp_path):
        refused = checkout.build("--bundle", tmp_path)
        assert (refused.returncode, "dray: not a bundle" in refused.stderr.splitlines()) == (78, True)
        refused = checkout.dray("build", "cuda", "--bundle", bundle)
        assert (refused.returncode, "dray: the bundle is for another image" in refused.stderr.splitlines()) == (
            78,
            True,
        )

    def test_a_folder_that_is_there_is_not_overwritten(self, checkout, bundle):
        refused = checkout.dray("bundle", VARIANT, "--out", bundle)
        assert refused.returncode == 78
        assert "the bundle's folder exists already" in refused.stderr


def test_a_base_that_cannot_be_pulled(checkout):
    """Its digest is unknown to every registry, where one is reached at all."""
    base = f"debian@sha256:{'0' * 64}"
    refused = checkout.build("--base", base)
    assert refused.returncode == 69
    said = refused.stderr.splitlines()
    (start,) = (at for at, line in enumerate(said) if line.startswith("dray: the base cannot be pulled"))
    assert said[start + 1] == f"  wanted: docker://{base}"
    assert said[start + 2].startswith("  found:  FATAL: ")
    assert said[-1].endswith("or make one: containers/base/make-base.sh bookworm build/base/bookworm.tar")
    assert all(not name.startswith(".dray") for name in checkout.left())


def test_a_base_that_is_no_root_filesystem(checkout, tmp_path):
    """Such as a tar of docker save."""
    (tmp_path / "manifest.json").write_text("[]")
    base = tmp_path / "a base.tar"
    with tarfile.open(base, "w") as tar:
        tar.add(tmp_path / "manifest.json", "manifest.json")
    refused = checkout.build("--base", base)
    assert refused.returncode == 78
    assert "dray: the base is not a root filesystem\n" in refused.stderr
    assert f"  where:  {base}\n" in refused.stderr


def test_nothing_to_build_with(checkout, tmp_path, monkeypatch):
    """It is told before anything is fetched."""
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/docker.sock")
    (tmp_path / "stat").symlink_to("/usr/bin/stat")
    monkeypatch.setenv("PATH", str(tmp_path))
    refused = checkout.build()
    assert refused.returncode == 69
    assert refused.stderr.partition("error   ")[2] == (
        "this machine has no Apptainer, and no Docker Engine to run it in: no Docker Engine runs on this machine\n"
        "        fix:    install apptainer and squashfs-tools\n"
        "                or install Docker Engine and start it, or set DOCKER_HOST\n"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="root makes the small disk")
def test_a_full_disk(checkout, tmp_path):
    small = tmp_path / "small disk"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8m", "dray-test", small], check=True)
    try:
        early = checkout.build("--force", "--out", small / "x.sif")
        about = checkout.path / "containers" / VARIANT / "image.toml"
        text = about.read_text()
        about.write_text(re.sub(r"\[size\](\n.+)+", "", text))  # as if somebody else had filled it since then
        refused = checkout.build("--force", "--out", small / "x.sif")
        about.write_text(text)
        left = list(small.iterdir())
    finally:
        subprocess.run(["umount", small], check=True)
    assert early.returncode == 69
    assert re.search(
        rf"^error   image {VARIANT}: a build needs .* in {small}, which has 0.0 GB free$", early.stderr, re.M
    )
    assert refused.returncode == 69
    assert refused.stderr.splitlines()[-4:] == [
        "dray: the disk is full",
        f"  where:  {small}",
        "  found:  0.0 GB free; dray doctor --build VARIANT shows what a build needs",
        "  fix:    make room",
    ]
    assert left == []


@pytest.mark.slow
def test_debian_packages_that_have_moved_on_are_refused_or_told(checkout):
    lock = debs.lock_file(checkout.path)
    lock.write_text(f"hello-traditional 1.0-0 amd64 {'0' * 64}\n")
    try:
        refused = checkout.build("--debian", "locked")
        built = checkout.build()
    finally:
        lock.write_text("")
    assert refused.returncode == 78
    assert "dray: Debian's packages are not as locked\n" in refused.stderr
    assert built.returncode == 0, built.stderr
    told = [line for line in built.stderr.splitlines() if line.startswith("dray: not as locked")]
    assert len(told) == 1
    assert re.fullmatch(r"dray: not as locked: hello-traditional 1\.0-0 -> \d\S+", told[0])
