"""`python -m dray.checks [--json]`: exit code 0 if nothing failed, 69 if this machine or image is unfit."""

from __future__ import annotations

import json
import os
import platform
import signal
import sys
import time
from collections import Counter
from pathlib import Path
from tempfile import TemporaryDirectory

from dray.checks import isolated
from dray.contract import exit_codes

GROUPS = ("image", "device", "deepspeed_operators", "compilers")
LIMIT = 600  # seconds; importing everything from a cold, busy file system takes minutes


def main() -> int:
    """Print each result as it comes, or all of them as one JSON object."""
    as_json = "--json" in sys.argv[1:]
    began, results = time.monotonic(), []
    with TemporaryDirectory(prefix="dray-checks-") as scratch:
        for name in GROUPS:
            for result in isolated.run(f"dray.checks.{name}", Path(scratch), limit=LIMIT):
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


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else the scratch folder stays
    try:
        sys.exit(main())
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(130)
