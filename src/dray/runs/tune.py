"""Tune a recipe: measure candidates one after another, each in its own short run, and keep the table after each."""

from __future__ import annotations

import json
import os
import signal
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from dray import engines, process
from dray.config.recipe import Recipe
from dray.config.sites import Choice
from dray.contract import exit_codes, files, run_folder
from dray.contract.findings import ConfigError, DrayError, Finding, counted
from dray.facts import Engine, Facts
from dray.interrupts import held_back, hurry_on_signals, stoppable
from dray.planning import tune_search
from dray.planning.schema import Plan
from dray.planning.tune_search import Candidate, Figure, Space, Value, applied, descend
from dray.runs import effect, local, login, replay, store, write
from dray.runs.metrics import Metrics, number
from dray.runs.slurm import Allocation
from dray.runs.store import Run, RunPaths, dig, make_run_folder

DONE, LEFT_OUT, REFUSED, DIFFER, HANGS, FAILED = "done", "left out", "refused", "losses differ", "hangs", "failed"
WARM_UP = 3
_TRIES = 8
_PLANS = 512
"""dray gives up after this many candidates were left out without a success, or after `_TRIES` failed runs."""
_GRACE = 30.0  # seconds for each of two signals; a run ends its ranks by itself


# The table ----------------------------------------------------------------------------------------------------------


class Row(BaseModel):
    """One candidate and its result."""

    values: dict[str, Value] = {}
    state: str
    why: str = ""
    run: str = ""
    """The name of its run folder; empty if it was not started."""
    step_s: float | None = Field(default=None, gt=0)
    """Median step time after the warm-up."""
    spread: float = Field(default=0.0, ge=0)
    """Median deviation from that median, relative to it; one slow step in ten does not change it."""
    tokens_per_s: float | None = None
    """Speed of all ranks at that step time."""
    memory_gb: float | None = None
    """Peak memory of rank 0."""
    losses: list[float] = []
    """Loss of each step, with the warm-up."""

    @property
    def candidate(self) -> Candidate:
        return Candidate(tuple(self.values.items()))

    @property
    def figure(self) -> Figure | None:
        """Its speed; None if it has none."""
        if self.state != DONE or self.tokens_per_s is None:
            return None
        return Figure(self.tokens_per_s, self.tokens_per_s * self.spread, self.memory_gb or 0.0)


class Tuning(BaseModel):
    """The content of tune.json."""

    version: int = 1
    path: str
    """The recipe's file."""
    recipe: dict[str, Any]
    """The recipe, with the settings of the command line."""
    ranks: int
    where: str
    """Where it was measured, for the reader."""
    grid: int
    """The number of candidates."""
    every: bool
    """Whether all of them are measured."""
    tolerance: float
    why: str
    """The reason for that tolerance."""
    start: dict[str, Value]
    """The recipe's own setting."""
    steps: int
    """Steps measured after the warm-up."""
    complete: bool = False
    rows: list[Row] = []

    @property
    def begun(self) -> list[Row]:
        """The rows with a run."""
        return [row for row in self.rows if row.run]

    @property
    def first(self) -> Candidate:
        """The recipe's own setting."""
        return Candidate(tuple(self.start.items()))

    @property
    def best(self) -> Row | None:
        """The fastest row; among rows equal within noise, the row with the fewest changes."""
        known = {row.candidate: row for row in self.rows}
        figures = [(candidate, row.figure) for candidate, row in known.items() if row.figure]
        chosen = tune_search.best(figures, self.first)
        return known[chosen] if chosen else None

    def require_best(self, folder: Path) -> Row:
        """The best row. DrayError if no candidate ran."""
        if self.best:
            return self.best
        if not self.begun:
            raise ConfigError(
                "no candidate fits", wanted="a candidate that can start", found=self.rows[0].why if self.rows else "",
                fix="use more nodes, a smaller model or [lora]",
            )  # fmt: skip
        raise DrayError(
            "no candidate runs", where=str(folder), found="\n".join(dict.fromkeys(row.why for row in self.begun)),
            fix=f"dray why {folder / self.begun[0].run}", code=exit_codes.FAILED,
        )  # fmt: skip

    def applied(self, candidate: Candidate) -> Recipe:
        """The recipe with a candidate's setting."""
        return applied(_recipe(self.recipe), candidate, self.first, ranks=self.ranks)

    def save(self, folder: Path) -> None:
        """Write tune.json; the first time make its folder."""
        if not folder.is_dir():
            make_run_folder(folder)
        files.write_atomic(folder / run_folder.TUNE, self.model_dump_json(indent=1) + "\n")


def _recipe(table: dict[str, Any]) -> Recipe:
    return Recipe.model_validate_json(json.dumps(table))


def load(folder: Path) -> Tuning:
    """The table in a folder."""
    fix = f"name a folder with {run_folder.TUNE} in it: dray study show STUDY"
    return store.load(Tuning, folder / run_folder.TUNE, "table", fix=fix)


# Where it measures --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Place:
    """The nodes where all candidates run, one after another."""

    facts: Facts
    choice: Choice
    options: tuple[str, ...]
    """The options for `dray run`."""
    env: Mapping[str, str]

    def plan(self, recipe: Recipe, folder: Path) -> Plan:
        """The plan of a candidate, with its findings."""
        return write.decide(recipe, self.facts, self.choice, RunPaths(folder / "001"))

    def first(self, recipe: Recipe, folder: Path) -> Plan:
        """The plan of the recipe's own setting; if its micro-batch does not fit the ranks, of the largest that does."""
        try:
            return self.plan(recipe, folder)
        except ConfigError:
            free = {"per_device": None, "gradient_accumulation_steps": None}
            batch = recipe.batch and recipe.batch.model_copy(update=free)
            return self.plan(recipe.model_copy(update={"batch": batch}), folder)

    def refusal(self, recipe: Recipe, folder: Path) -> str:
        """Why the candidate cannot start, such as a model that is too large; empty if it can."""
        try:
            if engines.get(self.facts.engine).image == "python":
                local.require(recipe, lambda *_: "")
            self.plan(recipe, folder).refuse()
        except ConfigError as refused:
            return _reason(refused.finding)
        return ""

    def text(self, plan: Plan) -> str:
        """Where the candidates were measured, for the reader."""
        ranks, nodes = counted(plan.world.size, "rank"), counted(len(plan.world.nodes), "node")
        job = f" of job {self.facts.job}" if self.facts.job else ""
        return f"{ranks} on {nodes}{job} ({plan.engine}, {plan.site})"


def _reason(finding: Finding) -> str:
    """The refusal in one line."""
    told = [finding.problem]
    for name, value in (("found", finding.found), ("wanted", finding.wanted)):
        if value:
            told.append(f"{name} {value.splitlines()[0]}")
    return "; ".join(told)


def place(
    recipe: Recipe, env: Mapping[str, str], *, nodes: int | None = None, gpus_per_node: int = 0,
    gpu_memory: float | None = None, engine: Engine = "bare", here: bool = False, site: str = "",
) -> Place:  # fmt: skip
    """The nodes of this shell's allocation, also inside a batch script; with `here`, or without one, this machine."""
    env = {name: value for name, value in env.items() if name != "ENVIRONMENT"}  # no run of the batch script itself
    allocation = None if here else Allocation.of(env)
    in_a_step = env.get("SLURM_STEP_ID") and not Allocation.of(env)
    if env.get("SLURM_ARRAY_TASK_ID") or (in_a_step and not here):
        raise ConfigError(
            "every task would measure the same", where=f"job {env.get('SLURM_JOB_ID', '')}",
            wanted="one dray study tune, which starts the ranks itself", found="a job array, or a step of srun",
            fix="use sbatch without --array, and leave out srun; or use --local to measure on this machine only",
        )  # fmt: skip
    options = [f"--site={site}"] if site else []
    if allocation:
        allocation.require_nodes(nodes)
        if gpus_per_node:
            raise ConfigError(
                "--gpus-per-node is set by salloc; --ranks sets the number of ranks", fix="leave out --gpus-per-node"
            )
        facts, choice = login.facts(
            recipe, int(allocation.nodes), 0, site, ranks=None, options=(), gpu_memory=gpu_memory
        )
        gpus = (env.get("SLURM_GPUS_ON_NODE") or env.get("SLURM_GPUS_PER_NODE") or "0").rpartition(":")[2]
        known = {"login": "", "nodelist": allocation.nodelist, "gpus_per_node": int(gpus), "job": int(allocation.job)}
        facts = facts.model_copy(update=known)
        return Place(facts=facts, choice=choice, options=tuple(options), env=env)
    if engine not in engines.names("local"):
        raise ConfigError(
            f"dray study tune cannot use --engine {engine} here", wanted=f"one of {', '.join(engines.names('local'))}",
            found=engine, fix="leave out --engine; inside salloc the site's engine is used",
        )  # fmt: skip
    gpus_per_node = gpus_per_node or (recipe.ranks_per_node or 0 if recipe.image != "cpu" else 0)
    facts = local.facts(
        recipe, engine=engine, image=local.image_of(engine, recipe), nodes=nodes, gpus_per_node=gpus_per_node,
        site=site,
    )  # fmt: skip
    facts, choice = write.at_site(facts.model_copy(update={"gpu_memory_gb": gpu_memory}))
    size = (f"--nodes={facts.nodes}", f"--gpus-per-node={gpus_per_node}", f"--engine={engine}")
    return Place(facts=facts, choice=choice, options=(*size, *options), env=env)


# A measurement ------------------------------------------------------------------------------------------------------


def short(recipe: Recipe, *, steps: int, preflight: bool) -> Recipe:
    """The recipe for some steps, without checkpoints, evaluation and restarts."""
    table = recipe.model_dump(mode="json", exclude_unset=True)
    assert recipe.train is not None
    train = table["train"] | {
        "steps": steps, "warmup_steps": min(recipe.train.warmup_steps, steps), "log_every": 1, "eval_every": 0,
        "trackers": [], "profile": "",
    }  # fmt: skip
    train.pop("epochs", None)
    data = table.get("data", {}) | {"max_eval_samples": 1}
    data.pop("test", None)
    for key in ("scale", "tiny", "evaluate"):
        table.pop(key, None)
    table |= {"train": train, "data": data, "checkpoint": {"final": False}, "max_requeues": 0, "max_restarts": 0}
    if not preflight:
        table["preflight"] = {"when": "never"}
    return _recipe(table)


def measured(run: Path, code: int, log: Path) -> Row:
    """The row of a run that ended; `log` is everything that it printed."""
    last = Run(run).last
    if last is None:
        return Row(state=REFUSED if code == exit_codes.CONFIG else FAILED, why=_printed(log, code))
    result = last.result or {}
    if code or result.get("status") != "done":
        why, name = (dig(result, "cause", key) or "" for key in ("why", "name"))
        line = why.partition("\n")[0] or result.get("reason") or _printed(log, code)
        return Row(state=FAILED, why=f"{line} ({name})" if name not in ("", "unknown") else line)
    steps = [event for event in Metrics(last.paths.metrics) if event.get("event") == "step"]
    losses = [loss for event in steps if (loss := number(event, "loss")) is not None]
    timed = [event for event in steps[WARM_UP:] if (number(event, "step_s") or 0) > 0]
    if len(losses) != len(steps) or not timed:
        return Row(state=FAILED, why=f"a loss is not a number, or no step follows the first {WARM_UP}")
    seconds = [event["step_s"] for event in timed]
    median = statistics.median(seconds)
    return Row(
        state=DONE,
        step_s=median,
        spread=statistics.median(abs(one - median) for one in seconds) / median,
        tokens_per_s=statistics.median(event["tokens_per_s"] * event["step_s"] for event in timed) / median,
        memory_gb=max(number(event, "memory_gb") or 0.0 for event in steps),
        losses=losses,
    )


def _printed(log: Path, code: int) -> str:
    """The refusal that the run printed, or its last line."""
    refusal, line = list[str](), f"exit code {code}"
    for text in files.tail(log, 60):
        line = text.strip() or line
        if line.startswith("dray: "):
            refusal = [line.removeprefix("dray: ")]
        elif refusal and line.startswith(("found:", "wanted:")):
            refusal.append(line)
    return "; ".join(refusal) or line


@dataclass
class Tuner:
    """Measures candidates for the search, each only once."""

    folder: Path
    tuning: Tuning
    place: Place
    program: Sequence[str]
    """The argv of dray."""
    limit: float
    """The seconds that a candidate may take."""
    tell: Callable[[Row], None]
    """Shows a row."""
    known: dict[Candidate, Row] = field(default_factory=dict)

    def all(self, candidates: Space) -> None:
        """Measure the whole grid, or the candidates that the search chooses."""
        self.tuning.save(self.folder)
        with stoppable():
            if self.tuning.every:
                for candidate in candidates.every():
                    self.figure(candidate)
            else:
                descend(candidates, self.figure)
        self.tuning.complete = True
        self.tuning.save(self.folder)

    def figure(self, candidate: Candidate) -> Figure | None:
        """The candidate's speed; None if it cannot run or its losses differ."""
        if candidate not in self.known:
            given_up = len(self.tuning.begun) >= _TRIES or len(self.known) >= _PLANS
            if given_up and not any(row.figure for row in self.tuning.rows):
                self.tuning.require_best(self.folder)
            row = self._row(candidate)
            row.values = dict(candidate.values)
            self.known[candidate] = row
            self.tuning.rows.append(row)
            self.tuning.save(self.folder)
            self.tell(row)
        return self.known[candidate].figure

    def _row(self, candidate: Candidate) -> Row:
        name = f"{len(self.tuning.begun) + 1:03}"
        try:
            recipe = self.tuning.applied(candidate)
        except ConfigError as wrong:
            return Row(state=LEFT_OUT, why=_reason(wrong.finding))
        if refused := self.place.refusal(recipe, self.folder):
            return Row(state=LEFT_OUT, why=refused)
        # A recipe that stays beside the table.
        recipe = short(recipe, steps=WARM_UP + self.tuning.steps, preflight=name == "001")
        for file, text in replay.as_files(recipe, name, whole=False).items():
            files.write_atomic(self.folder / file, text)
        log = self.folder / f"{name}.log"
        options = [f"--run={name}", f"--runs={self.folder}", *self.place.options]
        code = self._ended([*self.program, "run", str(self.folder / f"{name}.toml"), *options], log)
        if code is None:
            row = Row(state=HANGS, why=f"it did not end within {self.limit:g} s (--limit)")
        else:
            row = measured(self.folder / name, code, log)
        row.run = name
        self._require_same_losses(row)
        return row

    def _ended(self, argv: Sequence[str], log: Path) -> int | None:
        """The exit code; None if it took too long. All its processes are ended, also after Ctrl-C."""
        with log.open("wb") as output, held_back() as begun:
            running = process.start(argv, env=self.place.env, output=output)
            try:
                begun()
                running.wait(self.limit)
                return running.code()
            except KeyboardInterrupt:
                hurry_on_signals()
                raise
            finally:
                # The batch script ends its nodes at INT, and saves first at TERM.
                if running.code() is None and not running.ask(signal.SIGINT, _GRACE):
                    running.ask(signal.SIGTERM, _GRACE)
                running.stop()

    def _require_same_losses(self, row: Row) -> None:
        """Refuse the row if its losses differ from the first candidate's."""
        first = next((known for known in self.tuning.rows if known.figure), None)
        if first is None or row.state != DONE:
            return
        most = self.tuning.tolerance
        apart = effect.compare(dict(enumerate(row.losses, 1)), dict(enumerate(first.losses, 1)), most)
        if apart.first is not None:
            a, b = effect.pair(apart.first_a, apart.first_b)
            far = effect.difference(apart.first_a, apart.first_b)
            row.why = f"step {apart.first}: {a} and {b} in run {first.run}, {far:.1e} apart; "
            row.why += f"wanted at most {most:.0e} ({self.tuning.why})"
        elif apart.only_a or apart.only_b:
            row.why = f"logged {counted(len(row.losses), 'step')}, run {first.run} logged {len(first.losses)}"
        if row.why:
            row.state = DIFFER


# The best as a recipe -----------------------------------------------------------------------------------------------


def require_writable(file: Path, *, force: bool) -> None:
    """Check that the file can be written, before anything is measured."""
    wrong, fix = "", "name another FILE"
    if file.suffix != ".toml":
        wrong, fix = "it does not end in .toml", f"--out {file}.toml"
    elif not os.access(file.parent, os.W_OK):
        wrong = f"you cannot write in {file.parent}"
    elif os.path.lexists(file) and (file.is_dir() or not force):
        wrong, fix = "it already exists", "use --force to replace it, or name another FILE"
    if wrong:
        raise ConfigError(
            "the best setting cannot be written to this file", where=f"--out {file}", found=wrong, fix=fix
        )


def write_best(tuning: Tuning, folder: Path, file: Path, lines: Sequence[str]) -> None:
    """Write the best setting as a recipe, under these lines as comments, and the files that it names."""
    table = tuning.applied(tuning.require_best(folder).candidate).model_dump(mode="json", exclude_unset=True)
    # The accumulation depends on the number of ranks; the settings of [tiny] are already in the other tables.
    table["batch"].pop("gradient_accumulation_steps")
    for key in ("scale", "tiny"):
        table.pop(key, None)
    texts = {
        file.with_name(name): text for name, text in replay.as_files(_recipe(table), file.stem, whole=False).items()
    }
    texts[file] = "".join(f"# {line}".rstrip() + "\n" for line in lines) + "\n" + texts[file]
    for path, text in texts.items():
        if path != file and os.path.lexists(path) and files.text(path, "the file") != text:
            raise ConfigError(
                "a file that the recipe names exists already and differs", where=path, fix="choose another --out"
            )
        files.write_atomic(path, text)
