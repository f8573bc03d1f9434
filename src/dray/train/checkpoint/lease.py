"""A lock file gives a checkpoint folder to one run at a time; the run touches it while it is alive.

No lock of the file system is trusted, and no clock: those of two machines differ. A file that does not change while it
is watched is nobody's any more. A run that was only paused finds another's in its place, and writes nothing there.
"""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import secrets
import shlex
import time
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, NamedTuple, NoReturn

from dray.contract import files, processes, run_folder
from dray.contract.findings import ConfigError
from dray.train.config import Config
from dray.train.errors import say

NAME = "lease.json"
BEAT_S = 10.0
WATCH_S = 120.0  # longer than NFS keeps what it knows of a file, which is a minute
_LIMIT = 1 << 14  # bytes
_TURN_S, _KILLED_S = 0.05, 120.0  # to wait for another's turn to take over; one that lasts longer is of a killed run


class Holder(NamedTuple):
    """The run that holds the folder."""

    token: str
    user: str
    node: str
    job: int
    run: str
    """Its folder."""
    attempt: int
    since: str
    process: list[Any]

    def __str__(self) -> str:
        job = f"job {self.job}" if self.job else f"process {self.process[2]}"
        return f"{job} of {self.user} on {self.node}, run {self.run}, attempt {self.attempt}, since {self.since}"


class _Seen(NamedTuple):
    holder: Holder | None
    """None where the file says nothing: its writer died, or has not written it yet."""
    changed: tuple[str, int]


class Lease:
    """This process's lock on one checkpoint folder."""

    def __init__(self, folder: Path, config: Config) -> None:
        self.path = folder / NAME
        since = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        process = processes.mark(os.getpid())
        token, node = secrets.token_hex(16), os.environ.get(config.host_variable, "")
        self.own = Holder(token, _user(), node, config.job, config.run_folder, config.attempt, since, process)
        self._released, self._lock = Event(), Lock()
        self._turns: dict[str, float] = {}
        self._told = Path(config.folder, run_folder.ENDED)

    def acquire(self) -> None:
        """Take the folder, or refuse (78) and name its holder. It may watch the holder for two minutes."""
        while not self._created():
            seen = self._look()
            if seen is None:
                continue
            why = self._ended(seen.holder) or self._watched(seen)
            if why and self._took_over(seen):
                say(f"{self.path.parent}: taken over from {seen.holder or 'a run that left no name'}: {why}")
                break
        Thread(target=self._beat, name="lease", daemon=True).start()

    def require(self) -> None:
        """Refuse if another run has taken the folder, as after a pause of minutes: that run may write there now."""
        seen = self._look()
        if seen is None:
            self._created()
        elif seen.holder is None or seen.holder.token != self.own.token:
            raise ConfigError(
                "another run has taken over the checkpoint folder",
                where=self.path.parent,
                wanted="a sign of life from this run every two minutes",
                found=f"the folder belongs to {seen.holder or 'a run that left no name'}",
                fix="let that run go on; check whether this job was suspended, or its disk was away",
            )

    def release(self) -> None:
        """Free the folder for another run."""
        with self._lock:
            self._released.set()
            seen = self._look()
            if seen and seen.holder and seen.holder.token == self.own.token:
                self.path.unlink(missing_ok=True)

    def _beat(self) -> None:
        while not self._released.wait(BEAT_S):
            with self._lock, suppress(OSError):  # the next beat may do better
                if self._released.is_set():
                    return
                seen = self._look()
                if seen is None:  # somebody has cleaned up, or is taking over: that one sees it again, and refuses
                    self._created()
                elif seen.holder and seen.holder.token == self.own.token:
                    os.utime(self.path, follow_symlinks=False)  # of the file's own server, where it has one

    def _created(self, path: Path | None = None) -> bool:
        path = path or self.path
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o644)
        except FileExistsError:
            return False
        try:
            with os.fdopen(handle, "w") as file:
                json.dump(self.own._asdict(), file)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            path.unlink(missing_ok=True)
            raise
        return True

    def _look(self) -> _Seen | None:
        return _read(self.path)

    def _ended(self, holder: Holder | None) -> str:
        """How it is known that this one is no more; empty where it is not."""
        if holder is None:
            return ""
        if holder.run == self.own.run and holder.job == self.own.job and (holder.job or self._same_attempt(holder)):
            return "an earlier start of this run held it"
        if processes.gone(holder.process):
            return "its process has ended"
        with suppress(OSError):
            if files.read(self._told, limit=_LIMIT).decode(errors="replace").strip() == holder.token:
                return "Slurm no longer knows its job"
        result = Path(holder.run, run_folder.attempt(holder.attempt), run_folder.RESULT)
        return "its attempt has ended" if result.exists() else ""

    def _same_attempt(self, holder: Holder) -> bool:
        return holder.attempt == self.own.attempt

    def _watched(self, seen: _Seen) -> str:
        """Wait until it shows that it is alive, which refuses, or does not. Empty where the file has gone."""
        say(
            f"{self.path.parent} belongs to {seen.holder or 'a run that left no name'}: "
            f"waiting up to {WATCH_S:.0f} s for a sign of life"
        )
        end = time.monotonic() + WATCH_S
        while time.monotonic() < end:
            time.sleep(min(1.0, BEAT_S / 4))
            now = self._look()
            if now is None:
                return ""
            if now.holder and now.changed != seen.changed:
                self._refuse(now.holder)
        return f"no sign of life for {WATCH_S:.0f} s"

    def _refuse(self, holder: Holder) -> NoReturn:
        ends = f"end process {holder.process[2]} on {holder.node}"
        if holder.job:  # whose number may be that of a whole array
            ends = f"dray stop {shlex.quote(holder.run)}"
        raise ConfigError(
            "another run uses this checkpoint folder",
            where=self.path.parent,
            wanted="one run at a time",
            found=str(holder),
            fix=f"checkpoint.folder=ANOTHER; or end that run ({ends}), then run the same command again",
        )

    def _took_over(self, seen: _Seen) -> bool:
        """Whether this process, and no other that has seen the same, has its own file in that one's place now. There is
        a file in that place all the time: else a third run could make one."""
        name = hashlib.sha256(repr(seen.changed).encode()).hexdigest()[:32]
        turn = self.path.with_name(f"{NAME}.{name}")
        if not self._created(turn):  # another takes it over; one that was killed in between does not go on
            time.sleep(_TURN_S)
            if time.monotonic() > self._turns.setdefault(name, time.monotonic()) + _KILLED_S:
                turn.unlink(missing_ok=True)
            return False
        try:
            found = self._look()
            if found is None or found.changed != seen.changed:  # another was faster
                return False
            own = self.path.with_name(f"{NAME}.{self.own.token}")
            self._created(own)
            own.rename(self.path)
            return True
        finally:
            turn.unlink(missing_ok=True)


def _read(path: Path) -> _Seen | None:
    """Opened each time: NFS then asks its server."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    with os.fdopen(handle, "rb") as file:
        about, text = os.fstat(file.fileno()), file.read(_LIMIT)
    holder = _holder(text)
    return _Seen(holder, (holder.token if holder else "", about.st_mtime_ns))


def _holder(text: bytes) -> Holder | None:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    match found:
        case {
            "token": str(), "user": str(), "node": str(), "job": int(), "run": str(), "attempt": int(), "since": str(),
            "process": [str(), str(), int(), str()],
        }:  # fmt: skip
            return Holder(**{name: found[name] for name in Holder._fields})
    return None


def _user() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:  # a container may have any user
        return f"user {os.geteuid()}"
