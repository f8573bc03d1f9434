"""Failures: an exception that nobody expected, as a finding, and which of the recorded failures is the cause."""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Callable, Iterable

from dray.contract import exit_codes, secrets
from dray.contract.findings import DrayError

TRACEBACK = "DRAY_TRACEBACK"
"""If it is 1, dray prints the traceback and writes no file."""
DEFECT = "this is a defect of dray"
_FULL = {errno.ENOSPC, errno.EDQUOT}
MENDED = frozenset({
    *_FULL, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EROFS,
    errno.ESHUTDOWN,  # Lustre's, of a client that it has evicted
    errno.EHOSTDOWN, errno.EHOSTUNREACH, errno.ENETDOWN, errno.ENETUNREACH,
    errno.ENOTCONN, errno.ECONNRESET, errno.EREMOTEIO, errno.ESTALE, errno.ETIMEDOUT,
})  # fmt: skip
"""Errors of a machine or a file server that last until somebody repairs it, or until it is back."""
PEER_ENDED = ("Connection closed by peer", "Connection reset by peer", "ncclRemoteError")
"""What gloo and NCCL print in a rank whose peer has ended."""
UNNOTICED_S = 5.0
"""The rank that failed first may be recorded so many seconds after the ranks that failed because of it."""
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # how safetensors and tokenizers, which are Rust, name it
_SHOWN = 300
_OWN = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


def unexpected_error(raised: BaseException, *, log: bool = False) -> DrayError:
    """The finding for an exception: what the machine refused, or a defect of dray with its report.

    In a job's log the traceback is printed above it, since /tmp goes with the run.
    """
    if isinstance(raised, DrayError):
        return raised
    text, where, number = _printable(raised), _place(raised), _errno(raised)
    if not number:
        found = f"{type(raised).__name__}: {text}"[:_SHOWN]
        fix = f"report it where you got dray, with {_traceback(raised, show=log)}"
        return DrayError(DEFECT, where=where, found=found, fix=fix)
    if isinstance(raised, OSError) and raised.filename:
        where = _printable(raised.filename)
    fix = ""
    if number in _FULL:
        fix = "make room on that disk, or in your quota, and try again"
    elif not log:
        fix = f"if the cause is not clear, send a bug report with {_traceback(raised)}"
    code = exit_codes.UNFIT if number in {*MENDED, errno.EFBIG} else exit_codes.CONFIG
    return DrayError(os.strerror(number), where=where, found=text[:_SHOWN], fix=fix, code=code)


def is_machines(raised: BaseException) -> bool:
    """Whether the machine or a file server refused a valid request; also as Rust libraries report it."""
    return _errno(raised) in MENDED


def follows_peer(lines: Iterable[str]) -> bool:
    """Whether a rank's last lines say that another rank ended first."""
    return any(sign in line for line in lines for sign in PEER_ENDED)


def cause_order(time: float, first: float, is_follower: Callable[[], bool]) -> float:
    """The sort key of a failure, for a node's runner and for the run's result; `first` is the time of the first one.

    What tells of its own failure comes before a rank that tells only of another's end: that may be the quicker one.
    """
    return time + UNNOTICED_S * (time < first + UNNOTICED_S and is_follower())


def _printable(text: object) -> str:
    return secrets.redacted(ascii(str(text))[1:-1])


def _errno(raised: BaseException) -> int | None:
    if isinstance(raised, OSError):
        return raised.errno
    named = _OS_ERROR.search(str(raised))
    return int(named[1]) if named else None


def _place(raised: BaseException) -> str:
    """The innermost line of dray's own."""
    import traceback  # noqa: PLC0415  these two cost the runner's start more than all else here

    frames = traceback.extract_tb(raised.__traceback__)
    own = [frame for frame in frames if frame.filename.startswith(_OWN)] or frames[:1]
    return f"{'/'.join(own[-1].filename.rsplit('/', 3)[1:])}:{own[-1].lineno}" if own else ""


def _traceback(raised: BaseException, *, show: bool = False) -> str:
    """Where it is: in a file, or on the terminal."""
    import tempfile  # noqa: PLC0415
    import traceback  # noqa: PLC0415

    text = secrets.redacted("".join(traceback.format_exception(raised))).encode(errors="backslashreplace")
    if show or os.environ.get(TRACEBACK) == "1":
        print(text.decode(), file=sys.stderr)
        return "the traceback above"
    try:
        with tempfile.NamedTemporaryFile(prefix="dray-defect-", suffix=".txt", delete=False) as file:
            file.write(text)
    except OSError:
        return f"the output of the same command with {TRACEBACK}=1 before it"
    return file.name
