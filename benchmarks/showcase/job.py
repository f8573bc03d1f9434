"""Jobs of train.py on the local cluster, and what they print."""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from dray.cluster.local import LocalCluster
from dray.contract.findings import DrayError, UnfitError

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("train.py")
IMAGE = ROOT / "build" / "dray-cpu.sif"
FOLDER = "/shared/home/showcase"
STEP = re.compile(r"^step (\d+) loss (\S+) tokens/s (\d+)$", re.MULTILINE)
_SILENT_S = 120.0  # from one of a job's lines to the next
_GOES_ON = re.compile(r"JobState=(PENDING|CONFIGURING|RUNNING|COMPLETING)")


def prepare(cluster: LocalCluster, nodes: int) -> None:
    """A cluster of that size, and on it a folder with the script and its text."""
    if not IMAGE.exists():
        raise UnfitError("there is no CPU image", wanted=IMAGE, fix="make image-cpu")
    now = cluster.health()
    if not now or now.size.nodes != nodes or not now.ready:
        other = f", in the place of one of {now.size.nodes} nodes" if now and now.size.nodes != nodes else ""
        print(
            f"Bringing up a cluster of {nodes} nodes on this machine{other}: dray cluster up --nodes {nodes}",
            flush=True,
        )
        cluster.up(nodes=nodes)
    folder = cluster.shared / "home" / "showcase"
    shutil.rmtree(folder, ignore_errors=True)
    ended = cluster.exec(["install", "-D", "-t", FOLDER, str(SCRIPT)])
    if ended.code:
        raise DrayError("the script cannot be copied", where=folder, found=ended.err)
    text = "".join(page.read_text(encoding="utf-8") for page in sorted((ROOT / "docs").glob("*.md")))
    (folder / "input.txt").write_text(text, encoding="utf-8")


class Job:
    """One job, submitted in the script's folder without a checkpoint."""

    def __init__(self, cluster: LocalCluster, *argv: str) -> None:
        self.cluster, folder = cluster, cluster.shared / "home" / "showcase"
        self._output = folder / "job.out"
        for name in ("job.out", "ckpt.pt"):
            (folder / name).unlink(missing_ok=True)
        ended = cluster.exec(["sbatch", "--parsable", "--output=job.out", *argv], workdir=FOLDER)
        if ended.code:
            raise DrayError("the job cannot be submitted", found=ended.err)
        self._number = ended.out.strip()

    def output(self) -> str:
        """All that it has printed."""
        return self._output.read_text(errors="replace") if self._output.exists() else ""

    def until(self, seen: Callable[[str], object]) -> str:
        """Its output once this is seen in it; an error with its last lines if it is silent for too long."""
        before, deadline = "", time.monotonic() + _SILENT_S
        while not seen(output := self.output()):
            if output != before:
                before, deadline = output, time.monotonic() + _SILENT_S
            if time.monotonic() > deadline:
                raise DrayError(f"job {self._number} goes on no more", where=self._output, found=output[-2000:])
            time.sleep(0.1)
        return output

    def end(self) -> str:
        """Its output once Slurm says that it has ended."""
        show = ["scontrol", "show", "job", "--oneliner", self._number]
        self.until(lambda _: not _GOES_ON.search(self.cluster.exec(show).out))
        return self.output()

    def run(self) -> Path:
        """Its run folder, by its place on this machine."""
        found = re.search(r"^run folder: /shared/(.*)$", self.output(), re.MULTILINE)
        if not found:
            raise DrayError(f"job {self._number} has made no run folder", found=self.output()[-2000:])
        return self.cluster.shared / found[1]


def multinode(nodes: int, *words: str, steps: int, options: Sequence[str] = ()) -> list[str]:
    """The words after sbatch, as a user types them."""
    return [
        f"--nodes={nodes}",
        *options,
        f"{ROOT}/slurm/multinode.sh",
        "image=cpu",
        *words,
        "--",
        "train.py",
        str(steps),
    ]
