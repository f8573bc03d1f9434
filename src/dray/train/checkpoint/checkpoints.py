"""The checkpoints of a run: save atomically while training goes on, and find the newest one that is complete.

Each rank writes a file, with its shards and its position in the data, into a folder with a temporary name. All files
are synced. The manifest, with their sizes and checksums, is written last, and then the folder gets its name. So a run
that is killed at any moment leaves the checkpoint before whole. No file of a checkpoint is a pickle.
"""

from __future__ import annotations

import errno
import operator
import shutil
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from dray.contract.failures import MENDED
from dray.contract.findings import ConfigError, DrayError, UnfitError
from dray.train import ranks
from dray.train.checkpoint import manifest
from dray.train.checkpoint.lease import Lease
from dray.train.checkpoint.mirror import Mirror
from dray.train.checkpoint.shards import MismatchError, Positions, Reader, join, position_shards
from dray.train.checkpoint.staging import Staged, Staging
from dray.train.collectives import on_all, on_rank_0
from dray.train.config import Config
from dray.train.errors import at_end, say
from dray.train.loop.metrics import Metrics
from dray.train.parallel.base import Strategy
from dray.train.runtime.heartbeat import BEAT_S, Moved


def lock_folder(config: Config) -> Lease:
    """Lock the checkpoint folder for this run, before it spends time on data; all ranks call it."""
    lease = Lease(folder := Path(config.checkpoints), config)

    def begin() -> None:
        with disk_errors(folder, "nothing was trained yet"):
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            manifest.require_own(folder)
            lease.acquire()
        at_end(lease.release)

    on_rank_0(begin)
    return lease


def due(step: int, every: tuple[tuple[int, int], ...]) -> bool:
    """Return whether to save after this step. `every` has pairs `(until, each)` in order; until 0 has no end."""
    for until, each in every:
        if until == 0 or step <= until:
            return step % each == 0
    return False


def order(config: Config, dataset: str) -> dict[str, Any]:
    """Return all that decides which samples a step has. `dataset` is the dataset's identity."""
    return {
        "global_size": config.global_size,
        "sequence_length": config.data.sequence_length,
        "seed": config.train.seed,
        "streaming": config.data.streaming,
        "dataset": dataset,
    }


@contextmanager
def disk_errors(folder: Path, newest: str) -> Iterator[None]:
    """Turn an OSError into an UnfitError (69) if the disk may be mended during the run, else into a DrayError."""
    try:
        yield
    except OSError as error:
        raise (UnfitError if error.errno in MENDED else DrayError)(
            "the checkpoint cannot be written",
            where=error.filename or folder,
            wanted=f"room and permission to write in {folder}",
            found=error.strerror or error,
            fix=f"check the disk and its quota; {newest}",
        ) from error


class Checkpoints:
    """The checkpoints of one run, in a folder that all ranks see. `dataset` is the dataset's identity."""

    def __init__(self, config: Config, metrics: Metrics, lease: Lease, *, dataset: str) -> None:
        self.folder, self.metrics, self.lease = Path(config.checkpoints), metrics, lease
        self.run, self.keep = config.run, config.checkpoint.keep
        self.rank, self.world = ranks.rank(), ranks.world()
        self.order = order(config, dataset)
        self._about_run = {
            "version": manifest.VERSION,
            "run": config.run,
            "image_sha256": config.image_sha256,
            "dray": config.dray,
            "world_size": self.world,
            "order": self.order,
        }
        place = config.checkpoint.mirror
        self.mirror = Mirror(place, metrics, keep=self.keep) if place else None
        self._writer = ThreadPoolExecutor(1)
        self._began, self._moved = 0.0, Moved()
        self._pending: Future[None] | None = None
        self._save_error: UnfitError | None = None
        self._manifest: dict[str, Any] | None = None  # of the checkpoint that `find` has chosen
        self._skipped_before = 0  # steps without an update, in another program or with another train.precision
        self.newest: int | None = None
        """The step of the newest complete checkpoint."""

    def attach(self, strategy: Strategy) -> None:
        """Set the strategy whose tensors are saved and loaded."""
        self.strategy, self._staging = strategy, Staging(strategy.device)

    def reserve(self, position: list[Any] | None) -> None:
        """Allocate the host's memory for checkpoints now: if it is too small, the run ends before its first step."""
        self._staging.reserve({**self.strategy.state(), **position_shards(position)})

    def save(self, step: int, position: list[Any] | None) -> None:
        """Begin to save; all ranks call it. After `settle` the checkpoint is complete, or the log has a warning."""
        self.settle()
        self._began = time.monotonic()
        part = self._part(step)
        try:
            on_rank_0(lambda: self._make(part))
        except UnfitError as error:  # on all ranks alike
            self._not_saved(step, error)
            return
        scaler = self.strategy.scaler
        updates = step - self._skipped_before - (scaler.skipped if scaler else 0)
        state = {**self.strategy.state(), **position_shards(position)}
        staged = self._staging.fill(state, self.rank)
        if any(name.startswith("others.") for name in state):  # buffers, which the next forward pass may change
            self.fence()
        fields = {"step": step, "updates": updates, "scaler": scaler.state() if scaler else None}
        self._pending = self._writer.submit(self._write, part, staged, fields)

    def fence(self) -> None:
        """Call this before the weights change. The GPU, not the host, waits until it has copied them."""
        self._staging.fence()

    def settle(self) -> None:
        """Wait until the checkpoint that `save` has begun is complete."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        while not wait([pending], BEAT_S).done:
            self._moved.beat()
        pending.result()

    def close(self) -> None:
        """Free the staging buffer; wait until the mirror has the newest checkpoint, or two tries have failed."""
        self._staging.close()
        if self.mirror and self.rank == 0:
            self.mirror.settle()

    def require_saved(self) -> None:
        """Fail (69) if the last save failed."""
        if self._save_error:
            raise self._save_error

    def warning(self) -> str:
        """Return the warning for each log line while the disk or the mirror fails."""
        warnings = [f"not saved: {self._save_error.finding.found}; {self.newest_text()}"] if self._save_error else []
        if self.mirror and self.mirror.trouble:
            warnings.append(self.mirror.trouble)
        return f"  WARNING: {'; '.join(warnings)}" if warnings else ""

    def newest_text(self) -> str:
        """Return a sentence that names the newest checkpoint."""
        if self.newest is None:
            return "there is no checkpoint yet"
        return f"the newest checkpoint is of step {self.newest}"

    def find(self) -> bool:
        """Choose the newest complete checkpoint; return whether there is one. Rename damaged ones."""
        for step, mirrored in on_rank_0(self._candidates):
            path = self.folder / f"step-{step}"
            if mirrored and not self._fetch(step):
                continue
            saved, damage = self._verify(path)
            if damage:
                say(f"checkpoint {path} is skipped: {'; '.join(damage[:3])}")
                on_rank_0(partial(self._set_aside, path))
                continue
            self._require_order(path, saved["order"])
            self.newest, self._manifest = step, saved
            say(f"resumed at step {step} from {path}")
            if self.mirror and self.rank == 0 and step not in self.mirror.steps:
                self.mirror.put(path)
            return True
        return False

    def resume(self) -> Mapping[int, list[Any]]:
        """Load the checkpoint that `find` has chosen, if any; return the feed's positions. All ranks call it."""
        saved, path = self._manifest, self.folder / f"step-{self.newest}"
        if saved is None:
            return {}
        if self.strategy.scaler and saved.get("scaler"):
            self.strategy.scaler.load(saved["scaler"])
        skipped = self.strategy.scaler.skipped if self.strategy.scaler else 0
        self._skipped_before = saved["step"] - saved["updates"] - skipped
        try:
            self.strategy.load(Reader(path, saved["tensors"]), saved["updates"])
        except MismatchError as error:
            raise ConfigError(
                "the checkpoint does not have this recipe's tensors",
                wanted="the tensors of this recipe's model, train.optimizer and train.ema_decay",
                found=f"in {path}: {error}",
                fix="restore model, train.optimizer and train.ema_decay, or set another checkpoint.folder",
            ) from error
        return Positions(path, saved["tensors"])

    def _part(self, step: int) -> Path:
        return self.folder / f"step-{step}.part-{self.run}"

    def _disk_errors(self) -> AbstractContextManager[None]:
        return disk_errors(self.folder, self.newest_text())

    def _make(self, part: Path) -> None:
        """Make an empty folder with mode 755, whatever the umask: `require_own` refuses one that a group may write."""
        shutil.rmtree(part, ignore_errors=True)
        with self._disk_errors():
            self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            self.lease.require()
            part.mkdir(mode=0o755)

    def _write(self, part: Path, staged: Staged, fields: dict[str, Any]) -> None:
        step = fields["step"]
        try:
            # Each rank reports its own file: on NFS rank 0 may not see it yet.
            on_all(lambda: self._write_file(part, staged), join, lambda files: self._complete(part, fields | files))
        except DrayError as error:  # on all ranks alike
            staged.wait()
            if self.rank == 0:
                shutil.rmtree(part, ignore_errors=True)
            if not isinstance(error, UnfitError):
                raise
            self._not_saved(step, error)
            return
        seconds = round(time.monotonic() - self._began, 3)
        shown = f"checkpoint of step {step}: {seconds:.1f} s"
        self.metrics.write("checkpoint", shown, checkpoint=step, saved=True, seconds=seconds)
        self._save_error, self.newest = None, step
        if self.mirror and self.rank == 0:
            self.mirror.put(self.folder / f"step-{step}")

    def _write_file(self, part: Path, staged: Staged) -> dict[str, Any]:
        with self._disk_errors():
            return staged.write(part, self._moved.count)

    def _complete(self, part: Path, fields: dict[str, Any]) -> None:
        """Write the manifest, give the folder its name, and delete older checkpoints; on rank 0."""
        with self._disk_errors():
            manifest.write(part, {**fields, **self._about_run})
            for name, file in fields["files"].items():  # before older checkpoints are deleted
                size = (part / name).stat().st_size
                if size != file["bytes"]:
                    raise OSError(errno.EIO, f"{name} has {size} bytes, but {file['bytes']} were written")
            self.lease.require()
        self._publish(part)
        for step in _steps(self.folder)[: -self.keep]:
            path = self.folder / f"step-{step}"
            if self.mirror is None or not self.mirror.needs(path):
                shutil.rmtree(path, ignore_errors=True)
        for unfinished in self.folder.glob("step-*.part-*"):  # of runs that were killed
            shutil.rmtree(unfinished, ignore_errors=True)

    def _publish(self, part: Path) -> None:
        """Give a complete checkpoint its name."""
        with self._disk_errors():
            part.rename(self.folder / part.name.partition(".")[0])
            manifest.sync(self.folder)

    def _set_aside(self, path: Path) -> None:
        """Rename a damaged checkpoint: one of the same step may be written again."""
        with disk_errors(self.folder, f"{path.name} is damaged"):
            path.rename(path.with_name(f"{path.name}.broken-{time.time():.0f}"))

    def _not_saved(self, step: int, error: UnfitError) -> None:
        """Warn: earlier checkpoints are whole, and the next save tries again."""
        self._save_error, why = error, error.finding.found
        text = f"WARNING: the checkpoint of step {step} is not saved: {why}; the run goes on, and {self.newest_text()}"
        self.metrics.write("checkpoint", text, checkpoint=step, saved=False, why=f"{why}: {self.folder}")

    def _candidates(self) -> list[tuple[int, bool]]:
        """Return the steps of all checkpoints, the newest first, and whether each is the mirror's copy; on rank 0."""
        steps = _steps(self.folder)
        copies = self.mirror.find(self.folder, required=not steps) if self.mirror else []
        # Of one step the mirror's copy is second: it is fetched only if this folder's checkpoint is damaged.
        candidates = [(step, False) for step in steps] + [(step, True) for step in copies]
        return sorted(candidates, key=lambda candidate: (-candidate[0], candidate[1]))

    def _fetch(self, step: int) -> bool:
        """Fetch the mirror's copy into this folder; return whether it is there now. All ranks call it."""
        assert self.mirror
        part, name = self._part(step), f"step-{step}"
        try:
            on_rank_0(lambda: self._make(part))
            trouble = self.mirror.fetch(part, name, required=on_rank_0(lambda: not _steps(self.folder)))
            if not trouble:
                on_rank_0(lambda: self._publish(part))
        finally:
            if self.rank == 0:
                shutil.rmtree(part, ignore_errors=True)
        say(f"{name} of {self.mirror.place} is {f'skipped: {trouble}' if trouble else 'fetched'}")
        return not trouble

    def _verify(self, path: Path) -> tuple[dict[str, Any], list[str]]:
        """Return the manifest, and which files are damaged; each rank checks a share of them."""
        saved = on_rank_0(partial(manifest.read_checkpoint, path))
        share = slice(self.rank, None, self.world)
        return saved, on_all(lambda: manifest.damage(path, saved, share), operator.add)

    def _require_order(self, path: Path, saved_order: dict[str, Any]) -> None:
        """Refuse another batch, sequence length, seed or dataset: the order of samples would differ."""
        for name, value in self.order.items():
            if saved_order.get(name) != value:
                raise ConfigError(
                    "the data order differs from the checkpoint's",
                    wanted=f"{name} = {saved_order.get(name)}, as in {path}",
                    found=f"{name} = {value}",
                    fix="restore it, or start anew: another checkpoint.folder, and model.name = a final model's folder",
                )


def _steps(folder: Path) -> list[int]:
    return sorted(int(name) for path in folder.glob("step-*") if (name := path.name.removeprefix("step-")).isdigit())
