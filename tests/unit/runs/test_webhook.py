"""How a run ended, told to a real server on loopback."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from dray.runs.active_run import watch
from dray.runs.result import Result

RESULT = Result(
    run="r", status="stopped", exit_code=75, finished="x", world_size=4, hosts=["n1"], steps=7, reason="scancel"
)


class Server(HTTPServer):
    code = 200
    words: str | None = None
    seen: list[bytes]


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        self.server.seen.append(self.rfile.read(int(self.headers["Content-Length"])))
        self.send_response(self.server.code, self.server.words)
        self.send_header("Location", "/elsewhere")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        server.seen = []
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def url(server: Server) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}/services/secret-word"


@pytest.mark.seconds
def test_a_chat_gets_one_line_and_a_program_the_fields(server: Server) -> None:
    assert watch.tell_webhook(url(server), RESULT, "stopped by scancel at x\n  safe: y") is None
    line = "r: stopped by scancel at x"
    assert [json.loads(body) for body in server.seen] == [
        {
            **{"text": line, "content": line, "run": "r", "status": "stopped", "exit_code": 75, "steps": 7},
            **{"reason": "scancel", "requeue": False},
        }
    ]


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("code", "told"), [(404, "404 Not Found"), (302, "302 Found"), (500, "500 Internal Server Error")]
)
def test_another_answer_is_a_warning_and_a_redirect_is_not_followed(server: Server, code: int, told: str) -> None:
    server.code = code
    assert watch.tell_webhook(url(server), RESULT, "done") == f"the webhook answered {told}"
    assert len(server.seen) == 1


@pytest.mark.seconds
@pytest.mark.parametrize(("code", "told"), [(404, "404 Not Found"), (599, "599")])
def test_a_server_has_no_words_of_its_own(server: Server, code: int, told: str) -> None:
    server.code, server.words = code, "\x1b[2J\x1b]0;x\x07done: exit code 0"
    assert watch.tell_webhook(url(server), RESULT, "done") == f"the webhook answered {told}"


@pytest.mark.parametrize(
    "bad",
    [
        *(
            "",
            "hello",
            "ftp://x/y",
            "file:///etc/passwd",
            "http://example.org/secret-word",
            "https://",
            "https:///secret-word",
        ),
        *(
            "http://[::1/secret-word",
            "http://10.0.0.1/secret-word",
            "https://x/secret word",
            "http://127.0.0.1:99999/secret-word",
        ),
        "http://127.0.0.1:1/secret-word",
    ],
)
def test_what_is_no_url_or_answers_nothing(bad: str) -> None:
    failed = watch.tell_webhook(bad, RESULT, "done")
    assert failed
    assert failed.startswith("the webhook ")
    assert "secret" not in failed


@pytest.mark.seconds
def test_a_name_that_is_looked_up_for_ever_holds_up_no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "_WEBHOOK_S", 0)
    asked = threading.Event()
    monkeypatch.setattr(watch, "_post", lambda *_: asked.wait(30))
    began = time.monotonic()
    assert watch.tell_webhook("https://chat.example/x", RESULT, "done") == "the webhook did not answer within 1 s"
    assert time.monotonic() - began < 5
    asked.set()
