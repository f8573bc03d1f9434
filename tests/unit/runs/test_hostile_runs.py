"""Run folders in any state, and each verb that reads one: a clear line, an exit code by contract, no traceback, no end
that does not come."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer.main

import dray.cli
from damage import HOSTILE, RECORD, replace
from dray.cli.streams import show
from dray.contract import unexpected
from dray.facts import Facts
from dray.runs import look as looking
from dray.runs.finish import finish
from dray.runs.paths import RunPaths
from dray.runs.write import read_recipe, write
from helpers import ROOT

pytestmark = pytest.mark.hostile("run folders")

VERBS = tuple(
    tuple(line.split())
    for line in """
runs -n 0
status RUN
status RUN --json
logs RUN
top RUN
why RUN
why RUN --json
why RUN OUT.tar.gz --bundle
stop RUN --no-wait
report RUN --out OUT.html
report RUN --markdown
diff RUN OTHER
diff OTHER RUN
capsule show RUN
capsule verify RUN
capsule pack RUN OUT.tar.gz
replay RUN --recipe OUT.toml
replay RUN --compare OTHER
sync RUN
clean --dry-run
eval RUN
generate RUN a
export RUN
enter RUN -- true
""".strip().splitlines()
)
FILES = (
    "plan.json", "result.json", "metrics.jsonl", "capsule.json", "facts.txt", "process.json", "stop", "failures",
    "failures/rank-3.json", "logs", "logs/rank-0.log", "nodes/node-0.json", "preflight/report.json", "../job.json",
    "../checkpoints", "",
)  # fmt: skip
PLAIN = tuple(name for name in FILES if Path(name).suffix or name == "stop")
JSON = tuple(name for name in PLAIN if ".json" in name and name != "process.json")
CODES = {0, 1, 3, 69, 75, 78}
"""3 is the failed rank's own."""
LIMIT_S = 120  # of one call: only a hang takes so long
OLD = 1795570000.0
Change = Callable[[Any], Any]


def leaves(value: Any, change: Change) -> Any:
    """Each leaf of a JSON value in another way."""
    if isinstance(value, dict):
        return {name: leaves(one, change) for name, one in value.items()}
    return [leaves(one, change) for one in value] if isinstance(value, list) else change(value)


def numbers(by: object) -> Change:
    return lambda leaf: by if isinstance(leaf, int | float) and not isinstance(leaf, bool) else leaf


# What is in each number, text or leaf of each JSON file.
LEAVES: dict[str, Change] = {
    "NaN": numbers(float("nan")), "infinite": numbers(float("inf")), "huge": numbers(10**300), "2^63": numbers(1 << 63),
    "4,000 digits": numbers(10**4000), "negative": numbers(-1), "zero": numbers(0), "fractions": numbers(0.5),
    "null": lambda _: None, "true": lambda _: True, "a list": lambda leaf: [leaf], "a table": lambda leaf: {"x": leaf},
    "escapes": lambda leaf: f"{leaf}\n\x1b[2J\x1b]0;x\x07\r\x00" if isinstance(leaf, str) else leaf,
    "surrogates": lambda leaf: f"{leaf}\ud800" if isinstance(leaf, str) else leaf,
    "long": lambda leaf: leaf * 3000 if isinstance(leaf, str) else leaf,
    "version": lambda leaf: 99 if leaf == 1 else leaf,
    "paths": lambda leaf: "/etc/passwd" if isinstance(leaf, str) else leaf,
}  # fmt: skip


@pytest.fixture
def other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """A run that is as it should be."""
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("DRAY_RUNS", str(tmp_path / "runs"))
    monkeypatch.chdir(tmp_path)
    return begun(tmp_path, "other")


def begun(folder: Path, name: str) -> RunPaths:
    facts = Facts(scheduler="slurm", job=17, nodelist="n[1-2]", nodes=2, engine="apptainer", image="/i.sif")
    recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", ("ranks_per_node=2", "train.trackers=[]"))
    paths = write(recipe, facts, runs=folder / "runs", run=name)[1]
    start = {"event": "start", "time": OLD, "steps": 50, "first_step": 0, "world_size": 4, "hosts": ["n1", "n2"]}
    step = {"event": "step", "time": OLD + 9, "loss": 2.5, "lr": 0.1, "step_s": 0.1, "tokens": 1, "tokens_per_s": 9.0}
    events = [start, *(step | {"step": number} for number in range(1, 6)), {"event": "slow", "rank": 1, "node": "n1"}]
    paths.metrics.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    (paths.failures / "rank-3.json").write_text(json.dumps(RECORD))
    paths.rank_log(0).write_text("step 1/50\n\x1b[2Jtalk\n")
    (paths.folder / "nodes").mkdir(exist_ok=True)
    (paths.folder / "nodes" / "node-0.json").write_text('{"node": 0, "name": "n1", "packages": {"torch": "2"}}')
    paths.preflight.mkdir(exist_ok=True)
    paths.preflight_report.write_text('{"ranks": [], "sweep": [], "seconds": {}}')
    (paths.run / "job.json").write_text('{"job": 17, "cluster": "", "time": 1.0, "argv": ["sbatch"]}')
    finish(paths, code=1)
    return paths


def old(run: Path) -> None:
    """As if nothing had been written for long: what is new goes on, and is waited for."""
    for path in (run, *run.rglob("*")):
        os.utime(path, (OLD, OLD), follow_symlinks=False)


@pytest.fixture
def dray_says(
    other: RunPaths, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., list[str]]]:
    """What is wrong with what these verbs say of a run."""
    monkeypatch.setattr(looking, "_UNKNOWN_S", 0.0)
    monkeypatch.setattr(looking, "_NEXT_S", 0.0)
    monkeypatch.setattr(time, "sleep", lambda _seconds: None)
    dray.cli._register(None)
    monkeypatch.setattr(dray.cli, "_register", lambda _named: None)
    monkeypatch.setattr(dray.cli, "app", typer.main.get_command(dray.cli.app))  # once, and not for each call

    def hangs(*_: object) -> None:
        raise AssertionError("it hangs")

    before = signal.signal(signal.SIGALRM, hangs)

    def said(run: Path, verbs: tuple[tuple[str, ...], ...] = VERBS) -> list[str]:
        wrong = []
        for name in ("stdout", "stderr"):  # as main does
            monkeypatch.setattr(sys, name, show(getattr(sys, name)))
        for verb in verbs:
            words = [{"RUN": str(run), "OTHER": str(other.run)}.get(word, word) for word in verb]
            for name in ("OUT.html", "OUT.tar.gz", "OUT.toml"):
                Path(name).unlink(missing_ok=True)
            old(run) if run.exists() else None
            signal.alarm(LIMIT_S)
            try:
                code = dray.cli._code(words)
            except AssertionError as hung:
                code = str(hung)
            finally:
                signal.alarm(0)
            out, err = capfd.readouterr()
            bad = [word for word in (unexpected.DEFECT, "send a bug report with", "Traceback") if word in err]
            bad += ["an escape sequence"] if "\x1b" in (err if verb[0] == "logs" else out + err) else []
            bad += ["no line"] if not (out + err).strip() and verb[0] not in ("logs", "enter", "export") else []
            if code not in CODES or bad:
                wrong.append(f"{' '.join(verb)}: {code} {bad} {err[-400:]}")
        return wrong

    yield said
    signal.signal(signal.SIGALRM, before)


def fresh(other: RunPaths) -> RunPaths:
    run = other.run.with_name("mine")
    if run.is_symlink():
        run.unlink()
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(other.run, run, symlinks=True)
    return RunPaths(run)


def placed(paths: RunPaths, names: Sequence[str], content: Any) -> None:
    for name in names:
        path = paths.folder / name if name else paths.folder
        if path.parent.is_dir():
            replace(path, content)


@pytest.mark.seconds
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "each"])
def test_whatever_is_in_the_place_of_a_file(
    other: RunPaths, dray_says: Callable[..., list[str]], *, every: bool
) -> None:
    """In that of all files at once, and in that of one, of which the quick test has one kind for each file."""
    wrong = []
    for number, (kind, content) in enumerate(HOSTILE.items()):
        alone = [(name,) for place, name in enumerate(FILES) if every or place % len(HOSTILE) == number]
        for names in (PLAIN, *alone):
            paths = fresh(other)
            placed(paths, names, content)
            what = "all" if names is PLAIN else names[0] or "the attempt"
            wrong += [f"{kind} in the place of {what}: {text}" for text in dray_says(paths.run)]
    assert wrong == [], "\n".join(wrong)


@pytest.mark.seconds
@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["some", "each"])
def test_whatever_is_in_each_value(other: RunPaths, dray_says: Callable[..., list[str]], *, every: bool) -> None:
    """Of all JSON files, and of each alone."""
    wrong = []
    for number, (kind, change) in enumerate(LEAVES.items()):
        alone = [(name,) for place, name in enumerate(JSON) if every or place == number % len(JSON)]
        for names in (JSON, *alone):
            paths = fresh(other)
            for path in (paths.folder / name for name in names):
                lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
                path.write_text("".join(json.dumps(leaves(json.loads(line), change)) + "\n" for line in lines))
            what = "all" if names is JSON else names[0]
            wrong += [f"{kind} in {what}: {text}" for text in dray_says(paths.run)]
    assert wrong == [], "\n".join(wrong)


@pytest.mark.seconds
def test_names_that_no_terminal_should_be_sent(other: RunPaths, dray_says: Callable[..., list[str]]) -> None:
    run = other.run.with_name("a\n\x1b[2J\x1b]0;x\x07 name")
    shutil.copytree(other.run, run, symlinks=True)
    assert dray_says(run) == []


@pytest.mark.seconds
@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes files of others")
def test_a_run_of_another_user_is_shown_and_not_touched(other: RunPaths, dray_says: Callable[..., list[str]]) -> None:
    """Neither asked to end, nor entered, nor removed; as an ordinary user sees root's."""
    paths = fresh(other)
    for path in (paths.run, *paths.run.rglob("*")):
        os.chown(path, 65534, 65534, follow_symlinks=False)
    assert dray_says(paths.run) == []
    assert paths.stop.read_text() == ""


@pytest.mark.slow
def test_a_million_steps(other: RunPaths, dray_says: Callable[..., list[str]]) -> None:
    paths = fresh(other)
    step = '{"event": "step", "time": 1795570009.5, "step": %d, "loss": 2.5, "tokens_per_s": 9.0}\n'
    with paths.metrics.open("w") as file:
        file.writelines(step % number for number in range(1_000_000))
    assert dray_says(paths.run) == []
