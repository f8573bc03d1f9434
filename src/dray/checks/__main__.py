"""`python -m dray.checks [--json]`: 0 when nothing failed, 69 when this machine or image is unfit."""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory

from dray.checks import group
from dray.checks.result import Result

EXIT_UNFIT = 69
GROUPS = ("versions", "device", "operators", "kernels", "compilers")
LIMIT = 600.0  # seconds; importing everything from a cold, busy file system takes minutes


def main() -> int:
    """Show each result as it comes, or all of them as one JSON object."""
    options = _options()
    began = time.monotonic()
    seen = []
    for result in _results():
        seen.append(result)
        if not options.json:
            print(result, flush=True)
    states = Counter(result.state for result in seen)
    seconds = round(time.monotonic() - began, 1)
    if options.json:
        counts = {"ok": states["ok"], "skip": states["skip"], "fail": states["FAIL"], "seconds": seconds}
        print(json.dumps({"host": platform.node(), **counts, "results": [asdict(result) for result in seen]}, indent=1))
    else:
        print(f"{states['ok']} ok, {states['skip']} skipped, {states['FAIL']} failed, in {seconds} s")
    return EXIT_UNFIT if states["FAIL"] else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m dray.checks", description="What this image can do here.")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    return parser.parse_args()


def _results() -> Iterator[Result]:
    with TemporaryDirectory(prefix="dray-checks-") as scratch:
        for name in GROUPS:
            yield from group.run(f"dray.checks.{name}", Path(scratch), limit=LIMIT)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # else the scratch folder stays
    try:
        sys.exit(main())
    except (KeyboardInterrupt, BrokenPipeError):
        os._exit(130)
    except OSError as error:  # no folder to write to
        print(f"dray.checks cannot begin: {error}", file=sys.stderr)
        sys.exit(EXIT_UNFIT)
