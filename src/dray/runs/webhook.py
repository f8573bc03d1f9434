"""Report how a run ended to a chat or another service: one POST to the URL in the user's own file."""

from __future__ import annotations

import json
import re
import sys
import urllib.error
import urllib.request
from contextlib import suppress
from http.client import responses
from pathlib import Path
from threading import Thread

from dray.contract import files
from dray.runs.result import Result

# Plain HTTP would show the URL, a secret, to the whole network.
_PRIVATE = re.compile(r"https://\S+|http://(?:localhost|127\.0\.0\.1)[:/]\S*")
_SECONDS = 5  # Slurm kills a job soon after its time limit


def read(file: Path) -> str:
    """The URL in the user's own file; empty without one, or if others may read it."""
    with suppress(OSError, UnicodeDecodeError):
        if file.stat().st_mode & 0o077:
            print(f"dray: warning: {file} is not used: chmod 600 it, since its URL is a secret", file=sys.stderr)
        else:
            return files.read(file, own=True).decode().partition("\n")[0]
    return ""


def tell(url: str, result: Result, text: str) -> str | None:
    """Send the result and the first line of its summary; why that failed, or None."""
    fields = result.model_dump(include={"run", "status", "exit_code", "steps", "reason"})
    requeue = result.next is not None and result.next.requeue
    return post(url, f"{result.run}: {text.splitlines()[0]}", **fields, requeue=requeue)


def post(url: str, line: str, **fields: object) -> str | None:
    """Send a line of text and fields; why that failed, or None. The URL is a secret and appears in no message."""
    # Slack and Mattermost show `text`, Discord `content`.
    body = json.dumps({"text": line, "content": line, **fields}).encode()
    answers: list[str | None] = []
    # In a thread, because a socket's timeout does not limit the DNS lookup, which can take half a minute.
    thread = Thread(target=lambda: answers.append(_post(url, body)), daemon=True)
    thread.start()
    thread.join(_SECONDS + 1)
    return answers[0] if answers else f"the webhook did not answer within {_SECONDS + 1} s"


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
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=_SECONDS):
            return None
    except urllib.error.HTTPError as error:  # without the answer's own text
        return f"the webhook answered {error.code} {responses.get(error.code, '')}".rstrip()
    except Exception as error:  # the run's end does not depend on it, and another error's text may hold the URL
        reason = getattr(error, "reason", error)
        told = getattr(reason, "strerror", None) or type(reason).__name__
        return f"the webhook cannot be reached from this node: {told}"
