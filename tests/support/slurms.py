"""Slurm's commands on PATH: each call is a line of `calls`, and squeue prints what `squeue` has."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from pathlib import Path

_TOOL = """#!/bin/bash
here={folder}
printf '%s\\n' "$(basename "$0")${{*:+ }}$*" >>"$here/calls"
case "$0" in
  */squeue) cat "$here/squeue" ;;
  */scontrol) cat "$here/scontrol" ;;
  */scancel)
    mapfile -t jobs <"$here/squeue"; : >"$here/squeue"
    for job in "${{jobs[@]}}"; do # an array's number is all of its tasks
      [[ "$job" =~ ^[0-9]+[|]${{*: -1}}(_[0-9]+)?[|] ]] || printf '%s\\n' "$job" >>"$here/squeue"
    done
    [[ ! -x "$here/cancelled" ]] || "$here/cancelled" ;;
esac
"""


class Slurm:
    """Nothing is in its queue at first."""

    def __init__(self, folder: Path, monkeypatch) -> None:
        self.folder = folder / "slurm"
        self.folder.mkdir()
        for name in ("squeue", "scontrol", "calls"):
            (self.folder / name).touch()
        bins = self.folder / "bin"
        bins.mkdir()
        for name in ("squeue", "scancel", "scontrol", "srun", "sbatch"):
            (bins / name).write_text(_TOOL.format(folder=shlex.quote(str(self.folder))))
            (bins / name).chmod(0o755)
        for name in ("bash", "cat", "basename"):
            (bins / name).symlink_to(shutil.which(name) or name)
        monkeypatch.setenv("PATH", f"{bins}:{os.environ['PATH']}")

    def has(self, number: int, state: str, *, submitted: str = "2026-11-24T05:00:00", command: str = "run.sh") -> None:
        """One job."""
        self.lists((number, str(number), state), submitted=submitted, command=command)

    def lists(
        self, *jobs: tuple[int, str, str], submitted: str = "2026-11-24T05:00:00", command: str = "run.sh"
    ) -> None:
        """Several, by number, as scancel takes it, and state, as `squeue --array` prints them."""
        since = int(time.mktime(time.strptime(submitted, "%Y-%m-%dT%H:%M:%S")))  # SLURM_TIME_FORMAT=%s
        lines = [f"{number}|{id_}|{state}|{since}|None|N/A|{command}\n" for number, id_, state in jobs]
        (self.folder / "squeue").write_text("".join(lines))

    @property
    def calls(self) -> list[str]:
        """But for what is asked."""
        lines = (self.folder / "calls").read_text().splitlines()
        return [line for line in lines if not line.startswith(("squeue", "scontrol"))]
