"""Compiled code, kept in the run folder: the next attempt, such as a requeued job, does not compile again.

It is torch's cache artifacts, a file for each rank of a node: code for cuda:0 does not run on cuda:1. They do not hold
what the C++ compiler has made, so models on CPUs are compiled again. To load a file is to run its code. So the files
are not in checkpoint.folder, which a user may copy from somebody else, and dray loads only files that no other user
may write.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

import torch

from dray.contract import files
from dray.train import ranks
from dray.train.config import Config
from dray.train.errors import say


class Compiled:
    """The compiled code of a run: each rank loads that of its local rank, and the first node's ranks save theirs."""

    def __init__(self, config: Config, device: torch.device) -> None:
        self._on = config.train.compile is True
        self.path = Path(config.compiled) / _key(config, device) / f"local-rank-{ranks.local_rank()}"
        self._saves = self._on and ranks.rank() < ranks.local_world()
        self._size = 0
        self.nanoseconds = self._since = self._depth = 0
        if self._on or "torch._dynamo" in sys.modules:
            self._listen()

    def _listen(self) -> None:
        """Sum up the time in which torch compiles: the forward pass at once, the backward one when it is first taken.

        Nested compilations count once. The callbacks' arguments differ between torch's versions, so they are ignored.
        """
        from torch._dynamo import callback  # noqa: PLC0415  it imports all that compiles

        def begin(*_: object) -> None:
            self._since = self._since if self._depth else time.monotonic_ns()
            self._depth += 1

        def end(*_: object) -> None:
            self._depth -= 1
            self.nanoseconds += 0 if self._depth else time.monotonic_ns() - self._since

        callback.on_compile_start(begin)
        callback.on_compile_end(end)

    def load(self) -> None:
        """Fill torch's caches before anything is compiled."""
        if not self._on or not self.path.exists():
            return
        reasons = []
        for path in (self.path.parent.parent, self.path.parent, self.path):
            if why := files.open_to_others(path, folder=path != self.path):
                reasons.append(f"{path} is {why}")
        if not reasons:
            content = self.path.read_bytes()
            if torch.compiler.load_cache_artifacts(content):
                self._size = len(content)
            else:
                reasons = [f"torch cannot read {self.path}"]
        if reasons:
            say(f"compiled code of an earlier attempt is not used, and this attempt compiles again: {reasons[0]}")
        else:
            say(f"compiled code of an earlier attempt is used: {self.path}")

    def keep(self) -> None:
        """Save what has been compiled, if it is larger than the saved file. A full disk does not end the run."""
        artifacts = torch.compiler.save_cache_artifacts() if self._saves else None
        if artifacts is None or len(artifacts[0]) <= self._size:
            return
        self._size = len(artifacts[0])
        try:
            for folder in (self.path.parent.parent, self.path.parent):  # not by parents=True, which takes the umask
                folder.mkdir(mode=0o755, exist_ok=True)
            files.write_atomic(self.path, artifacts[0])
        except OSError as error:
            say(f"compiled code is not kept: {error}")
        else:
            say(f"compiled code is kept for the next attempt: {self._size / 1e6:.1f} MB in {self.path}")


def _key(config: Config, device: torch.device) -> str:
    """Image, devices and recipe. Inductor compiles for this very CPU, beside a GPU too."""
    gpu = "" if device.type == "cpu" else (torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device))
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    cpu = sorted({line for line in lines if line.lower().startswith(("flags", "features", "model name"))})
    parts = [config.image_sha256, torch.__version__, sys.version, cpu, gpu, config.recipe, config.per_device]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:24]
