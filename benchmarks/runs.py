"""How long `dray runs` takes for thousands of runs, of which one kind has a result and the other was killed.

.venv/bin/python benchmarks/runs.py [RUNS [ROUNDS]]

Slurm's commands are stand-ins that answer at once: 500 other jobs wait in the queue.
The first list of killed runs reads them whole, and writes their summaries.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from dray.facts import Facts
from dray.runs.finish import finish
from dray.runs.prepare import read_recipe, write
from dray.runs.status import Stop, write_summary
from dray.runs.store import RunPaths

ROOT = Path(__file__).resolve().parents[1]
FACTS = Facts(
    scheduler="slurm", job=17, nodelist="n[1-2]", nodes=2, engine="apptainer", image="/i.sif", cluster="local"
)
JOB = "{0}|{0}|PENDING|2026-11-24T05:00:00|Priority|N/A|/slurm/multinode.sh --run=/runs/other-{0} --image=/i.sif x\n"
STEP = {"event": "step", "loss": 2.5, "lr": 1e-4, "tokens": 512, "tokens_per_s": 1e4, "step_s": 0.1, "node_s": [1, 2]}
FILES = ("plan.json", "metrics.jsonl", "facts.txt")


def make(folder: Path, count: int) -> None:
    """As `dray submit` and its jobs leave them; their files are links to those of one run."""
    recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml")
    paths = write(recipe, FACTS, runs=folder / "one", run="mine")[1]
    lines = [json.dumps(STEP | {"time": step + 0.5, "step": step}) + "\n" for step in range(1, 1001)]
    paths.metrics.write_text('{"event": "start", "time": 1.0}\n' + "".join(lines))
    for name in FILES:
        os.utime(paths.folder / name, (1, 1))
    finish(paths, code=75, stopped=Stop("the time limit", "2026-11-24T05:00:00Z"))
    for kind in ("killed", "stopped"):
        for number in range(count):
            attempt = folder / kind / f"20261124-{number:06d}-smoke-cpu-17" / "attempt-1"
            attempt.mkdir(parents=True)
            for name in (*FILES, *(["result.json"] if kind == "stopped" else [])):
                os.link(paths.folder / name, attempt / name)
            queued = {"job": 17, "cluster": "", "time": 1.0, "argv": ["sbatch"]}
            (attempt.parent / "job.json").write_text(json.dumps(queued))
            os.utime(attempt.parent / "job.json", (1, 1))
            if kind == "stopped":
                write_summary(RunPaths(attempt.parent))


def slurm(folder: Path) -> Path:
    """The commands that `dray runs` asks."""
    folder.mkdir()
    (folder / "jobs").write_text("".join(map(JOB.format, range(100_000, 100_500))))
    (folder / "squeue").write_text(f"#!/bin/sh\nexec cat '{folder}/jobs'\n")
    (folder / "scontrol").write_text("#!/bin/sh\necho 'ClusterName = local'\n")
    for name in ("squeue", "scontrol"):
        (folder / name).chmod(0o755)
    return folder


def measured(runs: Path, tools: Path, *words: str) -> tuple[float, float]:
    """Seconds by the clock, and of the processor."""
    argv = [sys.executable, "-m", "dray", "runs", "--runs", str(runs), *words]
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    subprocess.run(argv, env=env, stdout=subprocess.DEVNULL, check=True)  # noqa: S603  our own list
    clock, after = time.perf_counter() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    return clock, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main(count: str = "5000", rounds: str = "3") -> None:
    """A line a round and kind; the last of a round is what the command takes without a run."""
    with tempfile.TemporaryDirectory(prefix="dray-runs-") as temporary:
        folder = Path(temporary)
        tools = slurm(folder / "bin")
        make(folder, int(count))
        (folder / "none").mkdir()
        for _ in range(int(rounds)):
            for kind, words in (("killed", ("-n", "0")), ("stopped", ("-n", "0")), ("killed", ()), ("none", ())):
                clock, processor = measured(folder / kind, tools, *words)
                print(f"{kind:<8}{' '.join(words):<5} {clock:6.2f} s, of the processor {processor:5.2f} s", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
