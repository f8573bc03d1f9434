"""Whole trainings whose loss jumps or is not finite: named with its samples, and left out where the recipe says so."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from helpers import ROOT

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from dray.runs.finish import finish  # noqa: E402
from trainings import Forks, Run  # noqa: E402

pytestmark = pytest.mark.torch
BEGUN = Callable[..., Run]
# What samples do to the loss, at the steps that a test names; the trainer is as it is.
STAND_IN = f"""
import os, runpy, sys
from dray.train.loop.loop import Loop
from dray.train.parallel.ddp import Ddp
step_, losses, now = Loop._step, Ddp.losses, 0

def stepped(self, step, *rest):
    global now
    now = step + 1
    return step_(self, step, *rest)

def lost(self, batch):
    loss, more = losses(self, batch)
    if os.environ.get("RANK") in os.environ.get("RANKS", "01"):
        if now == int(os.environ.get("NAN_AT", 0)) or now >= int(os.environ.get("NAN_FROM", 1 << 60)):
            loss = loss * float("nan")
        if now == int(os.environ.get("JUMP_AT", 0)):
            loss = loss * 30
    return loss, more

Loop._step, Ddp.losses = stepped, lost
sys.argv = [{str(ROOT / "tests/support/forks.py")!r}]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
FOUR = ("checkpoint.every=4", "checkpoint.keep=9")
SKIP = (*FOUR, "train.on_divergence=skip")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BEGUN]:
    forks, folder, count = Forks([sys.executable, "-c", STAND_IN]), tmp_path_factory.mktemp("my runs"), iter(range(99))
    yield lambda ranks, *words, **more: Run(forks, folder / f"run-{next(count)}", ranks, *words, **more)
    forks.close()


@pytest.fixture(scope="module")
def alone(run: BEGUN) -> Run:
    return run(2).end()


def steps(run: Run) -> list[int]:
    return [event["step"] for event in run.events("step")]


@pytest.mark.parametrize("log_every", [pytest.param(1, marks=pytest.mark.slow), 7])
def test_a_loss_that_is_not_finite_is_named_with_its_rank_and_samples(run: BEGUN, log_every: int) -> None:
    other = run(2, *FOUR, f"train.log_every={log_every}").end(1, NAN_AT="6", RANKS="1")
    assert (
        "the loss is not finite any more\n  wanted: finite numbers\n"
        "  found:  NaN or Inf at step 6, on rank 1; the newest checkpoint is of step 4\n"
        "          samples 44 to 47 of data.train\n"
    ) in other.said()
    (event,) = other.events("divergence")
    assert (event["kind"], event["first_step"], event["last_step"], event["ranks"]) == ("not finite", 6, 6, [1])
    assert event["samples"] == {"data.train": [[44, 47]]}
    found = finish(other.paths, code=1)
    assert found.warnings == [
        "the loss is not finite any more: NaN or Inf at step 6, on rank 1; samples 44 to 47 of data.train"
    ]


@pytest.mark.slow
def test_a_loss_that_jumps_is_a_warning(run: BEGUN, alone: Run) -> None:
    other = run(2, *FOUR).end(JUMP_AT="15")
    (event,) = other.events("divergence")
    assert (event["kind"], event["first_step"], event["last_step"], event["back_to"]) == ("jump", 15, 15, None)
    assert event["samples"] == {"data.train": [[112, 119]]}
    assert other.losses()[:14] == alone.losses()[:14]
    (warning,) = finish(other.paths, code=0).warnings
    assert warning.startswith("the loss jumped at step 15: ")
    assert warning.endswith(" is the median of the lines before; samples 112 to 119 of data.train")


@pytest.mark.parametrize(
    ("what", "at", "back", "strategy"),
    [
        pytest.param("NAN_AT", 6, 4, "ddp", marks=pytest.mark.slow),
        pytest.param("NAN_AT", 6, 4, "fsdp", marks=pytest.mark.slow),
        ("JUMP_AT", 15, 12, "ddp"),
        pytest.param("JUMP_AT", 15, 12, "fsdp", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_back_and_on_without_those_samples(
    run: BEGUN, alone: Run, strategy: str, what: str, at: int, back: int
) -> None:
    words = (*SKIP, f"train.strategy={strategy}")
    other = run(2, *words).end(**{what: str(at)})
    seen = [*range(1, at + (what == "JUMP_AT")), *range(back + 1, at), *range(at + 1, 21)]
    assert steps(other) == seen
    if strategy == "ddp":
        assert other.losses()[: at - 1] == alone.losses()[: at - 1]
    first = len(seen) - (20 - back - 1)  # where it begins again
    assert other.losses()[first : first + at - back - 1] == other.losses()[back : at - 1]
    (event,) = other.events("divergence")
    assert (event["back_to"], event["first_step"]) == (back, at)
    found = json.loads((other.folder / "checkpoints/step-16/manifest.json").read_text())
    assert (found["watch"]["skipped"], found["updates"]) == ([[at, at]], 15)
    assert finish(other.paths, code=0).warnings[0].endswith(f"; the run goes back to step {back} and skips step {at}")
    # The same again, wherever it is cut off: from a checkpoint before those samples, and from one after them.
    for step, env in ((back, {what: str(at)}), (16, {})):
        again = run(2, *words)
        shutil.copytree(other.folder / f"checkpoints/step-{step}", again.folder / f"checkpoints/step-{step}")
        again.end(**env)
        assert again.losses()[-4:] == other.losses()[-4:]
        assert all(torch.equal(weight, other.weights()[name]) for name, weight in again.weights().items())


@pytest.mark.slow
def test_it_goes_back_three_times(run: BEGUN) -> None:
    other = run(2, *SKIP).end(1, NAN_FROM="6")
    assert [(event["first_step"], event["back_to"]) for event in other.events("divergence")] == [
        (6, 4), (7, 4), (8, 4), (9, None),
    ]  # fmt: skip
    assert "NaN or Inf at step 9, on rank 0, 1; the newest checkpoint is of step " in other.said()


def test_without_a_checkpoint_before_it_stops(run: BEGUN) -> None:
    other = run(2, *SKIP).end(1, NAN_AT="3")
    assert "NaN or Inf at step 3, on rank 0, 1; there is no checkpoint yet\n" in other.said()


@pytest.mark.slow
def test_a_stream_goes_back_too(run: BEGUN, tmp_path: Path) -> None:
    from dray.train.data import corpus

    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": text}) + "\n" for text in list(corpus.documents())[:30]))
    words = ("data.streaming=true", f"data.train={text}", f"data.validation={text}")
    other = run(2, *words, *SKIP).end(NAN_AT="6")
    plain = run(2, *words, *FOUR).end()
    assert steps(other) == [1, 2, 3, 4, 5, 5, *range(7, 21)]
    assert other.losses()[:5] == plain.losses()[:5]
    assert other.losses()[5] == plain.losses()[4]
    again = run(2, *words, *SKIP)
    shutil.copytree(other.folder / "checkpoints/step-12", again.folder / "checkpoints/step-12")
    assert again.end().losses() == other.losses()[-8:]


def test_the_sources_of_a_mix_are_named(run: BEGUN, tmp_path: Path) -> None:
    from dray.train.data import corpus

    documents = list(corpus.documents())
    for name, some in (("web", documents[:100]), ("code", [text[::-1] for text in documents[:40]])):
        (tmp_path / f"{name}.txt").write_text("\n".join(some))
    mix = (
        f"data.mix.web.dataset={tmp_path}/web.txt", "data.mix.web.weight=3",
        f"data.mix.code.dataset={tmp_path}/code.txt",
    )  # fmt: skip
    other = run(2, *mix).end(1, NAN_AT="2")
    (event,) = other.events("divergence")
    assert set(event["samples"]) == {"data.mix.web", "data.mix.code"}
    assert sum(last - first + 1 for rows in event["samples"].values() for first, last in rows) == 8
    assert " of data.mix.web; samples " in other.said()
