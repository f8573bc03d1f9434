"""What of a disk's errors a run survives, and the room that a save wants."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from dray.contract import unexpected
from dray.contract.findings import UnfitError

saved = pytest.importorskip("dray.train.checkpoint.saved", reason="torch: the training stack is not installed")
pytestmark = pytest.mark.torch


@pytest.mark.hostile("disks")
@pytest.mark.parametrize(
    ("raised", "code", "found"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 69, "No space left on device"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 69, "Disk quota exceeded"),
        (OSError(errno.EIO, "rank-0.safetensors is not there"), 69, "[Errno 5] rank-0.safetensors is not there"),
        (OSError(errno.ESTALE, "Stale file handle", "/x"), 69, "Stale file handle"),
        (OSError(errno.ESHUTDOWN, "Cannot send after transport endpoint shutdown", "/x"), 69,
         "Cannot send after transport endpoint shutdown"),
        (OSError(errno.EFBIG, "File too large"), 1, "[Errno 27] File too large"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 1, "[Errno 13] Permission denied: '/x'"),
        (RuntimeError(), 1, "RuntimeError"),
    ],
)  # fmt: skip
def test_what_somebody_mends_is_told_from_what_stays(raised: Exception, code: int, found: str) -> None:
    failed = saved.failed(raised, Path("/kept"), "there is no checkpoint yet")
    assert (failed.finding.code, failed.finding.found) == (code, found)
    assert failed.problem == "the checkpoint cannot be written"


@pytest.mark.hostile("disks")
@pytest.mark.parametrize("name", ["ENOTCONN", "ETIMEDOUT", "EHOSTDOWN", "ECONNRESET", "EROFS", "ENOMEM", "EMFILE"])
def test_what_a_save_survives_is_nobody_s_configuration(name: str) -> None:
    raised = OSError(number := getattr(errno, name), os.strerror(number), "/kept/x")
    assert saved.failed(raised, Path("/kept"), "").finding.code == 69
    assert unexpected.error(raised, log=True).finding.code == 69


@pytest.mark.parametrize(("blocks", "free", "fits"), [(9000, 2000, True), (9000, 1000, False), (0, 0, True)])
def test_room_for_a_save(blocks: int, free: int, fits: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of file systems that tell; of 4 KB blocks, for 4 MB and what goes with them."""
    told = SimpleNamespace(f_bavail=free, f_blocks=blocks, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda _: told)
    if fits:
        saved.require_room(Path("/kept"), 4 << 20, "")
        return
    with pytest.raises(UnfitError) as refused:
        saved.require_room(Path("/kept"), 4 << 20, "the newest checkpoint is of step 4")
    assert str(refused.value) == (
        "the checkpoint does not fit on the disk\n  where:  /kept\n  wanted: 0.004194 GB\n"
        "  found:  No space left on device (0.004096 GB free, 0.004194 GB needed)\n"
        "  fix:    make room on that disk; the newest checkpoint is of step 4"
    )
