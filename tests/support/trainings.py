"""Whole trainings of a tiny model, one rank a process."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dray.contract.trainer import image_tasks
from dray.runs import local, prepare
from helpers import ROOT

GPT = tuple(
    f"model.config.{name}={value}"
    for name, value in (
        ("n_layer", 2), ("n_embd", 32), ("n_head", 2), ("n_positions", 32),
        ("resid_pdrop", 0.0), ("embd_pdrop", 0.0), ("attn_pdrop", 0.0),
    )
)  # fmt: skip
PATIENCE_S = 600.0  # for ranks that end; it proves nothing else


class Forks:
    """A process that has imported everything, and becomes ranks."""

    def __init__(self, argv: Sequence[str] = (sys.executable, str(ROOT / "tests/support/forks.py"))) -> None:
        self.argv = argv
        self.process = self._started()
        self.peak = 0

    def _started(self) -> subprocess.Popen[bytes]:
        """Without a buffer, in which `select` would not see a line."""
        return subprocess.Popen(self.argv, bufsize=0, stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def say(self, run: dict) -> list[int]:
        self.process.stdin.write(json.dumps(run).encode() + b"\n")
        return self.hear()

    def hear(self) -> Any:
        """The next answer; ranks that do not end in time are killed."""
        ready, _, _ = select.select([self.process.stdout], [], [], PATIENCE_S)
        if not ready:
            self.restart()
            raise TimeoutError(f"the ranks did not end within {PATIENCE_S:.0f} s")
        return json.loads(self.process.stdout.readline())

    def restart(self) -> None:
        """Kill all ranks, which end with this process, and begin anew."""
        self.process.terminate()
        self.process.communicate(timeout=60)
        self.process = self._started()

    def job(self, job: image_tasks.Job, folder: Path, **env: str) -> tuple[int, str]:
        """What a verb starts in the image, such as an export: its exit code, and all that it printed."""
        folder.mkdir(exist_ok=True)
        file, log = folder / "job.json", folder / "job.log"
        file.write_text(json.dumps(image_tasks.to_json(job)))
        log.unlink(missing_ok=True)
        self.say({"kind": "job", "file": str(file), "ranks": [{"env": env, "streams": streams(log)}]})
        ended = self.hear()
        self.peak = ended["peak"]
        return ended["codes"][0], log.read_text()

    def python(self, *words: str | Path, stdin: str = "", **env: str) -> subprocess.CompletedProcess[str]:
        """`python FILE WORDS` or `python -c CODE WORDS`, for what imports torch."""
        argv = [str(word) for word in words]
        with TemporaryDirectory() as folder:
            files = [Path(folder, name) for name in ("stdin", "stdout", "stderr")]
            files[0].write_text(stdin)
            self.say({"kind": "python", "words": argv, "ranks": [{"env": env, "streams": [*map(str, files)]}]})
            (code,) = self.hear()["codes"]
            return subprocess.CompletedProcess(argv, code, *(file.read_text() for file in files[1:]))

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(30)
        self.process.stdout.close()


def streams(log: Path) -> list[str]:
    return [os.devnull, str(log), str(log)]


def in_image(folder: Path) -> Forks:
    """The same in a container of the CPU image, for what is there alone; `folder` is seen at its own place."""
    given = [f"{ROOT}/{name}:{ROOT}/{name}:ro" for name in ("tests", "recipes")]
    binds = [word for bind in (*given, f"{folder}:{folder}") for word in ("-v", bind)]
    options = [*binds, "--ipc", "host", "--network", "none"]
    return Forks(
        ["docker", "run", "--rm", "-i", "--init", *options, "dray:cpu", "python3", f"{ROOT}/tests/support/forks.py"]
    )


class Run:
    """A run of one node on this machine, of tests/tiny.toml or another recipe, with `overrides`.

    Each rank executes `before`, Python which changes the trainer, once all is imported.
    """

    def __init__(
        self,
        forks: Forks,
        folder: Path,
        ranks: int,
        *overrides: str,
        model: Sequence[str] = GPT,
        steps: str = "steps=20",
        recipe: Path | None = None,
        before: str = "",
    ) -> None:
        self.forks, self.folder, self.before = forks, folder, before
        given = [f"ranks_per_node={ranks}", f"data.cache_dir={folder.parent}/tokens"]
        if recipe is None:
            given += [f"batch.per_device={8 // ranks}", f"train.{steps}", *model]
        chosen = prepare.read_recipe(recipe or ROOT / "tests" / "tiny.toml", [*given, *overrides])
        facts = local.facts(chosen, engine="bare", image=sys.executable, nodes=1, gpus_per_node=0, site="")
        self.plan, self.paths = prepare.write(chosen, facts, runs=folder.parent, run=folder.name)
        self.ranks = ranks
        self.codes: list[int] = []

    @contextmanager
    def going(self, **extra: str) -> Iterator[list[int]]:
        """The ranks' process ids while they run; their exit codes are there afterwards."""
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        env = {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(self.ranks),
            "LOCAL_WORLD_SIZE": str(self.ranks), "DRAY_NODE_NAME": self.plan.world.nodes[0].name, "HF_HUB_OFFLINE": "1",
            **extra,
        }  # fmt: skip
        ranks = [
            {"env": {**env, "RANK": str(rank), "LOCAL_RANK": str(rank)}, "streams": streams(self.log(rank))}
            for rank in range(self.ranks)
        ]
        pids = self.forks.say({"kind": "plan", "file": str(self.paths.plan), "before": self.before, "ranks": ranks})
        try:
            yield pids
        except BaseException:  # what the ranks wait for may never come, and the next run must not hear how they ended
            self.forks.restart()
            raise
        self.codes = self.forks.hear()["codes"]

    def end(self, code: int = 0, **extra: str) -> Run:
        """Run to the end, which is to be with this exit code (of the first rank that did not end well)."""
        with self.going(**extra):
            pass
        found = next((code for code in self.codes if code not in (0, -9)), min(self.codes))
        assert found == code, "".join(self.log(rank).read_text() for rank in range(self.ranks))
        return self

    def log(self, rank: int = 0) -> Path:
        return self.paths.rank_log(rank)

    def said(self) -> str:
        return "".join(self.log(rank).read_text() for rank in range(self.ranks))

    def events(self, kind: str) -> list[dict]:
        lines = self.paths.metrics.read_text().splitlines()
        return [event for line in lines if (event := json.loads(line))["event"] == kind]

    def losses(self) -> list[float]:
        return [event["loss"] for event in self.events("step")]

    def weights(self) -> dict:
        from safetensors.torch import load_file

        return load_file(self.paths.final_model / "model.safetensors")


def config(folder: Path, *words: str, model: Sequence[str] = GPT):
    """What a rank reads of the plan that `dray run` writes."""
    from dray.train.config import read

    chosen = prepare.read_recipe(
        ROOT / "tests" / "tiny.toml", [*model, f"data.cache_dir={folder}/tokens", "train.steps=20", *words]
    )
    facts = local.facts(chosen, engine="bare", image=sys.executable, nodes=1, gpus_per_node=0, site="")
    _, paths = prepare.write(chosen, facts, runs=folder, run="run")
    return read(str(paths.plan))
