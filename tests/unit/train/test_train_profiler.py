"""train.profile: some steps of rank 0 are profiled, and no failure of it ends the run."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from torch._C._autograd import DeviceType  # noqa: E402

from dray.runs.report import sections  # noqa: E402
from dray.runs.report.data import gather  # noqa: E402
from dray.train.loop import profiler as module  # noqa: E402
from dray.train.loop.profiler import Profiler, table  # noqa: E402
from trainings import Forks, Run  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    forks.close()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("*profile*")}


@pytest.mark.slow
def test_a_run_profiles_steps_and_a_resume_behind_them_says_that_it_does_not(forks: Forks, tmp_path: Path) -> None:
    words = ("train.profile=3-5", "checkpoint.every=3", "checkpoint.keep=9")
    run = Run(forks, tmp_path / "run", 2, *words, steps="steps=6").end()
    folder = run.paths.folder
    assert names(folder) == {"profile.json", "profile.trace.json.gz"}
    profile = json.loads((folder / "profile.json").read_text())
    assert (profile["first_step"], profile["last_step"], profile["rank"]) == (3, 5, 0)
    assert profile["kind"] == "operators"
    assert len(profile["rows"]) == 20
    calls = {row["name"]: row["calls"] for row in profile["rows"]}
    assert calls["aten::addmm"] == 3 * 2 * 4  # steps, layers, linear layers of a GPT-2 block
    assert 0.5 < sum(row["share"] for row in profile["rows"]) <= 1.001
    trace = json.loads(gzip.decompress((folder / "profile.trace.json.gz").read_bytes()))
    assert {event.get("name") for event in trace["traceEvents"]} > {"aten::addmm"}
    assert run.said().count("steps 3 to 5 are profiled") == 1
    report = sections.page(sections.document([gather(run.folder)], "Made by a test."))
    assert "operators of steps 3 to 5" in report
    assert "aten::addmm" in report
    assert "attempt-1/profile.trace.json.gz" in report

    middle = Run(forks, tmp_path / "middle", 2, *words, steps="steps=6")
    shutil.copytree(run.folder / "checkpoints/step-3", middle.folder / "checkpoints/step-3")
    middle.end()
    assert "steps 4 to 5 are profiled" in middle.said()

    behind = Run(forks, tmp_path / "behind", 2, "train.profile=1-3", steps="steps=6")
    shutil.copytree(run.folder / "checkpoints/step-3", behind.folder / "checkpoints/step-3")
    behind.end()
    line = "nothing is profiled: train.profile = 1-3, and the run goes on after step 3"
    assert behind.said().count(line) == 1
    assert names(behind.paths.folder) == set()


def begun(monkeypatch: pytest.MonkeyPatch, folder: Path, asked: str, steps: int = 9, rank: int = 0) -> Profiler:
    monkeypatch.setenv("RANK", str(rank))
    config: Any = SimpleNamespace(folder=str(folder), steps=steps, train=SimpleNamespace(profile=asked))
    return Profiler(config, torch.device("cpu"))


def taken(profiler: Profiler, first: int, last: int) -> None:
    for step in range(first, last + 1):
        profiler.before(step)
        torch.ones(4) @ torch.ones(4)
        profiler.after(step)


def test_only_rank_0_profiles_and_only_where_it_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr(module, "profile", None)
    for asked, rank in (("", 0), ("2-3", 1)):
        profiler = begun(monkeypatch, tmp_path, asked, rank=rank)
        profiler.begin(0)
        taken(profiler, 1, 9)
        profiler.close()
    assert capsys.readouterr().out == ""


def test_a_run_of_fewer_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    """With train.epochs the number of steps is known only now."""
    profiler = begun(monkeypatch, tmp_path, "12-14")
    profiler.begin(0)
    taken(profiler, 1, 9)
    assert capsys.readouterr().out == "nothing is profiled: train.profile = 12-14, and the run has 9 steps\n"
    profiler = begun(monkeypatch, tmp_path, "9-14")
    profiler.begin(0)
    taken(profiler, 1, 9)
    profiler.close()
    assert "steps 9 to 9 are profiled" in capsys.readouterr().out


def test_a_return_to_a_checkpoint_profiles_the_steps_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    profiler = begun(monkeypatch, tmp_path, "3-5")
    profiler.begin(0)
    taken(profiler, 1, 4)
    profiler.begin(2)
    taken(profiler, 3, 9)
    profiler.close()
    assert capsys.readouterr().out == f"steps 3 to 5 are profiled: {tmp_path}/profile.trace.json.gz\n"
    rows = {row["name"]: row["calls"] for row in json.loads((tmp_path / "profile.json").read_text())["rows"]}
    assert rows["aten::dot"] == 3


@pytest.mark.parametrize("failing", ["start", "stop", "export_chrome_trace", "key_averages"])
def test_a_failure_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, failing: str) -> None:
    class Failing(module.profile):
        pass

    def fail(self: Any, *_: object) -> None:
        if failing == "stop":
            module_stop(self)
        raise OSError(28, "No space left on device")

    module_stop = module.profile.stop
    setattr(Failing, failing, fail)
    monkeypatch.setattr(module, "profile", Failing)
    profiler = begun(monkeypatch, tmp_path, "2-3")
    profiler.begin(0)
    taken(profiler, 1, 9)
    profiler.close()
    line = "WARNING: steps 2 to 3 are not profiled: [Errno 28] No space left on device\n"
    assert capsys.readouterr().out == line
    assert not (tmp_path / "profile.json").exists()
    assert not [*tmp_path.glob("part-*")]


def event(key: str, device: DeviceType, *, count: int = 1, cpu: float = 0, gpu: float = 0, range_: bool = False) -> Any:
    return SimpleNamespace(
        key=key, device_type=device, count=count, self_cpu_time_total=cpu, self_device_time_total=gpu,
        is_user_annotation=range_,
    )  # fmt: skip


def test_kernels_come_before_operators_and_named_ranges_do_not_count() -> None:
    events = [
        event("aten::mm", DeviceType.CPU, cpu=900, gpu=4000),
        event("gemm", DeviceType.CUDA, count=2, gpu=3000),
        event("copy", DeviceType.CUDA, gpu=1000),
        event("a range", DeviceType.CUDA, gpu=9000, range_=True),
    ]
    assert table(events) == {
        "kind": "kernels", "total_ms": 4.0,
        "rows": [
            {"name": "gemm", "calls": 2, "ms": 3.0, "share": 0.75},
            {"name": "copy", "calls": 1, "ms": 1.0, "share": 0.25},
        ],
    }  # fmt: skip
    assert table(events[:1])["rows"] == [{"name": "aten::mm", "calls": 1, "ms": 0.9, "share": 1.0}]
    assert table([]) == {"kind": "operators", "total_ms": 0.0, "rows": []}
