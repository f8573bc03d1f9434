"""Files by URL, through fsspec: s3:// by s3fs, https:// by aiohttp, hf:// by the hub's library; a layer adds others."""

from __future__ import annotations

import asyncio
import io
import os
import re
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

import fsspec
from fsspec.spec import AbstractFileSystem
from huggingface_hub import HfApi

from dray.contract import exit_codes
from dray.contract.findings import ConfigError, DrayError
from dray.train.data import hub
from dray.train.errors import message

Version = tuple[int, str]
"""A file's size, and its hash, ETag or time."""
_TAGS = ("ETag", "etag", "Last-Modified", "LastModified", "last_modified", "mtime")
_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_PROFILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_SHARED_CREDENTIALS_FILE")
_HUB = re.compile("hf://datasets/([^/]+/[^/@]+)(?:@([^/]+))?")
_PACKAGE = re.compile("install ([a-z0-9]+)", re.IGNORECASE)
_SECRETS = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (s3://), or GOOGLE_APPLICATION_CREDENTIALS (gs://)"
_TEMPORARY = {408, 429, 500, 502, 503, 504}
_BUFFER = 1 << 22
_AT_ONCE = 32  # questions about files


@cache
def register() -> None:
    """Set dray's options of fsspec's file systems; `datasets` and the mirror read by them too."""
    client = {"trust_env": True, "middlewares": (_try_again,)}  # the proxy of the environment
    # A range of a compressed answer is no range of the file.
    web = {"headers": {"Accept-Encoding": "identity"}, "client_kwargs": client}
    s3 = {
        # Without a secret botocore asks the machine for one, which takes seconds where none answers.
        "anon": not any(os.environ.get(key) for key in _KEYS),
        "client_kwargs": {"region_name": os.environ.get("AWS_REGION")},
        "use_listings_cache": False,
    }
    fsspec.register_implementation(
        "s3", "dray.train.data.s3fs_compat.S3", clobber=True, errtxt="Install s3fs to access S3"
    )
    if "s3" in fsspec.registry:  # another package has used S3 before: fsspec then ignores the name of a class
        compat = import_module("dray.train.data.s3fs_compat")
        fsspec.register_implementation("s3", compat.S3, clobber=True)
    for protocol, options in (("s3", s3), ("http", web), ("https", web)):
        fsspec.config.conf[protocol] = options | fsspec.config.conf.get(protocol, {})


async def _try_again(request: Any, send: Callable[[Any], Awaitable[Any]]) -> Any:  # noqa: ANN401  aiohttp's own
    """Repeat a request of a part after 1, 2, 4 and 8 s where the server or the way to it fails, as s3fs does."""
    from aiohttp import ClientError  # noqa: PLC0415  only a run that reads from a web server has it

    for seconds in (1, 2, 4, 8):
        try:
            reply = await send(request)
            if reply.status == 206:
                await reply.read()  # aiohttp keeps it
            if reply.status not in _TEMPORARY:
                return reply
            reply.release()
        except (ClientError, OSError):
            pass
        await asyncio.sleep(seconds)
    return await send(request)


def system(url: str) -> AbstractFileSystem:
    """The file system of a URL."""
    register()
    protocol = urlsplit(url).scheme
    return _shared(protocol) if protocol in ("s3", "http", "https") else fsspec.core.url_to_fs(url)[0]


@cache
def _shared(protocol: str) -> AbstractFileSystem:
    """One for all threads; fsspec makes one for each, with its own connections."""
    return fsspec.filesystem(protocol)


def files(place: str, endings: tuple[str, ...]) -> list[str]:
    """The files of a URL, a pattern or a folder, in order; of a folder those with these endings."""
    with refusing_failures(place):
        place = _pinned(place)
        store = system(place)
        if place.startswith("http"):
            return [place]
        if "*" in place:
            found = cast(dict[str, dict[str, Any]], store.glob(place, detail=True))
        elif store.info(place)["type"] == "directory":
            within = cast(dict[str, dict[str, Any]], store.find(place, detail=True))
            found = {name: about for name, about in within.items() if name.lower().endswith(endings)}
        else:
            return [place]
        return sorted(store.unstrip_protocol(name) for name, about in found.items() if about["type"] == "file")


def _pinned(url: str) -> str:
    """A URL of the hub at its commit, so that all nodes and a later attempt read the same."""
    if not (dataset := _HUB.match(url)):
        return url
    name, revision = dataset.groups()
    about = HfApi().dataset_info(name, revision=revision and revision.replace("%2F", "/"))
    return f"hf://datasets/{name}@{about.sha}{url[dataset.end() :]}"


def versions(urls: list[str]) -> list[Version]:
    """The size and version of each of these files."""
    with ThreadPoolExecutor(_AT_ONCE) as threads:
        return [*threads.map(_version, urls)]


def _version(url: str) -> Version:
    with refusing_failures(url):
        about = system(url).info(url)
    dataset = _HUB.match(url)  # at a commit
    tag = dataset[2] if dataset else next((str(about[key]) for key in _TAGS if about.get(key)), "")
    if not tag or about["size"] is None:
        raise ConfigError(
            "this server sends no size or no version of the file",
            where=url,
            wanted="Content-Length, and ETag or Last-Modified, which the token cache needs",
            fix="download the file, and name the local copy in [data]",
        )
    return int(about["size"]), str(tag)


def opened(url: str, *, buffered: bool = True) -> BinaryIO:
    """The file's bytes, fetched as they are asked for; `buffered` where it is read line by line."""
    raw = system(url).open(url, "rb", block_size=_BUFFER)  # else each open file of S3 holds 50 MB
    return cast(BinaryIO, io.BufferedReader(raw, _BUFFER) if buffered else raw)


@contextmanager
def refusing_failures(url: str, what: str = "the dataset", done: str = "read") -> Iterator[None]:
    """Turn errors of remote files into errors with a fix. `what` and `done` are words of it: "the dataset", "read"."""
    protocol = urlsplit(url).scheme
    try:
        yield
    except DrayError:
        raise
    except hub.FAILURES as error:
        hub.failed(url, error, offline='if the nodes reach the hub: env.HF_HUB_OFFLINE = "0"')
    except ImportError as error:
        package = _PACKAGE.search(str(error))  # as fsspec says it: "Install adlfs to access Azure"
        name = package[1] if package else error.name or protocol
        raise missing_package(name, f"{protocol}://", str(error)) from error
    except Exception as error:
        # fsspec says of each failure of a web server that the file is missing.
        wrapped = protocol in ("http", "https") and isinstance(error, FileNotFoundError)
        cause = error.__cause__ or error if wrapped else error
        status, code = getattr(cause, "status", 0), exit_codes.CONFIG
        if isinstance(cause, PermissionError) or status in (401, 403):
            problem = f"no permission: {what} cannot be {done}"
            fix = f"export {_SECRETS} before you submit, and name them in pass_env; or name a public file"
        elif isinstance(cause, FileNotFoundError | NotADirectoryError) or status in (404, 410):
            problem, fix = f"{what} does not exist", "check the name of the bucket and of the file"
        elif isinstance(cause, ValueError) and re.search("Protocol not known|range requests", str(cause)):
            problem = f"{what} cannot be {done} by {protocol}://"
            fix = "name files of s3://, gs:// or hf://; or download the file, and name the copy"
        elif is_networks(cause):
            problem, fix = f"{what} cannot be {done}", "check the network, then run the same command again"
            code = exit_codes.FAILED
        else:
            raise
        raise DrayError(problem, where=url, found=message(cause), fix=fix, code=code) from error


def is_networks(error: BaseException) -> bool:
    """Return whether the network or the server failed; an OSError without a number is a damaged file's."""
    if isinstance(error, OSError):
        return bool(error.errno) or isinstance(error, TimeoutError | ConnectionError)
    return type(error).__module__.partition(".")[0] in ("aiohttp", "aiobotocore", "botocore")


def missing_package(package: str, what: str, found: str) -> ConfigError:
    """The error that names a missing Python package and the layer that adds it."""
    return ConfigError(
        f"{what} needs a Python package that is missing",
        wanted=package,
        found=" ".join(found.split())[:200],
        fix=f'dray image layer VARIANT --pip {package}, and layer = "{package}" in the recipe (VARIANT is its image)',
    )
