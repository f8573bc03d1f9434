"""Watch a run from outside its job: say what changes, and start it again where its recipe allows that.

The job itself cannot see that Slurm holds it, that it hangs in its end, or that its first node died.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from dray.contract.findings import DrayError, duration
from dray.runs import slurm
from dray.runs.metrics import whole
from dray.runs.slurm import Job
from dray.runs.status import LOST, State, Watched
from dray.runs.store import Run, dig

Tell = Callable[[str, State], None]
_LOOK_S = 30.0
_STALL_S = 600.0  # longer than a compiler or a large checkpoint is silent
_CLOSING, _CLOSING_S = "closing", 600.0  # Slurm's epilog takes minutes at most
_LATE_S = 60.0  # until a shared disk shows a result


def news(seen: State) -> dict[str, str]:
    """What there is to say of a run, each line with the name of its cause: it is said once while it lasts."""
    attempt = f"attempt {seen.attempt}: " if seen.attempt else ""
    why = f" ({seen.waiting.reason})" if seen.waiting else f", {seen.why}" if seen.why else ""
    found = {f"{seen.state} {seen.attempt}": f"{attempt}{seen.state}{why}"}
    if job := seen.slurm_job:
        if job.held:
            found["held"] = f"Slurm holds job {job.id} ({job.reason}); scontrol release {job.id} releases it"
        if job.state == "COMPLETING":
            found[_CLOSING] = f"job {job.id} has been ending for {duration(_CLOSING_S)}: a process or a disk hangs"
    if seen.live:
        if seen.live.quiet_s and seen.live.quiet_s > _STALL_S:
            found["stall"] = f"{attempt}no output for {duration(seen.live.quiet_s)}"
        for note in seen.live.notes:
            if note.startswith(("failed", "lost", "the loss", "the gradient")):
                found[note] = f"{attempt}{note}"
    return found


class Watcher:
    """Follows one run through its attempts. `submit` puts its next attempt into the queue."""

    def __init__(self, run: Path, tell: Tell, submit: Callable[[], None]) -> None:
        self._run, self._tell, self._submit = run, tell, submit
        self._due: dict[str, float] = {}
        """When each cause that lasts is to be told; never again once it was."""
        self._released = 0

    def watch(self, wait: Callable[[float], None] = time.sleep) -> State:
        """Watch until the run is over; return its last state."""
        watched = Watched(self._run)
        while True:
            seen = watched.look(closely=True)
            self.tell(seen)
            if seen.slurm_job and seen.slurm_job.held:
                self._release(seen, seen.slurm_job)
            if seen.state == LOST and self.may_start(seen):
                wait(_LATE_S)
                seen = watched.look(closely=True)
                if seen.state == LOST and self._start(seen):
                    watched = Watched(self._run)
                    continue
            if watched.over(seen):
                self.tell(seen)
                return seen
            wait(_LOOK_S)

    def tell(self, seen: State) -> None:
        """Tell what is new since the last look."""
        found, now = news(seen), time.monotonic()
        self._due = {cause: self._due.get(cause, now + _CLOSING_S * (cause == _CLOSING)) for cause in found}
        for cause, line in found.items():
            if now >= self._due[cause]:
                self._due[cause] = math.inf
                self._tell(line, seen)

    def may_start(self, seen: State) -> bool:
        """Whether the recipe's `max_requeues` allows another attempt."""
        last = Run(seen.path).last
        if last is None:  # its job was held or cancelled before it began
            return False
        return seen.attempts + self._released <= (whole(dig(last.plan, "recipe"), "max_requeues") or 0)

    def _release(self, seen: State, job: Job) -> None:
        if self.may_start(seen) and not job.reason.startswith("JobHeld"):  # else somebody wants it to wait
            with suppress(DrayError):
                slurm.release(job, seen.cluster)
                self._released += 1
                self._tell(f"released job {job.id}, as max_requeues allows", seen)

    def _start(self, seen: State) -> bool:
        if slurm.last_state(seen.job_id or "", seen.cluster).startswith("CANCELLED"):
            return False
        try:
            self._submit()
        except DrayError as refused:
            self._tell(f"the next attempt was not submitted: {refused.problem}", seen)
            return False
        self._tell("the next attempt was submitted, as max_requeues allows", seen)
        return True
