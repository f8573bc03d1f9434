#!/usr/bin/env python3
"""In the place of `dray run`: leaves what a run of that recipe would, as the plan file beside it says, and at once.

The plan is JSON: `speed` and `memory` by "key=value" are factors, `fail` is an exit code and a cause, `loss` an error.
"""

from __future__ import annotations

import json
import os
import sys
import time
import tomllib
from pathlib import Path

_DEFAULTS = {
    "train.strategy": "ddp", "train.activation_checkpointing": False, "train.compile": False, "train.loss": "full"
}  # fmt: skip


def main(argv: list[str]) -> int:
    """`run --run=NAME --runs=FOLDER ... RECIPE KEY=VALUE ...`."""
    options = dict(word.removeprefix("--").partition("=")[::2] for word in argv if word.startswith("--"))
    file, *settings = (word for word in argv[1:] if not word.startswith("--"))
    recipe = tomllib.loads(Path(file).read_text())
    planted = json.loads(Path(os.environ["PLANTED"]).read_text())
    named = {
        **_DEFAULTS,
        **{f"{part}.{key}": value for part in ("batch", "train") for key, value in recipe[part].items()},
    }
    named |= dict(setting.split("=", 1) for setting in settings)
    words = {f"{key}={str(value).lower()}" for key, value in named.items()}
    with Path(os.environ["PLANTED"]).with_name("calls").open("a") as calls:
        calls.write(" ".join(argv) + "\n")
    with Path(os.environ["PLANTED"]).with_name("environment").open("a") as seen:
        seen.write(f"{os.environ.get('ENVIRONMENT')}\n")

    def of(what: str) -> dict[str, object]:
        return {word: value for word, value in planted.get(what, {}).items() if set(word.split()) <= words}

    for refused in of("refuse").values():
        print(f"dray: {refused}\n  found:  it\n  fix:    none", file=sys.stderr)
        return 78
    folder = Path(options["runs"], options["run"], "attempt-1")
    folder.mkdir(parents=True)
    for marker in of("hang").values():
        Path(str(marker)).write_text(str(os.getpid()))
        time.sleep(600)
    result = {"run": options["run"], "status": "done", "exit_code": 0, "finished": "", "world_size": 2, "hosts": []}
    code = 0
    for code, why, name in of("fail").values():  # type: ignore[misc]
        cause = {"node": "n1", "rank": 0, "code": code, "why": why, "log": None, "last_lines": [], "name": name}
        result |= {"status": "failed", "exit_code": code, "cause": cause}
    speed, memory, wrong = 1000.0, 1.0, 0.0
    for factor in of("speed").values():
        speed *= float(str(factor))
    for factor in of("memory").values():
        memory *= float(str(factor))
    for error in of("loss").values():
        wrong += float(str(error))
    steps = []
    for step in range(1, recipe["train"]["steps"] + 1):
        seconds = 512 / speed * (50 if step <= 3 else 1.02 if step % 2 else 0.98)
        loss = (5 - step / 10) * (1 + (wrong if step > 2 else 0))
        steps.append(
            {"event": "step", "step": step, "loss": loss, "step_s": seconds, "tokens_per_s": 512 / seconds,
             "memory_gb": memory}
        )  # fmt: skip
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in steps))
    (folder / "result.json").write_text(json.dumps(result))
    return int(code)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
