"""Debian's packages: what an image would have against what is locked."""

from __future__ import annotations

import hashlib
import re
import shutil
from pathlib import Path

import pytest

from dray.contract.findings import ConfigError
from dray.images.fetch import debs


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

    @pytest.mark.parametrize("as_locked", [True, False])
    def test_packages_that_are_not_as_locked(self, root: Path, tmp_path: Path, monkeypatch, *, as_locked: bool) -> None:
        containers = tmp_path / "containers"
        containers.mkdir()
        for name in ("debian.in", "debian.sh", "debs.sh", "debs.def"):
            shutil.copy(root / "containers" / name, containers)
        debs.lock_file(tmp_path).write_text(f"gcc 4:12 amd64 {'0' * 64}\n")

        def download(_checkout: Path, folder: Path, **_: object) -> None:
            folder.mkdir(parents=True)
            (folder / "gcc_4%3a13_amd64.deb").write_text("newer")
            (folder / debs.INSTALLED).touch()

        monkeypatch.setattr(debs, "_download", download)
        said: list[str] = []
        fetch = {"base": tmp_path, "identity": "x", "as_locked": as_locked, "say": said.append}
        if not as_locked:
            debs.fetch(tmp_path, **fetch)
            assert said == ["dray: not as locked: gcc 4:12 -> 4:13"]
            return
        with pytest.raises(ConfigError) as refused:
            debs.fetch(tmp_path, **fetch)
        assert str(refused.value) == (
            "Debian's packages are not as locked\n"
            f"  where:  {debs.lock_file(tmp_path)}\n"
            "  found:  gcc 4:12 -> 4:13\n"
            "  fix:    --debian current (make: DEBIAN=current) takes today's packages\n"
            "          or make another base: containers/base/make-base.sh bookworm build/base/bookworm.tar\n"
            "          or lock again: dray image lock debian"
        )

    @pytest.mark.parametrize("left", ["a link", "a folder"])
    def test_a_base_that_leaves_more_than_files(self, tmp_path: Path, left: str) -> None:
        """A link of its making could put a file of this machine into a bundle."""
        for name in ("gcc_1_amd64.deb", debs.INSTALLED, "base.sha256"):
            (tmp_path / name).touch()
        debs.require_files(tmp_path)
        if left == "a link":
            (tmp_path / "x_1_all.deb").symlink_to("/etc/passwd")
        else:
            (tmp_path / "notes").mkdir()
        with pytest.raises(ConfigError, match="a program of the base left a link or a folder"):
            debs.require_files(tmp_path)
