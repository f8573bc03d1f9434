"""train.profile: some steps of rank 0 are profiled, and a full disk does not end the run."""

from __future__ import annotations

import gzip
import json
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


@pytest.mark.slow
def test_a_run_profiles_its_steps(forks: Forks, tmp_path: Path) -> None:
    run = Run(forks, tmp_path / "run", 2, "train.profile=3-5", steps="steps=6").end()
    trace = json.loads(gzip.decompress((run.paths.folder / "profile.trace.json.gz").read_bytes()))
    linear = [event for event in trace["traceEvents"] if event.get("name") == "aten::addmm"]
    assert len(linear) == 3 * 2 * 4  # steps, layers, linear layers of a GPT-2 block
    assert run.said().count("steps 3 to 5 are profiled") == 1
    profile = json.loads((run.paths.folder / "profile.json").read_text())
    assert (profile["first_step"], profile["last_step"], profile["kind"]) == (3, 5, "operators")
    assert {row["name"]: row["calls"] for row in profile["rows"]}["aten::addmm"] == 24
    report = sections.page(sections.document([gather(run.folder)], "Made by a test."))
    for text in ("operators of steps 3 to 5", "aten::addmm", "attempt-1/profile.trace.json.gz"):
        assert text in report


def profiled(monkeypatch: pytest.MonkeyPatch, folder: Path, asked: str, *, rank: int = 0, first: int = 1) -> None:
    monkeypatch.setenv("RANK", str(rank))
    config: Any = SimpleNamespace(folder=str(folder), steps=9, train=SimpleNamespace(profile=asked))
    profiler = Profiler(config, torch.device("cpu"))
    for step in range(first, 10):
        profiler.before(step)
        torch.ones(4) @ torch.ones(4)
        profiler.after(step)


@pytest.mark.parametrize(
    ("asked", "rank", "first", "said"),
    [
        ("", 0, 1, ""),
        ("2-3", 1, 1, ""),
        ("2-3", 0, 1, "steps 2 to 3 are profiled"),
        ("9-14", 0, 1, "steps 9 to 9 are profiled"),
        ("12-14", 0, 1, ""),
        ("2-3", 0, 3, ""),
    ],
    ids=["not asked", "rank 1", "two steps", "past the end", "after the end", "resumed after the first"],
)
def test_the_steps_that_are_profiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, asked: str, rank: int, first: int, said: str
) -> None:
    profiled(monkeypatch, tmp_path, asked, rank=rank, first=first)
    out = capsys.readouterr().out
    assert out.startswith(said)
    assert bool(out) == bool(said) == (tmp_path / "profile.trace.json.gz").exists()


@pytest.mark.parametrize("method", ["start", "stop", "export_chrome_trace"])
def test_a_full_disk_or_a_defect_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any, method: str
) -> None:
    def fail(profile: Any, *paths: str) -> None:
        for path in paths:
            Path(path).write_bytes(b"half a trace")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "profile", type("Failing", (module.profile,), {method: fail}))
    profiled(monkeypatch, tmp_path, "2-3")
    line = "WARNING: steps 2 to 3 are not profiled: [Errno 28] No space left on device\n"
    assert capsys.readouterr().out == line
    assert not [*tmp_path.iterdir()]


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
