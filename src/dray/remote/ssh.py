"""The connection: one login with the user's own ssh, which all steps of a verb share."""

from __future__ import annotations

import re
import secrets
import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from dray import process
from dray.contract.control_characters import printable
from dray.contract.findings import DrayError, UnfitError
from dray.remote.names import Remote

_SCRIPT = Path(__file__).with_name("there.sh")
_LOST = 255
"""ssh's own exit code; there.sh never ends with it."""
_LAST = 6
# What a Host of the user's may ask for, and what has no sense beside a command of ours.
_OURS = ("-T", "-o", "RemoteCommand=none", "-o", "ClearAllForwardings=yes")
# A configuration may have each command leave its connection in the background; before 8.5 that keeps our streams open.
_NO_MORE = ("-o", "ControlMaster=no")
_BASH = "exec bash -l -s"  # the same words for every login shell; all else goes to bash's standard input


class Brought(NamedTuple):
    """The scripts, image and recipe that a verb uses at the remote, by their names there."""

    dray: str = ""
    image: str = ""
    recipe: str = ""


class Connection:
    """A connection, open inside `connected`."""

    def __init__(self, remote: Remote, options: list[str]) -> None:
        self.remote = remote
        self._options = options

    def ask(self, function: str, *argv: str, feed: Iterable[bytes] = ()) -> str:
        """Call a function of there.sh and return its output; DrayError if it refuses."""
        out, err = bytearray(), bytearray()
        code = self._call(function, argv, feed, out.extend, err.extend)
        if code:
            raise _refused(code, shown(bytes(err)))
        return out.decode("utf-8", "replace")

    def run(self, function: str, *argv: str, on_out: Callable[[bytes], None], on_err: Callable[[bytes], None]) -> int:
        """Call a function of there.sh, pass its output on as it comes, and return its exit code."""
        return self._call(function, argv, (), on_out, on_err)

    def _call(
        self,
        function: str,
        argv: tuple[str, ...],
        feed: Iterable[bytes],
        on_out: Callable[[bytes], None],
        on_err: Callable[[bytes], None],
    ) -> int:
        mark = f"dray-{secrets.token_hex(8)}"
        script = f"{_SCRIPT.read_text(encoding='utf-8')}\n{shlex.join(['there::main', mark, function, *argv])}; exit\n"
        begins = _After(f"{mark}\n".encode(), on_out)
        last = bytearray()

        def errors(block: bytes) -> None:
            last.extend(block)
            del last[:-4096]
            on_err(block)

        command = ["ssh", *self._options, "--", self.remote.host, _BASH]
        code = process.converse(command, feed=chain([script.encode()], feed), on_out=begins, on_err=errors)
        if code in (_LOST,) or code < 0:
            raise lost(self.remote, shown(bytes(last)))
        if not begins.found:
            raise UnfitError(
                "no bash answers on the remote",
                where=self.remote.place,
                wanted="bash, and a ~/.bash_profile there that neither exits nor reads standard input",
                found=f"exit code {code}: {_end(shown(bytes(last)))}",
            )
        return code


class _After:
    """Passes on what comes after a mark: a profile may print a welcome before it."""

    def __init__(self, mark: bytes, passed: Callable[[bytes], None]) -> None:
        self.found = False
        self._mark, self._passed, self._held = mark, passed, b""

    def __call__(self, block: bytes) -> None:
        if self.found:
            self._passed(block)
            return
        _, found, rest = (self._held + block).partition(self._mark)
        self.found = bool(found)
        self._held = (self._held + block)[-len(self._mark) :]
        if rest:
            self._passed(rest)


@contextmanager
def connected(remote: Remote) -> Iterator[Connection]:
    """Open a connection, and close it at the end: one login, for which ssh may ask a password or second factor."""
    given = _settings(remote)
    alive = ["-o", "ServerAliveInterval=15"] if given.get("serveraliveinterval", "0") == "0" else []
    if given.get("controlpath", "none") != "none" and _is_open(remote):
        yield Connection(remote, [*_OURS, *alive, *_NO_MORE])
        return
    # A path of a socket has at most 108 characters, and TMPDIR may be long. mkdtemp lets nobody else in.
    with tempfile.TemporaryDirectory(prefix="dray-ssh-", dir="/tmp") as folder:
        options = [*_OURS, *alive, "-o", f"ControlPath={folder}/s"]
        log = Path(folder) / "log"
        # Its standard error is a file: some versions of ssh keep it open in the background.
        code = _begin(["ssh", *options, "-M", "-o", "ControlPersist=no", "-N", "-f", "--", remote.host], log)
        if code:
            raise _not_reached(remote, log.read_bytes())
        try:
            yield Connection(remote, [*options, *_NO_MORE])
        finally:
            with suppress(DrayError):
                process.run(["ssh", *options, "-O", "exit", "--", remote.host], check=False, seconds=10)


def _is_open(remote: Remote) -> bool:
    """Whether the user has a connection that can be shared."""
    with suppress(DrayError):
        return process.run(["ssh", "-O", "check", "--", remote.host], check=False, seconds=10).code == 0
    return False


def lost(remote: Remote, told: str) -> UnfitError:
    """The error for a connection that ended before its command."""
    return UnfitError(
        "the connection was lost; jobs on the remote continue",
        where=remote.place,
        found=_end(told) or "ssh printed nothing",
        fix=f"dray runs --on {remote.name} shows the runs there",
    )


def shown(text: bytes) -> str:
    """Another machine's text, without control characters."""
    return str(printable(text.decode("utf-8", "replace").replace("\r\n", "\n")))


def _begin(argv: list[str], log: Path) -> int:
    with log.open("wb") as output:
        return process.in_terminal(argv, errors=output)


def _not_reached(remote: Remote, told: bytes) -> UnfitError:
    return UnfitError(
        "ssh cannot reach the remote",
        where=remote.place,
        found=_end(shown(told)) or "ssh printed nothing",
        fix=f"try by hand: ssh {remote.host} true; a Host in ~/.ssh/config can set key, user and port",
    )


def _settings(remote: Remote) -> dict[str, str]:
    """What the user's own configuration says of this host."""
    done = process.run(["ssh", "-G", "--", remote.host], check=False, seconds=20)
    if done.code:
        raise _not_reached(remote, done.err.encode())
    return dict(re.findall(r"^(\S+) (.*)$", done.out, re.MULTILINE))


def _end(text: str) -> str:
    return "\n".join(text.strip().splitlines()[-_LAST:])


def _refused(code: int, told: str) -> DrayError:
    """A refusal of there.sh in the form that all have."""
    lines = told[told.rfind("dray: ") + 6 :] if "dray: " in told else told
    problem, *rest = lines.strip().splitlines() or [f"a step on the remote ended with exit code {code}"]
    fields: dict[str, str] = {}
    for line in rest:
        if found := re.fullmatch(r"  (where|wanted|found|fix): +(.*)", line):
            fields[found[1]] = found[2]
    return DrayError(problem, code=code, **fields)  # type: ignore[arg-type]
