"""Watch a run from outside its job: say what changes, and start it again where its recipe allows that.

The job itself cannot see that Slurm holds it, that it hangs in its end, or that its first node died.
"""

from __future__ import annotations

import json
import math
import re
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from http.client import responses
from pathlib import Path
from threading import Thread

from dray.contract import files
from dray.contract.findings import DrayError, duration
from dray.runs import slurm
from dray.runs.metrics import whole
from dray.runs.result import Result
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


# The webhook ---------------------------------------------------------------------------------------------------------

# Plain HTTP would show the URL, a secret, to the whole network.
_PRIVATE = re.compile(r"https://\S+|http://(?:localhost|127\.0\.0\.1)[:/]\S*")
_WEBHOOK_S = 5  # Slurm kills a job soon after its time limit


def read_webhook(file: Path) -> str:
    """The URL in the user's own file; empty without one, or if others may read it."""
    with suppress(OSError, UnicodeDecodeError):
        if file.stat().st_mode & 0o077:
            print(f"dray: warning: {file} is not used: chmod 600 it, since its URL is a secret", file=sys.stderr)
        else:
            return files.read(file, own=True).decode().partition("\n")[0]
    return ""


def tell_webhook(url: str, result: Result, text: str) -> str | None:
    """Send the result and the first line of its summary; why that failed, or None."""
    fields = result.model_dump(include={"run", "status", "exit_code", "steps", "reason"})
    requeue = result.next is not None and result.next.requeue
    return post_to_webhook(url, f"{result.run}: {text.splitlines()[0]}", **fields, requeue=requeue)


def post_to_webhook(url: str, line: str, **fields: object) -> str | None:
    """Send a line of text and fields; why that failed, or None. The URL is a secret and appears in no message."""
    # Slack and Mattermost show `text`, Discord `content`.
    body = json.dumps({"text": line, "content": line, **fields}).encode()
    answers: list[str | None] = []
    # In a thread, because a socket's timeout does not limit the DNS lookup, which can take half a minute.
    thread = Thread(target=lambda: answers.append(_post(url, body)), daemon=True)
    thread.start()
    thread.join(_WEBHOOK_S + 1)
    return answers[0] if answers else f"the webhook did not answer within {_WEBHOOK_S + 1} s"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: only the URL that the user named gets the report."""

    def redirect_request(self, *_: object) -> None:
        """Do not follow; the first answer's code is the error."""


def _post(url: str, body: bytes) -> str | None:
    if not _PRIVATE.fullmatch(url):
        return "the webhook was not called: the file has no https URL"
    headers = {"Content-Type": "application/json", "User-Agent": "dray"}
    request = urllib.request.Request(url, body, headers)  # noqa: S310  https, or http on loopback
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=_WEBHOOK_S):
            return None
    except urllib.error.HTTPError as error:  # without the answer's own text
        return f"the webhook answered {error.code} {responses.get(error.code, '')}".rstrip()
    except Exception as error:  # the run's end does not depend on it, and another error's text may hold the URL
        reason = getattr(error, "reason", error)
        told = getattr(reason, "strerror", None) or type(reason).__name__
        return f"the webhook cannot be reached from this node: {told}"
