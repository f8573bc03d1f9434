"""A lock file gives a checkpoint folder to one run at a time; the run touches it every ten seconds.

dray does not use locks of the file system, and compares no clocks, since those of two machines differ. A run that finds
the file of another one watches it. If the file does not change for two minutes, the other run counts as dead, and this
run replaces the file. If the other run was only paused, it finds the new file when it goes on, and writes no more.
"""

from __future__ import annotations

import json
import os
import secrets
import shlex
import time
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, NamedTuple

from dray.contract import files, processes, run_folder
from dray.contract.findings import ConfigError
from dray.train.checkpoint import manifest
from dray.train.config import Config
from dray.train.errors import say

NAME = "lease.json"
BEAT_S = 10.0
WATCH_S = 120.0  # NFS may show the time of a change a minute late
_SETTLE_S = 0.25  # another run that replaces the same file has done so after this time
_LIMIT = 1 << 14  # bytes


class Holder(NamedTuple):
    """The run that holds the folder. slurm/job.sh reads token, job, run and attempt, in this order."""

    token: str
    node: str
    job: int
    run: str
    """Its folder."""
    attempt: int
    since: str
    process: list[Any]

    def __str__(self) -> str:
        job = f"job {self.job}" if self.job else f"process {self.process[2]}"
        return f"{job} on {self.node}, run {self.run}, attempt {self.attempt}, since {self.since}"


State = tuple[Holder | None, int]
"""The holder, or None if the file is incomplete; and the time of the file's last change."""


class Lease:
    """This process's lock on one checkpoint folder."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.path = folder / NAME
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        process = processes.mark(os.getpid())
        token, node = secrets.token_hex(16), os.environ.get(config.host_variable, "")
        self.own = Holder(token, node, config.job, config.run_folder, config.attempt, since, process)
        self._released, self._lock = Event(), Lock()
        self._ended_file = Path(config.folder, run_folder.ENDED)

    def acquire(self) -> None:
        """Lock the folder, or refuse (78) and name its holder. To watch the holder's file may take two minutes."""
        while not self._create(self.path):
            state = self._read()
            if state is None:
                continue
            why = self._why_ended(state[0]) or self._watch(state)
            if why and self._replace(state):
                say(f"{self.path.parent}: taken over from {state[0] or 'a run that left no name'}: {why}")
                break
        Thread(target=self._beat, name="lease", daemon=True).start()

    def require(self) -> None:
        """Refuse (78) if another run has taken over the folder, as after this run was paused for minutes."""
        with self._lock:
            if self._still_holds():
                return
        holder, _ = self._read() or (None, 0)
        raise ConfigError(
            "another run has taken over the checkpoint folder",
            where=self.path.parent,
            wanted="lease.json touched by this run at least every 120 s",
            found=f"the folder belongs to {holder or 'a run that left no name'}",
            fix="let that run go on; check whether this job was suspended, or its disk was away",
        )

    def release(self) -> None:
        """Free the folder for another run."""
        with self._lock:
            self._released.set()
            if self._still_holds():
                self.path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._released.wait(BEAT_S):
            with self._lock, suppress(OSError):  # the next beat may succeed
                if not self._released.is_set() and self._still_holds():
                    os.utime(self.path, follow_symlinks=False)  # on a network disk by its server's clock

    def _still_holds(self) -> bool:
        """Return whether this run still holds the folder. If somebody has deleted the file, write it again."""
        state = self._read()
        if state is None:
            return self._create(self.path)
        return state[0] is not None and state[0].token == self.own.token

    def _create(self, path: Path) -> bool:
        """Write this run's file; return False if there is a file already."""
        created = False
        try:
            with manifest.new_file(path) as file:
                created = True
                file.write(json.dumps(self.own._asdict()).encode())
        except FileExistsError:
            return False
        except OSError:
            if created:  # on a full disk: for an incomplete file the next run would wait
                path.unlink(missing_ok=True)
            raise
        return True

    def _read(self) -> State | None:
        """Return the file's state; None if there is no file. NFS asks its server since the file is opened each time."""
        try:
            with files.open_regular(self.path, link=False) as file:
                changed, text = os.fstat(file.fileno()).st_mtime_ns, file.read(_LIMIT)
        except FileNotFoundError:
            return None
        try:
            return Holder(**json.loads(text)), changed
        except (ValueError, TypeError):
            return None, changed

    def _why_ended(self, holder: Holder | None) -> str:
        """Return why the holder has certainly ended; an empty text if it may be alive."""
        if holder is None:
            return ""
        same_run = (holder.run, holder.job) == (self.own.run, self.own.job)
        if same_run and (holder.job or holder.attempt == self.own.attempt):  # Slurm runs a job once at a time
            return "an earlier start of this run held it"
        if processes.gone(holder.process):
            return "its process has ended"
        with suppress(OSError):
            if files.read(self._ended_file, limit=_LIMIT).decode(errors="replace").strip() == holder.token:
                return "Slurm no longer knows its job"
        result = Path(holder.run, run_folder.attempt(holder.attempt), run_folder.RESULT)
        return "its attempt has ended" if result.exists() else ""

    def _watch(self, state: State) -> str:
        """Refuse if the file changes. Return why its run counts as dead; an empty text if somebody deletes the file."""
        say(
            f"{self.path.parent} belongs to {state[0] or 'a run that left no name'}: "
            f"waiting up to {WATCH_S:.0f} s for a sign of life"
        )
        watched = 0.0
        while watched < WATCH_S:
            before = time.monotonic()
            time.sleep(min(1.0, BEAT_S / 4))
            now = self._read()
            seconds = time.monotonic() - before
            # While the disk was away, or this process was paused, it could not see a change: watch from the start.
            watched = watched + seconds if seconds < WATCH_S / 2 else 0.0
            if now is None:
                return ""
            holder, _ = now
            if holder and now != state:
                command = f"end process {holder.process[2]} on {holder.node}"
                if holder.job:  # by its folder: the number may be that of a whole array
                    command = f"dray stop {shlex.quote(holder.run)}"
                raise ConfigError(
                    "another run uses this checkpoint folder",
                    where=self.path.parent,
                    wanted="one run at a time",
                    found=str(holder),
                    fix=f"checkpoint.folder=ANOTHER; or end that run ({command}), then run the same command again",
                )
        return f"no sign of life for {WATCH_S:.0f} s"

    def _replace(self, state: State) -> bool:
        """Replace a dead run's file by this run's; return whether this run holds the folder then.

        If several runs do so at once, the last one holds it. A rename replaces the file: if it was deleted first, a
        third run could create its own in between.
        """
        part = self.path.with_name(f"{NAME}.{self.own.token}")
        self._create(part)
        if self._read() != state:
            part.unlink()
            return False
        part.rename(self.path)
        time.sleep(_SETTLE_S)
        return self._still_holds()
