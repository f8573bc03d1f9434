"""dray's checkpoints beside torch's DCP, in turn, on this machine: seconds to stage, to write and to read.

    .venv/bin/python benchmarks/checkpoints.py [MEGABYTES [RANKS [ROUNDS]]]

All ranks have the same tensors, as with DDP, and write a share each. Both sides copy them first, write files that are
synced to the disk, and rename the folder. DCP is measured without checksums and with those of a manifest; dray's
checkpoints always have them.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dray.train.checkpoint import shards
from dray.train.checkpoint.checkpoints import Checkpoints
from dray.train.collectives import control_group, init_distributed
from dray.train.parallel.replicated_checkpoint import Replicas

KINDS = ("weights", "exp_avg", "exp_avg_sq")
WAYS = ("dcp", "dcp with checksums", "dray")


class Held:
    """Tensors of a strategy that has all of them on each rank."""

    scaler = None

    def __init__(self, megabytes: int) -> None:
        self.device = torch.device("cpu")
        rows = max(1, megabytes * 10**6 // (4 * 1024 * 20 * len(KINDS)))
        self.tensors = {kind: {f"layer.{n}": torch.randn(rows, 1024) for n in range(20)} for kind in KINDS}

    def state(self) -> shards.Shards:
        return self._replicas().part(self._all())

    def load(self, reader: shards.Reader, _: int) -> None:
        self._replicas().fill(self._all(), reader)

    def _replicas(self) -> Replicas:
        return Replicas(dist.get_rank(), dist.get_world_size())

    def _all(self) -> shards.Shards:
        return {
            name: one for kind, named in self.tensors.items() for name, one in shards.whole_shards(kind, named).items()
        }


class Dcp:
    """As dray wrote checkpoints by torch's DCP."""

    def __init__(self, held: Held, folder: Path, *, checksums: bool) -> None:
        self.held, self.folder, self.checksums = held, folder, checksums
        self.stager: Any = DefaultStager(StagingOptions(False, False, False, False))

    def stage(self) -> None:
        rank, count = dist.get_rank(), dist.get_world_size()
        share = {kind: dict(list(named.items())[rank::count]) for kind, named in self.held.tensors.items()}
        self.copies = self.stager.stage(share)

    def write(self) -> None:
        part, rank = self.folder / "part", dist.get_rank()
        save(self.copies, checkpoint_id=part, process_group=control_group())
        for path in part.glob(f"__{rank}_*") if self.checksums else ():
            with path.open("rb") as file:
                hashlib.file_digest(file, "sha256")
        dist.barrier()
        if rank == 0:
            part.rename(self.folder / "step-1")
        dist.barrier()

    def read(self) -> None:
        load(self.held.tensors, checkpoint_id=self.folder / "step-1", process_group=control_group())


class Ours:
    """As a run does it."""

    def __init__(self, held: Held, folder: Path) -> None:
        data = SimpleNamespace(sequence_length=1, streaming=False)
        self.config: Any = SimpleNamespace(
            checkpoints=str(folder), run="bench", checkpoint=SimpleNamespace(keep=9, mirror=""), data=data,
            image_sha256="", dray="", global_size=1, train=SimpleNamespace(seed=0),
        )  # fmt: skip
        self.held: Any = held
        self.checkpoints = self._opened()

    def stage(self) -> None:
        self.checkpoints.save(1, None)

    def write(self) -> None:
        self.checkpoints.settle()

    def read(self) -> None:
        checkpoints = self._opened()
        checkpoints.find()
        checkpoints.resume()

    def _opened(self) -> Checkpoints:
        """Nobody else has the folder, and nobody reads the metrics."""
        lease: Any = SimpleNamespace(require=lambda: None)
        metrics: Any = SimpleNamespace(write=lambda *_, **__: None)
        made = Checkpoints(self.config, metrics, lease, dataset="")
        made.attach(self.held)
        return made


def rank(folder: Path, megabytes: int, rounds: int) -> None:
    """One of the processes; rank 0 prints a line of JSON for each round."""
    init_distributed("cpu")
    held = Held(megabytes)
    kept: dict[str, Any] = {}
    for number in range(rounds + 1):  # the first one is to warm up: buffers and the disk's cache
        for way in WAYS:
            place = folder / way
            if way not in kept:
                kept[way] = Ours(held, place) if way == "dray" else Dcp(held, place, checksums="with" in way)
            if dist.get_rank() == 0:
                shutil.rmtree(place, ignore_errors=True)
                place.mkdir()
            seconds, cpu = [], []
            for act in (kept[way].stage, kept[way].write, kept[way].read):
                dist.barrier()  # the control group is the writer's, between save and settle
                began, used = time.monotonic(), time.process_time()
                act()
                cpu.append(time.process_time() - used)
                dist.barrier()
                seconds.append(time.monotonic() - began)
            if number and dist.get_rank() == 0:
                print(json.dumps([way, *seconds, cpu[0] + cpu[1]]), flush=True)
            if dist.get_rank() == 0:
                shutil.rmtree(place)
    sys.stdout.flush()
    os._exit(0)


def main(megabytes: int = 500, ranks: int = 2, rounds: int = 5) -> None:
    """Start the ranks and print a table."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as folder:
        env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
        env["OMP_NUM_THREADS"] = "1"
        argv = [sys.executable, __file__, "--rank", folder, str(megabytes), str(rounds)]
        # Files: a process that DCP leaves behind would hold a pipe open.
        outputs = [Path(folder, f"rank-{one}.txt") for one in range(ranks)]
        processes = [
            subprocess.Popen(  # noqa: S603  this file itself
                argv, env={**env, "RANK": str(one), "LOCAL_RANK": str(one)}, stdout=outputs[one].open("wb")
            )
            for one in range(ranks)
        ]
        for process in processes:
            process.wait()
        output = outputs[0].read_text()
    if any(process.returncode for process in processes):
        sys.exit("a rank failed")
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("[")]
    found = {way: [line[1:] for line in lines if line[0] == way] for way in WAYS}
    print(f"{megabytes} MB, {ranks} ranks, median of {rounds} rounds\n")
    print("| way | staged, s | written, s | both, to DCP | CPU of both, s | to DCP | read, s | to DCP |")
    print("|" + "---|" * 8)
    for way, rows in found.items():
        whole = [(own[0] + own[1]) / (dcp[0] + dcp[1]) for own, dcp in zip(rows, found["dcp"], strict=True)]
        cpus = [own[3] / dcp[3] for own, dcp in zip(rows, found["dcp"], strict=True)]
        reads = [own[2] / dcp[2] for own, dcp in zip(rows, found["dcp"], strict=True)]
        stage, write, read, cpu = (statistics.median(column) for column in zip(*rows, strict=True))
        ratios = [statistics.median(ratio) for ratio in (whole, cpus, reads)]
        save = f"{stage:.3f} | {write:.2f} | {ratios[0]:.2f} | {cpu:.2f} | {ratios[1]:.2f}"
        print(f"| {way} | {save} | {read:.2f} | {ratios[2]:.2f} |")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        rank(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
    else:
        main(*map(int, sys.argv[1:]))
