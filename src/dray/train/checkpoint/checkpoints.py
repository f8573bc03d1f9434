"""Atomic checkpoints, and the newest one that is complete.

A checkpoint is written into a folder of another name while training goes on: each rank writes a file of its shards and
its position in the data, every file is synced, a manifest with sizes and checksums comes last, and then one rename.
Whatever is killed at whatever moment leaves the one before. Nothing in it is a pickle, and nothing of it is believed
that the manifest does not describe.
"""

from __future__ import annotations

import errno
import operator
import shutil
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from dray.contract.findings import DrayError, UnfitError
from dray.train import ranks
from dray.train.checkpoint import manifest, saved
from dray.train.checkpoint.lease import Lease
from dray.train.checkpoint.mirror import Mirror
from dray.train.checkpoint.shards import Staged, Staging
from dray.train.collectives import on_all, on_rank_0
from dray.train.config import Config
from dray.train.errors import at_end, say
from dray.train.loop.divergence import Watch
from dray.train.loop.metrics import Metrics
from dray.train.parallel.base import Strategy
from dray.train.runtime.heartbeat import BEAT_S, Moved

_NAMED = 3  # troubles of a checkpoint that is skipped
_OLD = 86400  # seconds after which what a run left half-written is nobody's any more


def take(config: Config) -> Lease:
    """Lock the checkpoint folder for this run, before it spends time on data; all ranks call it."""
    lease = Lease(folder := Path(config.checkpoints), config)

    def begin() -> None:
        try:
            folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            manifest.require_own(folder)
            lease.acquire()
        except OSError as error:
            raise saved.failed(error, folder, "nothing was trained yet") from error
        at_end(lease.release)

    on_rank_0(begin)
    return lease


class Checkpoints:
    """The checkpoints of one run, in a folder that all ranks see. `dataset` is the dataset's identity."""

    def __init__(self, config: Config, metrics: Metrics, lease: Lease, *, dataset: str) -> None:
        self.folder, self.metrics = Path(config.checkpoints), metrics
        self.run, self.keep = config.run, config.checkpoint.keep
        self.made_by = {"run": config.run, "image_sha256": config.image_sha256, "dray": config.dray}
        self.order = saved.order(config, dataset)
        self.rank, self.world = ranks.rank(), ranks.world()
        self.lease, place = lease, config.checkpoint.mirror
        self.mirror = Mirror(place, metrics, keep=self.keep) if place else None
        self._writer = ThreadPoolExecutor(1)
        self._began, self._moved = 0.0, Moved()
        self._pending: Future[None] | None = None
        self._unsaved: UnfitError | None = None
        self._checkpoint: tuple[Path, dict[str, Any]] | None = None  # what `find` returned: its folder and manifest
        self.newest: int | None = None  # the step of the newest that is complete
        self.watch = Watch()

    def use(self, strategy: Strategy) -> None:
        """Save and load the tensors of this strategy from now on."""
        self.strategy, self._staging = strategy, Staging(strategy.device)

    def reserve(self, position: list[Any] | None) -> None:
        """Take the host's memory for checkpoints now: a run that it does not fit ends before its first step."""
        self._staging.reserve({**self.strategy.state(), **saved.positions(position)})

    def save(self, step: int, position: list[Any] | None) -> None:
        """Begin to save; all ranks call it. After `settle` the checkpoint is complete, or the log has a warning."""
        self.settle()
        self._began = time.monotonic()
        part = self.folder / f"step-{step}.part-{self.run}"
        try:
            on_rank_0(lambda: self._make(part))
        except UnfitError as failed:  # on all ranks alike
            self._not_saved(step, failed)
            return
        scaler = self.strategy.scaler
        updates = step - (scaler.skipped if scaler else 0) - self.watch.left_out(step)
        state = self.strategy.state()
        staged = self._staging.fill({**state, **saved.positions(position)}, self.rank)
        if any(name.startswith("others.") for name in state):  # a forward pass may write these
            self.fence()
        about = {"step": step, "updates": updates, "watch": self.watch.state()}
        about |= {"scaler": scaler.state() if scaler else None}
        self._pending = self._writer.submit(self._write, part, staged, about)

    def fence(self) -> None:
        """Call this before the weights change: a GPU may still be copying them."""
        self._staging.fence()

    def settle(self) -> None:
        """Wait until the begun checkpoint is complete."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        while not wait([pending], BEAT_S).done:
            self._moved.beat()
        try:
            pending.result()
        except DrayError:
            raise
        except Exception as error:
            raise self._failed(error) from error

    def close(self) -> None:
        """Wait until the newest checkpoint is copied to the mirror, or cannot be; give its memory back."""
        self._staging.close()
        if self.mirror and self.rank == 0:
            self.mirror.settle()

    def require_saved(self) -> None:
        """Fail (69) if the last save failed."""
        if self._unsaved:
            raise self._unsaved

    def warning(self) -> str:
        """The warning in each log line while the disk or the mirror does not work."""
        found = [f"not saved: {self._unsaved.finding.found}; {self.newest_text()}"] if self._unsaved else []
        found += [self.mirror.trouble] if self.mirror and self.mirror.trouble else []
        return f"  WARNING: {'; '.join(found)}" if found else ""

    def newest_text(self) -> str:
        """A sentence that names the newest checkpoint."""
        exists = self.newest is not None
        return f"the newest checkpoint is of step {self.newest}" if exists else "there is no checkpoint yet"

    def _make(self, part: Path) -> None:
        """No group may write there, whatever the umask: another's checkpoints are not read again."""
        shutil.rmtree(part, ignore_errors=True)
        try:
            self.folder.mkdir(mode=0o755, parents=True, exist_ok=True)
            self.lease.require()
            part.mkdir(mode=0o755)
        except OSError as error:
            raise self._failed(error) from error

    def _failed(self, error: BaseException) -> DrayError:
        return saved.failed(error, self.folder, self.newest_text())

    def _require_room(self, size: int) -> None:
        saved.require_room(self.folder, size, self.newest_text())

    def _write(self, part: Path, staged: Staged, about: dict[str, Any]) -> None:
        step = about["step"]
        try:
            on_all(lambda: len(staged.head) + len(staged.numbers), operator.add, self._require_room)
            on_all(
                lambda: self._write_own(part, staged), saved.joined, lambda ranks: self._complete(part, ranks, about)
            )
        except DrayError as failed:  # on all ranks alike
            staged.wait()
            if self.rank == 0:
                shutil.rmtree(part, ignore_errors=True)
            if not isinstance(failed, UnfitError):
                raise
            self._not_saved(step, failed)
            return
        seconds = round(time.monotonic() - self._began, 3)
        shown = f"checkpoint of step {step}: {seconds:.1f} s"
        self.metrics.write("checkpoint", shown, checkpoint=step, saved=True, seconds=seconds)
        self._unsaved, self.newest = None, step
        if self.mirror and self.rank == 0:
            self.mirror.put(self.folder / f"step-{step}")

    def _not_saved(self, step: int, failed: UnfitError) -> None:
        """Nothing that was there is hurt; the next save tries again."""
        self._unsaved, why = failed, failed.finding.found
        text = f"WARNING: the checkpoint of step {step} is not saved: {why}; the run goes on, and {self.newest_text()}"
        self.metrics.write("checkpoint", text, checkpoint=step, saved=False, why=f"{why}: {self.folder}")

    def _write_own(self, part: Path, staged: Staged) -> dict[str, Any]:
        """What this rank has written. It says so itself: what others wrote may not be visible yet."""
        try:
            return saved.written(part, staged, self.rank, self._moved.count)
        except OSError as error:
            raise self._failed(error) from error

    def _complete(self, part: Path, ranks: dict[str, Any], about: dict[str, Any]) -> None:
        found = {"version": saved.VERSION, **about, **self.made_by, "world_size": self.world, "order": self.order}
        try:
            manifest.write(part, manifest.sealed({**found, **ranks}))
            if trouble := manifest.cut_off(part):  # older ones go with it
                raise OSError(errno.EIO, trouble)
            self.lease.require()
            part.rename(self.folder / f"step-{about['step']}")
            manifest.sync(self.folder)
        except OSError as error:
            raise self._failed(error) from error
        self._prune()

    def find(self) -> bool:
        """Whether there is a complete checkpoint; the newest is the one to resume from. Damaged ones are renamed."""
        for step, mirrored in on_rank_0(self._begin):
            path = self.folder / f"step-{step}"
            if mirrored and not self._fetch(path):
                continue
            found = on_rank_0(partial(saved.look, path))
            troubles = [found["trouble"]] if "trouble" in found else self._troubles(path, found)
            if troubles:
                say(f"checkpoint {path} is skipped: {'; '.join(troubles)}")
                if self.rank == 0:  # a checkpoint of this step may be written again
                    path.rename(path.with_name(f"{path.name}.broken-{time.time():.0f}"))
                continue
            saved.require_order(self.order, path, found["order"])
            self.newest = step
            self.watch.load(found.get("watch", {}))
            say(f"resumed at step {step} from {path}")
            if self.mirror and self.rank == 0 and step not in self.mirror.known:
                self.mirror.put(path)
            self._checkpoint = path, found
            return True
        return False

    def resume(self) -> Mapping[int, list[Any]]:
        """Load the checkpoint that `find` found, if any; return the feed's positions."""
        if self._checkpoint is None:
            return {}
        path, found = self._checkpoint
        return saved.load(self.strategy, path, found)

    def again(self, *, without: list[int]) -> Mapping[int, list[Any]]:
        """Load the newest checkpoint again and skip the steps from first to last of `without`; as `resume`."""
        path = self.folder / f"step-{self.newest}"
        found = on_rank_0(partial(saved.look, path))
        troubles = [found["trouble"]] if "trouble" in found else self._troubles(path, found)
        if troubles:
            raise DrayError(
                "the checkpoint to which the run goes back is damaged", where=path, found="; ".join(troubles)
            )
        skipped = [*self.watch.skipped, without]
        self.watch.load(found.get("watch", {}))
        self.watch.skipped = skipped
        return saved.load(self.strategy, path, found)

    def _begin(self) -> list[tuple[int, bool]]:
        """The steps that there are and whether each is the mirror's, the newest first; on rank 0."""
        own = _steps(self.folder)
        copies = self.mirror.begin(self.folder, instead=bool(own)) if self.mirror else []
        # The mirror's of the same step comes after this folder's, which may be damaged.
        return sorted(
            [(step, False) for step in own] + [(step, True) for step in copies], key=lambda it: (-it[0], it[1])
        )

    def _fetch(self, path: Path) -> bool:
        """Whether the mirror's copy is in this folder now; all ranks together."""
        assert self.mirror
        part = path.with_name(f"{path.name}.part-{self.run}")

        def make() -> bool:
            self._make(part)
            return bool(_steps(self.folder))

        trouble = self.mirror.fetch(part, path, self._require_room, instead=on_rank_0(make))
        say(f"{path.name} of {self.mirror.place} is {f'skipped: {trouble}' if trouble else 'fetched'}")
        return not trouble

    def _troubles(self, path: Path, found: dict[str, Any]) -> list[str]:
        """What differs from the manifest; each rank checks its share of the files."""
        some = slice(self.rank, None, self.world)
        return list(on_all(lambda: saved.wrong(path, found, some)[:_NAMED], lambda one, two: [*one, *two][:_NAMED]))

    def _prune(self) -> None:
        """The newest `keep` stay; what was cut off goes."""
        for old in _steps(self.folder)[: -self.keep]:
            if self.mirror and old == self.mirror.copying:
                continue  # until the next time
            shutil.rmtree(self.folder / f"step-{old}", ignore_errors=True)
        for part in self.folder.glob("step-*.part-*"):
            with suppress(FileNotFoundError):  # another run, whose folder it is too, has just named it
                if part.name.endswith(f".part-{self.run}") or time.time() - part.stat().st_mtime > _OLD:
                    shutil.rmtree(part, ignore_errors=True)


def _steps(folder: Path) -> list[int]:
    return sorted(int(name) for path in folder.glob("step-*") if (name := path.name.removeprefix("step-")).isdigit())


def due(step: int, every: tuple[tuple[int, int], ...]) -> bool:
    """Whether to save after this step. `every` has `(until, each)` in order; until 0 means for ever."""
    for until, each in every:
        if until == 0 or step <= until:
            return step % each == 0
    return False
