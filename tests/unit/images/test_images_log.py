"""Which disk is full, of those that a build writes."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from dray.contract.findings import DrayError, UnfitError
from dray.images.build_output import build_log

# Of another filesystem than any folder of a test.
OUT = Path("/dev/images/dray-cpu.sif")
SAID = DrayError("mksquashfs", found="Write failed because No space left on device")
UNNAMED = OSError(errno.ENOSPC, "No space left on device")
OUT_NAMED = OSError(errno.ENOSPC, "No space left on device", str(OUT))
OUT_COPIED = OSError(errno.ENOSPC, "No space left on device", "source", None, str(OUT))


@pytest.mark.parametrize(
    ("error", "out", "free", "full"),
    [
        (SAID, OUT, {"build": 9e9, "out": 1.26e9}, "out"),
        (SAID, OUT, {"build": 0, "out": 1e9}, "build"),
        (SAID, None, {"build": 9e9, "out": 0}, "build"),
        (UNNAMED, OUT, {"build": 9e9, "out": 1e9}, "out"),
        (OUT_NAMED, None, {"build": 0, "out": 5e9}, "out"),
        (OUT_COPIED, None, {"build": 0, "out": 5e9}, "out"),
    ],
)
def test_the_full_disk_is_named(error, out, free, full, tmp_path, monkeypatch):
    folders = {"build": tmp_path / "build", "out": Path("/dev")}
    by_folder = {folders[name]: SimpleNamespace(free=left) for name, left in free.items()}
    monkeypatch.setattr(shutil, "disk_usage", by_folder.__getitem__)
    log_file = tmp_path / "build" / "logs" / "cpu.log"
    with pytest.raises(UnfitError) as raised, build_log(log_file, out=out):
        raise error
    more = f"; {tmp_path}/build can be removed: it holds fetched files and built images" if full == "build" else ""
    assert str(raised.value) == (
        f"the disk is full\n  where:  {folders[full]}\n"
        f"  found:  {free[full] / 1e9:.1f} GB free; dray doctor --build VARIANT shows what a build needs\n"
        f"  fix:    make room{more}"
    )
