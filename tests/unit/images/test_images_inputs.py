"""The folder of a build's inputs, and the descriptions that it is made from."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from dray.config.image_definition import ACCELERATORS, Image
from dray.config.load_toml import load
from dray.contract.findings import ConfigError
from dray.images import inputs
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
    """A new variant is a folder with image.toml and requirements, and a line in config/image_definition.py."""
    folder = checkout / "containers" / "cpu"
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
