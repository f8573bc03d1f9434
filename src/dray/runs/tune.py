"""Measure candidates one after another, each in its own short run, and save the table after each."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from dray import process
from dray.config.recipe import Recipe
from dray.contract import exit_codes, files
from dray.contract.findings import ConfigError, DrayError, counted
from dray.interrupts import held_back, hurry_on_signals, stoppable
from dray.planning.tune_search import Candidate, Figure, Space, applied, descend
from dray.runs import compare, measured, replay, space, tuned
from dray.runs.measured import DIFFER, DONE, HANGS, LEFT_OUT, Row
from dray.runs.tuned import Tuning

_TRIES = 8
_PLANS = 512
"""dray gives up after this many candidates were left out without a success, or after `_TRIES` failed runs."""
_GRACE = 30.0  # seconds for each of two signals; a run ends its ranks by itself


class Tuner:
    """Measures candidates for the search, each only once."""

    def __init__(
        self, folder: Path, tuning: Tuning, recipe: Recipe, where: space.Place, *, program: Sequence[str],
        limit: float, tell: Callable[[int, Row], None],
    ) -> None:  # fmt: skip
        """`limit` is the seconds that a candidate may take; `tell` shows each row."""
        self.tuning = tuning
        self._folder, self._recipe, self._where = folder, recipe, where
        self._program, self._limit, self._tell = program, limit, tell
        self._start = tuned.candidate(tuning.start)
        self._known: dict[Candidate, Row] = {}

    def all(self, candidates: Space) -> None:
        """Measure the whole grid, or the candidates that the search chooses."""
        tuned.save(self._folder, self.tuning)
        with stoppable():
            if self.tuning.every:
                for candidate in candidates.every():
                    self.figure(candidate)
            else:
                descend(candidates, self.figure)
        self._keep(self.tuning.model_copy(update={"complete": True}))

    def figure(self, candidate: Candidate) -> Figure | None:
        """The candidate's speed; None if it cannot run or its losses differ."""
        if candidate not in self._known:
            self._require_hope()
            row = self._row(candidate).model_copy(update={"values": dict(candidate.values)})
            self._known[candidate] = row
            self._keep(self.tuning.model_copy(update={"rows": [*self.tuning.rows, row]}))
            self._tell(len(self._known), row)
        row = self._known[candidate]
        return tuned.figure(row) if row.state == DONE else None

    def _require_hope(self) -> None:
        begun = [row for row in self._known.values() if row.run]
        if any(row.state == DONE for row in begun):
            return
        if len(begun) >= _TRIES or len(self._known) >= _PLANS:
            raise none_runs(self.tuning, self._folder)

    def _keep(self, tuning: Tuning) -> None:
        """Save the table now, so that no measurement is lost."""
        self.tuning = tuning
        tuned.save(self._folder, tuning)

    def _row(self, candidate: Candidate) -> Row:
        ranks, steps = self.tuning.ranks, self.tuning.warm_up + self.tuning.steps
        try:
            made = applied(self._recipe, candidate, self._start, ranks=ranks)
            refused = self._where.refusal(made, self._folder)
        except ConfigError as wrong:
            refused = space.reason(wrong.finding)
        if refused:
            return Row(values={}, state=LEFT_OUT, why=refused)
        name = f"{sum(bool(row.run) for row in self._known.values()) + 1:03}"
        short = space.short(self._recipe, candidate, self._start, ranks=ranks, steps=steps, checked=name == "001")
        row = self._run(name, short)
        return self._agreed(row).model_copy(update={"run": name})

    def _run(self, name: str, recipe: Recipe) -> Row:
        """Measure by `dray run`, with a recipe that stays beside the table."""
        for file, text in replay.as_files(recipe, name, whole=False).items():
            files.write_atomic(self._folder / file, text)
        options = [f"--run={name}", f"--runs={self._folder}", *self._where.options]
        argv = [*self._program, "run", str(self._folder / f"{name}.toml"), *options]
        log = self._folder / f"{name}.log"
        code = self._ended(argv, log)
        if code is None:
            return Row(values={}, state=HANGS, why=f"it did not end within {self._limit:g} s (--limit)")
        return measured.of_run(self._folder / name, code, log, warm_up=self.tuning.warm_up)

    def _ended(self, argv: Sequence[str], log: Path) -> int | None:
        """The exit code; None if it took too long. All its processes are ended, also after Ctrl-C."""
        with log.open("wb") as output, held_back() as begun:
            running = process.start(argv, env=self._where.env, output=output)
            try:
                begun()
                running.wait(self._limit)
                return running.code()
            except KeyboardInterrupt:
                hurry_on_signals()
                raise
            finally:
                # The batch script ends its nodes at INT, and saves first at TERM.
                if running.code() is None and not running.ask(signal.SIGINT, _GRACE):
                    running.ask(signal.SIGTERM, _GRACE)
                running.stop()

    def _agreed(self, row: Row) -> Row:
        """The row, rejected if its losses differ from the first candidate's."""
        first = next((known for known in self._known.values() if known.state == DONE), None)
        if row.state != DONE or first is None:
            return row
        own, others = (dict(enumerate(one.losses, 1)) for one in (row, first))
        found = compare.compare(own, others, self.tuning.tolerance)
        if found.first is not None:
            pair = f"{own[found.first]:.6g} and {others[found.first]:.6g} in run {first.run}"
            far = compare.difference(found.first_a, found.first_b)
            most = f"at most {self.tuning.tolerance:.0e} ({self.tuning.why})"
            why = f"step {found.first}: {pair}, {far:.1e} apart; wanted {most}"
        elif found.only_a or found.only_b:
            why = f"logged {counted(len(own), 'step')}, run {first.run} logged {len(others)}"
        else:
            return row
        return row.model_copy(update={"state": DIFFER, "why": why})


def none_runs(tuning: Tuning, folder: Path) -> DrayError:
    """The error for a table in which no candidate succeeded."""
    begun = [row for row in tuning.rows if row.run]
    if not begun:
        return ConfigError(
            "no candidate fits", wanted="a candidate that can start", found=tuning.rows[0].why if tuning.rows else "",
            fix="use more nodes, a smaller model or [lora]",
        )  # fmt: skip
    return DrayError(
        "no candidate runs", where=str(folder), found="\n".join(dict.fromkeys(row.why for row in begun)),
        fix=f"dray why {folder / begun[0].run}", code=exit_codes.FAILED,
    )  # fmt: skip
