"""What .ci/run keeps for its next run: whole folders, and only where no other user may write."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    not shutil.which("rsync"), reason="rsync is not installed (Debian: apt-get install rsync)"
)
BREAKS = '{ command CP "$@"; return 1; }'  # as a full disk, or an interruption, at the end of a copy


@pytest.fixture
def ci(root: Path, tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run bash with the functions of .ci/run, in a clone with an empty build folder."""
    clone = tmp_path / "clone"
    for folder in (".ci", "build", "tests", "containers"):
        (clone / folder).mkdir(parents=True)
    functions, last, _ = (root / ".ci/run").read_text().partition("\nci::main\n")
    assert last
    (clone / ".ci/run").write_text(functions)
    for file in ("containers/venv.lock", "pyproject.toml", "Makefile", "tests/torch.lock", "tests/torchao.lock"):
        (clone / file).write_text(file)

    def run(code: str, folder: Path = tmp_path / "kept") -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "DRAY_CI_CACHE": str(folder)}
        argv = ["bash", "-c", f"source '{clone}/.ci/run'\n{code}"]
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)

    return run


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_what_is_kept_is_there_in_another_clone(ci, tmp_path: Path) -> None:
    build, kept = tmp_path / "clone/build", tmp_path / "kept"
    for text in ("first", "second"):
        (build / "wheels").mkdir()
        (build / "wheels" / text).write_text(text)
        assert ci("ci::take; ci::keep wheels debs").returncode == 0
        assert (names(kept), names(kept / "wheels")) == (["lock", "wheels"], [text])
        shutil.rmtree(build / "wheels")
    (build / "wheels.partial").mkdir()  # of a run that was interrupted
    assert ci("ci::take").returncode == 0
    assert (names(build), names(build / "wheels")) == (["wheels"], ["second"])


def test_a_copy_that_breaks_is_neither_taken_nor_kept(ci, tmp_path: Path) -> None:
    build, kept = tmp_path / "clone/build", tmp_path / "kept"
    for folder, text in ((kept / "wheels", "whole"), (build / "debs", "new"), (kept / "debs", "old")):
        folder.mkdir(parents=True)
        (folder / text).write_text(text)
    kept.chmod(0o700)
    assert ci(f"cp() {BREAKS.replace('CP', 'cp')}\nci::take").returncode == 1
    assert not (build / "wheels").exists()
    assert "not kept" in ci(f"rsync() {BREAKS.replace('CP', 'rsync')}\nci::keep debs || echo not kept").stdout
    assert names(kept / "debs") == ["old"]
    assert ci("ci::take; ci::keep debs").returncode == 0
    assert (names(build / "wheels"), names(kept / "debs"), names(kept)) == (
        ["whole"],
        ["new"],
        ["debs", "lock", "wheels"],
    )


KEEP = "ci::take; ci::take_environment; {}; ci::keep_environment || echo not kept"
INSTALL = "mkdir .venv; touch .venv/{host,installed,check,cotainr,docs,dev}"


def test_an_environment_is_kept_when_it_was_installed_and_taken_when_it_is_whole(ci, tmp_path: Path) -> None:
    venv, kept = tmp_path / "clone/.venv", tmp_path / "kept/venv"
    broken = ci(KEEP.format(f"{INSTALL}; cp() {BREAKS.replace('CP', 'cp')}"))
    assert "not kept" in broken.stdout
    assert names(kept) == ["partial"]
    ci(KEEP.format("touch .venv/later"))  # it was there before this run
    assert names(kept) == ["partial"]
    shutil.rmtree(venv)
    ci(KEEP.format(INSTALL))
    (environment,) = kept.iterdir()
    installed = names(environment)
    shutil.rmtree(venv)
    ci(KEEP.format("touch .venv/later"))  # it was taken
    assert names(venv) == sorted([*installed, "later"])
    assert (names(kept), names(environment)) == ([environment.name], installed)
    shutil.rmtree(venv)
    assert ci(f"cp() {BREAKS.replace('CP', 'cp')}\n{KEEP.format(':')}").returncode == 1
    assert not venv.exists()


@pytest.mark.parametrize(
    ("mode", "parent", "found"),
    [
        (0o700, 0o755, ""),
        (0o755, 0o1777, ""),
        (0o770, 0o755, "other users may write the cache folder (mode 770): {}/shared/kept\n"),
        (0o1777, 0o755, "other users may write the cache folder (mode 1777): {}/shared/kept\n"),
        (0o700, 0o777, "other users may write the cache folder (mode 777): {}/shared\n"),
        (0o700, 0o775, "other users may write the cache folder (mode 775): {}/shared\n"),
    ],
)
def test_a_folder_that_others_may_write_or_replace_is_refused(
    ci, tmp_path: Path, mode: int, parent: int, found: str
) -> None:
    folder = tmp_path / "shared/kept"
    folder.mkdir(parents=True)
    folder.chmod(mode)
    folder.parent.chmod(parent)
    ended = ci("ci::take; echo taken", folder)
    refusal = found.format(tmp_path) and (
        found.format(tmp_path)
        + "  fix: DRAY_CI_CACHE=/var/cache/dray-ci, or another folder that root alone may write\n"
    )
    wanted = (78, "", refusal) if found else (0, "taken\n", "")
    assert (ended.returncode, ended.stdout, ended.stderr) == wanted


def test_a_link_or_another_user_s_folder_is_refused(ci, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    for folder in (tmp_path / "link", tmp_path / "link/kept"):
        assert ci("ci::take", folder).stderr.startswith(f"the cache folder is behind a link: {tmp_path}/link\n")
    if os.geteuid() == 0:
        os.chown(tmp_path / "real", 4242, -1)
        refused = ci("ci::take", tmp_path / "real/kept")
        assert (refused.returncode, refused.stderr.partition("\n")[0]) == (
            78,
            f"the cache folder is open to user 4242: {tmp_path}/real",
        )
