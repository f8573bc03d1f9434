"""Atomic checkpoints, and the newest one that is complete.

A checkpoint is written into a folder of another name while training goes on, every file is synced, a manifest with
sizes and checksums comes last, and then one rename. Whatever is killed at whatever moment leaves the one before.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from dray.contract.findings import ConfigError, DrayError
from dray.train.collectives import all_gather_json, barrier, broadcast_json, control_group
from dray.train.config import Config
from dray.train.errors import say
from dray.train.strategies.base import State, Strategy

_MANIFEST = "manifest.json"
_VERSION = 1  # of the manifest, and of what the files beside it hold
_OLD = 86400  # seconds after which what a run left half-written is nobody's any more


class Checkpoints:
    """Those of one run: their folder is on a disk that all ranks see. `dataset` tells one dataset from another."""

    def __init__(self, config: Config, strategy: Strategy, *, dataset: str) -> None:
        self.folder, self.strategy = Path(config.checkpoints), strategy
        self.run, self.keep, data = config.run, config.checkpoint.keep, config.data
        self.made_by = {"run": config.run, "image_sha256": config.image_sha256, "dray": config.dray}
        # What decides which samples a step has.
        self.order: dict[str, Any] = {
            "global_size": config.global_size,
            "sequence_length": data.sequence_length,
            "seed": config.train.seed,
        }
        self.order |= {"streaming": data.streaming, "dataset": dataset}
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self._writer = ThreadPoolExecutor(1)
        self._pending: Future[None] | None = None
        self.newest: int | None = None  # the step of the newest that is complete

    def save(self, step: int, position: Any) -> None:  # noqa: ANN401  any JSON value
        """All ranks together. It is there after `settle`."""
        self.settle()
        part = self.folder / f"step-{step}.part-{self.run}"
        if self.rank == 0:
            shutil.rmtree(part, ignore_errors=True)
            try:
                part.mkdir(parents=True)
            except OSError as error:
                self._cannot(error)
        barrier()
        scaler = self.strategy.scaler
        own = {"feed": position, "scaler": scaler.state() if scaler else None}
        updates = step - (scaler.skipped if scaler else 0)
        self._pending = self._writer.submit(self._write, part, self.strategy.state(), step, updates, own)

    def settle(self) -> None:
        """Wait until what was begun is there."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        try:
            pending.result()
        except CheckpointException as error:  # no Exception to Python
            self._cannot(next(cause for cause, _ in error.failures.values()))
        except Exception as error:
            self._cannot(error)

    def newest_text(self) -> str:
        """From what a run can resume."""
        exists = self.newest is not None
        return f"the newest checkpoint is of step {self.newest}" if exists else "there is no checkpoint yet"

    def _cannot(self, error: BaseException) -> NoReturn:
        raise DrayError(
            "the checkpoint cannot be written",
            wanted=f"room and permission to write in {self.folder}",
            found=" ".join(str(error).split())[-300:] or type(error).__name__,
            fix=f"check the disk and its quota; {self.newest_text()}",
        )

    def _write(self, part: Path, state: State, step: int, updates: int, own: dict[str, Any]) -> None:
        if self.strategy.device.type == "cuda":
            torch.cuda.set_device(self.strategy.device)  # a new thread has the first one
        save(state, checkpoint_id=part, process_group=control_group())
        text = json.dumps(own, default=lambda array: array.tolist())
        (part / f"rank-{self.rank}.json").write_text(text, encoding="utf-8")
        # Each rank lists what it wrote itself: what others wrote may not be visible yet.
        own_files = [path for path in part.iterdir() if path.name.startswith((f"__{self.rank}_", f"rank-{self.rank}."))]
        own_files += [part / ".metadata"] if self.rank == 0 else []
        files = _gathered({path.name: _sealed(path) for path in own_files})
        if self.rank == 0:
            manifest = {"version": _VERSION, "step": step, "updates": updates, **self.made_by, "world_size": self.world}
            manifest |= {"order": self.order, "files": files}
            with (part / _MANIFEST).open("w", encoding="utf-8") as file:
                json.dump(manifest, file, indent=1)
                file.flush()
                os.fsync(file.fileno())
            _sync(part)
            part.rename(self.folder / f"step-{step}")
            _sync(self.folder)
            self._prune()
        barrier()
        self.newest = step

    def resume(self) -> list[Any]:
        """Load the newest that is complete, if any; the feed's states. A broken one is reported and renamed."""
        for step in _of_rank_0(lambda: _steps(self.folder)[::-1]):
            path = self.folder / f"step-{step}"
            manifest = _of_rank_0(partial(_manifest, path))
            troubles = self._troubles(path, manifest["files"]) if "files" in manifest else [manifest["trouble"]]
            if troubles:
                say(f"checkpoint {path} is skipped: {'; '.join(troubles[:3])}")
                if self.rank == 0:  # a checkpoint of this step may be written again
                    path.rename(path.with_name(f"{path.name}.broken-{time.time():.0f}"))
                continue
            _require_version(path, manifest)
            self._check_order(path, manifest["order"])
            owns = [json.loads(own.read_text(encoding="utf-8")) for own in sorted(path.glob("rank-*.json"))]
            if self.strategy.scaler and owns[0]["scaler"]:
                self.strategy.scaler.load(owns[0]["scaler"])
            self._load(path, manifest["updates"])
            self.newest = step
            say(f"resumed at step {step} from {path}")
            return [own["feed"] for own in owns]
        return []

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

    def _load(self, path: Path, updates: int) -> None:
        try:
            self.strategy.load(lambda state: load(state, checkpoint_id=path), updates)
        except CheckpointException as error:
            raise ConfigError(
                "the checkpoint is of another model",
                wanted="the tensors of this recipe's model",
                found=f"in {path}: {' '.join(str(next(cause for cause, _ in error.failures.values())).split())[:300]}",
                fix="name another checkpoint.folder, or take the recipe that the checkpoint was made with",
            ) from error

    def _troubles(self, path: Path, files: dict[str, Any]) -> list[str]:
        """What differs from the manifest; each rank checks its share of the files."""
        return list(_gathered(_wrong(path, files, slice(self.rank, None, self.world))).values())

    def _prune(self) -> None:
        """The newest `keep` stay; what was cut off goes."""
        for old in _steps(self.folder)[: -self.keep]:
            shutil.rmtree(self.folder / f"step-{old}", ignore_errors=True)
        for part in self.folder.glob("step-*.part-*"):
            with suppress(FileNotFoundError):  # another run, whose folder it is too, has just named it
                if part.name.endswith(f".part-{self.run}") or time.time() - part.stat().st_mtime > _OLD:
                    shutil.rmtree(part, ignore_errors=True)


def _of_rank_0(look: Callable[[], Any]) -> Any:  # noqa: ANN401  what `look` returns
    """What rank 0 sees: another node may see an older state of a shared folder."""
    return broadcast_json(look() if dist.get_rank() == 0 else None)


def _gathered(own: dict[str, Any]) -> dict[str, Any]:
    return {name: value for part in all_gather_json(own) for name, value in part.items()}


def _steps(folder: Path) -> list[int]:
    return sorted(int(name) for path in folder.glob("step-*") if (name := path.name.removeprefix("step-")).isdigit())


def _manifest(path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return {"trouble": f"its manifest cannot be read ({error})"}
    return found if "files" in found else {"trouble": "its manifest names no files"}


def _require_version(path: Path, manifest: dict[str, Any]) -> None:
    if manifest.get("version") != _VERSION:
        raise ConfigError(
            "the checkpoint was written by another version of dray",
            where=path / _MANIFEST,
            wanted=f"checkpoint version {_VERSION}",
            found=f"checkpoint version {manifest.get('version')}, written by dray {manifest.get('dray')}",
            fix="resume with an image of that version; or begin with its model: model.name=RUN/checkpoints/final, and "
            "another checkpoint.folder",
        )


def troubles(path: Path) -> list[str]:
    """What differs from the manifest, of all files."""
    manifest = _manifest(path)
    return list(_wrong(path, manifest["files"]).values()) if "files" in manifest else [manifest["trouble"]]


def _wrong(path: Path, files: dict[str, Any], some: slice = slice(None)) -> dict[str, str]:
    found = {}
    for name in sorted(files)[some]:
        try:
            if _described(path / name) != files[name]:
                found[name] = f"{name} is not what was written"
        except OSError as error:
            found[name] = f"{name}: {error.strerror}"
    return found


def _sealed(path: Path) -> dict[str, Any]:
    """Synced to the disk, with size and checksum."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
    return _described(path)


def _described(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def due(step: int, every: tuple[tuple[int, int], ...]) -> bool:
    """Whether a checkpoint is to be made after so many steps: `(until, each)` in turn, 0 for ever."""
    for until, each in every:
        if until == 0 or step <= until:
            return step % each == 0
    return False
