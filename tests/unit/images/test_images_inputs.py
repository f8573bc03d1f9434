"""The folder of a build's inputs, and the descriptions that it is made from."""

from __future__ import annotations

import hashlib
import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from dray.config.image import ACCELERATORS, Image
from dray.config.model import load
from dray.contract.findings import ConfigError
from dray.images import inputs
from dray.images.fetch import debs
from dray.images.inputs import BuildContext
from dray.images.locks import lock

HOSTILE = "p a$s'\"`id`;\\"
VARIANTS = tuple(ACCELERATORS)


@pytest.fixture
def checkout(root, tmp_path) -> Path:
    """The real containers/, in a folder with a space."""
    copy = tmp_path / "my work"
    shutil.copytree(root / "containers", copy / "containers", symlinks=True)
    (copy / "debs").mkdir()
    for name in ("b_1_all.deb", "a_1%3a2_amd64.deb", "base.sha256"):
        (copy / "debs" / name).write_text(name)
    for name in ("w-1-py3-none-any.whl", "dray-1-py3-none-any.whl"):
        (copy / name).write_text(name)
    return copy


def laid_out(checkout: Path, image: Image) -> Path:
    return inputs.lay_out(
        checkout,
        image,
        fetched=[checkout / "w-1-py3-none-any.whl"],
        own=checkout / "dray-1-py3-none-any.whl",
        packages=checkout / "debs",
        base="sha256:base",
    )


def described(variant: str, **more: object) -> Image:
    return Image.model_validate({"variant": variant, "base": f"x@sha256:{'0' * 64}", "python": "3.11", **more})


def test_everything_a_build_reads(root, checkout):
    image = described(
        "cuda",
        architectures=["8.0", "9.0"],
        driver="580.1",
        environment={"ODD": HOSTILE},
        labels={"a.b": 'say "$HOME" \\o/'},
    )
    folder = laid_out(checkout, image)
    assert folder == checkout / "build" / "inputs" / "cuda"
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == sorted(
        [
            *("Containerfile", "dray.def", "environment", "image.env", "labels", "requirements.lock", "build.lock"),
            *("wheels/w-1-py3-none-any.whl", "dray/dray-1-py3-none-any.whl"),
            *(f"debs/{name}" for name in ("b_1_all.deb", "a_1%3a2_amd64.deb", "base.sha256")),
            *(f"steps/{path.name}" for path in (root / "containers" / "steps").iterdir() if path.is_file()),
        ]
    )
    epoch = lock.epoch(root / "containers" / "cuda" / "requirements.lock")
    assert (folder / "image.env").read_text() == (
        "DRAY_VARIANT=cuda\nDRAY_PYTHON=3.11\nDRAY_ACCELERATOR=cuda\nDRAY_ARCHITECTURES='8.0;9.0'\nDRAY_DRIVER=580.1\n"
        f"DRAY_BASE=sha256:base\nSOURCE_DATE_EPOCH={epoch}\n"
    )
    assert (folder / "labels").read_text() == 'a.b say "$HOME" \\o/\n'
    environment = (folder / "environment").read_text().splitlines()
    assert environment[-1] == f"ODD={shlex.quote(HOSTILE)}"
    assert [line.partition("=")[0] for line in environment] == [
        *("PATH", "PYTHONNOUSERSITE", "PYTHONDONTWRITEBYTECODE", "PYTHONUNBUFFERED", "ODD")
    ]
    recipe = (folder / "Containerfile").read_text()
    shared = (root / "containers" / "Containerfile").read_text()
    assert recipe.startswith(shared)
    assert recipe.removeprefix(shared).splitlines()[-2:] == [
        'ENV ODD="p a\\$s\'\\"`id`;\\\\"',
        'LABEL a.b="say \\"\\$HOME\\" \\\\o/"',
    ]


def test_the_steps_see_values_as_they_are(checkout):
    folder = laid_out(checkout, described("cpu", environment={"ODD": HOSTILE}))
    # As the definition puts it into the image.
    script = 'eval "$(sed "s/^/export /" "$1")"; printf %s "$ODD"'
    shown = subprocess.run(
        ["bash", "-c", script, "-", folder / "environment"], capture_output=True, text=True, check=True
    )
    assert shown.stdout == HOSTILE


def test_a_variant_s_own_definition_or_the_shared_one(checkout):
    """A new variant is a folder with image.toml and requirements, and a line in config/image.py."""
    folder = checkout / "containers" / "cpu"
    for name in ("dray-cpu.def", "Containerfile"):
        (folder / name).unlink()
    made = laid_out(checkout, described("cpu"))
    assert (made / "dray.def").read_bytes() == (folder.parent / "dray.def").read_bytes()
    assert (made / "Containerfile").read_text().startswith((folder.parent / "Containerfile").read_text())
    (folder / "dray-cpu.def").write_text("own")
    (folder / "Containerfile").write_text("own\n")
    made = laid_out(checkout, described("cpu"))
    assert (made / "dray.def").read_text() == "own"
    assert (made / "Containerfile").read_text().startswith("own\n")


def test_laid_out_anew_each_time(checkout):
    folder = laid_out(checkout, described("cpu"))
    (folder / "left-over").touch()
    (folder / "steps" / "__pycache__").mkdir()
    (checkout / "containers" / "steps" / "__pycache__").mkdir(exist_ok=True)
    laid_out(checkout, described("cpu"))
    assert not (folder / "left-over").exists()
    assert not (folder / "steps" / "__pycache__").exists()


def test_one_digest_for_all_of_it(checkout):
    image = described("cpu")
    folder = laid_out(checkout, image)

    def digest(base: str = "here") -> str:
        return BuildContext(image=image, inputs=folder, base=Path(base)).digest

    first = digest()
    assert digest("there") == first  # a path is no content
    laid_out(checkout, image)
    for name in ("SHA256SUMS", "README.md", "builder.tar", "base.tar"):  # what a bundle adds
        (folder / name).touch()
    assert digest() == first
    (folder / "steps" / "lib.sh").write_text("changed")
    assert digest() != first


def test_unknown_variant(root):
    with pytest.raises(ConfigError) as raised:
        inputs.image(root, "cpuu")
    assert raised.value.details == {
        "where": str(root / "containers"),
        "wanted": ", ".join(VARIANTS),
        "found": "cpuu",
    }


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_is_described(root, variant):
    image = inputs.image(root, variant)
    folder = root / "containers" / variant
    assert image.variant == variant
    assert (folder / f"dray-{variant}.def").resolve() == root / "containers" / "dray.def"
    assert (folder / "Containerfile").resolve() == root / "containers" / "Containerfile"
    lock.require_fresh(root, image)
    torch = {pin.name: pin for pin in lock.read(folder / "requirements.lock")}["torch"]
    versions = {
        "cpu": "2.13.0",
        "cuda": "2.13.0",
        "cuda12": "2.9.1",
        "rocm": "2.10.0+rocm7.1",
        "rocm6": "2.8.0+rocm6.4",
    }
    assert torch.version == versions[variant]
    described = image.labels["org.opencontainers.image.description"]
    assert described.endswith(f"for ROCm {torch.version.partition('+rocm')[2]}") == (image.accelerator == "rocm")


@pytest.mark.parametrize(
    ("written", "changed"),
    [
        ("@sha256:", "@sha25:"),
        ('variant = "cpu"', 'variant = "tpu"'),
        ('python = "3.11"', 'python = "311"'),
        ('name = "torch"', 'name = "To rch"'),
        ('sha256 = ["', 'sha256 = ["x'),
        ("[labels]", "[label]"),
    ],
)
def test_what_an_image_cannot_be(root, tmp_path, written, changed):
    text = (root / "containers" / "cpu" / "image.toml").read_text()
    assert written in text
    (tmp_path / "image.toml").write_text(text.replace(written, changed, 1))
    with pytest.raises(ConfigError, match="1 error"):
        load(Image, tmp_path / "image.toml")


class TestDebian:
    """What an image would have against what is locked."""

    HASH = "6d7b1f1b4a0b0b86a2b3a1c4b4f8b3a0"

    @pytest.mark.parametrize(
        ("locked", "fetched", "installed", "told"),
        [
            ("a 1:2 amd64", "a_1%3a2_amd64", "", []),
            ("a 1:2 amd64", "", "a 1:2 amd64", []),  # the base has it
            ("a 1:2 amd64", "a_1%3a2_amd64", "a 1:1 amd64", []),  # and an older one is replaced
            ("a 0.9 all", "a_1_all", "", ["a 0.9 -> 1"]),
            ("a 1 all", "a_1_amd64", "", ["a 1 -> 1"]),
            ("", "a_1_all", "", ["a none -> 1"]),
            ("a 1 all", "", "", ["a 1 -> none"]),
            ("a 1 all", "", "a 2 all", ["a 1 -> 2, in the base"]),
            ("a 1 all base", "", "a 2 all", []),  # the base's own file
            ("a 1 all base", "a_1_all", "", []),
            ("a 1 all base", "a_2_all", "", ["a 1 -> 2"]),
            ("a 1 all base", "", "", []),  # a site's base without it
            ("", "", "b 1 all", []),
        ],
    )
    def test_differences(self, tmp_path, locked, fetched, installed, told):
        folder = tmp_path / "debs"
        folder.mkdir()
        digest = ""
        if fetched:
            (folder / f"{fetched}.deb").write_text(fetched)
            digest = hashlib.sha256(fetched.encode()).hexdigest()
        (folder / debs.INSTALLED).write_text(f"{installed}\n" if installed else "")
        lock_file = tmp_path / "debian.lock"
        name, *rest = locked.split(" base")
        line = f"{name} {digest or self.HASH}{' base' if rest else ''}\n" if locked else ""
        lock_file.write_text(f"# archive 20261126T181055Z\n{line}")
        assert debs.differences(folder, lock_file) == told

    def test_other_bytes_of_the_same_version(self, tmp_path):
        (tmp_path / "a_1_all.deb").write_text("other")
        (tmp_path / debs.INSTALLED).touch()
        (tmp_path / "debian.lock").write_text(f"a 1 all {self.HASH}\n")
        assert debs.differences(tmp_path, tmp_path / "debian.lock") == ["a 1 -> 1"]

    @pytest.mark.parametrize("architecture", ["amd64", "arm64"])
    def test_the_real_lock_is_of_all_that_is_needed(self, root, architecture):
        asked = {line.split("#")[0].strip() for line in (root / "containers" / "debian.in").read_text().splitlines()}
        head, *rest = debs.lock_file(root, architecture).read_text().splitlines()
        lines = [line.split() for line in rest]
        assert re.fullmatch(r"# archive \d{8}T\d{6}Z", head)
        assert asked - {""} <= {name for name, *_ in lines}
        assert {one[2] for one in lines} <= {architecture, "all"}
        # What the slim image has not, though many a base that is made by hand has it.
        on_top = {one[0] for one in lines if len(one) == 4}
        assert {"ca-certificates", "libssl3", "openssl", "perl"} <= on_top
        assert {"libc6", "perl-base", "zlib1g"} & on_top == set()

    @pytest.mark.parametrize("check", [True, False])
    def test_each_architecture_has_a_lock_of_its_own(self, tmp_path, monkeypatch, check):
        """A check writes nothing."""
        (tmp_path / "containers").mkdir()
        before = "# archive 20200101T000000Z\na 1 amd64 0\n"
        debs.lock_file(tmp_path, "amd64").write_text(before)

        def download(_checkout, folder, *, locked, architecture, **_):
            folder.mkdir()
            (folder / f"a_2_{architecture}.deb").write_text(architecture)
            (folder / f"libc6_1_{architecture}.deb").write_text(architecture)
            (folder / debs.INSTALLED).write_text("libc6 0.9 amd64\n")
            assert locked == ""

        monkeypatch.setattr(debs, "_download", download)
        changed = debs.update_locks(tmp_path, base=tmp_path, say=print, check=check)
        assert changed == [
            *("amd64: a 1 -> 2", "amd64: libc6 none -> 1", "arm64: a none -> 2", "arm64: libc6 none -> 1"),
        ]
        written = {path.name: path.read_text() for path in sorted((tmp_path / "containers").iterdir())}
        if check:
            assert written == {"debian-amd64.lock": before}
            return
        for architecture in ("amd64", "arm64"):
            digest = hashlib.sha256(architecture.encode()).hexdigest()
            head, *lines = written.pop(f"debian-{architecture}.lock").splitlines()
            assert re.fullmatch(r"# archive \d{8}T\d{6}Z", head)
            assert lines == [f"a 2 {architecture} {digest}", f"libc6 1 {architecture} {digest} base"]
        assert written == {}
