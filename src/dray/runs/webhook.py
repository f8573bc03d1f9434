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
    """Send the report; why it failed, or None. The URL is a secret and appears in no message."""
    answers: list[str | None] = []
    # In a thread, because a socket's timeout does not limit the DNS lookup, which can take half a minute.
    asked = Thread(target=lambda: answers.append(_told(url, result, text)), daemon=True)
    asked.start()
    asked.join(_SECONDS + 1)
    return answers[0] if answers else f"the webhook did not answer within {_SECONDS + 1} s"


def _told(url: str, result: Result, text: str) -> str | None:
    if wrong := _refused(url):
        return f"the webhook was not called: {wrong}"
    first = f"{result.run}: {text.partition(chr(10))[0]}"
    fields = {"run": result.run, "status": result.status, "exit_code": result.exit_code, "steps": result.steps}
    fields |= {"reason": result.reason, "requeue": bool(result.next and result.next.requeue)}
    # Slack and Mattermost show `text`, Discord `content`.
    body = json.dumps({"text": first, "content": first, **fields}).encode()
    headers = {"Content-Type": "application/json", "User-Agent": "dray"}
    request = urllib.request.Request(url, body, headers)  # noqa: S310  _refused has looked at it
    try:
        with urllib.request.build_opener(_NoRedirects).open(request, timeout=_SECONDS):
            return None
    except urllib.error.HTTPError as error:
        return (
            f"the webhook answered {error.code} {responses.get(error.code, '')}".rstrip()
        )  # without the answer's own text
    except Exception as error:  # the run's end does not depend on it
        inner = getattr(error, "reason", None) or error
        reason = getattr(inner, "strerror", None) or type(inner).__name__
        return f"the webhook cannot be reached from this node: {reason}"


class _NoRedirects(urllib.request.HTTPRedirectHandler):
    """Refuses redirects: only the URL that the user named gets the report."""

    def redirect_request(self, *_: object) -> None:
        """Do not follow; the first answer's code is the error."""


def _refused(url: str) -> str:
    """Why the URL is refused; plain HTTP would show this secret to the whole network."""
    try:
        parts = urlsplit(url)
        host = parts.hostname or ""
    except ValueError:
        return "the file has no URL"
    if parts.scheme not in ("http", "https") or not host or not url.isprintable() or " " in url:
        return "the file has no https URL"
    if parts.scheme == "http" and host != "localhost" and not _is_loopback(host):
        return "the URL is not https"
    return ""


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
