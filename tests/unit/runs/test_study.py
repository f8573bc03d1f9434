"""`dray study scale` and `dray study sweep`: which runs they start, and what they make of what those have left."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dray import process
from dray.cli import study as studies
from dray.contract.findings import ConfigError
from dray.facts import Facts
from dray.runs import study
from dray.runs.prepare import read_recipe, write
from dray.runs.study import Member, Study
from helpers import ROOT

RECIPE = ROOT / "recipes" / "smoke-cpu.toml"
LISTS = "checkpoint.every=[[2,1],[0,10]]"
FACTS = Facts(scheduler="local", nodelist="node1", nodes=1, engine="bare", image=sys.executable)


def ran(runs: Path, name: str, losses: list[float | None], speed: float = 100.0, *words: str) -> None:
    """A run that has trained and ended."""
    _, paths = write(read_recipe(RECIPE, ["nodes=1", *words]), FACTS, runs=runs, run=name)
    events: list[dict[str, Any]] = [
        {"event": "step", "step": step, "loss": loss, "tokens_per_s": 1.0 if step == 1 else speed}
        for step, loss in enumerate(losses, 1)
    ]
    events.append({"event": "eval", "step": len(losses), "loss": 2.5})
    paths.metrics.write_text("".join(json.dumps(event) + "\n" for event in events))
    result = {"run": name, "status": "done", "exit_code": 0, "finished": "", "world_size": 1, "hosts": []}
    paths.result.write_text(json.dumps(result))


def shown(folder: Path, capsys: pytest.CaptureFixture[str], **options: Any) -> tuple[int, str]:
    capsys.readouterr()
    code = studies.show(str(folder), **options)
    return code, capsys.readouterr().out


def made(runs: Path, kind: str, *counts: int) -> Path:
    members = [Member(run=f"r{count}", ranks=count) for count in counts]
    tolerance = study.PARITY if kind == "strong" else None
    made = Study(kind=kind, recipe=str(RECIPE), tolerance=tolerance, reason="it is fp32", members=members)  # type: ignore[arg-type]
    made.save(runs / "s")
    return runs / "s"


class TestTable:
    def test_speed_efficiency_and_losses_that_agree(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = made(tmp_path, "strong", 1, 2, 4)
        ran(tmp_path, "r1", [5.0, 4.0, 3.0], 100)
        ran(tmp_path, "r2", [5.0, 4.0, 3.00001], 180)
        ran(tmp_path, "r4", [5.0, 4.0, 3.0], 200)
        assert shown(folder, capsys) == (
            0,
            f"""\
ranks  state  tokens/s  speedup  efficiency     loss  eval loss  run
    1  done        100     1.00        100%  3.00000    2.50000  r1
    2  done        180     1.80         90%  3.00001    2.50000  r2
    4  done        200     2.00         50%  3.00000    2.50000  r4

losses: 3.3e-06 apart at most, step by step; they agree

again: dray study show {folder}
""",
        )

    def test_losses_that_differ_end_with_1(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = made(tmp_path, "strong", 1, 2)
        ran(tmp_path, "r1", [5.0, 4.0, 3.0])
        ran(tmp_path, "r2", [5.0, 4.001, 3.1])
        code, out = shown(folder, capsys)
        assert code == 1
        wanted = "LOSSES DIFFER by more than 1e-04 (it is fp32):\n"
        assert f"{wanted}2 ranks: step 2: 4.001, but 4 with 1 rank\n" in out
        code, out = shown(folder, capsys, as_json=True)
        found = json.loads(out)
        assert (code, found["kind"], [run["ranks"] for run in found["runs"]]) == (1, "strong", [1, 2])
        assert found["runs"][1]["apart"] == "step 2: 4.001, but 4 with 1 rank"

    def test_a_loss_that_is_not_finite(self, tmp_path: Path, capsys: Any) -> None:
        folder = made(tmp_path, "strong", 1, 2)
        ran(tmp_path, "r1", [5.0, 4.0, 3.0])
        ran(tmp_path, "r2", [5.0, None, None])
        code, out = shown(folder, capsys)
        assert (code, "2 ranks: the loss of a step is not finite\n" in out) == (1, True)

    def test_losses_that_reach_0(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = made(tmp_path, "strong", 1, 2)
        ran(tmp_path, "r1", [5.0, 0.0])
        ran(tmp_path, "r2", [5.0, 0.0])
        code, out = shown(folder, capsys)
        assert (code, "losses: 0.0e+00 apart at most, step by step; they agree\n" in out) == (0, True)

    def test_nothing_is_compared_yet(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = made(tmp_path, "strong", 1, 2)
        ran(tmp_path, "r1", [5.0, 4.0, 3.0])
        code, out = shown(folder, capsys)
        assert (code, "losses: not compared yet; no two runs have logged the same step\n" in out) == (0, True)

    def test_a_damaged_study_without_its_numbers(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = made(tmp_path, "weak", 0)
        ran(tmp_path, "r0", [5.0, 4.0])
        assert shown(folder, capsys)[0] == 0

    def test_what_need_not_agree(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = made(tmp_path, "weak", 1, 2)
        ran(tmp_path, "r1", [5.0, 4.0])
        ran(tmp_path, "r2", [5.0, 4.1])
        code, out = shown(folder, capsys)
        assert (code, "losses" in out) == (0, False)

    def test_runs_that_wait_fail_or_are_damaged(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = made(tmp_path, "strong", 1, 2, 4, 8)
        ran(tmp_path, "r1", [5.0])
        (tmp_path / "r2" / "attempt-1").mkdir(parents=True)
        (tmp_path / "r4" / "attempt-1").mkdir(parents=True)
        (tmp_path / "r4/attempt-1/metrics.jsonl").write_bytes(b'\0\n{"event": "step", "step": "x", "loss": NaN}\n[')
        (tmp_path / "r4/attempt-1/result.json").write_text("{")
        (tmp_path / "r4/attempt-1/plan.json").mkdir()
        code, out = shown(folder, capsys)
        states = [line.split()[:2] for line in out.splitlines()[1:5]]
        assert (code, states) == (0, [["1", "done"], ["2", "no"], ["4", "no"], ["8", "no"]])
        result = json.loads((tmp_path / "r1/attempt-1/result.json").read_text()) | {"status": "failed"}
        (tmp_path / "r1/attempt-1/result.json").write_text(json.dumps(result))
        assert shown(folder, capsys)[0] == 1

    @pytest.mark.parametrize(
        ("attempts", "speed"),
        [
            ([[1.0]], 1.0),
            ([[1.0, 10.0, 30.0]], 20.0),
            ([[1.0, 10.0, 10.0, 10.0], [2.0, 20.0]], 20.0),
            ([[1.0, None, 20.0]], 20.0),
            ([[None, None]], None),
        ],
    )
    def test_the_speed_of_the_last_attempt(
        self, attempts: list[list[float | None]], speed: float | None, tmp_path: Path
    ) -> None:
        folder = made(tmp_path, "strong", 1)
        for speeds in attempts:
            _, paths = write(read_recipe(RECIPE, ["nodes=1"]), FACTS, runs=tmp_path, run="r1")
            events = [
                {"event": "step", "step": step, "loss": 1.0, "tokens_per_s": one} for step, one in enumerate(speeds, 1)
            ]
            paths.metrics.write_text("".join(json.dumps(event) + "\n" for event in events))
        (row,) = study.look(folder, study.load(folder))
        assert row.tokens_per_s == speed

    def test_metrics_that_cannot_be_read(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        folder = made(tmp_path, "strong", 1, 2)
        for name in ("r1", "r2"):
            ran(tmp_path, name, [5.0, 4.0])
        metrics = tmp_path / "r2/attempt-1/metrics.jsonl"
        metrics.unlink()
        metrics.mkdir()
        code, out = shown(folder, capsys)
        assert (code, f"\n2 ranks: {metrics} cannot be read: a folder\n" in out) == (0, True), out

    def test_a_first_candidate_whose_metrics_cannot_be_read(self, tmp_path: Path) -> None:
        losses = {"001": "full", "002": "chunked"}
        members = [Member(run=run, values={"train.loss": loss}) for run, loss in losses.items()]
        found = Study(kind="tune", recipe=str(RECIPE), members=members)
        for member in members:
            ran(tmp_path, member.run, [5.0, 4.0])
        metrics = tmp_path / "001/attempt-1/metrics.jsonl"
        metrics.unlink()
        metrics.mkdir()
        best = study.best_row(study.look(tmp_path, found))
        assert best
        assert best.run == "002"

    @pytest.mark.parametrize(
        ("content", "problem"),
        [
            ('{"version": 1, "kind": "x"}', "the study is damaged"),
            ('{"version": 1, "kind": "weak", "recipe": "", "members": [{"run": "../x"}]}', "the study is damaged"),
        ],
    )
    def test_a_damaged_study(self, content: str, problem: str, tmp_path: Path) -> None:
        (tmp_path / "study.json").write_text(content)
        with pytest.raises(ConfigError, match=problem):
            study.load(tmp_path)

    def test_a_folder_without_a_study(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError) as refused:
            study.load(tmp_path)
        assert refused.value.finding.fix == "dray study show FOLDER, with study.json in this folder"

    def test_a_study_by_the_beginning_of_its_name(self, tmp_path: Path) -> None:
        for name in ("20-a", "20-b"):
            Study(kind="sweep", recipe="x").save(tmp_path / name)
        (tmp_path / "20-run").mkdir()
        assert study.find("20-a", tmp_path) == tmp_path / "20-a"
        for named, problem in (("20", "several studies begin with this name"), ("30", "there is no such study")):
            with pytest.raises(ConfigError, match=problem):
                study.find(named, tmp_path)

    def test_a_study_beside_a_folder_of_its_name(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        Study(kind="sweep", recipe="x").save(tmp_path / "runs" / "20-a")
        (tmp_path / "20-a").mkdir()
        monkeypatch.chdir(tmp_path)
        assert study.find("20-a", tmp_path / "runs") == tmp_path / "runs" / "20-a"
        monkeypatch.chdir(tmp_path / "runs")
        assert study.find("20-a", tmp_path) == tmp_path / "runs" / "20-a"


class TestStart:
    @pytest.fixture
    def asked(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
        """The command lines of all that would be started."""
        found: list[list[str]] = []

        def run(argv: list[str]) -> int:
            argv = argv[argv.index("run") + 1 :]
            found.append(argv)
            ran(tmp_path, argv[0].partition("=")[2], [5.0])
            return 0

        monkeypatch.setattr(process, "in_front", run)
        monkeypatch.setenv("PATH", "/nowhere")
        monkeypatch.setattr(study, "new_id", lambda name: f"20-{name}")
        return found

    def test_strong_and_weak(self, asked: list[list[str]], tmp_path: Path) -> None:
        studies.scale(RECIPE, "2,1", ["train.steps=40"], runs=tmp_path)
        where = [f"--runs={tmp_path}", str(RECIPE), "train.steps=40"]
        assert asked == [
            ["--run=20-scale-smoke-cpu-1", "--nodes=1", "--ranks=1", *where],
            ["--run=20-scale-smoke-cpu-2", "--nodes=1", "--ranks=2", *where],
        ]
        assert study.load(tmp_path / "20-scale-smoke-cpu").tolerance == study.PARITY
        asked.clear()
        studies.scale(RECIPE, "2,8", per_node=4, weak=True, runs=tmp_path / "weak")
        assert [argv[1:3] + argv[-1:] for argv in asked] == [
            ["--nodes=1", "--ranks=2", "batch.global_size=16"],
            ["--nodes=2", "--ranks=4", "batch.global_size=64"],
        ]

    @pytest.mark.parametrize(("code", "begun", "ended_with"), [(137, 2, 0), (130, 1, 130), (75, 1, 75), (1, 2, 0)])
    def test_a_run_that_fails_leaves_the_others_and_one_that_is_stopped_ends_them(
        self, code: int, begun: int, ended_with: int, asked: list[list[str]], tmp_path: Path,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:  # fmt: skip
        def run(argv: list[str]) -> int:
            asked.append(argv)
            (tmp_path / argv[argv.index("run") + 1].partition("=")[2]).mkdir()
            return code

        monkeypatch.setattr(process, "in_front", run)
        ended = studies.scale(RECIPE, "1,2", runs=tmp_path)
        assert (len(asked), ended) == (begun, ended_with)

    def test_no_run_goes_on_from_another(self, asked: list[list[str]], tmp_path: Path) -> None:
        studies.scale(RECIPE, "1,2", ["checkpoint.folder=/c/"], runs=tmp_path)
        assert [argv[-1] for argv in asked] == [f"checkpoint.folder=/c/20-scale-smoke-cpu-{ranks}" for ranks in (1, 2)]

    def test_a_sweep_is_all_combinations(self, asked: list[list[str]], tmp_path: Path) -> None:
        settings = ["train.lr=1e-3,4e-3", "train.steps=40", "train.betas=[0.9,0.95]", LISTS]
        studies.sweep(RECIPE, settings, runs=tmp_path)
        assert [argv[-4:] for argv in asked] == [
            ["train.steps=40", "train.betas=[0.9,0.95]", LISTS, "train.lr=1e-3"],
            ["train.steps=40", "train.betas=[0.9,0.95]", LISTS, "train.lr=4e-3"],
        ]

    @pytest.mark.parametrize(
        ("ranks", "problem"),
        [
            ("", "there is nothing to compare"),
            ("1,x", "there is nothing to compare"),
            ("0,1", "there is nothing to compare"),
            ("1,3", "global batch 16 is not divisible by 3 ranks"),
            ("4,6", "6 ranks do not fill whole nodes of 4"),
        ],
    )
    def test_what_is_wrong_is_said_before_one_begins(
        self, ranks: str, problem: str, asked: list[list[str]], tmp_path: Path
    ) -> None:
        with pytest.raises(ConfigError, match=problem):
            studies.scale(RECIPE, ranks, per_node=4, runs=tmp_path / "runs")
        assert (asked, (tmp_path / "runs").exists()) == ([], False)

    @pytest.mark.parametrize("settings", [[], ["train.lr=1e-3"], ["train.lr=1e-3,x"]])
    def test_a_sweep_of_nothing(self, settings: list[str], asked: list[list[str]], tmp_path: Path) -> None:
        with pytest.raises(ConfigError):
            studies.sweep(RECIPE, settings, runs=tmp_path / "runs")
        assert (asked, (tmp_path / "runs").exists()) == ([], False)


@pytest.mark.seconds
def test_runs_of_a_command_one_after_another_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """For real, without a cluster."""
    recipe = tmp_path / "mine.toml"
    recipe.write_text('name = "mine"\nlauncher = "python"\n[preflight]\nwhen = "never"\n[command]\nargv = ["true"]\n')
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setattr(sys, "argv", ["dray.py"])
    code = studies.scale(recipe, "1,2", ["image=cpu"], runs=tmp_path / "runs")
    out = capfd.readouterr().out
    assert (code, out.count("done: exit code 0")) == (0, 2)
    (folder,) = (path.parent for path in (tmp_path / "runs").glob("*/study.json"))
    rows = study.look(folder, study.load(folder))
    assert [(row.ranks, row.state, row.apart) for row in rows] == [(1, "done", ""), (2, "done", "")]


ALLOCATION = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NUM_NODES": "1"}


@pytest.mark.parametrize(
    ("line", "begun", "ended_with"),
    [
        ("true", 2, 0),
        ("exit 1", 2, 0),
        ("kill -TERM $PPID; exec sleep 60", 1, 143),
        ("kill -INT $PPID; exit 1", 1, 130),
        ("kill -HUP $PPID", 1, 129),
        ("exit 75", 1, 75),
    ],
)
def test_inside_an_salloc_each_run_is_a_process_of_its_own(
    line: str, begun: int, ended_with: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batch script takes that one's place, and its Ctrl-C and exit code end the study or do not."""
    for name in ("ENVIRONMENT", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ALLOCATION.items():
        monkeypatch.setenv(name, value)
    script = tmp_path / "dray"
    runs, calls = tmp_path / "runs", tmp_path / "calls"
    script.write_text(f'#!/bin/bash\necho "$@" >>{calls}\nmkdir {runs}/${{2#*=}}\n{line}\n')
    script.chmod(0o755)
    monkeypatch.setattr(studies, "program", lambda: [str(script)])
    monkeypatch.setattr(study, "new_id", lambda name: f"20-{name}")
    code = studies.scale(RECIPE, "1,2", runs=runs)
    where = f"--runs={runs} {RECIPE}"
    assert (calls.read_text().splitlines(), code) == (
        [f"run --run=20-scale-smoke-cpu-{n} --nodes=1 --ranks={n} {where}" for n in (1, 2)][:begun],
        ended_with,
    )


def test_inside_an_salloc_what_is_refused_ends_the_study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ENVIRONMENT", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ALLOCATION.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(studies, "program", lambda: ["bash", "-c", "exit 78"])
    code = studies.scale(RECIPE, "1,2", runs=tmp_path / "runs")
    assert code == 78
