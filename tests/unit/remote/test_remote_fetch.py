"""The file that a verb at a remote sends, where the login node may send anything."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from pathlib import Path

import pytest
import typer

from dray.cli import remote
from dray.contract.findings import ConfigError
from dray.remote import remotes_file
from dray.runs.report import archive

Fetch = Callable[..., None]
REPORT, WHY = ["report"], ["why", "--bundle"]


class Sends:
    """A connection on which these blocks come."""

    remote = remotes_file.parse("mine", "cluster:/there")

    def __init__(self, blocks: Iterable[bytes], code: int = 0) -> None:
        self._blocks, self._code = blocks, code

    def run(self, function: str, *argv: str, on_out: Callable[[bytes], None], on_err: Callable[[bytes], None]) -> int:
        assert (function, argv[:4]) == ("verb", ("", "", "", "1"))
        for block in self._blocks:
            on_out(block)
        return self._code


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "train.py").write_text("mine")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(remote.remotes_file, "find", lambda _name: Sends.remote)
    return tmp_path


@pytest.fixture
def fetch(here: Path, monkeypatch: pytest.MonkeyPatch) -> Fetch:
    """`bring_back` on a connection on which these blocks come."""

    def call(blocks: Iterable[bytes], argv: list[str], target: Path | None = None, code: int = 0) -> None:
        monkeypatch.setattr(remote.ssh, "connected", lambda _remote: nullcontext(Sends(blocks, code)))
        remote.bring_back("mine", argv, target, None, archive.require_new if argv == WHY else anything)

    return call


def anything(_file: Path) -> None:
    """Whatever is there may be replaced."""


def files_of(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text() for path in folder.iterdir()}


@pytest.mark.parametrize(
    ("blocks", "argv", "target", "name"),
    [
        ([b"dray-report-first.html\npage"], REPORT, None, "dray-report-first.html"),
        ([b"dray-rep", b"ort-a.b_c-1.html", b"\n", b"pa", b"ge"], REPORT, None, "dray-report-a.b_c-1.html"),
        ([b"dray-why-first.tar.gz\n", b"page"], WHY, None, "dray-why-first.tar.gz"),
        ([b"report.html\npage"], REPORT, Path("mine.html"), "mine.html"),
        ([b"report.html\npage"], REPORT, Path("train.py"), "train.py"),  # the user has typed it
    ],
)
def test_a_file_comes(
    here: Path,
    fetch: Fetch,
    capsys: pytest.CaptureFixture[str],
    blocks: list[bytes],
    argv: list[str],
    target: Path | None,
    name: str,
) -> None:
    fetch(blocks, argv, target)
    assert capsys.readouterr().out == f"{argv[0]}: {here / name}\n"
    assert files_of(here) == {"train.py": "mine"} | {name: "page"}


def test_an_archive_is_for_this_user_alone(here: Path, fetch: Fetch) -> None:
    before = os.umask(0o002)
    try:
        fetch([b"dray-why-first.tar.gz\npage"], WHY)
    finally:
        os.umask(before)
    assert stat.S_IMODE((here / "dray-why-first.tar.gz").stat().st_mode) == 0o600


@pytest.mark.parametrize("target", [None, Path("mine.tar.gz")])
def test_an_archive_that_exists_stays(here: Path, fetch: Fetch, target: Path | None) -> None:
    for path in (Path("dray-why-first.tar.gz"), Path("mine.tar.gz")):
        path.write_text("mine")
    with pytest.raises(ConfigError, match="the archive already exists"):
        fetch([b"dray-why-first.tar.gz\npage"], WHY, target)
    assert {*files_of(here).values()} == {"mine"}


def test_no_login_for_an_archive_that_exists(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "mine.tar.gz").write_text("mine")
    monkeypatch.setattr(remote.ssh, "connected", lambda _remote: pytest.fail("it logs in"))
    with pytest.raises(ConfigError, match="the archive already exists"):
        remote.bring_back("mine", WHY, Path("mine.tar.gz"), None, archive.require_new)


@pytest.mark.parametrize("argv", [REPORT, WHY], ids=["report", "why"])
@pytest.mark.parametrize(
    "sent",
    [
        b"train.py\nx", b"Makefile\nx", b"sitecustomize.py\nx", b"../x\nx", b"/etc/x\nx", b".bashrc\nx", b"\nx", b"",
        b"x", b"dray-report-x.html", b"dray-report-../../x.html\nx", b"dray-report-.html.py\nx",
        b"dray-report-a\x1b[m.html\nx", b"dray-why-x.tar.gz.sh\nx", b"dray-why-\xff.tar.gz\nx", b"x" * 100_000,
    ],
)  # fmt: skip
def test_a_name_that_the_verb_does_not_give(here: Path, fetch: Fetch, sent: bytes, argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="the remote's file has an unexpected name"):
        fetch([sent], argv)
    assert files_of(here) == {"train.py": "mine"}


def test_a_verb_that_fails_leaves_nothing(here: Path, fetch: Fetch) -> None:
    with pytest.raises(typer.Exit):
        fetch([b"dray-report-x.html\nhalf"], REPORT, code=69)
    with pytest.raises(typer.Exit):
        fetch([], REPORT, code=78)
    assert files_of(here) == {"train.py": "mine"}


def test_a_place_that_cannot_be_written(here: Path, fetch: Fetch) -> None:
    for target in (Path("none/x.html"), here):
        with pytest.raises(OSError):  # noqa: PT011  whatever the system says
            fetch([b"dray-report-x.html\npage"], REPORT, target)
    assert files_of(here) == {"train.py": "mine"}


def test_a_link_under_the_name_is_replaced_and_not_followed(here: Path, fetch: Fetch) -> None:
    (here / "dray-report-x.html").symlink_to("train.py")
    fetch([b"dray-report-x.html\npage"], REPORT)
    assert files_of(here) == {"train.py": "mine", "dray-report-x.html": "page"}
