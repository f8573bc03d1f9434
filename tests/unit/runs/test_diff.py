"""`dray diff`: ten kinds of difference, each planted alone and named first; and what they came to."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dray.facts import Facts
from dray.runs import compared, effect, replay
from dray.runs.store import RunPaths
from dray.runs.write import read_recipe, write
from helpers import PYTHON, ROOT

FACTS = Facts(
    scheduler="slurm", job=17, nodelist="n[1-2]", nodes=2, engine="apptainer", image="/i.sif", image_sha256="a" * 64
)
CAPSULE: dict[str, Any] = {
    "torch": "2.13.0", "preflight": "gloo over TCP, 0.97 GB/s of bus bandwidth, in 2.3 s", "finished": "TIME",
    "data": {"train": "a" * 64}, "source": {"folder": "/me", "commit": "c" * 40},
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
    return [(one.kind, one.name) for one in compared.compare(a.run, b.run).differences]


def node(**other: object) -> dict[str, Any]:
    return {"nodes": [CAPSULE["nodes"][0] | other]}


# What is changed, the kind and name that come first, and how many differences there are in all.
PLANTED: dict[str, tuple[dict[str, Any], tuple[str, str], int]] = {
    "image": ({"facts": {"image_sha256": "b" * 64}}, ("image", "image_sha256"), 1),
    "versions": ({"told": {"torch": "2.14.0"}}, ("versions", "torch"), 1),
    "code": ({"told": {"source": {"folder": "/me", "commit": "d" * 40}}}, ("code", "commit"), 1),
    "model": ({"words": ["model.config.n_layer=3"]}, ("model", "model.config.n_layer"), 1),
    "training": ({"words": ["train.lr=0.5"]}, ("training", "train.lr"), 1),
    "environment": ({"words": ["env.MKL_CBWR=COMPATIBLE"]}, ("environment", "MKL_CBWR"), 1),
    "the number of nodes": ({"facts": {"nodes": 1, "nodelist": "n1"}}, ("nodes", "nodes"), 4),
    "the processor": ({"told": node(cpu="Intel Xeon")}, ("nodes", "cpu"), 1),
    "transport": (
        {"told": {"preflight": "NCCL over sockets, 0.97 GB/s of bus bandwidth"}},
        ("transport", "preflight"),
        1,
    ),
    "batch": ({"words": ["batch.global_size=32"]}, ("batch", "batch.global_size"), 2),
    "data": ({"told": {"data": {"train": "b" * 64}}}, ("data", "tokens of train"), 1),
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


def test_all_at_once_are_in_order(base: RunPaths) -> None:
    every = [change for change, _, _ in PLANTED.values()]
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
    began = paths.plan.stat().st_mtime + 8
    same = {"event": "step", "tokens_per_s": 100.0 / step_s}
    events = [
        {**same, "time": began + step, "step": step, "loss": loss, "step_s": step_s + step / 100}
        for step, loss in losses.items()
    ]
    paths.metrics.write_text("".join(json.dumps(event) + "\n" for event in events))


PAGE = """\
A: base
B: slow
differences, most important first:
  seed  train.seed  42 -> 7
losses first differ at step 3: 2.301 and 2.302
largest relative difference 4.3e-04, at step 3
at step 4, the last common step: 2.1 and 2.1001
1 more step of B is not in A
step, median: 0.53 -> 1.035 s (+95%)
step, p95:    0.54 -> 1.05 s (+94%)
speed:        200 -> 100 tokens/s (-50%)
start-up:     9 -> 9 s (+0%)
"""


def test_thousands_are_whole_numbers() -> None:
    before = effect.Curve(tokens_per_s=18950.4, median_s=0.12345)
    after = before.model_copy(update={"tokens_per_s": 323400.0})
    assert [*compared._times(before, after)] == [
        "step, median: 0.1235 -> 0.1235 s (+0%)",
        "speed:        18,950 -> 323,400 tokens/s (+1607%)",
    ]


def test_a_copy_tells_no_start_up_and_medians_are_those_of_all_verbs(base: RunPaths) -> None:
    log(base, {1: 2.5, 2: 2.4, 3: 2.3, 4: 2.1, 5: 2.0})
    found = effect.curve([base])
    assert (found.start_s, found.median_s) == (pytest.approx(9), pytest.approx(0.535))
    os.utime(base.plan, (base.plan.stat().st_mtime + 3600,) * 2)
    assert effect.curve([base]).start_s is None


@pytest.mark.seconds
def test_the_whole_page(base: RunPaths) -> None:
    other = planted(base.run.parent, "slow", "train.seed=7")
    log(base, {1: 2.5, 2: 2.4, 3: 2.301, 4: 2.1})
    log(other, {1: 2.5, 2: 2.4, 3: 2.302, 4: 2.1001, 5: 2.0}, step_s=1.0)
    argv = [sys.executable, "-m", "dray", "diff", base.run, "slow"]
    env = {**PYTHON, "HOME": "/home/me", "DRAY_RUNS": str(base.run.parent)}
    ended = subprocess.run(argv, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr, ended.stdout) == (0, "", PAGE)


def diff(base: RunPaths, *words: str | Path) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-m", "dray", "diff", *words]
    env = {**PYTHON, "HOME": "/home/me", "DRAY_RUNS": str(base.run.parent)}
    return subprocess.run(argv, env=env, cwd=base.run, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.seconds
def test_a_run_is_not_compared_with_itself(tmp_path: Path) -> None:
    base = planted(tmp_path, "base")
    alone = diff(base, "base")
    assert (alone.returncode, alone.stderr.splitlines()[0]) == (78, "dray: there is no other run to compare with")
    other = planted(base.run.parent, "slow", "train.seed=7")
    os.utime(base.plan, (1, 1))
    for words in (("slow", "slow"), ("slow", other.run), ("slow", other.folder)):
        refused = diff(base, *words)
        assert (refused.returncode, refused.stderr.splitlines()[0]) == (78, "dray: both names mean the same run"), words
    for words in (("slow",), ("base",)):  # the newest one is slow
        assert "train.seed" in diff(base, *words).stdout


def test_losses_that_are_identical(base: RunPaths) -> None:
    losses = {step: 1 / 3 + step for step in range(1, 41)}
    log(base, losses)
    found = effect.effect([base], [base]).parting
    assert (effect.losses_text(found), found.identical) == (["all 40 losses are identical to the last bit"], True)


@pytest.mark.parametrize(
    ("a", "b", "far"),
    [
        (0.0, 0.0, 0.0), (3.0, 3.0, 0.0), (0.0, 1e-9, 1.0), (2.0, 1.0, 0.5), (1.0, -1.0, 2.0), (1e300, -1e300, 2.0),
        (None, None, math.inf), (None, 1.0, math.inf), (math.nan, math.nan, math.inf), (math.inf, math.inf, math.inf),
    ],
)  # fmt: skip
def test_the_difference_of_two_losses(a: float | None, b: float | None, far: float) -> None:
    """In both orders, as for diff, replay, scale and tune."""
    assert (effect.difference(a, b), effect.difference(b, a)) == (far, far)
    for tolerance in (0.0, 0.4, 0.6):
        found = effect.compare({1: 1.0, 2: a, 3: 1.0}, {2: b, 3: 1.0}, tolerance)
        assert (found.first, found.steps, found.only_a) == (2 if far > tolerance else None, 2, 1)


def test_two_runs_that_diverged_are_not_identical(base: RunPaths) -> None:
    log(base, {1: 3.0, 2: None})
    found = effect.effect([base], [base]).parting
    assert effect.losses_text(found) == ["losses first differ at step 2: not finite and not finite"]
    assert not found.identical
    assert not replay.same(found)


def test_one_bit_is_a_difference(base: RunPaths, tmp_path: Path) -> None:
    other = planted(tmp_path, "other")
    log(base, {1: 0.1 + 0.2})
    log(other, {1: 0.3})
    found = effect.effect([base], [other]).parting
    assert effect.losses_text(found) == [
        "losses first differ at step 1: 0.30000000000000004 and 0.3",
        "largest relative difference 1.9e-16, at step 1",
    ]
    log(other, {1: None})
    found = effect.effect([base], [other]).parting
    assert effect.losses_text(found) == ["losses first differ at step 1: 0.3 and not finite"]


def test_a_step_that_was_taken_again_counts_as_the_later_attempt_has_it(tmp_path: Path) -> None:
    first, second = planted(tmp_path, "mine"), planted(tmp_path, "mine")
    log(first, {1: 3.0, 2: 2.0, 3: 1.0})
    log(second, {3: 0.9, 4: 0.8})
    assert effect.curve([first, second]).losses == {1: 3.0, 2: 2.0, 3: 0.9, 4: 0.8}


def test_a_run_without_a_capsule(base: RunPaths, tmp_path: Path) -> None:
    other = planted(tmp_path, "other")
    other.capsule.unlink()
    assert compared.compare(base.run, other.run).notes == [
        "other has no capsule: its versions and nodes are unknown"
    ]  # fmt: skip
