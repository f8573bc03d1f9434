"""The runs that exist: list and watch them, stop or enter one, and remove old ones."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

import typer

from dray import process
from dray.cli.args import Json, NamedRun, On, Run, Runs, age, program
from dray.cli.streams import is_gone, shown
from dray.config import dray_home
from dray.contract import exit_codes, files, node
from dray.contract.control_characters import cell, printable
from dray.contract.findings import ConfigError, DrayError, counted, duration
from dray.runs import metrics, slurm
from dray.runs import status as statuses
from dray.runs.metrics import LONGEST, Event, number, parsed, whole
from dray.runs.status import State, Watched, utc
from dray.runs.store import default_runs, find, newest_first, node_number, require_own

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from dray.runs.active_run.logs import Log

_LESS = ("COST", "ATTEMPTS", "NODES", "RECIPE", "STARTED")
"""The order in which columns are left out on a narrow terminal; `dray status` shows all."""
_RIGHT = {"NODES", "STEP", "LOSS", "ATTEMPTS", "COST"}


def runs(
    states: Annotated[
        list[str] | None,
        typer.Option(
            "--state", metavar="STATE", help=f"Only this state: {', '.join(statuses.STATES)}; may be repeated."
        ),
    ] = None,
    since: str = "",
    last: Annotated[int, typer.Option("--last", "-n", min=0, help="Number of runs, 0 for all.")] = 30,
    as_json: Json = False,
    runs: Runs = None,
    on: On = "",
) -> None:
    """List runs, the newest first: state, recipe, nodes, step, loss, start, attempts and cost.

    The state comes from the run's files, and from Slurm's queue if this machine has Slurm.

    --since AGE: Only runs that began since then, such as 90m, 12h, 3d or 2w.

    dray runs --state failed --state lost --since 3d
    """
    if on:
        from dray.cli.remote import hand_over

        hand_over(on)
    folder = (runs or default_runs()).absolute()
    wrong = sorted({*(states or ())} - {*statuses.STATES})
    if wrong:
        raise ConfigError("--state has a wrong value", wanted=f"one of {', '.join(statuses.STATES)}", found=wrong[0])
    oldest = time.time() - age("--since", since) if since else 0.0
    fitting = _fitting(folder, states or statuses.STATES, oldest)
    shown = list(islice(fitting, last or None))
    if as_json:
        print(json.dumps([seen.model_dump() for seen in shown], indent=1))
        return
    if shown:
        print_table(shown)
    else:
        print(f"no such runs in {folder}" if states or since else f"no runs in {folder}")
    if len(shown) == last and next(fitting, None):
        print(f"the newest {last} are shown; -n 0 shows all")


def _fitting(folder: Path, states: Sequence[str], oldest: float) -> Iterator[State]:
    queue = slurm.Slurm()
    for run in newest_first(folder):
        seen = statuses.listed(run, queue)
        if seen.state in states and (_timestamp(seen.started) or 0.0) >= oldest:
            yield seen


def print_table(shown: Sequence[State]) -> None:
    """Print columns. Lines are never wrapped, for tools such as awk; on a narrow terminal some columns are left out."""
    cells = [_cells(seen) for seen in shown]
    heads = {head: head for head in cells[0]}
    rows = [heads, *cells]
    widths = {head: max(len(row[head]) for row in rows) for head in heads}
    if sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
        for head in _LESS:
            if sum(widths.values()) + 2 * (len(widths) - 1) > columns:
                del widths[head]
    for row in rows:
        line = [row[head].rjust(width) if head in _RIGHT else row[head].ljust(width) for head, width in widths.items()]
        print("  ".join(line).rstrip())


def _cells(seen: State) -> dict[str, str]:
    step = "" if seen.step is None else f"{seen.step:,}"
    if seen.steps is not None:
        step = f"{step or '0'}/{seen.steps:,}"
    return {
        "RUN": cell(seen.run),
        "STATE": seen.state,
        "RECIPE": cell(seen.recipe or ""),
        "NODES": f"{len(seen.nodes) or ''}",
        "STEP": step,
        "LOSS": "" if seen.loss is None else f"{seen.loss:.3f}",
        "STARTED": _local_time(seen.started),
        "ATTEMPTS": str(seen.attempts),
        "COST": metrics.cost_text(seen.spent),
    }


_NODES = 8
_NO_RESULT = {
    statuses.STOPPED: "stopped by {why} {at}, before it could write a result",
    statuses.LOST: "the run was killed before it could write a result: dray why {folder}",
    statuses.NO_RESULT: "the run is active, or was killed before it could write a result: dray why {folder}",
}
"""What is told of an attempt without a result."""


def status(
    run: Run = "",
    as_json: Json = False,
    runs: Runs = None,
    on: On = "",
) -> None:
    """Show the state of a run: why it waits and until when, which stage or step it has reached, or how it ended.

    dray status 4711
    """
    if on:
        from dray.cli.remote import hand_over

        hand_over(on)
    seen = statuses.status(find(run, runs), closely=True)
    print(seen.model_dump_json(indent=1) if as_json else "\n".join(status_text(seen)))


def status_text(seen: State) -> list[str]:
    """The state in a few lines."""
    from dray.runs.result import result_of, summary

    lines = [status_line(seen), *waiting_lines(seen)]
    start = [f"  {metrics.startup_text(seen.startup)}"] if seen.startup else []
    if seen.spent:
        start.append(f"  cost: {metrics.cost_text(seen.spent)}")
    result = result_of(seen.paths) if seen.paths and seen.state != statuses.RUNNING else None
    if result and seen.paths:
        return [*lines, *start, *summary(result, seen.paths).splitlines()]
    lines += [*running_lines(seen), *start]
    if seen.attempt and seen.state in _NO_RESULT:
        told = _NO_RESULT[seen.state]
        at, folder = _local_time(seen.finished), shlex.quote(seen.folder)
        lines.append("  " + told.format(why=seen.why, at=at, folder=folder))
    elif seen.why:
        lines.append(f"  {seen.why}")
    lines += [f"warning: {warning}" for warning in seen.warnings]
    return [*lines, f"run folder: {seen.folder}"]


def status_line(seen: State) -> str:
    """One line: name, state, recipe, attempt, job and nodes."""
    parts = [seen.recipe] if seen.recipe else []
    parts += [f"attempt {seen.attempt}"] if seen.attempt else []
    parts += [f"job {seen.job_id}"] if seen.job_id else []
    nodes = " ".join(seen.nodes[:_NODES]) + " ..." * (len(seen.nodes) > _NODES)
    parts += [f"{counted(seen.ranks, 'rank')} on {nodes}"] if seen.ranks and nodes else []
    return cell(f"{seen.run}: {seen.state}" + (f" ({', '.join(parts)})" if parts else ""))


def waiting_lines(seen: State) -> list[str]:
    """What Slurm shows of a job in the queue."""
    job = seen.waiting
    if job is None:
        submitted = f"  job {seen.job_id} was submitted {_local_time(seen.started)}; Slurm gives no details here"
        return [submitted] if seen.state == statuses.QUEUED else []
    why = ": ".join(word for word in (job.reason, slurm.meaning(job.reason)) if word not in ("", "None"))
    lines = [f"  Slurm: job {job.id} {job.state}{', ' * bool(why)}{why}"]
    if job.start is None:
        lines.append("  expected start: Slurm has no estimate yet")
    else:
        left = duration(max(0.0, job.start - time.time()))
        when = f"{_local_time(utc(job.start))} (in {left})"
        estimate = f"  expected start: {when}; Slurm's estimate, which changes with the queue"
        lines.append(f"  not before: {when}" if job.reason == "BeginTime" else estimate)
    return [*lines, f"  earlier attempts: {seen.attempts}"] if seen.attempts else lines


def running_lines(seen: State) -> list[str]:
    """Stage, step, speed, and notes."""
    live = seen.live
    if live is None:
        return []
    lines = [f"  stage: {live.stage}"]
    if seen.step is not None:
        parts = [f"step {seen.step:,}" + (f" of {seen.steps:,}" if seen.steps else "")]
        parts += [f"loss {seen.loss:.4f}"] if seen.loss is not None else []
        parts += [f"{seen.tokens_per_s:,.0f} tokens/s"] if seen.tokens_per_s else []
        parts += [f"{duration(seen.left_s)} left"] if seen.left_s is not None else []
        lines.append("  " + "  ".join(parts))
    if seen.started:
        lines.append(f"  began {_local_time(seen.started)}")
    if live.quiet_s is not None:
        lines.append(f"  last sign of life: {duration(live.quiet_s)} ago")
    if live.restarts:
        lines.append(f"  restarts: {live.restarts}")
    return lines + [f"  {note}" for note in live.notes]


def _timestamp(utc: str | None) -> float | None:
    """A time of result.json in seconds since 1970; None if there is none."""
    with suppress(ValueError, OverflowError):
        return datetime.fromisoformat(utc).timestamp() if utc else None
    return None


def _local_time(utc: str | None) -> str:
    """A time of result.json in this machine's zone, to the minute; empty if there is none."""
    at = _timestamp(utc)
    return "" if at is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(at))


_LOOK_S = 1.0
_NODES_PER_S = 64  # each look asks the shared disk for the state of all logs
_LINES = 6


def top(run: Run = "", runs: Runs = None) -> None:
    """Watch a run live: progress, loss, speed, nodes and last lines. Ctrl-C does not stop the run.

    Into a pipe it prints a line for each logged step.

    dray top 4711
    """
    watch_live(find(run, runs))


def watch_live(run: Path, wait: Callable[[float], None] = time.sleep) -> None:
    """Show the run until it has ended, through its next attempts too."""
    from rich.console import Console
    from rich.live import Live as Screen

    console = Console(highlight=False)
    watched, lines = Watched(run), _LiveLines()
    try:
        with Screen(
            console=console, transient=True, auto_refresh=False, redirect_stdout=False, vertical_overflow="crop"
        ) as drawn:
            seen = watched.look(closely=True)
            while not watched.over(seen) and not is_gone():
                if console.is_interactive:
                    drawn.update(live_screen(seen), refresh=True)
                else:
                    lines.show(seen)
                wait(max(_LOOK_S, len(seen.nodes) / _NODES_PER_S))
                seen = watched.look(closely=True)
            if lines.steps:
                lines.steps.look()
    except KeyboardInterrupt:
        print("\nthe run goes on; dray top shows it again", flush=True)
        return
    print("\n".join(status_text(seen)), flush=True)


class _LiveLines:
    """For a pipe: a line for each step, and for each change of state."""

    def __init__(self) -> None:
        self.steps: Steps | None = None
        self._attempt: int | None = None
        self._state = ""

    def show(self, seen: State) -> None:
        """Print what is new."""
        state = "\n".join([status_line(seen), *waiting_lines(seen)[:1]])
        if state != self._state:
            print(state, flush=True)
            self._state = state
        if seen.paths and seen.attempt != self._attempt:
            self._attempt, self.steps = seen.attempt, Steps(seen.paths.metrics)
        if self.steps:
            self.steps.look()


def live_screen(seen: State) -> RenderableType:
    """What the terminal shows of a run."""
    from rich.console import Group

    parts = [_screen_line(status_line(seen), "bold")]
    parts += [_screen_line(line) for line in [*waiting_lines(seen), *running_lines(seen)]]
    if seen.paths:
        parts += [
            _screen_line(f"  | {shown(line.encode())}", "dim") for line in files.tail(seen.paths.rank_log(0), _LINES)
        ]
    return Group(*parts)


def _screen_line(line: str, style: str = "") -> Text:
    from rich.text import Text

    return Text(str(printable(line)), style=style, no_wrap=True, overflow="ellipsis")


_FIGURES = {
    "loss": "loss {:.3f}",
    "perplexity": "perplexity {:.2f}",
    "accuracy": "accuracy {:.3f}",
    "tokens_per_s": "{:,.0f} tokens/s",
}


class Steps:
    """Prints a line for each logged step and for each evaluation."""

    def __init__(self, metrics: Path) -> None:
        from dray.runs.active_run.logs import Growing

        self._file = Growing(metrics)

    def look(self) -> None:
        """Print what has come since the last look."""
        with suppress(FileNotFoundError):
            for line in self._file.lines(LONGEST):
                if text := step_line(parsed(line) or {}):
                    print(text, flush=True)

    def close(self) -> None:
        """Each line is already whole."""


def step_line(event: Event) -> str:
    """An event of the metrics as a line; empty for those that are not shown."""
    kind, step = str(printable(event.get("event")))[:80], whole(event, "step")
    if kind == "start":
        first = whole(event, "first_step")
        return f"resumed at step {first} of {whole(event, 'steps')}" if first else ""
    if kind == "step":
        parts = [f"step {step}"]
    elif "perplexity" in event:
        parts = [f"{kind.replace('eval', 'evaluation', 1).replace('-', ' ', 1)} at step {step}"]
    else:
        return ""
    for name, form in _FIGURES.items():
        if name in event:
            value = number(event, name)
            parts.append(f"{name} not finite" if value is None else form.format(value))
    left = number(event, "seconds_left")
    if left is not None:
        parts.append(f"{duration(left)} left")
    return "  ".join(parts)


_POLL_S = 1.0
_STATS = 2000  # a second, which a shared disk can serve
_COLOURS = (36, 33, 32, 35, 34, 31)


def logs(
    run: Run = "",
    node: str = "",
    rank: Annotated[int | None, typer.Option(min=0, metavar="R", help="Only this rank.")] = None,
    follow: bool = False,
    last: Annotated[
        int | None,
        typer.Option(
            "--last",
            "-n",
            min=0,
            metavar="N",
            help="Only the last N lines of each log; with -f all new ones. Default: all.",
        ),
    ] = None,
    runs: Runs = None,
    on: On = "",
) -> None:
    """Show the logs of all nodes and ranks, one after another.

    --node N: Only this node and its ranks: its name, or its number from 0.
    --follow, -f: Follow until the run ends, through its next attempts too.

    dray logs 4711 --rank 3 -n 50 -f
    """
    if on:
        from dray.cli.remote import hand_over

        hand_over(on)
    watched = Watched(find(run, runs))
    seen = watched.look()
    if rank is not None and seen.ranks and rank >= seen.ranks:
        raise ConfigError(
            "the run has no such rank", where="--rank", wanted=f"a number from 0 to {seen.ranks - 1}", found=str(rank)
        )
    view = LogView(node, rank)
    view.add(seen)
    if not view.logs and not follow:
        raise ConfigError(
            "there is no such log",
            where=seen.paths.logs if seen.paths else seen.folder,
            found=status_line(seen),
            fix="dray logs without --node and --rank shows all logs; with -f it waits for one",
        )
    view.print(last, whole=not follow)
    if follow:
        try:
            view.follow(watched, seen)
        except KeyboardInterrupt:
            print("\nthe run goes on", file=sys.stderr)


class LogView:
    """Prints the chosen logs of a run, each line after the name of its rank or node.

    On a terminal in colours and without control characters; into a pipe go the log's own bytes.
    """

    def __init__(self, node: str = "", rank: int | None = None) -> None:
        self._out: TextIO = getattr(sys.stdout, "rich_proxied_file", sys.stdout)
        self._node, self._rank = node, rank
        self._attempt: int | None = None
        self._width = 0
        self.logs: dict[Path, Log] = {}

    def add(self, seen: State) -> None:
        """Add logs that are new; those of an earlier attempt go."""
        from dray.runs.active_run import logs as log_files

        if seen.attempt != self._attempt:
            self._attempt = seen.attempt
            self.logs.clear()
        if seen.paths is None:
            found = log_files.in_folder(seen.path)
        else:
            node = node_number(seen.nodes, self._node) if self._node else None
            each = (seen.ranks or 0) // max(1, len(seen.nodes))
            found = log_files.of(seen.paths, node=node, rank=self._rank, each=max(1, each))
        for log in found:
            self.logs.setdefault(log.path, log)
        self._width = max((len(log.label) for log in self.logs.values()), default=0)

    def print(self, last: int | None = None, *, whole: bool = False) -> None:
        """Print the new lines of each log, or only the `last` of them."""
        for log in self.logs.values():
            lines = log.new(whole=whole)
            for line in lines if last is None else deque(lines, last):
                self.line(log, line)
                if is_gone():
                    return

    def follow(self, watched: Watched, seen: State, wait: Callable[[float], None] = time.sleep) -> None:
        """Print new lines until the run has ended."""
        shown_state = ""
        while not is_gone():
            over = watched.over(seen)
            self.print()
            if (state := status_line(seen)) != shown_state:
                sys.stdout.flush()
                print(f"dray: {state}", file=sys.stderr, flush=True)
                shown_state = state
            if over:
                return
            sys.stdout.flush()
            wait(max(_POLL_S, len(self.logs) / _STATS))
            self.print()
            seen = watched.look()
            self.add(seen)

    def line(self, log: Log, line: bytes) -> None:
        """Print one line of a log."""
        name = f"{log.label:<{self._width}} | " if len(self.logs) > 1 else ""
        if not sys.stdout.isatty():
            self._out.flush()
            self._out.buffer.write(name.encode() + line + b"\n")
            return
        if name and not os.environ.get("NO_COLOR"):
            colour = _COLOURS[log.number % len(_COLOURS)] if log.kind == "rank" else 2
            name = f"\x1b[{colour}m{name}\x1b[0m"
        print(name + shown(line), file=self._out)


_SENDMAIL = 'PATH=$PATH:/usr/sbin:/usr/lib; printf "%s\\n" "$1" | sendmail -t'


def watch(
    run: Run = "",
    mail: str = "",
    runs: Runs = None,
) -> int:
    """Watch a run from outside its job, through its attempts, and print a line when something happens to it.

    It runs on a login node, and says when the run starts, stalls, loses a node, diverges, is requeued, is held by
    Slurm, or ends. A job that Slurm holds is released, and a run whose job died is submitted again, as often as the
    recipe's max_requeues allows.

    --mail ADDRESS: Mail each line, too, by this machine's sendmail.

    dray watch 4711 --mail me@example.org
    """
    from dray.runs.active_run.watch import Watcher, post_to_webhook

    folder = require_own(find(run, runs))
    if mail and not re.fullmatch(r"[!-?A-~]+@[!-?A-~]+", mail):
        raise ConfigError("--mail has a wrong value", wanted="one address, such as me@example.org", found=ascii(mail))
    url = _webhook()

    def tell(line: str, seen: State) -> None:
        print(f"{time.strftime('%Y-%m-%d %H:%M')}  {seen.run}: {line}", flush=True)
        if mail:
            _mail(mail, seen, line)
        if url and seen.state not in (statuses.DONE, statuses.FAILED, statuses.STOPPED):  # the job itself tells its end
            text = f"{seen.run}: {line}"
            if failed := post_to_webhook(url, text, run=seen.run, status=seen.state, steps=seen.step):
                print(f"dray: warning: {failed}")

    def submit() -> None:
        process.run([*program(), "submit", f"--run={folder}"])

    try:
        seen = Watcher(folder, tell, submit).watch()
    except KeyboardInterrupt:
        print("\nthe run goes on")
        return exit_codes.DONE
    code = seen.exit_code
    if code is None:
        code = exit_codes.DONE if seen.state == statuses.DONE else exit_codes.FAILED
    return code


def _webhook() -> str:
    from dray.runs.active_run.watch import read_webhook

    return read_webhook(Path(os.environ.get("DRAY_WEBHOOK_FILE") or dray_home.configuration() / "webhook"))


def _mail(address: str, seen: State, line: str) -> None:
    text = f"To: {address}\nSubject: dray: {seen.run}: {seen.state}\n\n{line}\n\nrun folder: {seen.folder}"
    try:
        process.run(["bash", "-c", _SENDMAIL, "sendmail", text], seconds=60)
    except DrayError as failed:
        print(f"dray: warning: the mail was not sent: {failed.problem}")


def stop(
    run: NamedRun,
    now: bool = False,
    no_wait: bool = False,
    runs: Runs = None,
    on: On = "",
) -> None:
    """Ask a run to save a checkpoint and end, wait, and show how it ended. The job is not requeued.

    A job that waits in the queue is cancelled.

    --now: End it at once; unsaved steps are lost.
    --no-wait: Return at once; the run still saves and ends.

    dray stop 4711
    """
    if on:
        from dray.cli.remote import hand_over

        hand_over(on)
    from dray.runs.active_run.stop import stop_run

    try:
        stop_run(require_own(find(run, runs)), now=now, wait=not no_wait, say=partial(print, flush=True))
    except KeyboardInterrupt:
        print("the run still saves and ends; dray stop shows how it ended")
        raise typer.Exit(130) from None


def enter(
    context: typer.Context,
    run: Run = "",
    node: str = "",
    jupyter: bool = False,
    port: Annotated[int, typer.Option(min=1, max=65535, help="With --jupyter: its port on the node.")] = 8888,
    runs: Runs = None,
) -> None:
    """Open a shell, or run a COMMAND, in the container of a run that is still running.

    The shell has the run's mounts and environment. The run continues when you leave.

    --node N: A node's name, or its number from 0. Default: the first node.
    --jupyter: Start JupyterLab there, and print how to reach it.

    dray enter 4711 --node 1
    dray enter 4711 -- nvidia-smi
    dray enter 4711 --jupyter
    """
    from dray.runs import prepare
    from dray.runs.active_run import enter as inside

    command = list(context.obj or [])
    state = statuses.status(require_own(find(run, runs)))
    plan, paths = inside.active_plan(state)
    host = inside.node_of(plan, node)
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    if not terminal and not command:
        what = "JupyterLab, whose token only you may see," if jupyter else "a shell"
        raise ConfigError(f"{what} needs a terminal", fix="dray enter RUN -- COMMAND")
    layer = None
    if jupyter:
        command = inside.jupyter(plan, paths.folder / f"jupyter-{port}", port)
        layer = prepare.made_layer(plan.variant, inside.JUPYTER)
        print(f"on your own machine: {inside.tunnel(host if state.slurm_job else '', port)}")
        print("then open the last URL that JupyterLab prints here; Ctrl-C ends it")
        if not layer and not plan.layer:
            print(f"if JupyterLab is missing: {inside.install(plan)}")
    elif not command:
        command = ["bash"]
        print(
            f"in the image of {plan.run} on {host} ({plan.engine}); exit leaves it, and the run goes on",
            file=sys.stderr,
        )
    argv = inside.argv(state, host, command, terminal=terminal, layer=layer)
    process.replace(argv, inside.environment(os.environ))


def clean(
    kind: Literal["runs", "tokens"] | None = None,
    older_than: str = "30d",
    checkpoints: bool = False,
    cache_dir: Path | None = None,
    yes: bool = False,
    runs: Runs = None,
) -> int:
    """Show old runs and tokens of datasets; with --yes remove them.

    KIND: Only these. Default: both.
    --older-than AGE: Only what was unchanged for this long, such as 30d, 12h or 4w.
    --checkpoints: Remove also runs that have checkpoints or a model.
    --cache-dir FOLDER: The recipes' data.cache_dir, for tokens. Default: /tmp/dray-tokens-UID.
    --yes: Remove them.

    dray clean runs --older-than 60d
    dray clean tokens --cache-dir /scratch/me/tokens --yes
    """
    from dray.runs import clean as disk

    items = disk.items(
        [kind] if kind else ["runs", "tokens"],
        runs=(runs or default_runs()).absolute(),
        tokens=(cache_dir or Path(f"{node.TOKENS}{os.getuid()}")).absolute(),
        days=age("--older-than", older_than) / 86400,
        checkpoints=checkpoints,
    )
    old = [item for item in items if not item.kept]
    for item in items:
        why = f"kept: {item.kept}" if item.kept else item.holds
        print(f"{_size(item.bytes):>10}  {item.days:6.1f} days  {item.kind:<8}{item.path}  {why}")
    print(f"to remove: {counted(len(old), 'folder')}, {_size(sum(item.bytes for item in old))}")
    if not yes:
        if old:
            print("dray clean --yes, with the same options, removes them")
        return exit_codes.DONE
    code = exit_codes.DONE
    for item in old:
        if why := disk.remove(item):
            print(f"dray: warning: {item.path} was not removed: {why}", file=sys.stderr)
            code = exit_codes.FAILED
    return code


def _size(size: float) -> str:
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.2f} MB"
