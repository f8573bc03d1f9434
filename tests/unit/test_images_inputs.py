"""The folder of a build's inputs, and the description and lock that it is made from."""

from __future__ import annotations

import re
import shutil
import stat
import subprocess
import tomllib
from pathlib import Path

import pytest

from dray.errors import ConfigError
from dray.images import inputs
from dray.spec.image import Image
from dray.spec.model import load

HOSTILE = "http://user:p a$s'\"`id`;\\@proxy.invalid:3128"


@pytest.fixture
def checkout(root, tmp_path) -> Path:
    """The real containers/, in a folder with a space."""
    copy = tmp_path / "my work"
    shutil.copytree(root / "containers", copy / "containers")
    (copy / "fetched").mkdir()
    (copy / "fetched" / "a-1-py3-none-any.whl").write_text("a")
    (copy / "dray-1-py3-none-any.whl").write_text("dray")
    return copy


@pytest.fixture
def folder(checkout, tmp_path, monkeypatch) -> Path:
    bundle = tmp_path / "bundle.crt"
    bundle.write_text("the host's certificates")
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    for name in ("http_proxy", "https_proxy", "HTTPS_PROXY", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HTTP_PROXY", HOSTILE)
    monkeypatch.setenv("no_proxy", "localhost,.invalid")
    image = Image(variant="cpu", base=f"x@sha256:{'0' * 64}", python="3.11", labels={"a.b": 'say "$HOME" \\o/'})
    return inputs.lay_out(checkout, image, fetched=checkout / "fetched", own=checkout / "dray-1-py3-none-any.whl")


def test_everything_a_build_reads(root, checkout, folder):
    assert folder == checkout / "build" / "inputs" / "cpu"
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()) == sorted(
        [
            *("Containerfile", "dray.def", "image.env", "labels", "requirements.lock", "host/ca.crt", "host/env"),
            *("wheels/a-1-py3-none-any.whl", "dray/dray-1-py3-none-any.whl"),
            *(f"steps/{path.name}" for path in (root / "containers" / "steps").iterdir()),
        ]
    )
    assert (folder / "host" / "ca.crt").read_text() == "the host's certificates"
    assert stat.S_IMODE((folder / "host" / "env").stat().st_mode) == 0o600
    assert (folder / "image.env").read_text() == "DRAY_VARIANT=cpu\nDRAY_PYTHON=3.11\n"
    assert (folder / "labels").read_text() == 'a.b say "$HOME" \\o/\n'
    assert (folder / "Containerfile").read_text() == (
        (root / "containers" / "cpu" / "Containerfile").read_text() + 'LABEL a.b="say \\"\\$HOME\\" \\\\o/"\n'
    )


def test_proxies_reach_the_steps_as_they_are(folder):
    shown = subprocess.run(
        [
            "bash",
            "-c",
            'set -aeu; source "$1"; printf "%s\\0%s" "$http_proxy" "$no_proxy"',
            "-",
            folder / "host" / "env",
        ],
        env={},
        capture_output=True,
        text=True,
        check=True,
    )
    assert shown.stdout.split("\0") == [HOSTILE, "localhost,.invalid"]


def test_laid_out_anew_each_time(checkout, folder):
    (folder / "left-over").touch()
    image = Image(variant="cpu", base=f"x@sha256:{'0' * 64}", python="3.11")
    inputs.lay_out(checkout, image, fetched=checkout / "fetched", own=checkout / "dray-1-py3-none-any.whl")
    assert not (folder / "left-over").exists()


def test_unknown_variant(root):
    with pytest.raises(ConfigError) as raised:
        inputs.image(root, "cpuu")
    variants = sorted(path.parent.name for path in (root / "containers").glob("*/image.toml"))
    assert raised.value.details == {"where": str(root / "containers"), "wanted": ", ".join(variants), "found": "cpuu"}


def test_a_base_without_a_digest_is_refused(root, tmp_path):
    described = (root / "containers" / "cpu" / "image.toml").read_text()
    (tmp_path / "image.toml").write_text(re.sub("@sha256:[0-9a-f]+", "", described))
    with pytest.raises(ConfigError, match="1 error"):
        load(Image, tmp_path / "image.toml")


class TestLock:
    @pytest.fixture
    def locked(self, root) -> dict[str, list[str]]:
        """Pin -> hashes."""
        text = (root / "containers" / "cpu" / "requirements.lock").read_text()
        entries = re.findall(r"^(\S+) \\\n((?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+)", text, re.MULTILINE)
        assert "".join(f"{pin} \\\n{hashes}" for pin, hashes in entries) == text
        return {pin: re.findall("[0-9a-f]{64}", hashes) for pin, hashes in entries}

    def test_torch_is_the_cpu_build(self, locked):
        assert len(locked["torch==2.13.0"]) == 1
        assert [pin for pin in locked if re.match("nvidia|cuda|triton|pytorch-triton", pin)] == []

    def test_it_pins_all_that_is_wished(self, root, locked):
        names = {pin.partition("==")[0] for pin in locked}
        project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
        wished = (root / "containers" / "cpu" / "requirements.in").read_text().splitlines()
        assert {line for line in wished if line and not line.startswith("#")} == {
            *project["dependencies"],
            *project["optional-dependencies"]["train"],
        }
        assert {re.split("[>=]", line)[0].lower() for line in project["dependencies"]} <= names
        assert set(project["optional-dependencies"]["train"]) <= set(locked)
