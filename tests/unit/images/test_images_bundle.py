"""A bundle is complete, signed and from this checkout, before anything in it is installed or run."""

from __future__ import annotations

import hashlib
import shlex
import shutil
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from dray.clients import builder
from dray.config.image_definition import Image
from dray.contract.findings import ConfigError
from dray.images import bundle as bundles
from dray.images import inputs
from helpers import ROOT

pytestmark = pytest.mark.hostile("what is installed")


@pytest.fixture
def bundle(tmp_path: Path) -> Path:
    """A bundle of one wheel, which one lock of `containers` names, in a folder with a space."""
    folder, locks = tmp_path / "a bundle", tmp_path / "containers" / "cpu"
    for name, text in {"wheels/x-1-py3-none-any.whl": "x", "image.env": "A=1\n"}.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    (tmp_path / "src" / "dray").mkdir(parents=True)
    (tmp_path / "src" / "dray" / "a.py").write_text("a = 1\n")
    (folder / "dray").mkdir()
    wheel_of(folder, {"dray/a.py": "a = 1\n", "dray-1.dist-info/entry_points.txt": "[x]\ny = dray.a:a\n"})
    locks.mkdir(parents=True)
    (locks / "requirements.lock").write_text(f"x==1 --hash=sha256:{hashlib.sha256(b'x').hexdigest()}\n")
    summed(folder)
    return folder


def wheel_of(folder: Path, content: dict[str, str]) -> None:
    with zipfile.ZipFile(folder / "dray" / "dray-1-py3-none-any.whl", "w") as wheel:
        for name, text in content.items():
            wheel.writestr(name, text)


def summed(folder: Path) -> None:
    found = bundles.sums(folder)
    lines = [f"{digest}  {name}\n" for name, digest in found.items() if name not in (bundles.SUMS, bundles.SIGNATURE)]
    (folder / bundles.SUMS).write_text("".join(lines))


def key(folder: Path, name: str) -> tuple[Path, Path]:
    """A key, and a file of signers with it."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", name, "-f", folder / name], check=True)
    signers = folder / f"{name}.signers"
    signers.write_text(f"{name} {(folder / name).with_suffix('.pub').read_text()}")
    return folder / name, signers


class TestBundle:
    def test_a_whole_one_passes(self, bundle: Path) -> None:
        bundles.require(bundle, bundle.parent)

    @pytest.mark.parametrize("base", ["bookworm.tar", "0123.sif"])
    def test_what_is_made_passes_and_says_how_to_build_from_it(
        self, bundle: Path, tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(builder, "engine", nullcontext)  # of a machine with Apptainer
        (bundle / bundles.SUMS).unlink()
        (tmp_path / base).write_text("base")
        out = tmp_path / "out" / "bundle-cpu"
        image = inputs.image(ROOT, "cpu")
        context = inputs.BuildContext(image=image, inputs=bundle, base=tmp_path / base)
        make = partial(inputs.to_bundle, tmp_path, context, out, say=print)
        assert make(key=key(tmp_path, "me")[0]) == out
        bundles.require(out, tmp_path, tmp_path / "me.signers")
        copy = f"base{Path(base).suffix}"
        assert {path.name for path in out.iterdir()} - {path.name for path in bundle.iterdir()} == {
            *("README.md", "SHA256SUMS", "SHA256SUMS.sig", copy)
        }
        readme = (out / "README.md").read_text()
        assert "make image-cpu BUNDLE=bundle-cpu" in readme
        assert ("docker import base.tar" in readme) is (copy == "base.tar")
        with pytest.raises(ConfigError, match="the bundle's folder exists already"):
            make(key=None)

    @pytest.mark.parametrize(
        ("change", "problem", "found"),
        [
            ("rm SHA256SUMS", "not a bundle", None),
            ("rm image.env", "the bundle differs from its checksums", "image.env"),
            ("echo B=1 >>image.env", "the bundle differs from its checksums", "image.env"),
            ("echo more >wheels/y.whl", "the bundle differs from its checksums", "wheels/y.whl"),
            ("printf '\\377' >SHA256SUMS", "the bundle differs from its checksums", None),
            (": >SHA256SUMS", "the bundle differs from its checksums", None),
        ],
    )
    def test_what_has_not_arrived_is_told(self, bundle: Path, change: str, problem: str, found: str | None) -> None:
        subprocess.run(["bash", "-c", change], cwd=bundle, check=True)
        with pytest.raises(ConfigError) as refused:
            bundles.require(bundle, bundle.parent)
        assert refused.value.problem == problem
        assert found is None or refused.value.details["found"] == found

    def test_a_wheel_that_no_lock_names_is_refused_whatever_the_sums_say(self, bundle: Path) -> None:
        (bundle / "wheels" / "x-1-py3-none-any.whl").write_text("evil")
        summed(bundle)
        with pytest.raises(ConfigError, match="wheels or sources that no lock of this checkout names") as refused:
            bundles.require(bundle, bundle.parent)
        assert refused.value.details["found"] == "wheels/x-1-py3-none-any.whl"

    @pytest.mark.parametrize(
        ("name", "text"),
        [
            ("dray/a.py", "evil = 1\n"),
            ("dray/b.py", "evil = 1\n"),
            ("evil.pth", "import evil\n"),
            ("dray/../evil.py", "evil = 1\n"),
            ("dray-1.data/scripts/python", "evil"),
            ("dray-1.dist-info/entry_points.txt", "[x]\ny = os:system\n"),
        ],
    )
    def test_its_dray_is_this_checkout_s(self, bundle: Path, name: str, text: str) -> None:
        """No lock names that wheel, and make installs it."""
        wheel_of(bundle, {"dray/__init__.py": "", name: text} if name == "dray/b.py" else {name: text})
        summed(bundle)
        with pytest.raises(ConfigError, match="the bundle's dray is not this checkout's") as refused:
            bundles.require(bundle, bundle.parent)
        assert f"dray-1-py3-none-any.whl: {name}" in refused.value.details["found"]

    @pytest.mark.parametrize(
        ("change", "found"),
        [
            ("mkfifo wheels/p", "wheels/p"),
            ("ln -s nothing wheels/d", "wheels/d"),
            ("ln -s /tmp steps", "steps"),
            ("rm image.env; ln -s ../x image.env", "image.env"),
        ],
    )
    def test_it_has_files_and_folders_alone(self, bundle: Path, change: str, found: str) -> None:
        subprocess.run(["bash", "-c", change], cwd=bundle, check=True)
        with pytest.raises(ConfigError, match="the bundle has links or special files") as refused:
            bundles.require(bundle, bundle.parent)
        assert refused.value.details["found"] == found

    def test_who_signed_it(self, bundle: Path, tmp_path: Path, capsys) -> None:
        (mine, me), (_, stranger) = key(tmp_path, "me"), key(tmp_path, "stranger")

        def refused(signers: Path) -> str:
            with pytest.raises(ConfigError, match="the bundle is not signed by one of the signers") as raised:
                bundles.require(bundle, tmp_path, signers)
            return raised.value.details["found"]

        assert "read signature file: No such file" in refused(me)
        bundles.sign(bundle, mine)
        bundles.require(bundle, tmp_path)
        bundles.require(bundle, tmp_path, me)
        assert capsys.readouterr().err.startswith('dray: the bundle\'s checksums: Good "dray-bundle" signature for me ')
        assert "No principal matched" in refused(stranger)
        assert 'nobody": No such file' in refused(tmp_path / "nobody")
        (bundle / "image.env").write_text("B=1\n")
        summed(bundle)
        assert "Signature verification failed: incorrect signature" in refused(me)

    def test_a_key_that_is_none(self, bundle: Path, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="the bundle cannot be signed"):
            bundles.sign(bundle, tmp_path / "no key")

    def test_make_asks_before_it_installs(self, bundle: Path, root: Path, tmp_path: Path) -> None:
        """With the plain Python of a machine that has nothing."""
        (bundle / "image.env").unlink()
        ignored = shutil.ignore_patterns("__pycache__")
        shutil.copytree(root / "src" / "dray", tmp_path / "src" / "dray", ignore=ignored, dirs_exist_ok=True)
        for name in ("Makefile", "pyproject.toml", "containers/venv.lock"):
            shutil.copy(root / name, tmp_path / name)
        argv = ["make", "install", f"BUNDLE={bundle.name}", f"PYTHON={shlex.quote(sys.executable)} -S"]
        done = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 2
        assert done.stderr.startswith("dray: the bundle differs from its checksums\n"), done.stderr
        assert not (tmp_path / ".venv").exists()

    def test_its_signature_is_no_input_of_the_image(self, bundle: Path, tmp_path: Path) -> None:
        described = Image.model_validate({"variant": "cpu", "base": f"x@sha256:{'0' * 64}", "python": "3.11"})
        before = inputs.BuildContext(image=described, inputs=bundle, base=bundle).digest
        bundles.sign(bundle, key(tmp_path, "me")[0])
        assert inputs.BuildContext(image=described, inputs=bundle, base=bundle).digest == before
