"""Atomic checkpoints, and the newest one that is complete.

A checkpoint is written into a folder of another name while training goes on: each rank writes its shards as safetensors
and its position as JSON, every file is synced, a manifest with sizes and checksums comes last, and then one rename.
Whatever is killed at whatever moment leaves the one before. Nothing in it is a pickle, and nothing of it is believed
that the manifest does not describe.
"""

from __future__ import annotations

import json
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist

from dray.contract.findings import ConfigError, DrayError
from dray.train import manifest, saved, shards
from dray.train.collectives import all_gather_json, on_all, on_rank_0
from dray.train.config import Config
from dray.train.errors import say
from dray.train.shards import MismatchError, Reader, Staged, Staging
from dray.train.strategies.base import Strategy

_OLD = 86400  # seconds after which what a run left half-written is nobody's any more


class Checkpoints:
    """Those of one run: their folder is on a disk that all ranks see. `dataset` tells one dataset from another."""

    def __init__(self, config: Config, strategy: Strategy, *, dataset: str) -> None:
        self.folder, self.strategy = Path(config.checkpoints), strategy
        self.run, self.keep = config.run, config.checkpoint.keep
        self.made_by = {"run": config.run, "image_sha256": config.image_sha256, "dray": config.dray}
        self.order = saved.order(config, dataset)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._staging = Staging(strategy.device)
        self._writer = ThreadPoolExecutor(1)
        self._began = 0.0
        self._pending: Future[None] | None = None
        self.newest: int | None = None  # the step of the newest that is complete
        self.took: dict[int, float] = {}  # seconds from its beginning to its name, by step; the loop takes them out

    def save(self, step: int, position: Any) -> None:  # noqa: ANN401  any JSON value
        """All ranks together. It is there after `settle`."""
        self.settle()
        self._began = time.monotonic()
        part = self.folder / f"step-{step}.part-{self.run}"
        on_rank_0(lambda: self._make(part))
        scaler = self.strategy.scaler
        own = {"feed": position, "scaler": scaler.state() if scaler else None}
        updates = step - (scaler.skipped if scaler else 0)
        state = self.strategy.state()
        staged = self._staging.fill(state)
        if any(name.startswith("others.") for name in state):  # a forward pass may write these
            self.fence()
        self._pending = self._writer.submit(self._write, part, staged, step, updates, own)

    def fence(self) -> None:
        """Call it before the weights are changed: on a GPU they may still be copied."""
        self._staging.fence()

    def settle(self) -> None:
        """Wait until what was begun is there."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except DrayError:
            raise
        except Exception as error:
            raise self._failed(error) from error

    def newest_text(self) -> str:
        """From what a run can resume."""
        exists = self.newest is not None
        return f"the newest checkpoint is of step {self.newest}" if exists else "there is no checkpoint yet"

    def _make(self, part: Path) -> None:
        """No group may write there, whatever the umask: another's checkpoints are not read again."""
        shutil.rmtree(part, ignore_errors=True)
        try:
            self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            part.mkdir(mode=0o755)
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: BaseException) -> DrayError:
        return DrayError(
            "the checkpoint cannot be written",
            wanted=f"room and permission to write in {self.folder}",
            found=" ".join(str(error).split())[-300:] or type(error).__name__,
            fix=f"check the disk and its quota; {self.newest_text()}",
        )

    def _write(self, part: Path, staged: Staged, step: int, updates: int, own: dict[str, Any]) -> None:
        ranks = on_all(lambda: self._write_own(part, staged, own))
        on_rank_0(lambda: self._complete(part, ranks, step, updates))
        self.took[step] = time.monotonic() - self._began
        self.newest = step

    def _write_own(self, part: Path, staged: Staged, own: dict[str, Any]) -> dict[str, Any]:
        """What this rank has written. It says so itself: what others wrote may not be visible yet."""
        text = json.dumps(own, default=lambda array: array.tolist()).encode()
        staged.wait()
        tensors, position = saved.files(self.rank)
        try:
            files = {position: manifest.written(part / position, text)}
            if staged.tensors:
                files[tensors] = manifest.written(part / tensors, staged.head, staged.numbers)
        except OSError as error:
            raise self._failed(error) from error
        return {"files": files, "tensors": staged.tensors}

    def _complete(self, part: Path, ranks: list[dict[str, Any]], step: int, updates: int) -> None:
        files = {name: one for rank in ranks for name, one in rank["files"].items()}
        tensors = shards.joined(
            [rank["tensors"] for rank in ranks], [saved.files(rank)[0] for rank in range(self.world)]
        )
        found = {"version": saved.VERSION, "step": step, "updates": updates, **self.made_by, "world_size": self.world}
        found |= {"order": self.order, "files": files, "tensors": tensors}
        try:
            manifest.write(part, found)
            part.rename(self.folder / f"step-{step}")
            manifest.sync(self.folder)
        except OSError as error:
            raise self._failed(error) from error
        self._prune()

    def resume(self) -> list[Any]:
        """Load the newest that is complete, if any; the feed's states. A broken one is reported and renamed."""
        for step in on_rank_0(self._own_steps)[::-1]:
            path = self.folder / f"step-{step}"
            found = on_rank_0(partial(saved.look, path))
            troubles = [found["trouble"]] if "trouble" in found else self._troubles(path, found)
            if troubles:
                say(f"checkpoint {path} is skipped: {'; '.join(troubles[:3])}")
                if self.rank == 0:  # a checkpoint of this step may be written again
                    path.rename(path.with_name(f"{path.name}.broken-{time.time():.0f}"))
                continue
            self._check_order(path, found["order"])
            read = self._converted(path, found) if found["version"] == saved.OF_DCP else path
            if read != path:
                found = manifest.read(read)
            owns = [json.loads((read / saved.files(rank)[1]).read_bytes()) for rank in range(found["world_size"])]
            if self.strategy.scaler and owns[0]["scaler"]:
                self.strategy.scaler.load(owns[0]["scaler"])
            self._load(read, found)
            self.newest = step
            say(f"resumed at step {step} from {path}")
            return [own["feed"] for own in owns]
        return []

    def _own_steps(self) -> list[int]:
        if self.folder.exists():
            manifest.require_own(self.folder)
        return _steps(self.folder)

    def _converted(self, path: Path, found: dict[str, Any]) -> Path:
        """The same checkpoint in a folder of its own, which goes when the next one has been written."""
        from dray.train import dcp  # noqa: PLC0415  for checkpoints of before alone

        part = path.with_name(f"{path.name}.part-{self.run}")

        def convert() -> None:
            self._make(part)
            dcp.convert(path, part, found)

        on_rank_0(convert)
        return part

    def _check_order(self, path: Path, order: dict[str, Any]) -> None:
        """Another batch, sequence length, seed or dataset gives the same numbers other samples."""
        for name, own in self.order.items():
            if order.get(name) != own:
                raise ConfigError(
                    "the data order differs from the checkpoint's",
                    wanted=f"{name} = {order.get(name)}, as in {path}",
                    found=f"{name} = {own}",
                    fix="restore it, or set another checkpoint.folder and model.name = the folder of a final model",
                )

    def _load(self, path: Path, found: dict[str, Any]) -> None:
        try:
            self.strategy.load(Reader(path, found["tensors"]).fill, found["updates"])
        except MismatchError as error:
            raise ConfigError(
                "the checkpoint is of another model",
                wanted="the tensors of this recipe's model",
                found=f"in {path}: {error}",
                fix="name another checkpoint.folder, or take the recipe that the checkpoint was made with",
            ) from error

    def _troubles(self, path: Path, found: dict[str, Any]) -> list[str]:
        """What differs from the manifest; each rank checks its share of the files."""
        some = slice(self.rank, None, self.world)
        return [trouble for rank in all_gather_json(saved.wrong(path, found, some)) for trouble in rank]

    def _prune(self) -> None:
        """The newest `keep` stay; what was cut off goes."""
        for old in _steps(self.folder)[: -self.keep]:
            shutil.rmtree(self.folder / f"step-{old}", ignore_errors=True)
        for part in self.folder.glob("step-*.part-*"):
            with suppress(FileNotFoundError):  # another run, whose folder it is too, has just named it
                if part.name.endswith(f".part-{self.run}") or time.time() - part.stat().st_mtime > _OLD:
                    shutil.rmtree(part, ignore_errors=True)


def _steps(folder: Path) -> list[int]:
    return sorted(int(name) for path in folder.glob("step-*") if (name := path.name.removeprefix("step-")).isdigit())


def due(step: int, every: tuple[tuple[int, int], ...]) -> bool:
    """Whether a checkpoint is to be made after so many steps: `(until, each)` in turn, 0 for ever."""
    for until, each in every:
        if until == 0 or step <= until:
            return step % each == 0
    return False
