"""A web server and an S3 server on loopback: what fsspec asks of the real ones, and what goes wrong with them."""

from __future__ import annotations

import hashlib
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape, unescape

Objects = dict[str, bytes]  # by BUCKET/KEY


class Store:
    """The objects, which may be changed while they are served, and the paths that were asked for."""

    def __init__(self, address: str, objects: Objects) -> None:
        self.address, self.objects = address, objects
        self.asked: list[tuple[str, str]] = []
        self.breaks = 0
        """How many of the next answers end in the middle."""
        self.ranges = True
        self.buckets: set[str] = set()
        """Those that may be empty."""
        self.cuts = 0
        """How many of the next objects, or parts of one, lose their connection in the middle."""
        self.parts: dict[str, dict[int, bytes]] = {}
        """Of objects that are not complete yet, by the upload's number."""


@contextmanager
def serving(objects: Objects) -> Iterator[Store]:
    """What has `private` in its name wants a signature; `nobody` is denied to all."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Store,), {}))
    store = Store(f"http://127.0.0.1:{server.server_port}", objects)
    server.RequestHandlerClass.store = store
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield store
    finally:
        server.shutdown()
        server.server_close()


def forget() -> None:
    """A process reads its variables once; a test has other ones."""
    import fsspec

    from dray.train.data import remote

    for protocol in ("s3", "http", "https"):
        fsspec.config.conf.pop(protocol, None)
        fsspec.get_filesystem_class(protocol).clear_instance_cache()
    remote.register.cache_clear()
    remote._shared.cache_clear()


class _Store(BaseHTTPRequestHandler):
    store: Store
    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET(body=False)

    def do_GET(self, *, body: bool = True) -> None:
        url = urlsplit(self.path)
        path, query = unquote(url.path).strip("/"), parse_qs(url.query, keep_blank_values=True)
        self.store.asked.append((self.command, path))
        if "nobody" in path or ("private" in path and "AKIAMAYREAD" not in self.headers.get("Authorization", "")):
            return self._error(403, "AccessDenied", body)
        if "/" not in path and not body and path in self.store.buckets:
            return self._answer(200, b"", {}, body)
        if "/" not in path:
            return self._listed(path, query, body)
        if path not in self.store.objects:
            return self._error(404, "NoSuchKey", body)
        return self._object(self.store.objects[path], body)

    def do_PUT(self) -> None:
        """A part of an object, or a whole one."""
        url = urlsplit(self.path)
        path, query = unquote(url.path).lstrip("/"), parse_qs(url.query)
        self.store.asked.append((self.command, path))
        if self._refused(path):
            return
        if self.store.cuts:
            self.store.cuts -= 1
            self.rfile.read(1)
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        said = self._sent()
        if "partNumber" in query:
            self.store.parts[query["uploadId"][0]][int(query["partNumber"][0])] = said
        else:
            self.store.objects[path] = said
        self._answer(200, b"", {"ETag": f'"{hashlib.md5(said).hexdigest()}"'}, body=True)

    def do_POST(self) -> None:
        """An object of several parts begins, or is complete; or several are removed."""
        url = urlsplit(self.path)
        path, query = unquote(url.path).strip("/"), parse_qs(url.query, keep_blank_values=True)
        self.store.asked.append((self.command, path))
        said = self._sent()
        if self._refused(path):
            return
        kind, fields = "DeleteResult", ""
        if "uploads" in query:
            kind, upload = "InitiateMultipartUploadResult", str(len(self.store.parts) + 1)
            self.store.parts[upload] = {}
            fields = f"<UploadId>{upload}</UploadId>"
        elif "uploadId" in query:
            parts = self.store.parts[query["uploadId"][0]]
            kind, self.store.objects[path] = (
                "CompleteMultipartUploadResult",
                b"".join(parts[one] for one in sorted(parts)),
            )
            fields = '<ETag>"of parts"</ETag>'
        else:
            for key in re.findall(b"<Key>([^<]*)</Key>", said):
                self.store.objects.pop(f"{path}/{unescape(key.decode())}", None)
        self._answer(200, f"<{kind}>{fields}</{kind}>".encode(), {"Content-Type": "application/xml"}, body=True)

    def do_DELETE(self) -> None:
        path = unquote(urlsplit(self.path).path).lstrip("/")
        self.store.asked.append((self.command, path))
        if not self._refused(path):
            self.store.objects.pop(path, None)
            self._answer(204, b"", {}, body=False)

    def _refused(self, path: str) -> bool:
        if "nobody" in path or ("private" in path and "AKIAMAYREAD" not in self.headers.get("Authorization", "")):
            self._error(403, "AccessDenied", body=True)
            return True
        bucket = path.partition("/")[0]
        if bucket not in self.store.buckets:
            self._error(404, "NoSuchBucket", body=True)
            return True
        return False

    def _sent(self) -> bytes:
        """The body, out of HTTP's chunks and then out of S3's own, which have a checksum behind them."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            said = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        else:
            said = b""
            while size := int(self.rfile.readline().strip() or b"0", 16):
                said += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        if "aws-chunked" not in self.headers.get("Content-Encoding", ""):
            return said
        found, rest = b"", said
        while True:
            head, _, rest = rest.partition(b"\r\n")
            size = int(head.partition(b";")[0], 16)
            if not size:
                return found
            found, rest = found + rest[:size], rest[size + 2 :]

    def _object(self, said: bytes, body: bool) -> None:
        headers = {"ETag": f'"{hashlib.md5(said).hexdigest()}"', "Last-Modified": "Tue, 24 Nov 2026 00:00:00 GMT"}
        part = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        code, sent = 200, said
        if part and self.store.ranges:
            begin, end = int(part[1]), min(int(part[2]) + 1, len(said))
            if begin >= len(said):
                return self._answer(416, b"", headers, body)
            code, sent = 206, said[begin:end]
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{len(said)}"
        return self._answer(code, sent, headers, body)

    def _listed(self, bucket: str, query: dict[str, list[str]], body: bool) -> None:
        keys = [path.removeprefix(f"{bucket}/") for path in sorted(self.store.objects) if path.startswith(f"{bucket}/")]
        if not keys and bucket not in self.store.buckets:
            return self._error(404, "NoSuchBucket", body)
        prefix, until = query.get("prefix", [""])[0], query.get("delimiter", [""])[0]
        keys, folders = [key for key in keys if key.startswith(prefix)], []
        if until:
            folders = sorted(
                {prefix + key[len(prefix) :].partition(until)[0] + until for key in keys if until in key[len(prefix) :]}
            )
            keys = [key for key in keys if until not in key[len(prefix) :]]
        files = "".join(
            f"<Contents><Key>{escape(key)}</Key><LastModified>2026-11-24T00:00:00.000Z</LastModified>"
            f"<Size>{len(self.store.objects[f'{bucket}/{key}'])}</Size></Contents>"
            for key in keys
        )
        files += "".join(f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>" for one in folders)
        files += f"<KeyCount>{len(keys) + len(folders)}</KeyCount><IsTruncated>false</IsTruncated>"
        said = f"<ListBucketResult><Name>{bucket}</Name>{files}</ListBucketResult>"
        return self._answer(200, said.encode(), {"Content-Type": "application/xml"}, body)

    def _error(self, code: int, name: str, body: bool) -> None:
        said = f"<Error><Code>{name}</Code><Message>{name}</Message></Error>"
        self._answer(code, said.encode(), {"Content-Type": "application/xml"}, body)

    def _answer(self, code: int, said: bytes, headers: dict[str, str], body: bool) -> None:
        self.send_response(code)
        for name, value in {**headers, "Content-Length": str(len(said))}.items():
            self.send_header(name, value)
        self.end_headers()
        if body and self.store.breaks and len(said) > 1:
            self.store.breaks -= 1
            self.wfile.write(said[: len(said) // 2])
            self.close_connection = True
        elif body:
            self.wfile.write(said)

    def log_message(self, *_: object) -> None:
        pass
