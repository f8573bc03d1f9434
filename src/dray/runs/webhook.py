"""Report how a run ended to a chat or another service: one POST to the URL in the user's own file."""

from __future__ import annotations

import ipaddress
import json
import urllib.error
import urllib.request
from http.client import responses
from threading import Thread
from urllib.parse import urlsplit

from dray.runs.result import Result

_SECONDS = 5  # Slurm kills a job soon after its time limit


def tell(url: str, result: Result, text: str) -> str | None:
    """Send the result and the first line of its summary; why that failed, or None."""
    return post(
        url,
        f"{result.run}: {text.partition(chr(10))[0]}",
        run=result.run,
        status=result.status,
        exit_code=result.exit_code,
        steps=result.steps,
        reason=result.reason,
        requeue=result.next is not None and result.next.requeue,
    )


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
    if not _is_private(url):
        return "the webhook was not called: the file has no https URL"
    headers = {"Content-Type": "application/json", "User-Agent": "dray"}
    request = urllib.request.Request(url, body, headers)  # noqa: S310  _is_private has looked at it
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=_SECONDS):
            return None
    except urllib.error.HTTPError as error:  # without the answer's own text
        return f"the webhook answered {error.code} {responses.get(error.code, '')}".rstrip()
    except Exception as error:  # the run's end does not depend on it
        inner = getattr(error, "reason", None) or error
        reason = getattr(inner, "strerror", None) or type(inner).__name__
        return f"the webhook cannot be reached from this node: {reason}"


def _is_private(url: str) -> bool:
    """Whether only the server sees the URL: plain HTTP would show this secret to the whole network."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
        if parts.scheme == "http":
            return host == "localhost" or ipaddress.ip_address(host).is_loopback
        return parts.scheme == "https"
    except ValueError:  # no URL, or a name in place of an address
        return False
