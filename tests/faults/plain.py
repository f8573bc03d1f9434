"""A program that knows only that 75 means "try again": it saves when it hears SIGUSR1, and goes on from there.

plain.py FOLDER STEPS: a number a step, the same whatever happens to it in between.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

folder, steps = Path(sys.argv[1]), int(sys.argv[2])
rank = os.environ["RANK"]
state = folder / f"state-{rank}.json"
asked = False


def ask(*_: object) -> None:
    """Save after this step."""
    global asked  # noqa: PLW0603  the least that a user would write
    asked = True


def save(step: int, value: int) -> None:
    """Whole or not at all."""
    part = state.with_suffix(".part")
    part.write_text(json.dumps([step, value]))
    part.rename(state)


signal.signal(signal.SIGUSR1, ask)
folder.mkdir(exist_ok=True, parents=True)
step, value = json.loads(state.read_text()) if state.exists() else (0, 1)
while step < steps:
    step, value = step + 1, (value * 6364136223846793005 + 1442695040888963407) % (1 << 64)
    with (folder / f"log-{rank}").open("a") as log:
        log.write(f"{step} {value} {time.time()}\n")
    time.sleep(0.05)
    if step % 10 == 0 or asked:
        save(step, value)
    if asked:
        sys.exit(75)
save(step, value)
print(f"end {value}")
