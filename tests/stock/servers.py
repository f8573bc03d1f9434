"""Web servers on loopback under the names that dray contacts, with a certificate of the test's own CA."""

from __future__ import annotations

import shutil
import ssl
import subprocess
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import NamedTuple
from urllib.parse import unquote

Answer = Callable[[str], bytes | Path | None]


class Request(NamedTuple):
    """One that was answered."""

    host: str
    path: str
    status: int
    size: int


class Authority(NamedTuple):
    """A CA and what it has signed: one certificate of all names."""

    ca: Path
    certificate: Path
    key: Path


def authority(folder: Path, names: Iterable[str], addresses: Iterable[str]) -> Authority:
    """Made anew."""
    made = Authority(folder / "ca.crt", folder / "names.crt", folder / "names.key")
    request = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2"]
    ca = ["-subj", "/CN=dray's test of the stock path", "-addext", "keyUsage=critical,keyCertSign"]
    _openssl([*request, *ca, "-keyout", folder / "ca.key", "-out", made.ca])
    alternatives = ",".join((*(f"DNS:{name}" for name in names), *(f"IP:{address}" for address in addresses)))
    signed = ["-CA", made.ca, "-CAkey", folder / "ca.key", "-subj", "/CN=names"]
    signed += ["-addext", f"subjectAltName={alternatives}", "-addext", "basicConstraints=critical,CA:FALSE"]
    _openssl([*request, *signed, "-keyout", made.key, "-out", made.certificate])
    return made


def _openssl(argv: list[str | Path]) -> None:
    subprocess.run(argv, check=True, capture_output=True)


@contextmanager
def serving(address: str, answers: dict[str, Answer], signed: Authority) -> Iterator[list[Request]]:
    """Answer by http and https, each host by its own function; what was asked for so far."""
    seen: list[Request] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            host = self.headers["Host"].partition(":")[0]
            path = unquote(self.path.partition("?")[0])
            content = answers[host](path) if host in answers else None
            size = len(content) if isinstance(content, bytes) else content.stat().st_size if content else 0
            status = 404 if content is None else 200
            seen.append(Request(host, path, status, size))
            self.send_response(status)
            self.send_header("Content-Type", "text/html" if path.endswith("/") else "application/octet-stream")
            self.send_header("Content-Length", str(size))
            self.end_headers()
            if self.command == "HEAD" or content is None:
                return
            if isinstance(content, bytes):
                self.wfile.write(content)
            else:
                with content.open("rb") as file:
                    shutil.copyfileobj(file, self.wfile)

        do_HEAD = do_GET  # noqa: N815  as http.server wants it

        def log_message(self, *_: object) -> None:
            pass

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(signed.certificate, signed.key)
    with ExitStack() as stack:
        for port in (80, 443):
            server = stack.enter_context(ThreadingHTTPServer((address, port), Handler))
            if port == 443:
                server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
            thread = Thread(target=server.serve_forever, daemon=True)
            thread.start()
            stack.callback(thread.join)
            stack.callback(server.shutdown)
        yield seen
