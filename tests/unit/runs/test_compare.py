"""`dray diff`: ten kinds of difference, each planted alone and named first; and what they came to."""

from __future__ import annotations

import io
import json
import math
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import typer

from dray.cli import report as verb
from dray.facts import Facts
from dray.runs import compare, replay
from dray.runs.prepare import read_recipe, write
from dray.runs.store import RunPaths
from helpers import ROOT

FACTS = Facts(
    scheduler="slurm", job=17, nodelist="n[1-2]", nodes=2, engine="apptainer", image="/i.sif", image_sha256="a" * 64
)
CAPSULE: dict[str, Any] = {
    "torch": "2.13.0", "preflight": "gloo over TCP, 0.97 GB/s of bus bandwidth, in 2.3 s", "finished": "TIME",
    "data": {"train": "a" * 64}, "source": {"folder": "/me", "commit": "c" * 40, "branch": "main"},
    "nodes": [{"node": 0, "name": "n1", "cpu": "AMD EPYC 7763", "threads": 4}],
}  # fmt: skip


def planted(
    runs: Path, run: str, *words: str, facts: dict[str, Any] | None = None, told: dict[str, Any] | None = None
) -> RunPaths:
    """A real plan, and a capsule as if it had ended."""
    seen = FACTS.model_copy(update=facts or {})
    paths = write(read_recipe(ROOT / "recipes" / "smoke-cpu.toml", words), seen, runs=runs, run=run)[1]
    paths.capsule.write_text(json.dumps(json.loads(paths.capsule.read_text()) | CAPSULE | (told or {})))
    return paths


def lines(a: RunPaths, b: RunPaths) -> list[tuple[str, str]]:
    return [(one.kind, one.name) for one in compare.runs(a.run, b.run).differences]


def node(**other: object) -> dict[str, Any]:
    return {"nodes": [CAPSULE["nodes"][0] | other]}


# What is changed, the kind and name that come first, and how many differences there are in all.
PLANTED: dict[str, tuple[dict[str, Any], tuple[str, str], int]] = {
    "image": ({"facts": {"image_sha256": "b" * 64}}, ("image", "image_sha256"), 1),
    "the file of the image": ({"facts": {"image_sha256": "", "image": "/j.sif"}}, ("image", "image"), 1),
    "versions": ({"told": {"torch": "2.14.0"}}, ("versions", "torch"), 1),
    "code": ({"told": {"source": {"folder": "/me", "commit": "d" * 40}}}, ("code", "source.commit"), 1),
    "changes of the code": (
        {"told": {"source": CAPSULE["source"] | {"diff_sha256": "d" * 64}}},
        ("code", "source.diff_sha256"),
        1,
    ),
    "model": ({"words": ["model.config.n_layer=3"]}, ("model", "model.config.n_layer"), 1),
    "training": ({"words": ["train.lr=0.5"]}, ("training", "train.lr"), 1),
    "environment": ({"words": ["env.MKL_CBWR=COMPATIBLE"]}, ("environment", "MKL_CBWR"), 1),
    "the number of nodes": ({"facts": {"nodes": 1, "nodelist": "n1"}}, ("nodes", "nodes"), 4),
    "the processor": ({"told": node(cpu="Intel Xeon")}, ("nodes", "node.cpu"), 1),
    "transport": (
        {"told": {"preflight": "NCCL over sockets, 0.97 GB/s of bus bandwidth"}},
        ("transport", "preflight"),
        1,
    ),
    "batch": ({"words": ["batch.global_size=32"]}, ("batch", "batch.global_size"), 2),
    "data": ({"told": {"data": {"train": "b" * 64}}}, ("data", "tokens.train"), 1),
    "the dataset": ({"words": ["data.sequence_length=64"]}, ("data", "data.sequence_length"), 1),
    "seed": ({"words": ["train.seed=7"]}, ("seed", "train.seed"), 1),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> RunPaths:
    """What each is compared with."""
    return planted(tmp_path_factory.mktemp("runs"), "base")


@pytest.mark.parametrize("kind", PLANTED)
def test_each_kind_is_named_first(base: RunPaths, kind: str) -> None:
    change, first, count = PLANTED[kind]
    words, more = change.get("words", ()), {key: change.get(key) for key in ("facts", "told")}
    other = planted(base.run.parent, kind.replace(" ", "-"), *words, **more)
    found = lines(base, other)
    assert (found[0], len(found)) == (first, count), found


def test_the_same_plan_twice(base: RunPaths) -> None:
    """Another time, job, folder and secret are no difference."""
    assert lines(base, planted(base.run.parent, "twin", facts={"job": 18})) == []


def test_threads_that_a_replay_names_are_no_difference(base: RunPaths) -> None:
    """The nodes' own number of threads tells them apart."""
    assert lines(base, planted(base.run.parent, "threads", "env.OMP_NUM_THREADS=4")) == []


def test_all_at_once_are_in_order(base: RunPaths) -> None:
    every = [change for name, (change, _, _) in PLANTED.items() if name != "the file of the image"]
    words = [word for change in every for word in change.get("words", ())]
    facts, told = (
        {key: value for change in every for key, value in change.get(part, {}).items()} for part in ("facts", "told")
    )
    kinds = [kind for kind, _ in lines(base, planted(base.run.parent, "all", *words, facts=facts, told=told))]
    assert list(dict.fromkeys(kinds)) == [
        "image", "versions", "code", "model", "training", "environment", "nodes", "transport", "batch", "data", "seed",
    ]  # fmt: skip


def test_a_command_and_a_training(base: RunPaths, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A table that one of them lacks is one difference, not one for each of its keys."""
    monkeypatch.chdir(tmp_path)
    recipe = read_recipe(None, (), ("./train",))
    other = write(recipe, FACTS, runs=base.run.parent, run="command")[1]
    found = lines(base, other)
    assert [one for one in found if one[0] in ("code", "training", "batch")] == [
        ("code", "command"), ("training", "train"), ("batch", "batch"),
    ]  # fmt: skip


# What it came to.


def log(paths: RunPaths, losses: dict[int, float | None], *, step_s: float = 0.5) -> None:
    same = {"event": "step", "tokens_per_s": 10_000.0 / step_s}
    events = [
        {**same, "time": 1.0, "step": step, "loss": loss, "step_s": step_s + step / 100}
        for step, loss in losses.items()
    ]
    paths.metrics.write_text("".join(json.dumps(event) + "\n" for event in events))


PAGE = """\
A: {a}
B: {b}
differences, A -> B, most important first:
  seed: train.seed: 42 -> 7
losses first differ at step 3: A 2.301, B 2.302
largest relative difference 4.3e-04
only B logged 1 more step
median speed, A -> B: 20,000 -> 10,000 tokens/s (-50%)
"""


def diff(*words: str | Path) -> list[str]:
    """What the verb prints."""
    app = typer.Typer()
    app.command()(verb.diff)
    with redirect_stdout(io.StringIO()) as printed:
        app([str(word) for word in words], standalone_mode=False)
    return printed.getvalue().splitlines()


def test_the_whole_page(base: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAY_RUNS", str(base.run.parent))
    other = planted(base.run.parent, "slow", "train.seed=7")
    log(base, {1: 2.5, 2: 2.4, 3: 2.301, 4: 2.1})
    log(other, {1: 2.5, 2: 2.4, 3: 2.302, 4: 2.1001, 5: 2.0}, step_s=1.0)
    assert diff(base.run, "slow") == PAGE.format(a=base.run, b=other.run).splitlines()
    assert diff(other.folder, "slow")[:2] == [f"A: {other.folder}", f"B: {other.run}"]
    assert json.loads("\n".join(diff(base.run, "slow", "--json")))["losses"]["first"] == 3


def losses_text(a: RunPaths, b: RunPaths) -> list[str]:
    return [*verb.loss_lines(compare.runs(a.run, b.run).losses)]


def test_losses_that_are_identical(base: RunPaths) -> None:
    log(base, {step: 1 / 3 + step for step in range(1, 41)})
    assert losses_text(base, base) == ["losses are identical to the last bit in 40 steps"]


@pytest.mark.parametrize(
    ("a", "b", "far"),
    [
        (0.0, 0.0, 0.0), (3.0, 3.0, 0.0), (0.0, 1e-9, 1.0), (2.0, 1.0, 0.5), (1.0, -1.0, 2.0), (1e300, -1e300, 2.0),
        (None, None, math.inf), (None, 1.0, math.inf), (math.nan, math.nan, math.inf), (math.inf, math.inf, math.inf),
    ],
)  # fmt: skip
def test_the_difference_of_two_losses(a: float | None, b: float | None, far: float) -> None:
    """In both orders, as for diff, replay, scale and tune."""
    assert (compare.difference(a, b), compare.difference(b, a)) == (far, far)
    for tolerance in (0.0, 0.4, 0.6):
        found = compare.compare({1: 1.0, 2: a, 3: 1.0}, {2: b, 3: 1.0}, tolerance)
        assert (found.first, found.steps, found.only_a) == (2 if far > tolerance else None, 2, 1)


def test_two_runs_that_diverged_are_not_identical(base: RunPaths) -> None:
    log(base, {1: 3.0, 2: None})
    assert losses_text(base, base) == ["losses first differ at step 2: A not finite, B not finite"]
    assert not replay.same(compare.runs(base.run, base.run).losses)


def test_one_bit_is_a_difference(base: RunPaths, tmp_path: Path) -> None:
    other = planted(tmp_path, "other")
    log(base, {1: 0.1 + 0.2})
    log(other, {1: 0.3})
    assert losses_text(base, other) == [
        "losses first differ at step 1: A 0.30000000000000004, B 0.3",
        "largest relative difference 1.9e-16",
    ]
    log(other, {1: None})
    assert losses_text(base, other) == ["losses first differ at step 1: A 0.3, B not finite"]


def test_a_step_that_was_taken_again_counts_as_the_later_attempt_has_it(tmp_path: Path) -> None:
    first, second = planted(tmp_path, "mine"), planted(tmp_path, "mine")
    log(first, {1: 3.0, 2: 2.0, 3: 1.0})
    log(second, {3: 0.9, 4: 0.8})
    assert compare.curve([first, second]).losses == {1: 3.0, 2: 2.0, 3: 0.9, 4: 0.8}
    both = compare.runs(first.run, first.folder)
    assert (len(both.curves[0].losses), len(both.curves[1].losses)) == (4, 3)
