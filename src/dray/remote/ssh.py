"""The connection: one login with the user's own ssh, which all steps of a verb share, and rsync over it."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from dray import process
from dray.contract.control_characters import printable
from dray.contract.findings import DrayError, UnfitError
from dray.remote.remotes_file import Remote

Output = Callable[[bytes], object]
_SCRIPT = Path(__file__).with_name("there.sh")
# What a Host of the user's may ask for, and what has no sense beside a command of ours.
_OURS = ("-T", "-o", "RemoteCommand=none", "-o", "ClearAllForwardings=yes", "-o", "ServerAliveInterval=15")
# A configuration may have each command leave its connection in the background; before 8.5 that keeps our streams open.
_NO_MORE = ("-o", "ControlMaster=no")
# The same words for every login shell; all else goes to bash's standard input. What a profile prints goes nowhere.
_BASH = "exec bash -c 'exec bash -l -s 3>&1 >/dev/null'"


class Connection:
    """A connection, open inside `connected`."""

    def __init__(self, remote: Remote, options: Iterable[str]) -> None:
        self.remote = remote
        self._ssh = ["ssh", *options, *_NO_MORE]

    def ask(self, function: str, *argv: str) -> str:
        """Call a function of there.sh and return its output; DrayError if it refuses."""
        out, err = bytearray(), bytearray()
        code = self.run(function, *argv, on_out=out.extend, on_err=err.extend)
        if code:
            refusal = shown(err).rpartition("dray: ")[2].strip()  # in the form that all have
            raise DrayError(refusal or f"a step on the remote ended with exit code {code}", code=code)
        return shown(out)

    def run(self, function: str, *argv: str, on_out: Output, on_err: Output) -> int:
        """Call a function of there.sh, pass its output on as it comes, and return its exit code."""
        call = shlex.join(["there::main", function, self.remote.path, *argv])
        script = f"exec >&3 3>&-\n{_SCRIPT.read_text(encoding='utf-8')}\n{call}; exit\n"
        command = [*self._ssh, "--", self.remote.host, _BASH]
        code = process.converse(command, feed=[script.encode()], on_out=on_out, on_err=on_err)
        if code == 255 or code < 0:  # ssh's own exit code; there.sh never ends with it
            raise UnfitError(
                "the connection was lost; jobs on the remote continue", where=self.remote.place,
                fix=f"dray runs --on {self.remote.name} shows the runs there",
            )  # fmt: skip
        return code

    def rsync(self, source: str, item: str, *options: str) -> None:
        """Copy a file or the content of a folder to `item` in the remote's folder, for this user alone."""
        # rsync before 3.2.4 lets the remote's shell split a path at its spaces.
        command = f"umask 077 && cd {shlex.quote(self.remote.path)} && rsync"
        rsync = ["rsync", f"--rsh={shlex.join(self._ssh)}", f"--rsync-path={command}", *options]
        argv = [*rsync, source, f"{self.remote.host}:{item}"]
        done = process.run(argv, check=False)
        if done.code:
            raise UnfitError(
                "rsync cannot copy to the remote",
                where=f"{self.remote.place}/{item}",
                found=_end(done.err.encode()),
                fix="install rsync there, free space, or see your quota; a ~/.bashrc there must print nothing",
            )


@contextmanager
def connected(remote: Remote) -> Iterator[Connection]:
    """Open a connection, and close it at the end: one login, for which ssh may ask a password or second factor."""
    if _control("check", [], remote):  # the user has a connection that can be shared
        yield Connection(remote, _OURS)
        return
    # A path of a socket has at most 108 characters, and TMPDIR may be long. mkdtemp lets nobody else in.
    with tempfile.TemporaryDirectory(prefix="dray-ssh-", dir="/tmp") as folder:
        options = [*_OURS, "-o", f"ControlPath={folder}/s"]
        # Its standard error is a file: some versions of ssh keep it open in the background.
        log = Path(folder) / "log"
        with log.open("wb") as errors:
            argv = ["ssh", *options, "-M", "-o", "ControlPersist=no", "-N", "-f", "--", remote.host]
            code = process.in_terminal(argv, errors=errors)
        if code:
            raise UnfitError(
                "ssh cannot reach the remote", where=remote.place, found=_end(log.read_bytes()),
                fix=f"try by hand: ssh {remote.host} true; a Host in ~/.ssh/config can set key, user and port",
            )  # fmt: skip
        try:
            yield Connection(remote, options)
        finally:
            _control("exit", options, remote)


def _control(command: str, options: Sequence[str], remote: Remote) -> bool:
    """Whether the shared connection obeys; one that hangs does not."""
    with suppress(DrayError):
        return process.run(["ssh", *options, "-O", command, "--", remote.host], check=False, seconds=10).code == 0
    return False


def shown(text: bytes | bytearray) -> str:
    """Another machine's text, without control characters."""
    return str(printable(text.decode("utf-8", "replace").replace("\r\n", "\n")))


def _end(text: bytes | bytearray) -> str:
    return "\n".join(shown(text).strip().splitlines()[-6:]) or "nothing was printed"
