"""An exception that nobody expected, as a finding: what the machine refused, or a defect of dray with its report."""

from __future__ import annotations

import errno
import os
import re
import sys

from dray.contract import exit_codes, secrets
from dray.contract.findings import DrayError

TRACEBACK = "DRAY_TRACEBACK"
"""Set to 1, the traceback is printed and not put into a file."""
DEFECT = "this is a defect of dray"
_MACHINE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ESTALE}
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # how safetensors and tokenizers, which are Rust, name it
_SHOWN = 300


def error(raised: BaseException) -> DrayError:
    """What to say of it."""
    if isinstance(raised, DrayError):
        return raised
    place, told = _place(raised), _traceback(raised)
    if number := _errno(raised):
        code = exit_codes.UNFIT if number in _MACHINE else exit_codes.CONFIG
        where = raised.filename if isinstance(raised, OSError) else None
        return DrayError(
            os.strerror(number), where=secrets.redacted(ascii(where)[1:-1]) if where else place, code=code,
            found=secrets.redacted(ascii(str(raised))[1:-1])[:_SHOWN], fix=f"what asked for it: {told}",
        )  # fmt: skip
    found = f"{type(raised).__name__}: {secrets.redacted(ascii(str(raised))[1:-1])}"[:_SHOWN]
    return DrayError(DEFECT, where=place, found=found, fix=f"report it to those you have dray from, with {told}")


def _errno(raised: BaseException) -> int | None:
    if isinstance(raised, OSError):
        return raised.errno
    named = _OS_ERROR.search(str(raised))
    return int(named[1]) if named else None


def _place(raised: BaseException) -> str:
    """The innermost line of dray's own."""
    place, trace = "", raised.__traceback__
    while trace:
        file = trace.tb_frame.f_code.co_filename
        if "/dray/" in file or not place:
            place = f"{'/'.join(file.rsplit('/', 3)[1:])}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place


def _traceback(raised: BaseException) -> str:
    """Where it is: in a file, or on the terminal."""
    import tempfile  # noqa: PLC0415  these two cost the runner's start more than all else here
    import traceback  # noqa: PLC0415

    text = secrets.redacted("".join(traceback.format_exception(raised)))
    if os.environ.get(TRACEBACK) == "1":
        print(text.encode(errors="backslashreplace").decode(), file=sys.stderr)
        return "the traceback above"
    try:
        file, path = tempfile.mkstemp(prefix="dray-defect-", suffix=".txt")
        with open(file, "w", errors="backslashreplace", encoding="utf-8") as out:
            out.write(text)
    except OSError:
        return f"what {TRACEBACK}=1 before the command prints"
    return path
