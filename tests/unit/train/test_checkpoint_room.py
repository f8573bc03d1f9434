"""What of a disk's errors a run survives."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dray.contract import failures
from dray.contract.findings import DrayError

checkpoints = pytest.importorskip("dray.train.checkpoint.checkpoints", reason="torch: no training stack is installed")
pytestmark = pytest.mark.torch


def failing(raised: Exception) -> DrayError:
    with pytest.raises(DrayError) as failed, checkpoints.disk_errors(Path("/kept"), "there is no checkpoint yet"):
        raise raised
    return failed.value


@pytest.mark.hostile("disks")
@pytest.mark.parametrize(
    ("raised", "code", "found"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), 69, "No space left on device"),
        (OSError(errno.EDQUOT, "Disk quota exceeded"), 69, "Disk quota exceeded"),
        (OSError(errno.EIO, "rank-0.safetensors is not there"), 69, "rank-0.safetensors is not there"),
        (OSError(errno.ESTALE, "Stale file handle", "/x"), 69, "Stale file handle"),
        (OSError(errno.ESHUTDOWN, "Cannot send after transport endpoint shutdown", "/x"), 69,
         "Cannot send after transport endpoint shutdown"),
        (OSError(errno.EFBIG, "File too large"), 1, "File too large"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), 1, "Permission denied"),
    ],
)  # fmt: skip
def test_what_somebody_mends_is_told_from_what_stays(raised: Exception, code: int, found: str) -> None:
    failed = failing(raised)
    assert (failed.finding.code, failed.finding.found) == (code, found)
    assert failed.problem == "the checkpoint cannot be written"


@pytest.mark.hostile("disks")
@pytest.mark.parametrize("name", ["ENOTCONN", "ETIMEDOUT", "EHOSTDOWN", "ECONNRESET", "EROFS", "ENOMEM", "EMFILE"])
def test_what_a_save_survives_is_nobody_s_configuration(name: str) -> None:
    raised = OSError(number := getattr(errno, name), os.strerror(number), "/kept/x")
    assert failing(raised).finding.code == 69
    assert failures.unexpected_error(raised, log=True).finding.code == 69
