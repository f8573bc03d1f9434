"""The stand-ins for all that dray contacts, but PyPI, and a checkout that knows their digests."""

from __future__ import annotations

import hashlib
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from urllib.parse import quote, urlsplit

from stock import debian, machine, registry, servers

from helpers import ROOT

HERE = Path(__file__).parent
ARCHIVE = "archive.dray.test"
HUB = ("registry-1.docker.io", "index.docker.io", "auth.docker.io")
# A small package of every image, on whose exact version no other depends.
GONE = "libjansson4"
_BASE = re.compile(r"(debian:(bookworm|trixie)\S*@sha256:)[0-9a-f]{64}")
_DIGEST = re.compile(r"\b[0-9a-f]{64}\b")


@dataclass(frozen=True, kw_only=True)
class Walk:
    """What a test needs of it."""

    machine: machine.Machine
    checkout: Path
    debian: debian.Debian
    index: str
    """The host of torch's."""
    block: str
    """The first three numbers of the servers' addresses."""
    signed: servers.Authority
    scratch: Path
    seen: list[servers.Request]
    times: dict[str, tuple[float, int]] = field(default_factory=dict)

    def typed(
        self, command: str, *, log: str, umask: str = "022", env: Mapping[str, str] | None = None,
        on: machine.Machine | None = None,
    ) -> machine.Ended:  # fmt: skip
        """What a user types in the checkout; its minutes and bytes count."""
        before = self._bytes()
        ended = (on or self.machine).run(command, folder=self.checkout, log=log, umask=umask, env=env)
        self.times[log] = (ended.seconds, self._bytes() - before)
        return ended

    def _bytes(self) -> int:
        """What the servers and the registry have given; PyPI's bytes are not counted."""
        pulled = re.findall(r'"GET /v2/\S+ HTTP/\S+" 200 (\d+)', (self.machine.logs / "registry.txt").read_text())
        return sum(map(int, pulled)) + sum(request.size for request in self.seen)

    def write_table(self) -> None:
        """What each command took, for people."""
        lines = [f"{log:24}  {seconds:6.0f} s  {size / 1e6:6.0f} MB\n" for log, (seconds, size) in self.times.items()]
        (self.machine.logs / "table.txt").write_text("".join(lines))


@contextmanager
def prepared(kept: Path, logs: Path) -> Iterator[Walk]:
    """Everything stands. `kept` has what the servers give, for the next time; people read `logs`."""
    for folder in (kept, logs):
        folder.mkdir(parents=True, exist_ok=True)
    mirrors = _mirrors()
    hosts = {root: str(urlsplit(uri).hostname) for root, uri in mirrors.items()}
    image = tomllib.loads((ROOT / "containers/cpu/image.toml").read_text())
    (torch,) = image["vendor"]
    index = urlsplit(torch["index"])
    block = f"127.{os.getpid() % 200 + 20}.{os.getpid() // 200 % 250}"
    names = {f"{block}.1": [*set(hosts.values()), ARCHIVE, str(index.hostname)], f"{block}.2": [*HUB]}
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="dray-stock-", dir="/var/tmp")))
        scratch.chmod(0o755)
        signed = servers.authority(scratch, chain.from_iterable(names.values()), names)
        key = debian.Key(scratch / "gpg")
        lock = ROOT / "containers/debian-amd64.lock"
        mirror = debian.Debian(hosts, locked=debian.read(lock), gone=GONE, key=key, kept=kept / "debian")
        wheel = _wheel(kept, torch)
        answers = dict.fromkeys(hosts.values(), mirror.mirror)
        answers |= {ARCHIVE: mirror.archive, str(index.hostname): _index(index.path, torch["name"], wheel)}
        answers[f"{block}.1"] = _first(list(answers.values()))
        seen = stack.enter_context(servers.serving(f"{block}.1", answers, signed))
        where = stack.enter_context(registry.serving(f"{block}.2", signed, scratch / "registry", logs / "registry.txt"))
        digests = {}
        for suite in ("bookworm", "trixie"):
            packed = registry.bootstrap(
                suite, archive=f"http://{block}.1/archive", keyring=key.ring,
                out=kept / f"{suite}-{hashlib.sha256(lock.read_bytes()).hexdigest()[:16]}.tar",
            )  # fmt: skip
            layer = registry.base(
                suite, packed=packed, dated=f"http://{ARCHIVE}/archive", mirrors=mirrors, key=key.public, folder=scratch
            )
            digests[suite] = registry.push(where, signed.ca, "library/debian", layer)
            registry.push(where, signed.ca, "hub/library/debian", layer)
        seen.clear()
        running = stack.enter_context(machine.started(hosts=names, ca=signed.ca, scratch=scratch, logs=logs))
        checkout = scratch / "a stock machine/dray"
        _clone(checkout, digests, mirror)
        running.root(f"chown -R {machine.USER}: '{checkout.parent}'")
        yield Walk(
            machine=running, checkout=checkout, debian=mirror, index=str(index.hostname), block=block, signed=signed,
            scratch=scratch, seen=seen,
        )  # fmt: skip


def _mirrors() -> dict[str, str]:
    """Where this machine's apt finds Debian, by the last part of the address."""
    argv = ["apt-get", "indextargets", "--format", "$(REPO_URI)", "Created-By: Packages"]
    found = subprocess.run(argv, capture_output=True, text=True, check=True).stdout.split()
    by_name = {uri.rstrip("/").rpartition("/")[2]: uri.rstrip("/") for uri in found}
    return {name: by_name[name] for name in debian.SUITES}


def _wheel(kept: Path, torch: dict) -> Path:
    """The vendor's wheel: of an image that this checkout has built, or from where this machine's own pip finds it."""
    name = f"{torch['name']}-{torch['version']}-*.whl"
    folders = (ROOT / "build/wheels", kept)
    found = [wheel for folder in folders for wheel in folder.glob(name) if _sha256(wheel) in torch["sha256"]]
    if not found:
        argv = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(kept)]
        subprocess.run([*argv, f"{torch['name']}=={torch['version']}"], check=True)
        found = [*kept.glob(name)]
    (wheel, *_) = found
    assert _sha256(wheel) in torch["sha256"], f"{wheel} is not the file that image.toml names"
    return wheel


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _index(path: str, package: str, wheel: Path) -> servers.Answer:
    """A vendor's index with this wheel alone."""
    link = f'<a href="{path}/{quote(wheel.name)}#sha256={hashlib.sha256(wheel.read_bytes()).hexdigest()}">'
    page = f"<!DOCTYPE html><html><body>{link}{wheel.name}</a></body></html>".encode()
    return {f"{path}/{package}/": page, f"{path}/{wheel.name}": wheel}.get


def _first(answers: list[servers.Answer]) -> servers.Answer:
    """A server that has what all of these have."""
    return lambda path: next((found for answer in answers if (found := answer(path)) is not None), None)


def _clone(checkout: Path, digests: dict[str, str], mirror: debian.Debian) -> None:
    """HEAD, but for the digests of what the servers have."""
    subprocess.run(["git", "clone", "--quiet", "--no-hardlinks", ROOT, checkout], check=True)
    for path in (checkout / "containers").rglob("*"):
        if path.is_file() and not path.is_symlink():
            text = path.read_text()
            changed = _BASE.sub(lambda found: found[1] + digests[found[2]].removeprefix("sha256:"), text)
            if changed != text:
                path.write_text(changed)
    lock = checkout / "containers/debian-amd64.lock"
    text = lock.read_text()
    for name, sha256 in mirror.hashes.items():
        text = text.replace(mirror.locked[name].sha256, sha256)
    lock.write_text(text)


def differences(checkout: Path) -> list[str]:
    """What a checkout has otherwise than its HEAD, apart from digests."""
    lines = _git(checkout, "diff", "--unified=0").splitlines()
    found = [_DIGEST.sub("DIGEST", line) for line in lines if line[:1] in "+-" and line[:3] not in ("+++", "---")]
    before, after = ([line[1:] for line in found if line[0] == sign] for sign in "-+")
    return [] if before == after else found


def changed(checkout: Path) -> set[str]:
    """The files that are not as in its HEAD."""
    return set(_git(checkout, "diff", "--name-only").splitlines())


def _git(checkout: Path, *words: str) -> str:
    argv = ["git", "-c", f"safe.directory={checkout}", "-C", checkout, *words]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout
