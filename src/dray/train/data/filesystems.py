"""File systems in the place of fsspec's own, whose packages no image has: S3 and Google's by pyarrow, and the web."""

from __future__ import annotations

import http.client
import io
import os
import time
import urllib.error
import urllib.request
from typing import Any

from fsspec.implementations.arrow import ArrowFSWrapper
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from dray.contract.findings import ConfigError

_BUFFER = 1 << 20
_TRIES = 5
_TEMPORARY = {408, 429, 500, 502, 503, 504}


class _Arrow(ArrowFSWrapper):  # type: ignore[misc]  # it has no types
    def _open(self, path: str, mode: str = "rb", **options: Any) -> io.BufferedReader:  # noqa: ANN401  fsspec's own
        # Some builders of `datasets` ask for a line, which is a request for each byte of it without a buffer.
        file = super()._open(path, mode, **options)
        return io.BufferedReader(file, _BUFFER) if mode == "rb" else file


class S3(_Arrow):
    """S3 by pyarrow, which every image has. s3fs needs another python-dateutil than the images have."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401  fsspec's own
        from pyarrow.fs import S3FileSystem  # noqa: PLC0415  not every build of pyarrow has it

        env = os.environ
        keys = ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SHARED_CREDENTIALS_FILE")
        system = S3FileSystem(
            # Without a secret it asks the machine for one, which takes seconds where none answers.
            anonymous=not any(env.get(key) for key in keys),
            region=env.get("AWS_REGION") or env.get("AWS_DEFAULT_REGION") or "us-east-1",
            endpoint_override=env.get("AWS_ENDPOINT_URL_S3") or env.get("AWS_ENDPOINT_URL"),
            connect_timeout=20,
            request_timeout=60,
        )
        super().__init__(system, **options)

    def tagged(self, path: str) -> dict[str, Any]:
        """Its size and ETag."""
        with self.fs.open_input_file(self._strip_protocol(path)) as file:
            about = file.metadata()
            return {"size": file.size(), "ETag": about.get("ETag") or about.get("Last-Modified", "")}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("s3://").rstrip("/")

    def unstrip_protocol(self, name: str) -> str:
        return name if "://" in name else f"s3://{name}"


class Gs(_Arrow):
    """Google Cloud Storage, by pyarrow too."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401  fsspec's own
        from pyarrow.fs import GcsFileSystem  # noqa: PLC0415  not every build of pyarrow has it

        super().__init__(GcsFileSystem(anonymous="GOOGLE_APPLICATION_CREDENTIALS" not in os.environ), **options)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path.removeprefix("gs://").rstrip("/")

    def unstrip_protocol(self, name: str) -> str:
        return name if "://" in name else f"gs://{name}"


class Http(AbstractFileSystem):  # type: ignore[misc]
    """A web server's files by ranges of bytes, each asked for again where a transfer breaks."""

    protocol = ("http", "https")

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return path

    def unstrip_protocol(self, name: str) -> str:
        return name

    def info(self, path: str, **_: Any) -> dict[str, Any]:  # noqa: ANN401  fsspec's own
        # A range, not HEAD: it shows whether the server has ranges, and some answer HEAD with another size.
        headers, _body = _answer(path, 0, 1)
        return {
            "name": path,
            "type": "file",
            "size": int(headers["Content-Range"].rpartition("/")[2]),
            "ETag": headers.get("ETag") or headers.get("Last-Modified") or "",
        }

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **_: Any) -> _HttpFile:  # noqa: ANN401
        return _HttpFile(self, path, mode, block_size or 1 << 22, size=self.info(path)["size"])


class _HttpFile(AbstractBufferedFile):  # type: ignore[misc]
    def _fetch_range(self, start: int, end: int) -> bytes:
        return _answer(self.path, start, end)[1]


def _answer(url: str, start: int, end: int) -> tuple[http.client.HTTPMessage, bytes]:
    """The bytes of a part; again, after 1, 2, 4 and 8 s, where the server or the way to it fails."""
    for turn in range(_TRIES):
        try:
            request = urllib.request.Request(url, headers={"Range": f"bytes={start}-{end - 1}"})  # noqa: S310  http(s)
            with urllib.request.urlopen(request, timeout=60) as reply:  # noqa: S310  http(s)
                if reply.status != 206 or not reply.headers.get("Content-Range", "").rpartition("/")[2].isdigit():
                    raise ConfigError(
                        "this server does not send parts of a file",
                        where=url,
                        wanted="HTTP status 206 for a range of bytes",
                        found=f"HTTP status {reply.status}, without a range",
                        fix="download the file, and name the local copy in [data]",
                    )
                body = reply.read()
                whole = min(end, int(reply.headers["Content-Range"].rpartition("/")[2])) - start
                if len(body) < whole:
                    raise http.client.IncompleteRead(body, whole - len(body))
                return reply.headers, body
        except urllib.error.HTTPError as error:
            if error.code == 416 and not start:  # an empty file has no first byte
                return _nothing(), b""
            if error.code in (401, 403):
                raise PermissionError(f"HTTP {error.code}") from error
            if error.code in (404, 410):
                raise FileNotFoundError(f"HTTP {error.code}") from error
            if error.code not in _TEMPORARY or turn == _TRIES - 1:
                raise OSError(f"HTTP {error.code} {error.reason}") from error
        except (OSError, http.client.HTTPException) as error:
            if turn == _TRIES - 1:
                raise OSError(f"{type(error).__name__}: {error}, {_TRIES} times") from error
        time.sleep(2.0**turn)
    raise AssertionError


def _nothing() -> http.client.HTTPMessage:
    headers = http.client.HTTPMessage()
    headers["Content-Range"], headers["ETag"] = "bytes */0", "empty"
    return headers
