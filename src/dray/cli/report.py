"""What became of runs: why one failed, a page about one or several, what differs between two, and a job's result."""

from __future__ import annotations

import io
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from dray import __version__, process
from dray.cli.args import Json, NamedRun, On, Run, Runs, Sbatch, complete_runs, refuse_or_warn, typed
from dray.contract import exit_codes, files
from dray.contract.findings import ConfigError, counted
from dray.runs.store import RunPaths, default_runs, find, require_own

if TYPE_CHECKING:
    from dray.planning.schema import Plan
    from dray.runs.compare import Comparison, Difference, LossComparison
    from dray.runs.replay import Original


def why(
    context: typer.Context,
    run: Run = "",
    file: Path | None = None,
    bundle: bool = False,
    as_json: Json = False,
    runs: Runs = None,
    on: On = "",
) -> None:
    """Show why a run failed: the first failure, its cause and the fix. --bundle packs the files for a bug report.

    FILE: With --bundle: archive to write. Default: dray-why-RUN.tar.gz.
    --bundle: Pack plan, result, failures and the ends of logs, without secrets.

    dray why
    dray why 4711 report.tar.gz --bundle
    """
    from dray.runs.report import archive
    from dray.runs.report import why as reasons

    if file and not bundle:
        raise ConfigError("FILE needs --bundle", found=str(file), fix="add --bundle, or leave out the FILE")
    if bundle and as_json:
        raise ConfigError("--json and --bundle exclude each other", fix="leave out one of them")
    if on:
        from dray.cli import remote

        if bundle:
            remote_runs = runs if typed(context, "runs") else None
            remote.bring_back(on, ["why", run, "--bundle"], file, remote_runs, archive.require_new)
            return
        remote.hand_over(on)
    paths, report = reasons.of(find(run, runs))
    if not bundle:
        print(report.model_dump_json(indent=1) if as_json else reasons.text(report))
        return
    out = file or Path(f"dray-why-{paths.run.name}.tar.gz")
    made = archive.make(paths.run, out, why=reasons.text(report))
    print(archive.text(made))


_LOCAL = ("tensorboard",)
"""Trackers without a server."""


def report(
    context: typer.Context,
    named: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="RUN",
            autocompletion=complete_runs,
            help="Runs: folders, names or their beginnings, or job numbers. Default: the newest.",
        ),
    ] = None,
    out: Path | None = None,
    sync: bool = False,
    to: list[str] | None = None,
    follow: bool = False,
    runs: Runs = None,
    on: On = "",
) -> None:
    """Write a report of a run, or of several side by side: one HTML page that needs no network.

    With --sync, send a run's metrics to W&B, MLflow, Trackio and others, from a login node.

    --out FILE: File to write. Default: dray-report-RUN.html; of several runs dray-report-runs.html.
    --sync: Send the run's metrics to its trackers' servers instead; nothing twice.
    --to TRACKER: With --sync: send to it; may be repeated. Default: train.trackers.
    --follow, -f: With --sync: keep sending until the run ends.

    dray report 4711 4712 --out compared.html
    dray report 4711 --sync --to mlflow
    """
    from dray.runs.report import sections
    from dray.runs.report.data import gather

    named = named or [""]
    misplaced = out if sync else to or follow
    if misplaced:
        raise ConfigError("--to and --follow belong to --sync, and --out does not", fix="dray report RUN --sync")
    if on:
        from dray.cli import remote

        if sync:
            remote.hand_over(on)
        remote_runs = runs if typed(context, "runs") else None
        remote.bring_back(on, ["report", *filter(None, named)], out, remote_runs, _require_html)
        return
    if sync:
        raise typer.Exit(max(_sync(find(name, runs), to or [], follow=follow) for name in named))
    gathered = [gather(folder) for folder in dict.fromkeys(find(name, runs) for name in named)]
    target = out or Path(f"dray-report-{gathered[0].explained.run if len(gathered) == 1 else 'runs'}.html")
    _require_html(target)
    made = time.strftime(f"Made by dray {__version__} at %Y-%m-%dT%H:%M:%SZ.", time.gmtime())
    try:
        files.write_atomic(target, sections.page(sections.document(gathered, made)))
    except OSError as error:
        raise ConfigError(
            "the report cannot be written", where=target, found=error.strerror or error, fix="--out=FILE"
        ) from error
    print(f"report: {target.absolute()}")


def _require_html(file: Path) -> None:
    """Refuse another file than a page: a mistyped option must not cost a recipe."""
    if file.suffix != ".html":
        raise ConfigError("a report is a page of HTML", found=f"--out={file}", fix="--out=dray-report.html")


def _sync(run: Path, to: list[str], *, follow: bool) -> int:
    """Send what was not sent before; return the exit code."""
    from dray.config.training import Tracker
    from dray.contract.trainer import image_tasks
    from dray.runs import local

    require_own(run)  # what was sent is recorded in it
    plan, paths = local.trained_run(run)
    trackers = plan.recipe.train.trackers if plan.recipe.train else ()
    names = list(dict.fromkeys(to or [name for name in trackers if name not in _LOCAL]))
    known = get_args(Tracker)
    if not names or not {*names} <= {*known}:
        raise ConfigError(
            "--sync needs a tracker with a server",
            where=paths.run,
            wanted=f"one of {', '.join(known)} in train.trackers, or by --to",
            found=", ".join(names) or f"train.trackers = [{', '.join(trackers)}]",
            fix="--to wandb, even if the recipe does not name it",
        )
    prefixes = tuple(f"{name.partition('_')[0].upper()}_" for name in names)
    given = (*local.hub_variables(), *(name for name in os.environ if name.startswith(prefixes)))
    recipe = plan.recipe.model_copy(update={"env": {}, "pass_env": given})
    job = image_tasks.Sync(str(paths.run), plan.run, plan.recipe.name, names, follow)
    return local.run_in_image(recipe, job, engine="bare", folder=paths.run, env={"HF_HUB_OFFLINE": "0"})


def diff(a: NamedRun, b: NamedRun, as_json: Json = False, runs: Runs = None) -> None:
    """Show what differs between two runs, the most important first, and their losses and times side by side.

    The first RUN is A, the second B.

    dray diff 4711 4712
    """
    from dray.runs import compare

    found = compare.runs(find(a, runs), find(b, runs))
    print(found.model_dump_json(indent=1) if as_json else "\n".join(diff_text(found)))


def diff_text(found: Comparison) -> Iterator[str]:
    """The differences, most important first; then losses and speed."""
    yield f"A: {found.a}"
    yield f"B: {found.b}"
    yield "differences, A -> B, most important first:" if found.differences else "dray found no differences"
    yield from map(difference_line, found.differences)
    yield from loss_lines(found.losses)
    before, after = (curve.tokens_per_s for curve in found.curves)
    if before and after:
        yield f"median speed, A -> B: {before:,.0f} -> {after:,.0f} tokens/s ({after / before - 1:+.0%})"


def difference_line(found: Difference) -> str:
    """The difference in a line of a list."""
    return f"  {found.kind}: {found.name}: {found.a} -> {found.b}"


def loss_lines(found: LossComparison) -> Iterator[str]:
    """Lines that say whether losses are identical, and if not, where and how far they differ."""
    from dray.runs.compare import pair

    if not found.steps:
        yield "losses: no common step"
    elif found.first is None:
        yield f"losses are identical to the last bit in {counted(found.steps, 'step')}"
    else:
        a, b = pair(found.first_a, found.first_b)
        yield f"losses first differ at step {found.first}: A {a}, B {b}"
    if found.largest:
        yield f"largest relative difference {found.largest:.1e}"
    for count, name in ((found.only_a, "A"), (found.only_b, "B")):
        if count:
            yield f"only {name} logged {counted(count, 'more step')}"


def replay(
    run: Run = "",
    engine: str = "",
    recipe: Path | None = None,
    sbatch: Sbatch = None,
    runs: Runs = None,
) -> int:
    """Repeat a run with the same recipe, nodes and ranks, and compare the losses step by step.

    It lists what will differ. The exit code is 0 if all losses are equal to the last bit, else 1.
    A run of Slurm is submitted again, and the `dray diff` to type later is printed: the exit code is 0 then.
    With --sbatch=--wait it waits for the job, and compares here. Of another user's run, --recipe writes the recipe.

    --engine [bare|docker|podman]: Container engine on this machine. Default: the run's own.
    --recipe FILE: Write the run's recipe with all decided values; start nothing.

    dray replay 20261120-124439
    dray replay 4711 --recipe again.toml
    """
    from dray.runs import replay as replays

    before = replays.original(find(run, runs))
    if recipe:
        _save_recipe(recipe, before)
        return exit_codes.DONE
    replays.require_own(before)
    runs = (runs or default_runs()).absolute()
    if before.plan.by_slurm and not engine and process.which("sbatch"):
        return _repeat_as_job(before, runs, sbatch or [])
    return _repeat_here(before, runs, replays.engine_here(before.plan, engine))


def _save_recipe(file: Path, before: Original) -> None:
    from dray.cli.recipe import write_new
    from dray.runs import replay as replays

    for name, text in replays.as_files(before.recipe, file.stem).items():
        write_new(file.with_name(name), text, "the recipe", fix="give another name")
    recipe = shlex.quote(str(file.with_suffix(".toml")))
    if found := replays.foreign(before):
        print(f"another user may have written this run ({found}): read {recipe} first, since it may run code")
    print(f"dray submit {recipe} --nodes {before.recipe.nodes}, and then: dray diff RUN NEW_RUN")


def _repeat_here(before: Original, runs: Path, engine: str) -> int:
    """Repeat the run on this machine."""
    from dray.cli.run import conduct
    from dray.runs import local, prepare

    recipe = before.recipe
    local.require(recipe)
    site = "" if before.plan.by_slurm else before.plan.site.removeprefix("site ")
    facts = local.facts(recipe, engine=engine, nodes=recipe.nodes, gpus_per_node=before.gpus, site=site)
    plan, paths = prepare.write(recipe, facts, runs=runs)
    _announce(before, paths, plan)
    return _compare(before, paths.run, conduct(plan, paths))


def _repeat_as_job(before: Original, runs: Path, options: Sequence[str]) -> int:
    """Submit a job with the same nodes, ranks and options. With --wait, compare once it has ended: sbatch itself would
    not tell the job's number before."""
    from dray.cli.runs import status_text
    from dray.runs import replay as replays
    from dray.runs import submit
    from dray.runs.status import LOST, Watched

    kept = [option for option in options if option not in submit.WAIT]
    job = replays.job(before, runs, kept)
    refuse_or_warn(job.plan)
    folder = Path(job.plan.run_folder)
    _announce(before, RunPaths(folder), job.plan)
    print(shlex.join(job.argv), flush=True)
    print(f"job {replays.start(before, job)} is in the queue\nrun folder: {folder}")
    if kept == options:
        print(f"once it has ended: {shlex.join(['dray', 'diff', str(before.folder), str(folder)])}")
        return exit_codes.DONE
    watched = Watched(folder)
    while not watched.over(seen := watched.look()):
        time.sleep(watched.ask_s)
    if seen.state == LOST:  # a shared disk may show the result later than Slurm the job's end
        time.sleep(watched.next_s)
        seen = watched.look()
    print("\n".join(status_text(seen)))
    code = exit_codes.FAILED if seen.exit_code is None else seen.exit_code
    return _compare(before, folder, code) if seen.recipe else code  # without a plan nothing ran


def _announce(before: Original, paths: RunPaths, plan: Plan) -> None:
    """Print what will differ, as far as this machine can tell."""
    found = [*map(difference_line, before.differences(paths, plan))]
    head = "what cannot be the same, run -> replay:"
    if not found:
        head = "nothing differs from the run, as far as dray can tell before the start"
    print("\n".join([head, *found]), flush=True)


def _compare(before: Original, folder: Path, code: int) -> int:
    """Print what differs in the replay, which ended with this exit code, and whether the losses are the same."""
    from dray.runs import compare
    from dray.runs.replay import same

    found = compare.runs(before.folder, folder)
    print("\n".join(diff_text(found)))
    if code:
        print(f"the replay failed with exit code {code}: {shlex.join(['dray', 'why', str(folder)])}")
    train = before.recipe.train
    if not train:
        print("dray does not know the losses of a command: compare what it printed")
        return code
    if same(found.losses):
        return code
    if before.gpus and not train.deterministic:
        print("train.deterministic = false: on GPUs, the same run has other losses each time")
    return code or exit_codes.FAILED


def finish(
    run: Path,
    code: Annotated[int, typer.Option(min=0, max=255, help="Exit code of the step that started the nodes.")],
    stopped: bool = False,
    url_file: Annotated[
        Path | None, typer.Option("--webhook", help="File with the URL of whom to tell how the run ended.")
    ] = None,
) -> int:
    """Write result.json, print how the run ended, and end with the run's exit code.

    Standard input has what Slurm and the job's script know of the job.

    RUN: A run folder.
    --stopped: The run was stopped.
    """
    from dray.planning.grace import DEFAULT_S
    from dray.runs import slurm, status, store
    from dray.runs.active_run.watch import read_webhook, tell_webhook
    from dray.runs.finish import finish as conclude
    from dray.runs.metrics import whole
    from dray.runs.result import summary

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # what stopped the run may be sent again
    paths = store.attempt_at(run)
    known = sys.stdin.buffer.read().decode(errors="replace") if sys.stdin and not sys.stdin.isatty() else ""
    grace = whole(store.Attempt(store.Run(paths.run), paths.attempt).plan, "grace_s") or DEFAULT_S
    told = status.stop_of_job(known, now=time.time(), grace=grace)
    # Slurm may signal the nodes alone, as in a preemption: then the job's script has heard nothing, and no rank fails.
    why = told if stopped or (code and told.by_slurm and not any(paths.failures.glob("*.json"))) else None
    fields = slurm.fields(known)
    result = conclude(paths, code=code, stopped=why, batch=slurm.is_batch(fields), known=known)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    with suppress(OSError):  # a full disk or a closed pipe; the exit code still tells
        print(text := summary(result, paths))
        url = read_webhook(url_file) if url_file else ""
        if url and (failed := tell_webhook(url, result, text)):
            print(f"warning: {failed}")
    return result.exit_code
