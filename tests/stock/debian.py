"""Debian's mirror as it is, from which one locked version has left, and Debian's dated archive, which has them all.

Both hand on what the real mirror has. Indexes that differ are signed anew, by a key that the test's bases know too.
"""

from __future__ import annotations

import gzip
import hashlib
import lzma
import re
import shutil
import subprocess
import tempfile
import urllib.error
import urllib.request
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import cache
from pathlib import Path
from typing import NamedTuple

SUITES = {"debian": ("bookworm", "bookworm-updates"), "debian-security": ("bookworm-security",)}
_PACKAGES = "main/binary-amd64/Packages"
_DATED = re.compile(r"/archive/([^/]+)/(\d{8}T\d{6}Z)/(.+)")
_EXPIRED = "Valid-Until: Thu, 01 Jan 2026 00:00:00 UTC\n"


class Locked(NamedTuple):
    """A line of the lock."""

    name: str
    version: str
    architecture: str
    sha256: str


def read(lock: Path) -> dict[str, Locked]:
    """What is locked, by name."""
    lines = (line.split() for line in lock.read_text().splitlines() if not line.startswith("#"))
    return {line[0]: Locked(*line[:4]) for line in lines}


class Key:
    """What signs."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(mode=0o700)
        self.home = folder
        self._gpg("--passphrase", "", "--quick-generate-key", "dray's test of the stock path", "rsa3072", "sign", "2d")
        self.public = self._gpg("--export")
        self.ring = folder.with_suffix(".public")
        self.ring.write_bytes(self.public)

    def signed(self, text: str) -> bytes:
        return self._gpg("--digest-algo", "SHA512", "--clearsign", given=text.encode())

    def _gpg(self, *words: str, given: bytes = b"") -> bytes:
        argv = ["gpg", "--homedir", self.home, "--batch", "--quiet", *words]
        return subprocess.run(argv, input=given, stdout=subprocess.PIPE, check=True).stdout


class Debian:
    """The mirror and the archive."""

    def __init__(self, hosts: dict[str, str], *, locked: dict[str, Locked], gone: str, key: Key, kept: Path) -> None:
        """`hosts` are the real mirror's, by the root of the archive: debian, debian-security."""
        self.hosts, self.locked, self.key, self.kept = hosts, locked, key, kept
        self.gone = locked[gone]
        self.hashes: dict[str, str] = {}  # of locked versions that the real mirror has dropped, and are made again here
        shutil.rmtree(kept / "today", ignore_errors=True)
        self._mirror: dict[str, bytes | None] = {}
        self._archive: dict[str, bytes | None] = {}
        self._change()

    def mirror(self, path: str) -> bytes | Path | None:
        """What the mirror has at /debian/..."""
        # A real one that caches may serve sid's Release past its date.
        if path not in self._mirror and path.endswith("/InRelease") and (found := self._upstream(path)):
            body = _body(found.read_bytes())
            until = re.search(r"Valid-Until: (.*)", body)
            if until and parsedate_to_datetime(until[1]) < datetime.now(UTC):
                self._mirror[path] = self.key.signed(body.replace(f"{until[0]}\n", ""))
        return self._mirror[path] if path in self._mirror else self._upstream(path)

    def archive(self, path: str) -> bytes | Path | None:
        """What the archive has at /archive/debian/STAMP/..."""
        dated = _DATED.fullmatch(path)
        if not dated:
            return None
        inside = f"/{dated[1]}/{dated[3]}"
        if inside not in self._archive and inside.endswith("/InRelease"):
            self._archive[inside] = self._expired(_body(self._bytes(inside)))
        return self._archive[inside] if inside in self._archive else self._upstream(inside)

    def _change(self) -> None:
        """Put what differs from the real mirror into the two tables."""
        stanzas = {path: self._stanzas(path) for path in self._indexes()}
        now: dict[str, tuple[str, str]] = {}  # the index and the stanza that has the locked file
        newest: dict[str, tuple[str, str]] = {}  # of locked packages, in the last index that has one
        for path, found in stanzas.items():
            for stanza in reversed(found):
                if not (locked := self.locked.get(_field(stanza, "Package"))):
                    continue
                newest[locked.name] = (path, stanza)
                if _field(stanza, "SHA256") == locked.sha256:
                    now[locked.name] = (path, stanza)
        for name in self.locked.keys() - now.keys():
            path, stanza = newest[name]
            now[name] = (path, self._made(path, stanza, self.locked[name].version, self._archive))
            self.hashes[name] = _field(now[name][1], "SHA256")
        path, stanza = now[self.gone.name]
        newer = self._made(path, stanza, f"{self.gone.version}+stock1", self._mirror)
        self._mirror[_file(path, stanza)] = None
        for index, found in stanzas.items():
            others = [stanza for stanza in found if _field(stanza, "Package") != self.gone.name]
            if len(others) < len(found):
                added = [newer] if index == path else []
                self._put(self._mirror, index, [*others, *added], self._mirror_release)
            others = [stanza for stanza in found if _field(stanza, "Package") not in self.hashes]
            if len(others) < len(found):
                added = [now[name][1] for name in self.hashes if now[name][0] == index]
                self._put(self._archive, index, [*others, *added], self._expired)

    def _indexes(self) -> list[str]:
        return [f"/{root}/dists/{suite}/{_PACKAGES}" for root, suites in SUITES.items() for suite in suites]

    def _stanzas(self, path: str) -> list[str]:
        text = lzma.decompress(self._bytes(f"{path}.xz")).decode()
        return [stanza for stanza in text.split("\n\n") if stanza.strip()]

    def _put(self, table: dict[str, bytes | None], index: str, stanzas: list[str], release) -> None:
        content = "\n\n".join((*stanzas, "")).encode()
        packed = gzip.compress(content, compresslevel=1, mtime=0)
        suite = index.removesuffix(f"/{_PACKAGES}")
        body = re.sub(rf"\n [0-9a-f]+ +\d+ {_PACKAGES}(\.\w+)?(?=\n)", "", _body(self._bytes(f"{suite}/InRelease")))
        body = body.replace("Acquire-By-Hash: yes\n", "")
        for name, data in ((_PACKAGES, content), (f"{_PACKAGES}.gz", packed)):
            line = f" {hashlib.sha256(data).hexdigest()} {len(data)} {name}\n"
            body = body.replace("\nSHA256:\n", f"\nSHA256:\n{line}")
            table[f"{suite}/{name}"] = data
        table[f"{suite}/{_PACKAGES}.xz"] = None
        table[f"{suite}/InRelease"] = release(body)

    def _mirror_release(self, body: str) -> bytes:
        return self.key.signed(body)

    def _expired(self, body: str) -> bytes:
        body = re.sub(r"Valid-Until: .*\n", "", body)
        return self.key.signed(re.sub(r"(?m)^Date: ", f"{_EXPIRED}Date: ", body, count=1))

    def _made(self, index: str, stanza: str, version: str, table: dict[str, bytes | None]) -> str:
        """The stanza of a package made from the real one, as another version of it; its file goes into the table."""
        deb = self._upstream(_file(index, stanza))
        with tempfile.TemporaryDirectory() as made:
            folder, out = Path(made, "tree"), Path(made, "out.deb")
            subprocess.run(["dpkg-deb", "--raw-extract", deb, folder], check=True)
            control = folder / "DEBIAN" / "control"
            control.write_text(self._control(control.read_text(), version))
            argv = ["dpkg-deb", "--root-owner-group", "-Zgzip", "-z1", "--build", folder, out]
            subprocess.run(argv, check=True, stdout=subprocess.DEVNULL)
            content = out.read_bytes()
            text = control.read_text()
        architecture = _field(stanza, "Architecture")
        file = f"pool/stock/{_field(stanza, 'Package')}_{version.replace(':', '%3a')}_{architecture}.deb"
        table[f"/{index.split('/')[1]}/{file}"] = content
        return f"{text.strip()}\nFilename: {file}\nSize: {len(content)}\nSHA256: {hashlib.sha256(content).hexdigest()}"

    def _control(self, text: str, version: str) -> str:
        """With this version; what it wants of other locked packages in an exact version, it wants as locked."""

        def exact(wanted: re.Match[str]) -> str:
            other = self.locked.get(wanted[1])
            return f"{wanted[1]} (= {other.version})" if other else wanted[0]

        text = re.sub(r"([a-z0-9][a-z0-9+.-]+) \(= [^)]+\)", exact, text)
        return re.sub(r"(?m)^Version: .*$", f"Version: {version}", text)

    def _bytes(self, path: str) -> bytes:
        found = self._upstream(path)
        assert found, path
        return found.read_bytes()

    def _upstream(self, path: str) -> Path | None:
        """What the real mirror has; files that never change are kept for the next run of the test."""
        root = path.split("/")[1]
        if root not in self.hosts:
            return None
        unchanging = "/pool/" in path or "/by-hash/" in path
        file = self.kept / ("unchanging" if unchanging else "today") / path.lstrip("/")
        return file if file.exists() else _fetched(f"http://{self.hosts[root]}{path}", file)


@cache
def _fetched(url: str, file: Path) -> Path | None:
    file.parent.mkdir(parents=True, exist_ok=True)
    try:
        with urllib.request.urlopen(url.replace("+", "%2b"), timeout=60) as answer:
            content = answer.read()
    except urllib.error.HTTPError as error:
        if error.code == 404:
            return None
        raise
    with tempfile.NamedTemporaryFile(dir=file.parent, delete=False) as partial:
        partial.write(content)
    return Path(partial.name).replace(file)


def _field(stanza: str, name: str) -> str:
    found = re.search(rf"(?m)^{name}: (.*)$", stanza)
    return found[1] if found else ""


def _file(index: str, stanza: str) -> str:
    return f"/{index.split('/')[1]}/{_field(stanza, 'Filename')}"


def _body(signed: bytes) -> str:
    """A Release file without its signature."""
    text = signed.decode().partition("\n\n")[2]
    return text.partition("-----BEGIN PGP SIGNATURE-----")[0]
