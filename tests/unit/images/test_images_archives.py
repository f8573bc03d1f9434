"""Sources that a build compiles: what image.toml may say of them, and tars as they should not come."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import Message
from pathlib import Path
from urllib.response import addinfourl

import pytest
from pydantic import ValidationError

from dray.config import mirrors
from dray.config.image_definition import ACCELERATORS, Image, SourceArchive
from dray.contract.findings import ConfigError, UnfitError
from dray.images import bundle, inputs
from dray.images.fetch import debs, source_archives

open_url = urllib.request.urlopen
URL = "https://example.org/v1.tar.gz"
TOP = "tool-1"
HALF = gzip.compress(bytes(range(256)))[:-99]
FILE = ("file", f"{TOP}/a", "")
KINDS = {"file": tarfile.REGTYPE, "link": tarfile.SYMTYPE, "hard": tarfile.LNKTYPE}

Fetch = Callable[..., list[Path]]


def packed(*members: tuple[str, str, str]) -> bytes:
    """A tar of these: kind, name, and what a link leads to."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for kind, name, target in members:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = KINDS[kind], target
            tar.addfile(member)
    return out.getvalue()


def source(content: bytes, **more: object) -> SourceArchive:
    known = {
        "name": "tool",
        "version": "1",
        "url": URL,
        "license": "MIT",
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    return SourceArchive.model_validate({**known, **more})


def image(*sources: SourceArchive) -> Image:
    return Image(variant="cuda", base=f"debian@sha256:{'0' * 64}", python="3.11", source=list(sources))


@pytest.fixture
def fetch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fetch:
    """Fetch one source into `kept`, which the URL has as `served`, if anybody has."""

    def fetch(wanted: SourceArchive, *, served: bytes | None = None, own: dict[str, bytes] | None = None) -> list[Path]:
        def answer(url: str, **more: object) -> addinfourl:
            if url.startswith("file:"):
                return open_url(url, **more)
            if served is None:
                raise urllib.error.URLError("no route to host")
            assert url == URL
            return addinfourl(io.BytesIO(served), Message(), url)

        monkeypatch.setattr(source_archives.urllib.request, "urlopen", answer)
        folder = tmp_path / "own"
        folder.mkdir(exist_ok=True)
        for name, content in (own or {}).items():
            (folder / name).write_bytes(content)
        return source_archives.fetch(
            image(wanted), folder=tmp_path / "kept", own=folder if own else None, say=said.append
        )

    said: list[str] = []
    fetch.said = said  # type: ignore[attr-defined]
    return fetch


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


class TestDescription:
    @pytest.mark.parametrize(
        "bad",
        [
            {"name": "Tool"},
            {"name": "../tool"},
            {"name": ""},
            {"version": "v1"},
            {"version": "1/.."},
            {"sha256": "0" * 63},
            {"sha256": "G" * 64},
            {"url": "http://example.org/v1.tar.gz"},
            {"url": "file:///v1.tar.gz"},
            {"url": "https://example.org/v1.zip"},
            {"url": "https://example.org/a b.tar.gz"},
            {"license": ""},
            {"license": "MIT\nBSD"},
            {"branch": "main"},
        ],
    )
    def test_what_a_source_cannot_be(self, bad: dict[str, str]) -> None:
        with pytest.raises(ValidationError, match="1 validation error"):
            source(b"", **bad)

    @pytest.mark.parametrize("bad", ["", "-o", "a b", "../m4", "M4"])
    def test_what_a_package_cannot_be(self, bad: str) -> None:
        with pytest.raises(ValidationError, match="1 validation error"):
            Image.model_validate({**image().model_dump(), "without": [bad]})

    def test_the_cpu_image_compiles_none_and_gets_no_package_for_it(self, root: Path) -> None:
        images = {variant: inputs.image(root, variant) for variant in ACCELERATORS}
        gpus = [images[name].source for name in ("cuda", "cuda12", "rocm", "rocm6")]
        assert [one.name for one in gpus[0]] == ["aws-ofi-nccl", "libfabric"]
        assert gpus[0] == gpus[1] == gpus[2] == gpus[3]
        assert images["cpu"].source == []
        assert [name for name, one in images.items() if one.without] == ["cpu"]
        for architecture in ("amd64", "arm64"):
            locked = debs.lock_file(root, architecture).read_text().splitlines()
            assert set(images["cpu"].without) <= {line.split()[0] for line in locked}
        step = (root / "containers" / "steps" / "56-fabric.sh").read_text()
        removed = step.rpartition("readonly UNNEEDED=(")[2].partition(")")[0].split()
        assert sorted([*removed, "libhwloc15"]) == images["cpu"].without  # all that is left is the library


class TestFetch:
    def test_from_its_url_once(self, fetch: Fetch, tmp_path: Path) -> None:
        tar = packed(FILE, ("link", f"{TOP}/docs/b", "../a"), ("hard", f"{TOP}/c", f"{TOP}/a"))
        (kept,) = fetch(source(tar), served=gzip.compress(tar))
        assert (kept, kept.read_bytes()) == (tmp_path / "kept" / "tool-1.tar", tar)
        assert fetch(source(tar)) == [kept]
        assert fetch.said == [f"dray: fetch {URL}"]  # type: ignore[attr-defined]
        kept.write_bytes(b"damaged")
        assert fetch(source(tar), served=gzip.compress(tar)) == [kept]
        assert (left(tmp_path / "kept"), kept.read_bytes()) == (["tool-1.tar"], tar)

    def test_from_a_folder_that_the_user_names(self, fetch: Fetch) -> None:
        tar = packed(FILE)
        (kept,) = fetch(source(tar), own={"tool-1.tar.gz": gzip.compress(tar), "tool-2.tar.gz": b"another"})
        assert kept.read_bytes() == tar
        assert fetch.said == []  # type: ignore[attr-defined]

    def test_without_a_network(self, fetch: Fetch, tmp_path: Path) -> None:
        with pytest.raises(UnfitError) as refused:
            fetch(source(b""))
        assert str(refused.value) == (
            "a source archive of the image cannot be fetched\n"
            f"  where:  {URL}\n"
            "  wanted: tool-1.tar.gz\n"
            "  found:  <urlopen error no route to host>\n"
            f'  fix:    if only a mirror can be reached: "{URL}" = "https://..." below [mirrors] in {mirrors.path()}\n'
            "          or put the files into a folder: make image-cuda WHEELS=FOLDER\n"
            "          or, without a network, make a bundle on a machine with one: dray image bundle cuda"
        )
        assert left(tmp_path / "kept") == []

    def test_another_one_than_is_pinned(self, fetch: Fetch, tmp_path: Path) -> None:
        tar, evil = packed(FILE), packed(FILE, FILE)
        with pytest.raises(ConfigError) as refused:
            fetch(source(tar), own={"tool-1.tar.gz": gzip.compress(evil)})
        assert refused.value.details == {
            "where": (tmp_path / "own" / "tool-1.tar.gz").as_uri(),
            "wanted": f"sha256 {hashlib.sha256(tar).hexdigest()}, of the uncompressed tar",
            "found": f"sha256 {hashlib.sha256(evil).hexdigest()}",
            "fix": f"fetch the file again from {URL}, or remove it from the folder",
        }
        (tmp_path / "own" / "tool-1.tar.gz").unlink()
        with pytest.raises(ConfigError, match="a source archive is not the pinned one"):
            fetch(source(tar), served=gzip.compress(evil))
        assert left(tmp_path / "kept") == []

    @pytest.mark.parametrize("broken", [b"no gzip", HALF, b"\x1f\x8b\x08" + b"\0" * 99])
    def test_half_of_one(self, fetch: Fetch, tmp_path: Path, broken: bytes) -> None:
        with pytest.raises(UnfitError, match="a source archive of the image cannot be fetched"):
            fetch(source(b""), served=broken)
        assert left(tmp_path / "kept") == []


def test_the_build_sees_its_sources_and_what_they_are(root: Path, tmp_path: Path) -> None:
    """And a variant's packages, without those that are not for it."""
    (tmp_path / "containers").symlink_to(root / "containers")
    for name in ("debs/m4_1_amd64.deb", "debs/m4-doc_1_all.deb", "debs/base.sha256", "dray.whl", "tool-1.tar"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    common = {"fetched": [], "own": tmp_path / "dray.whl", "packages": tmp_path / "debs", "base": "b"}
    wanted = source(b"")
    cuda = inputs.lay_out(tmp_path, image(wanted), tars=[tmp_path / "tool-1.tar"], **common)
    assert left(cuda / "sources") == ["tool-1.tar"]
    assert json.loads((cuda / "sources.json").read_text()) == [wanted.model_dump()]
    assert left(cuda / "debs") == ["base.sha256", "m4-doc_1_all.deb", "m4_1_amd64.deb"]
    cpu = inputs.lay_out(tmp_path, image().model_copy(update={"variant": "cpu", "without": ["m4"]}), **common)
    assert (left(cpu / "sources"), (cpu / "sources.json").exists()) == ([], False)
    assert left(cpu / "debs") == ["base.sha256", "m4-doc_1_all.deb"]


def test_a_bundle_has_the_pinned_sources_alone(tmp_path: Path) -> None:
    folder, containers = tmp_path / "bundle", tmp_path / "containers" / "cuda"
    tar = folder / "sources" / "tool-1.tar"
    for each in (tar.parent, containers):
        each.mkdir(parents=True)
    tar.write_bytes(packed(FILE))
    (containers / "image.toml").write_text(f'[[source]]\nsha256 = "{hashlib.sha256(tar.read_bytes()).hexdigest()}"\n')

    def require() -> None:
        (folder / bundle.SUMS).write_text(f"{hashlib.sha256(tar.read_bytes()).hexdigest()}  sources/tool-1.tar\n")
        bundle.require(folder, tmp_path)

    require()
    tar.write_bytes(packed(FILE, FILE))
    with pytest.raises(ConfigError, match="wheels or sources that no lock of this checkout names") as refused:
        require()
    assert refused.value.details["found"] == "sources/tool-1.tar"
