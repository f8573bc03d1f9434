"""Mirror of the checkpoints: each node copies its ranks' files during training; all ranks fetch one back.

Every byte is read back from there and compared with the manifest's checksums before the manifest follows: what has a
manifest is complete. A copy that fails is tried again, and never ends the run.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from threading import Condition, Thread
from typing import TYPE_CHECKING, Any, cast

from dray.contract import exit_codes, findings
from dray.contract.findings import ConfigError, DrayError, UnfitError
from dray.train import manifest
from dray.train.collectives import on_all, on_rank_0, placed
from dray.train.data import remote
from dray.train.errors import say
from dray.train.heartbeat import BEAT_S, Moved
from dray.train.nodes import Nodes
from dray.train.place import Files, Place, step_of

if TYPE_CHECKING:
    from dray.train.metrics import Metrics

RETRY_S = 60.0
_WHAT = "the mirror of the checkpoints"


class Mirror:
    """The mirror of one run. Rank 0 begins, puts and settles; other nodes' first ranks help; all ranks fetch.

    `place` is s3://, gs:// or a folder.
    """

    def __init__(self, place: str, metrics: Metrics, *, keep: int, nodes: Nodes | None = None) -> None:
        self.place, self.metrics, self.keep = place, metrics, keep
        self.nodes = nodes or Nodes(None, 0, 1)
        self.copying: int | None = None  # retention leaves it in the checkpoint folder
        self.trouble = ""
        self.known: list[int] = []  # the steps that were there at the start
        self._next: Path | None = None
        self._tried = False
        self._changed = Condition()
        self._thread: Thread | None = None
        self._moved = Moved()
        self._target = Place(place, self._moved.count)

    def help(self) -> None:
        """Copy this node's files whenever rank 0 asks for it."""
        self._target = Place(self.place, self.nodes.beat)
        Thread(target=self.nodes.serve, args=(self._helped,), name="mirror", daemon=True).start()

    def begin(self, folder: Path, *, instead: bool) -> list[int]:
        """The steps that are complete in the mirror. If it does not answer, the run ends unless `instead` is true."""
        if "://" not in self.place and Path(self.place).exists():
            if Path(self.place).samefile(folder):
                raise ConfigError(
                    "checkpoint.mirror is the checkpoint folder itself",
                    wanted="a place that survives the loss of this folder",
                    found=self.place,
                    fix="checkpoint.mirror=ANOTHER",
                )
            manifest.require_own(Path(self.place))
        try:
            with remote.reading(self.place, _WHAT):
                self.known = self._target.steps()
        except DrayError as failed:
            self._warned(failed, instead=instead)
        return self.known

    def fetch(self, part: Path, path: Path, room: Callable[[int], None], *, instead: bool) -> str:
        """Fetch this checkpoint into the empty folder `part`, then rename it; return why it failed, or empty.

        All ranks together, each its share of the files. `room` is asked for so many bytes, on rank 0.
        """

        def begin() -> dict[str, Any]:
            found = self._target.fetch_manifest(part, path.name)
            if "trouble" not in found:
                room(sum(one["bytes"] for one in found["files"].values()))
            return found

        def end(left: list[str]) -> str:
            trouble = self._fetched(lambda: self._target.fetch(part, path.name, files, left), instead=instead)
            if not trouble:
                manifest.sync(part)
                part.rename(path)
                manifest.sync(path.parent)
            return str(trouble)

        begun = on_rank_0(lambda: self._fetched(begin, instead=instead))
        if isinstance(begun, str) or "trouble" in begun:
            return begun if isinstance(begun, str) else str(begun["trouble"])
        files, (rank, world) = begun["files"], placed()
        own = [*files][rank::world]
        return str(on_all(lambda: self._left(part, path.name, files, own), operator.add, end))

    def _fetched(self, do: Callable[[], Any], *, instead: bool) -> Any:  # noqa: ANN401  what `do` returns
        """On rank 0; why not, where the mirror does not answer."""
        try:
            with remote.reading(self.place, _WHAT):
                return do()
        except UnfitError:  # this disk
            raise
        except DrayError as failed:
            return self._warned(failed, instead=instead)

    def _left(self, part: Path, name: str, files: Files, own: list[str]) -> list[str]:
        """Fetch these; those that rank 0 has to, since this node may not see the mirror."""
        with suppress(DrayError), remote.reading(self.place, _WHAT):
            if not self._target.fetch(part, name, files, own):
                return []
        for one in own:
            (part / one).unlink(missing_ok=True)
        return own

    def _warned(self, failed: DrayError, *, instead: bool) -> str:
        finding = failed.finding
        if not instead:  # to begin from nothing is not what was meant
            again = exit_codes.RETRY if finding.code == exit_codes.FAILED else finding.code
            raise findings.error(finding._replace(code=again))
        self.trouble = f"{finding.problem}: {finding.found}"
        say(f"WARNING: {self.trouble}")
        return self.trouble

    def put(self, path: Path) -> None:
        """Begin to copy this checkpoint. It replaces an older one that still waits."""
        with self._changed:
            self._next, self._tried = path, False
            if self._thread is None:
                self._thread = Thread(target=self._work, name="mirror", daemon=True)
                self._thread.start()
            self._changed.notify_all()

    def settle(self) -> None:
        """Wait until the newest checkpoint is copied, or two tries have failed."""
        for _ in range(2):
            with self._changed:
                self._tried = False
                self._changed.notify_all()
                while not self._changed.wait_for(
                    lambda: self.copying is None and (self._next is None or self._tried), BEAT_S
                ):
                    self._moved.beat()

    def _work(self) -> None:
        while True:
            with self._changed:
                if self._tried:
                    self._changed.wait_for(lambda: not self._tried, RETRY_S)
                else:
                    self._changed.wait_for(lambda: self._next is not None)
                path = cast(Path, self._next)
                self._next, self._tried, self.copying = None, False, step_of(path.name)
            trouble = self._copied(path)
            step = cast(int, self.copying)
            if trouble or self.trouble:
                self.trouble = trouble and f"the copy of step {step} failed: {trouble}"
                text = f"WARNING: {trouble}" if trouble else f"step {step} is in {self.place}"
                why = {"why": f"{trouble}: {self.place}"} if trouble else {}
                self.metrics.write("mirror", text, checkpoint=step, saved=not trouble, **why)
            with self._changed:
                if trouble and self._next is None and path.is_dir():
                    self._next, self._tried = path, True
                self.copying = None
                self._changed.notify_all()

    def _copied(self, path: Path) -> str:
        """Why it is not there; empty where it is."""
        return self._written(lambda: self._copy(path))

    def _written(self, do: Callable[[], None]) -> str:
        try:
            with remote.reading(self.place, _WHAT, "written"):
                do()
        except Exception as error:  # whatever a store answers: the run goes on
            finding = error.finding if isinstance(error, DrayError) else None
            text = f"{finding.problem}: {finding.found}" if finding else f"{type(error).__name__}: {error}"
            return " ".join(text.split())[:300]
        return ""

    def _copy(self, path: Path) -> None:
        files = _files(path)
        names = [*files]
        self._target.begin(path)
        self.nodes.ask(str(path))
        try:
            self._target.send(path, files, self.nodes.share(names))
        finally:
            unsent = self.nodes.wait(self._moved.count)
        # A node may also not see the mirror, or another one by the same name.
        left = {*self._target.missing(path, files)}.union(*(self.nodes.share(names, node) for node in unsent))
        self._target.send(path, files, [name for name in names if name in left])
        self._target.complete(path)
        self._target.prune(cast(int, step_of(path.name)), self.keep)

    def _helped(self, name: str) -> str:
        path = Path(name)

        def send() -> None:
            files = _files(path)
            self._target.send(path, files, self.nodes.share([*files]))

        return self._written(send)


def _files(path: Path) -> Files:
    found = manifest.read(path)
    if "trouble" in found:
        raise OSError(found["trouble"])
    return cast(Files, found["files"])
