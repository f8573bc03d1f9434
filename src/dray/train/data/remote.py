"""Files by URL, through fsspec: s3:// and gs:// by pyarrow, hf:// by the hub's library, https:// by Python's own."""

from __future__ import annotations

import gzip
import http.client
import io
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, BinaryIO, NoReturn, cast
from urllib.parse import urlsplit

import fsspec
from fsspec.spec import AbstractFileSystem
from huggingface_hub import HfApi

from dray.contract import exit_codes
from dray.contract.findings import ConfigError, DrayError
from dray.train.data import hub
from dray.train.data.filesystems import S3, Gs, Http

Seen = tuple[int, str]
"""A file's size, and its hash, ETag or time."""
_TAGS = ("ETag", "etag", "blob_id", "sha256", "md5", "content_md5", "mtime", "LastModified", "last_modified", "updated")
_MISSING = ("NO_SUCH_BUCKET", "NO_SUCH_KEY", "RESOURCE_NOT_FOUND", "does not exist", "HTTP status 404")
_DENIED = ("ACCESS_DENIED", "INVALID_ACCESS_KEY", "SIGNATURE_DOES_NOT_MATCH", "HTTP status 403")
_OURS = {"s3": S3, "gs": Gs, "http": Http, "https": Http}
_COMMIT = re.compile("hf://datasets/[^/]+/[^/]+@([0-9a-f]{40})/")
_BUFFER = 1 << 22
_AT_ONCE = 32  # questions about files
_SECRETS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS (the path of a file)",
    "hf": "HF_TOKEN",
}


def files(place: str, endings: tuple[str, ...]) -> list[str]:
    """The files of a URL, a pattern or a folder, in order; of a folder those with these endings."""
    with reading(place):
        place = _pinned(place)
        system = _system(place)
        if isinstance(system, Http):
            return [place]
        if "*" in place:
            found = cast(dict[str, dict[str, Any]], system.glob(place, detail=True))
        else:
            about = system.info(place)
            found = {about["name"]: about}
            if about["type"] == "directory":
                within = cast(dict[str, dict[str, Any]], system.find(place, detail=True))
                found = {name: one for name, one in within.items() if name.lower().endswith(endings)}
        return sorted(system.unstrip_protocol(name) for name, about in found.items() if about["type"] == "file")


def seen(urls: list[str]) -> list[Seen]:
    """The size and version of each of these files."""
    if len(urls) == 1:
        return [_seen(urls[0])]
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return [*threads.map(_seen, urls)]


def _seen(url: str) -> Seen:
    with reading(url):
        system = _system(url)
        if isinstance(system, S3):  # whose listing has no ETag
            about = system.tagged(url)
        elif commit := _COMMIT.match(url):  # a file's own hash is told or not, by what was asked before
            about = system.info(url) | {"ETag": commit[1]}
        else:
            about = system.info(url)
        tag = next((str(about[key]) for key in _TAGS if about.get(key)), "")
    if not tag:
        raise ConfigError(
            "this server sends no version of the file",
            where=url,
            wanted="an ETag or Last-Modified header, which the token cache needs",
            found="neither",
            fix="download the file, and name the local copy in [data]",
        )
    return int(about["size"]), tag


def opened(url: str, *, buffered: bool = True) -> BinaryIO:
    """The file's bytes, fetched as they are asked for; `buffered` where it is read line by line."""
    raw = _system(url).open(url, "rb")
    return cast(BinaryIO, io.BufferedReader(raw, _BUFFER) if buffered else raw)


@contextmanager
def reading(url: str, what: str = "the dataset", done: str = "read") -> Iterator[None]:
    """Turn errors of remote files into errors with a fix; `what` is being read or written, as `done` says."""
    protocol = urlsplit(url).scheme
    try:
        if protocol == "hf":
            try:
                yield
            except hub.FAILURES as error:
                hub.failed(url, error, offline='if the nodes reach the hub: env.HF_HUB_OFFLINE = "0"')
        else:
            yield
    except ImportError as error:
        package = error.name or {"abfs": "adlfs", "abfss": "adlfs", "az": "adlfs"}.get(protocol, protocol)
        raise missing_package(package, f"{protocol}://", str(error)) from error
    except (FileNotFoundError, NotADirectoryError) as error:
        _no(url, f"{what} does not exist", str(error), "check the name of the bucket and of the file")
    except PermissionError as error:
        _denied(url, protocol, str(error), f"no permission: {what} cannot be {done}")
    except gzip.BadGzipFile:  # an OSError too, and what reads the file says it
        raise
    except (OSError, http.client.HTTPException) as error:
        if "data stream" in str(error) or "decompress" in str(error):  # bz2's and zstd's
            raise
        _as_arrow_says(url, protocol, error, what, done)
    except ValueError as error:
        if "rotocol" not in str(error):
            raise
        _no(
            url,
            f"{what} has a protocol that fsspec does not know: {protocol}",
            str(error),
            "s3://, hf://, gs:// or https://",
        )


def _as_arrow_says(url: str, protocol: str, error: Exception, what: str, done: str) -> NoReturn:
    text = " ".join(str(error).split())
    if any(word in text for word in _MISSING):
        _no(url, f"{what} does not exist", text, "check the name of the bucket and of the file")
    if any(word in text for word in _DENIED):
        _denied(url, protocol, text, f"no permission: {what} cannot be {done}")
    raise DrayError(
        f"{what} cannot be {done}",
        where=url,
        found=text[:300],
        fix="check the network, then run the same command again",
        code=exit_codes.FAILED,
    ) from error


def _denied(url: str, protocol: str, found: str, problem: str) -> NoReturn:
    secret = _SECRETS.get(protocol, "")
    fix = f"export {secret} before you submit, and name it in pass_env" if secret else "name a file that all may read"
    _no(url, problem, found, fix)


def _no(url: str, problem: str, found: str, fix: str) -> NoReturn:
    raise ConfigError(problem, where=url, found=" ".join(found.split())[:300], fix=fix)


def missing_package(package: str, what: str, found: str) -> ConfigError:
    """The error that names a missing Python package and the layer that adds it."""
    return ConfigError(
        f"{what} needs a Python package that is missing",
        wanted=package,
        found=" ".join(found.split())[:200],
        fix=f'dray image layer VARIANT --pip {package}, and layer = "{package}" in the recipe (VARIANT is its image)',
    )


def _system(url: str) -> AbstractFileSystem:
    protocol = urlsplit(url).scheme
    return own_system(protocol) if protocol in _OURS else fsspec.core.url_to_fs(url)[0]


@cache
def own_system(protocol: str) -> AbstractFileSystem:
    """One file system for all threads; fsspec makes one for each."""
    return _OURS[protocol]()


@cache
def register() -> None:
    """Register dray's file systems instead of fsspec's; `datasets` uses them too."""
    for name, system in _OURS.items():
        fsspec.register_implementation(name, system, clobber=True)


def _pinned(url: str) -> str:
    """Of the hub at a commit, so that all nodes and a later attempt read the same."""
    parts = url.removeprefix("hf://").split("/", 3)
    if not url.startswith("hf://") or len(parts) < 3:
        return url
    kind, owner, name, rest = (*parts, "")[:4]
    name, _, revision = name.partition("@")
    if kind != "datasets":
        return url
    about = HfApi().dataset_info(f"{owner}/{name}", revision=revision.replace("%2F", "/") or None)
    return f"hf://{kind}/{owner}/{name}@{about.sha}/{rest}"
