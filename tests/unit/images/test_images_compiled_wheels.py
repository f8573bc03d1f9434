"""The wheel with DeepSpeed's operators: what it is kept by, and when a kept one is used."""

from __future__ import annotations

import os
from pathlib import Path
from zipfile import ZipFile

import pytest

from dray.config.image_definition import Image
from dray.images import inputs
from dray.images.fetch import compiled_wheels
from dray.images.inputs import BuildContext

KEY = "0" * 64
WHEEL = "deepspeed-0.19.8-cp311-cp311-linux_x86_64.whl"


@pytest.fixture
def checkout(tmp_path) -> Path:
    (tmp_path / "build").mkdir()
    return tmp_path


@pytest.fixture
def kept(checkout, tmp_path) -> Path:
    """Written under a umask that lets a group write, as LUMI's does."""
    made = tmp_path / "made"
    made.mkdir()
    before = os.umask(0o007)
    try:
        with ZipFile(made / WHEEL, "w") as wheel:
            wheel.writestr("deepspeed/ops/adam.so", "operators")
        compiled_wheels.keep(checkout, KEY, made)
    finally:
        os.umask(before)
    return checkout / "build" / "operators" / KEY


def found(checkout: Path) -> tuple[Path | None, list[str]]:
    lines: list[str] = []
    return compiled_wheels.find(checkout, KEY, say=lines.append), lines


def test_what_was_kept_is_found(checkout, kept):
    assert found(checkout) == (kept, [])
    assert ZipFile(kept / WHEEL).read("deepspeed/ops/adam.so") == b"operators"
    assert [path.name for path in kept.parent.iterdir()] == [KEY]
    assert compiled_wheels.find(checkout, "1" * 64, say=print) is None


def test_what_a_build_did_not_compile_is_not_kept(checkout, kept, tmp_path):
    (tmp_path / "none").mkdir()
    compiled_wheels.keep(checkout, "1" * 64, tmp_path / "none")
    compiled_wheels.keep(checkout, KEY, kept)  # found by this build, and there already
    assert [path.name for path in kept.parent.iterdir()] == [KEY]


def _writable(kept: Path) -> None:
    (kept / WHEEL).chmod(0o664)


def _open_folder(kept: Path) -> None:
    kept.chmod(0o777)


def _link(kept: Path) -> None:
    other = kept.with_name("elsewhere")
    (kept / WHEEL).rename(other)
    (kept / WHEEL).symlink_to(other)


def _cut(kept: Path) -> None:
    (kept / WHEEL).write_bytes((kept / WHEEL).read_bytes()[:-30])


def _flip(kept: Path) -> None:
    (kept / WHEEL).write_bytes((kept / WHEEL).read_bytes().replace(b"operators", b"Operators"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (_cut, f"is damaged: {WHEEL}"),  # by a power failure: nothing else would name it
        (_flip, "is damaged: deepspeed/ops/adam.so"),
        (_writable, "is a file that others may write, mode 0664"),
        (_open_folder, "is a folder that others may write, mode 0777"),
        (_link, "is a link in place of a file"),
    ],
)
def test_what_cannot_be_trusted_is_removed(checkout, kept, change, reason):
    change(kept)
    assert found(checkout) == (None, [f"dray: compile DeepSpeed's operators again: {kept} {reason}"])
    assert not kept.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="root gives a file away")
def test_another_user_s_wheel(checkout, kept):
    os.chown(kept / WHEEL, 12345, 12345)
    assert found(checkout)[0] is None


READ = ("requirements.lock", "image.env", "environment", "dray.def", "debs/gcc_12_amd64.deb", "wheels/torch-2-x.whl")
READ += ("steps/lib.sh", "steps/run.sh", "steps/10-system.sh", "steps/50-python.sh", "steps/55-deepspeed.sh")
STEPS = ("steps/60-dray.sh", "steps/70-prune.sh", "steps/90-seal.sh", "steps/sbom.py")
LATER = (*STEPS, "steps/56-fabric.sh", "dray/dray-1-py3-none-any.whl", "sources/aws-ofi-nccl-1.19.2.tar")
LATER += ("sources.json", "labels", "Containerfile", "README.md", "base.tar")


@pytest.mark.parametrize("changed", [*READ, *LATER])
def test_the_key_changes_with_what_the_compiler_sees_and_with_nothing_else(tmp_path, changed):
    image = Image.model_validate({"variant": "cpu", "base": f"x@sha256:{KEY}", "python": "3.11"})
    keys = []
    for content in ("one", "two"):
        for name in (*READ, *LATER):
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(content if name == changed else name)
        keys.append(BuildContext(image=image, inputs=tmp_path, base=tmp_path).operators)
    assert (keys[0] == keys[1]) is (changed in LATER)


def test_every_step_is_one_of_both(root):
    """A step that is added is compiled for anew, unless it comes after the compiler."""
    steps = {f"steps/{path.name}" for path in (root / "containers" / "steps").iterdir() if path.is_file()}
    assert steps == {name for name in (*READ, *LATER) if name.startswith("steps/")}
    assert [name for name in sorted(steps) if inputs.is_later(name)] == sorted(
        name for name in LATER if name.startswith("steps/")
    )
