"""`python -m dray.checks [--json]`: exit code 0 if nothing failed, 69 if this machine or image is unfit.

Each group of checks has a process of its own: one that hangs, dies or prints does not harm the others.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from dray.checks import image
from dray.checks.run_check import failed, skipped
from dray.contract import exit_codes
from dray.contract.files import tail
from dray.contract.findings import Finding

GROUPS = ("image", "device", "deepspeed_operators", "compilers")
LIMIT = 600  # seconds; importing everything from a cold, busy file system takes minutes
_GROUP = "--group"  # before a module and its limit: run this group alone, as a child of the program
_OUTPUT_LINES = 5
# Everything that a check writes goes to the scratch folder.
_FOLDERS = (
    *("CUDA_CACHE_PATH", "HF_HOME", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "TRITON_CACHE_DIR"),
    *("TRITON_HOME", "XDG_CACHE_HOME"),
)
_SETTINGS = {
    "PYTHONDONTWRITEBYTECODE": "1",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no worker processes for one function
    "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",  # they double the time of the first function
}


def main() -> int:
    """Print each result as it comes, or all of them as one JSON object."""
    as_json = "--json" in sys.argv[1:]
    began, results = time.monotonic(), []
    with TemporaryDirectory(prefix="dray-checks-") as scratch:
        for name in GROUPS:
            for result in run_group(f"dray.checks.{name}", Path(scratch), limit=LIMIT):
                results.append(result)
                if not as_json:
                    print(result.line(), flush=True)
    levels = Counter(result.level for result in results)
    seconds = round(time.monotonic() - began, 1)
    if as_json:
        counts = {name: levels[name] for name in ("ok", "skip", "error")}
        shown = [result.data() for result in results]
        print(json.dumps({"host": platform.node(), **counts, "seconds": seconds, "results": shown}, indent=1))
    else:
        print(f"{levels['ok']} ok, {levels['skip']} skipped, {levels['error']} failed, in {seconds} s")
    return exit_codes.UNFIT if levels["error"] else exit_codes.DONE


def run_group(module: str, scratch: Path, *, limit: int) -> Iterator[Finding]:
    """The results as they come, and one more if the group fails. A failure has the last lines of its output."""
    output = scratch / "output"
    argv = [sys.executable, "-m", "dray.checks", _GROUP, module, str(limit)]
    env = {**os.environ, **dict.fromkeys(_FOLDERS, str(scratch)), **_SETTINGS}
    with (
        output.open("wb") as file,
        subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=file, env=env, start_new_session=True) as child,  # noqa: S603
    ):
        try:
            for line in child.stdout or ():
                yield _with_output(Finding(*json.loads(line)), output)
            code = child.wait()
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # the child and all that it started
    if code:
        ended = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        if code == -signal.SIGALRM:
            ended = f"not done after {limit} s"
        yield _with_output(Finding(module.rpartition(".")[2], found=ended, code=exit_codes.UNFIT), output)


def _with_output(finding: Finding, output: Path) -> Finding:
    if not finding.code:
        return finding
    return finding._replace(found="\n".join([finding.found, *tail(output, _OUTPUT_LINES)]))


def _run_as_child(module: str, limit: int) -> None:
    """Run the group in this process: print each result as a JSON line on stdout, all else on stderr."""
    signal.alarm(limit)
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as results:
        os.dup2(2, 1)  # libraries and compilers print what they like
        for result in _results(module):
            sys.stdout.flush()
            print(json.dumps(result), file=results, flush=True)


def _results(module: str) -> Iterator[Finding]:
    """The results of a group; an exception is one too."""
    name = module.rpartition(".")[2]
    try:
        yield from importlib.import_module(module).results()
    except ModuleNotFoundError as error:
        if error.name and image.absent(error.name):
            yield skipped(name, f"needs {error.name}, which is not installed")
        else:
            yield failed(name, error)
    except Exception as error:
        yield failed(name, error)


if __name__ == "__main__":
    if sys.argv[1:2] == [_GROUP]:
        _run_as_child(sys.argv[2], int(sys.argv[3]))
        sys.exit()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else the scratch folder stays
    try:
        sys.exit(main())
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(130)
