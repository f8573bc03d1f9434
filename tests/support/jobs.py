"""A job as its batch script sees it: stand-ins for Slurm and for Apptainer, which starts this Python as the image."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import warm
from helpers import ROOT

APPTAINER = """#!/bin/bash
while [[ "$1" != *.sif ]]; do
  [[ "$1" != --pwd ]] || cd "$2" || exit
  [[ "$1" != --pwd=* ]] || cd "${1#*=}" || exit
  shift
done
image="$1"
shift
while IFS= read -r -d '' variable; do
  [[ "$variable" != APPTAINERENV_* ]] || export "${variable#APPTAINERENV_}"
done </proc/$$/environ
if [[ "$1 $2" != "python3 -m" ]]; then # what slurm/adopt.sh asks
  python3() { "$PYTHON" "$@"; }
  export -f python3
  while [[ "$1" == env || "$1" == *=* ]]; do
    [[ "$1" == env ]] || export "$1"
    shift
  done
  [[ "$image" == */.adopt-* ]] || { "$@"; exit; }
  mv -- "$image" "$image.hidden" # a container does not see its own image
  code=0
  "$@" || code=$?
  mv -- "$image.hidden" "$image"
  exit "$code"
fi
shift 2
echo "$(basename "$image") $1 $2" >>"$SEEN"
[[ "$1" != dray ]] || exec "$PYTHON" -SE "$WARM" "$image.d" "$@"
exec "$PYTHON" -c '
import runpy, sys
sys.prefix, sys.argv = sys.argv[1] + ".d", sys.argv[2:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
' "$image" "$@"
"""
# As the real one: INT goes to the tasks, the second kills them, and so does any TERM or HUP.
SRUN = f"""#!/bin/sh
''':'
exec {shlex.quote(sys.executable)} "$0" "$@"
'''
import os, signal, subprocess, sys
env = {{**os.environ, "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURMD_NODENAME": "n1"}}
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, signal.SIG_DFL)
task = subprocess.Popen([sys.argv[-1]], env=env, stdout=open("logs/node-0.log", "ab"), stderr=subprocess.STDOUT)
open("task", "w").write(str(task.pid))
interrupts = ["--disable-status" not in sys.argv]
def pass_on(number, _):
    interrupts.append(True)
    task.send_signal(signal.SIGINT if number == signal.SIGINT and not any(interrupts[:-1]) else signal.SIGKILL)
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, pass_on)
code = task.wait()
sys.exit(code if code >= 0 else 128 - code)
"""


class Job:
    """A job of Slurm's as its batch script sees it."""

    def __init__(self, folder: Path) -> None:
        self.home, self.runs, self.seen = folder / "my dray", folder / "runs", folder / "seen"
        for name in ("slurm", "recipes", "containers"):
            (self.home / name).parent.mkdir(exist_ok=True)
            (self.home / name).symlink_to(ROOT / name)
        (self.home / "src").symlink_to(ROOT / "src")
        (self.home / "pyproject.toml").symlink_to(ROOT / "pyproject.toml")
        for variant in ("cpu", "cuda", "rocm"):
            image = self.home / "build" / f"dray-{variant}.sif"
            Path(f"{image}.d").mkdir(parents=True)
            Path(f"{image}.d", "image.json").write_text(json.dumps({"variant": variant}))
            image.write_text(variant)
        self.bin = folder / "bin"
        self.bin.mkdir()
        self.tool("apptainer", APPTAINER)
        self.env = {
            "PATH": f"{self.bin}:{os.environ['PATH']}", "HOME": str(folder), "DRAY_HOME": str(self.home),
            "PYTHON": sys.executable, "WARM": str(warm.client()), "SEEN": str(self.seen), "DRAY_RUNS": str(self.runs),
            "SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1",
        }  # fmt: skip

    def tool(self, name: str, script: str) -> None:
        (self.bin / name).write_text(script)
        (self.bin / name).chmod(0o755)

    def python(self) -> None:
        """On the nodes, for an image that the stand-in does not unpack."""
        quick = f'exec {shlex.join([sys.executable, "-SE", str(warm.client()), sys.prefix])} "$@"'
        self.tool(
            "python3",
            f'#!/bin/sh\n[ "$1 $2" != "-m dray" ] || {{ shift; {quick}; }}\nexec {shlex.quote(sys.executable)} "$@"\n',
        )

    def argv(self, *words: str | Path, plan_only: bool = True) -> list[str | Path]:
        only = (
            'job::start() { printf "%s\\n" "engine $engine" "image $image" "attempt $attempt"; };' if plan_only else ""
        )
        script = f'set -euo pipefail; source "$DRAY_HOME/slurm/job.sh"; {only} job::main "$@"'
        return ["bash", "-c", script, "job", *words]

    def plan(self, *words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
        """Up to the moment at which the nodes would start."""
        return subprocess.run(
            self.argv(*words), env={**self.env, **env}, cwd=self.home, capture_output=True, text=True, check=False
        )
