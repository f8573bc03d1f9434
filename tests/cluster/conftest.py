"""A job on the real cluster, and the run folder that it leaves."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dray.runs.store import newest_attempt
from helpers import until


@dataclass(frozen=True)
class Ended:
    """A job that has ended: its exit code, what it printed, and its run folder on this machine."""

    code: int
    output: str
    folder: Path | None

    @property
    def attempt(self) -> Path:
        """The folder of its newest attempt."""
        assert self.folder is not None, self.output
        return newest_attempt(self.folder).folder

    def result(self) -> dict[str, Any]:
        return json.loads((self.attempt / "result.json").read_text())

    def metrics(self, event: str) -> list[dict[str, Any]]:
        lines = (self.attempt / "metrics.jsonl").read_text().splitlines()
        return [seen for line in lines if (seen := json.loads(line))["event"] == event]


# `sbatch --wait` looks after 2, 10 and 42 seconds; most jobs here end in between.
WAIT = """
job=$(sbatch --parsable "$@") || exit
unfinished="JobState=(PENDING|CONFIGURING|RUNNING|COMPLETING)"
while state=$(scontrol show job --oneliner "$job") && [[ $state =~ $unfinished ]]; do
  ((SECONDS < 300)) || { echo "$state" >&2; exit 124; }
  sleep 0.2
done
[[ $state =~ ExitCode=([0-9]+): ]]
exit "${BASH_REMATCH[1]}"
"""


@pytest.fixture(scope="session")
def sbatch(cluster):
    """Submit and wait, as the cluster's ordinary user; `words` are what follows sbatch."""

    def submit(*words: str, workdir: str | None = None, env: dict[str, str] | None = None) -> Ended:
        log = cluster.shared / "home" / "job.log"
        log.unlink(missing_ok=True)
        given = ["bash", "-c", WAIT, "sbatch", "--output=/shared/home/job.log", *words]
        code, out, err = cluster.exec(given, workdir=workdir, env=env)
        output = log.read_text() if log.exists() else out + err
        found = re.search(r"^run folder: /shared/(.*)$", output, re.MULTILINE)
        return Ended(code, output, cluster.shared / found[1] if found else None)

    return submit


LOGIN = "/opt/login"


@dataclass(frozen=True)
class Login:
    """The cluster's login node, where its ordinary user has the `dray` command."""

    python: tuple[str, ...]
    """dray there, before its own words."""

    @property
    def argv(self) -> list[str]:
        """Likewise, from this machine."""
        return [sys.executable, "-m", "dray", "cluster", "exec", "--", *self.python]

    def dray(self, *words: str) -> tuple[int, str, str]:
        done = subprocess.run(
            [*self.argv, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        return done.returncode, done.stdout, done.stderr


@pytest.fixture(scope="session")
def login(cluster, root: Path) -> Login:
    """With this machine's Python, since the cluster's containers have none, and the checkout's own packages."""
    binary, stdlib = Path(sys.executable).resolve(), Path(sysconfig.get_path("stdlib"))
    shared = Path(sysconfig.get_config_var("LIBDIR"), sysconfig.get_config_var("INSTSONAME") or "")
    brought = {"bin": [binary], "lib": [stdlib, *([shared.resolve()] if shared.is_file() else [])]}
    if cluster.exec(["test", "-e", f"{LOGIN}/whole"]).code:
        enter = ["docker", "exec", "--interactive", cluster.machine("controller").name, "bash", "-c"]
        for folder, files in brought.items():
            for file in files:
                tar = ["tar", "-C", file.parent, "--exclude=site-packages", "--exclude=dist-packages", "-c", file.name]
                into = f"mkdir -p {LOGIN}/{folder} && tar -C {LOGIN}/{folder} -x"
                with subprocess.Popen(tar, stdout=subprocess.PIPE) as packs:
                    subprocess.run([*enter, into], stdin=packs.stdout, check=True)
                assert packs.returncode == 0
        subprocess.run([*enter, f"touch {LOGIN}/whole"], check=True)
    env = {"LD_LIBRARY_PATH": f"{LOGIN}/lib", "PYTHONPATH": f"{root / 'src'}:{sysconfig.get_path('purelib')}"}
    return Login(
        ("env", *(f"{name}={value}" for name, value in env.items()), f"{LOGIN}/bin/{binary.name}", "-m", "dray")
    )


# This machine is no login node of the cluster: the command is handed on to one, and the folder belongs to the user
# there, as it does where one user submits and runs.
SBATCH = f"""#!/bin/bash
[ "$(id -u)" != 0 ] || chown -R "$(stat -c %u:%g "$SHARED/home")" "$SHARED/my runs"
exec {shlex.quote(sys.executable)} -m dray cluster exec -- sbatch "$@"
"""


@pytest.fixture(scope="session")
def submit(cluster, root: Path, tmp_path_factory: pytest.TempPathFactory):
    """By `dray submit`: the job once it has ended, and its number."""
    tool = tmp_path_factory.mktemp("bin") / "sbatch"
    tool.write_text(SBATCH)
    tool.chmod(0o755)

    def submitted(*words: str | Path, cwd: Path | None = None) -> tuple[Ended, str]:
        ended = subprocess.run(
            [sys.executable, "-m", "dray", "submit", "--runs", cluster.shared / "my runs", *words],
            cwd=cwd or root,
            env={**os.environ, "PATH": f"{tool.parent}:{os.environ['PATH']}", "SHARED": str(cluster.shared)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        queued, where = ended.stdout.splitlines()
        folder = Path(where.removeprefix("run folder: "))
        job = queued.removeprefix("job ").removesuffix(" is in the queue")
        until(
            lambda: list(folder.glob("attempt-*/result.json")),
            lambda: [path.read_text() for path in folder.glob("job-*.log")],
        )
        return Ended(0, (folder / f"job-{job}.log").read_text(), folder), job

    return submitted


@pytest.fixture(scope="session")
def full_run(cluster, root: Path) -> Ended:
    """The smoke recipe on both nodes, by the README's own line with fewer steps; .ci/run's demo takes all of them."""
    (line,) = re.findall(r"^\S+ cluster exec -- sbatch .*$", (root / "README.md").read_text(), re.MULTILINE)
    ended = subprocess.run(
        ["bash", "-c", f"{line} train.steps=60"], cwd=root, capture_output=True, text=True, check=False
    )
    log = cluster.shared / "home" / "smoke.log"
    output = log.read_text() if log.exists() else ended.stdout + ended.stderr
    found = re.search(r"^run folder: /shared/(.*)$", output, re.MULTILINE)
    return Ended(ended.returncode, output, cluster.shared / found[1] if found else None)


SHORT = (
    "train.steps=6", "train.warmup_steps=2", "train.log_every=1", "train.lr_scheduler_type=constant",
    "preflight.when=never", "model.config.n_layer=2", "data.max_eval_samples=8",
)  # fmt: skip


@pytest.fixture(scope="session")
def short() -> tuple[str, ...]:
    """Six steps of a small model, each with its loss."""
    return SHORT


def losses(ended: Ended, ranks: int = 4) -> list[float]:
    """Of each step of that many ranks on two nodes, and of the first evaluation."""
    assert ended.code == 0, ended.output
    assert ended.metrics("start")[0]["hosts"] == [*["n1"] * (ranks // 2), *["n2"] * (ranks // 2)]
    return [step["loss"] for step in ended.metrics("step")] + [ended.metrics("eval")[0]["loss"]]


@pytest.fixture(scope="session")
def losses_of() -> Callable[..., list[float]]:
    return losses


@pytest.fixture(scope="session")
def plain(sbatch) -> list[float]:
    """By torchrun and DDP; tests/unit/train/test_train_runs.py holds it against a loop of forty lines."""
    return losses(sbatch("slurm/multinode.sh", "recipes/smoke-cpu.toml", *SHORT))
