"""Tokens that lie on a disk of many nodes are copied to the node's own for as long as the attempt lasts."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

np = pytest.importorskip("numpy")
token_cache = pytest.importorskip("dray.train.data.token_cache")
from dray.contract.findings import DrayError  # noqa: E402

MOUNTS = """22 1 254:0 / / rw,relatime shared:1 - ext4 /dev/root rw
30 22 0:31 / /tmp rw - tmpfs tmpfs rw
31 30 8:1 /x /tmp/my\\040disk rw shared:2 master:1 - xfs /dev/sda1 rw
32 22 0:44 / /scratch rw - lustre 10.0.0.1@o2ib:/work rw,flock
33 22 0:45 / /proc rw - autofs systemd-1 rw
34 33 0:46 / /proc rw - proc proc rw
"""


@pytest.mark.parametrize(
    ("folder", "kind"),
    [
        ("/scratch/me", "lustre"),
        ("/scratchy", "ext4"),
        ("/tmp/a", "tmpfs"),
        ("/tmp/my disk/a", "xfs"),
        ("/proc/x", "proc"),
    ],
)
def test_the_file_system_is_the_innermost_mount_s(tmp_path: Path, folder: str, kind: str) -> None:
    (tmp_path / "mounts").write_text(MOUNTS)
    assert token_cache.file_system(Path(folder), tmp_path / "mounts") == kind


def test_this_machine_s_are_known() -> None:
    assert token_cache.file_system(Path("/proc/self")) == "proc"
    assert token_cache.file_system(Path("/")) not in ("", "proc")


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Where the tokens are read that a node opens, by the kinds of its two disks."""

    def opened(cache: str, scratch: str) -> Path:
        (tmp_path / "attempt").mkdir(mode=0o700, exist_ok=True)
        monkeypatch.setattr(token_cache, "file_system", lambda folder: scratch if "attempt" in folder.parts else cache)
        tokens = token_cache.cached(
            tmp_path / "my cache",
            "x",
            lambda: ["abc"],
            lambda texts: [token for text in texts for token in (*text.encode(), 256)],
            end=256,
            vocabulary=257,
            scratch=str(tmp_path / "attempt"),
        )
        assert (tokens.ids.tolist(), tokens.starts.tolist()) == ([97, 98, 99, 256], [0, 4])
        return Path(tokens.ids.filename).parent

    return opened


def test_they_are_read_from_the_copy(tmp_path: Path, opened: Callable[..., Path], capsys) -> None:
    copy = tmp_path / "attempt" / "tokens" / "x"
    assert opened("lustre", "xfs") == copy
    assert "tokens copied from lustre to this node's xfs: 0.0 GB in 0 s" in capsys.readouterr().out
    assert [path.stat().st_mode & 0o777 for path in (copy.parent, copy)] == [0o700, 0o700]
    assert sorted(path.name for path in copy.parent.iterdir()) == ["x"]
    assert opened("lustre", "xfs") == copy  # training and evaluation may read the same
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("cache", "scratch"), [("ext4", "xfs"), ("tmpfs", "xfs"), ("overlay", "xfs"), ("lustre", "tmpfs"), ("nfs4", "")]
)
def test_they_stay_where_a_copy_is_no_gain(tmp_path: Path, opened, capsys, cache: str, scratch: str) -> None:
    assert opened(cache, scratch) == tmp_path / "my cache" / "x"
    assert (list((tmp_path / "attempt").iterdir()), capsys.readouterr().out) == ([], "")


def test_they_stay_where_there_is_no_room(tmp_path: Path, opened, capsys, monkeypatch) -> None:
    size = sum(path.stat().st_size for path in opened("ext4", "xfs").iterdir())
    usage = type(shutil.disk_usage(tmp_path))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 40, 1 << 40, 2 * size - 1))
    assert opened("lustre", "xfs") == tmp_path / "my cache" / "x"
    assert "tokens stay on lustre, and are not copied to " in capsys.readouterr().out
    assert list((tmp_path / "attempt" / "tokens").iterdir()) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 40, 1 << 40, 2 * size))
    assert opened("lustre", "xfs") == tmp_path / "attempt" / "tokens" / "x"


def test_they_stay_where_copying_fails(tmp_path: Path, opened, capsys, monkeypatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfile", full)
    assert opened("lustre", "xfs") == tmp_path / "my cache" / "x"
    assert "No space left on device" in capsys.readouterr().out
    assert list((tmp_path / "attempt" / "tokens").iterdir()) == []


def test_a_copy_that_differs_is_not_trained_on(tmp_path: Path, opened, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "copyfile", lambda source, to: to.write_bytes(source.read_bytes().replace(b"a", b"b")))
    with pytest.raises(DrayError, match="tokens in the cache are damaged") as refused:
        opened("lustre", "xfs")
    assert "attempt" in str(refused.value.details["where"])
