"""`dray study tune`: its runs, its table and the recipe that it writes. Most runs are planted, by support/tuned.py."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dray import cli
from dray.cli import study as verb
from dray.config.recipe import Recipe
from dray.contract import exit_codes
from dray.contract.findings import ConfigError
from dray.runs import study
from dray.runs.prepare import read_recipe
from grids import CAUSAL, MASKED, among_the_best
from helpers import ROOT

pytestmark = pytest.mark.torch

TINY = """\
name = "tiny"
ranks_per_node = 2

[env]
OMP_NUM_THREADS = "1"

[batch]
global_size = 16
per_device = 4

[data]
sequence_length = 32

[model.config]
n_layer = 2
n_embd = 32
n_head = 2
n_positions = 32
resid_pdrop = 0.0
embd_pdrop = 0.0
attn_pdrop = 0.0

[train]
steps = 100
lr = 1e-3
warmup_steps = 20
precision = "fp32"
"""
WHOLE = ("SLURM_JOB_ID", "SLURM_JOB_NODELIST", "SLURM_JOB_NUM_NODES")
AXES = ("train.strategy=ddp,fsdp", "batch.per_device=1,2,4,8")


class Desk:
    """A folder with a recipe, and planted runs."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.runs, self.recipe = folder, folder / "runs", folder / "tiny.toml"
        self.recipe.write_text(TINY)
        self.plant()

    def plant(self, **planted: dict[str, Any]) -> None:
        (self.folder / "planted.json").write_text(json.dumps(planted))

    def calls(self) -> list[str]:
        calls = self.folder / "calls"
        return calls.read_text().splitlines() if calls.exists() else []

    def study(self) -> Path:
        (found,) = self.runs.glob("*/study.json")
        return found.parent


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    for name in [*WHOLE, "ENVIRONMENT", "SLURM_STEP_ID", "SLURM_ARRAY_TASK_ID", "DRAY_SITE"]:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PLANTED", str(tmp_path / "planted.json"))
    monkeypatch.setenv("DRAY_RUNS", str(tmp_path / "runs"))
    monkeypatch.setattr(verb, "program", lambda: [sys.executable, str(ROOT / "tests/support/tuned.py")])
    monkeypatch.setattr(verb, "new_id", lambda name: f"20-{name}")
    return Desk(tmp_path)


@pytest.fixture
def dray(capfd: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Types a line; the exit code and both streams."""

    def typed(*words: object) -> tuple[int, str, str]:
        capfd.readouterr()
        verbs = ["study"] if words[:1] == ("show",) else ["study", "tune"]
        code = cli._code([*verbs, *map(str, words)])
        return code, *capfd.readouterr()

    return typed


PLANTED = {
    "speed": {"batch.per_device=8": 1.2, "batch.per_device=2": 0.8, "batch.per_device=1": 0.5,
              "train.strategy=fsdp": 1.1, "train.strategy=fsdp batch.per_device=8": 0.7},
    "memory": {"batch.per_device=8": 2.5, "train.strategy=fsdp": 0.5},
}  # fmt: skip


class TestTable:
    def test_the_whole_of_a_search(self, desk: Desk, dray: Any) -> None:
        desk.plant(**PLANTED)
        code, out, err = dray(desk.recipe, *AXES)
        folder = desk.runs / "20-tune-tiny"
        assert (code, err) == (0, "")
        assert (
            out
            == f"""\
{folder}

== the recipe's own
the recipe's own: 1,000 tokens/s +- 2%, 1.00 GB

== batch.per_device=8
batch.per_device=8: 1,200 tokens/s +- 2%, 2.50 GB

== batch.per_device=8 train.strategy=fsdp
batch.per_device=8 train.strategy=fsdp: 924 tokens/s +- 2%, 1.25 GB

settings                                state  tokens/s  +-  memory GB     loss  run
batch.per_device=8                      done      1,200  2%       2.50  3.70000  002
the recipe's own                        done      1,000  2%       1.00  3.70000  001
batch.per_device=8 train.strategy=fsdp  done        924  2%       1.25  3.70000  003

losses: 0.0e+00 apart at most, step by step; they agree
best: batch.per_device=8: 1,200 tokens/s +- 2%, 2.50 GB

again: dray study show {folder}
dray run {folder}/best.toml
"""
        )

    def test_all_of_them_and_the_search_find_the_same(self, desk: Desk, dray: Any) -> None:
        desk.plant(**PLANTED)
        code, out, _ = dray(desk.recipe, *AXES, "--all")
        assert (code, "best: batch.per_device=8: 1,200 tokens/s" in out) == (0, True)
        folder = desk.study()
        options = f"--nodes=1 --runs={folder} {folder}/short.toml"
        calls = [call.partition(" batch.")[0].partition(" train.")[0] for call in desk.calls()]
        assert calls == [f"run --run={n:03} {options}" for n in range(1, 9)]

    def test_what_a_candidate_runs_and_that_it_trains_the_same(self, desk: Desk, dray: Any) -> None:
        desk.recipe.write_text(
            TINY.replace("steps = 100", 'epochs = 2\neval_every = 5\nprofile = "10-12"\ntrackers = ["wandb"]')
            + '[checkpoint]\nevery = 5\nfolder = "/c"\n[evaluate.more]\ndataset = "builtin"\n'
        )
        dray(desk.recipe, "batch.per_device=2,4", "--steps=5", "max_requeues=2")
        own = read_recipe(desk.recipe)
        recipes = []
        for call in desk.calls():
            file, *settings = (word for word in call.split()[1:] if not word.startswith("--"))
            recipes.append(read_recipe(Path(file), settings))
        changed = {"steps", "epochs", "warmup_steps", "log_every", "eval_every", "trackers", "profile", "loss",
                   "compile", "strategy", "activation_checkpointing", "offload"}  # fmt: skip
        for made, rows in zip(recipes, (4, 2), strict=True):
            assert made.train
            assert own.train
            assert made.batch
            assert (made.batch.global_size, made.batch.per_device, made.batch.gradient_accumulation_steps) == (
                16, rows, 8 // rows
            )  # fmt: skip
            assert made.train.model_dump(exclude=changed) == own.train.model_dump(exclude=changed)
            assert (made.train.steps, made.train.warmup_steps, made.train.log_every) == (8, 8, 1)
            assert (made.train.strategy, made.train.loss) == (own.train.strategy, "full")
            assert (made.checkpoint.every, made.checkpoint.folder, made.checkpoint.final) == ((), "", False)
            assert (made.evaluate, made.max_requeues, made.data.max_eval_samples) == ({}, 0, 1)
            assert made.model == own.model
        assert [made.preflight.when for made in recipes] == [own.preflight.when, "never"]

    @pytest.mark.parametrize(
        ("planted", "told"),
        [
            ({"loss": {"train.loss=chunked": 2e-4}},
             "LOSSES DIFFER by more than 1e-04 (fp32):\ntrain.loss=chunked: step 3: 4.701, but 4.7 with the recipe's "
             "own\nbest: the recipe's own: 1,000"),
            ({"loss": {"train.loss=chunked": 5e-5}}, "they agree\nbest: train.loss=chunked: 3,001"),
            ({"fail": {"train.loss=chunked": [137, "signal 9 (SIGKILL)", "out of memory on the host"]}},
             "\ntrain.loss=chunked: signal 9 (SIGKILL)\nbest: the recipe's own: 1,000"),
            ({"refuse": {"train.loss=chunked": "the disk is full"}},
             "\ntrain.loss=chunked: dray run refused it\nbest: the recipe's own: 1,000"),
            ({"loss": {"train.loss=full": "nan"}},
             "\nthe recipe's own: the loss of a step is not finite\nbest: train.loss=chunked: 3,001"),
        ],
    )  # fmt: skip
    def test_a_candidate_that_fails_or_has_other_losses(
        self, planted: dict[str, Any], told: str, desk: Desk, dray: Any
    ) -> None:
        desk.plant(**{"speed": {"train.loss=chunked": 3.0}, **planted})
        code, out, _ = dray(desk.recipe, "train.loss=full,chunked", "--all")
        assert (code, told in out) == (0, True), out

    def test_a_refused_candidate_takes_no_figures_of_another(self, desk: Desk, dray: Any) -> None:
        desk.plant(refuse={"batch.per_device=8": "the model does not fit"}, speed={"batch.per_device=2": 2.0})
        code, out, _ = dray(desk.recipe, "batch.per_device=8,2", "--all")
        assert (code, "\nbest: batch.per_device=2: 2,001 tokens/s" in out) == (0, True), out
        rows = study.look(desk.study(), study.load(desk.study()))
        assert [(row.run, row.state, row.tokens_per_s is None) for row in rows] == [
            ("001", "done", False), ("002", "done", False), ("003", "left out", True),
        ]  # fmt: skip

    @pytest.mark.slow
    @pytest.mark.seconds
    def test_a_candidate_that_hangs(self, desk: Desk, dray: Any) -> None:
        marker = desk.folder / "hangs"
        desk.plant(hang={"train.loss=chunked": str(marker)})
        code, out, _ = dray(desk.recipe, "train.loss=full,chunked", "--all", "--limit=5")
        assert (code, "\ntrain.loss=chunked: it did not end in time (--limit)\n" in out) == (0, True)
        with pytest.raises(ProcessLookupError):
            os.kill(int(marker.read_text()), 0)

    def test_it_gives_up_after_eight_that_fail(self, desk: Desk, dray: Any) -> None:
        desk.plant(fail={"train.precision=fp32": [1, "it broke", "unknown"]})
        code, out, err = dray(desk.recipe, "train.loss=full,chunked", *AXES)
        assert (code, len(desk.calls()), err) == (1, 8, "")
        assert out.endswith(f": it broke\n\nagain: dray study show {desk.study()}\n")

    def test_json(self, desk: Desk, dray: Any) -> None:
        desk.plant(**PLANTED)
        dray(desk.recipe, "batch.per_device=1,2,4,8")
        code, out, _ = dray("show", "20-tune", "--json")
        found = json.loads(out)
        assert (code, found["study"], found["best"]) == (0, str(desk.study()), "002")
        assert [row["values"]["batch.per_device"] for row in found["runs"]] == [4, 8]


class TestOut:
    def test_the_best_is_a_recipe(self, desk: Desk, dray: Any) -> None:
        desk.plant(**PLANTED)
        code, shown, _ = dray(desk.recipe, *AXES, "train.lr=2e-3")
        out = desk.study() / "best.toml"
        assert (code, shown.splitlines()[-1]) == (0, f"dray run {out}")
        made, own = read_recipe(out), read_recipe(desk.recipe, ["train.lr=2e-3"])
        assert made.batch
        assert made.train
        assert own.train
        assert (made.batch.per_device, made.batch.gradient_accumulation_steps) == (8, None)
        assert made.train.model_dump(exclude={"loss", "compile"}) == own.train.model_dump(exclude={"loss", "compile"})
        assert (made.train.loss, made.train.compile) == ("full", False)
        assert made.model_dump(exclude={"batch", "train"}) == own.model_dump(exclude={"batch", "train"})

    def test_a_scale_is_written_as_what_it_sets(self, desk: Desk, dray: Any) -> None:
        desk.recipe.write_text(TINY.replace("ranks", 'scale = "tiny"\nranks', 1) + "[tiny.batch]\nper_device = 2\n")
        desk.plant(speed={"batch.per_device=8": 2.0})
        dray(desk.recipe, "batch.per_device=4,8")
        made = tomllib.loads((desk.study() / "best.toml").read_text())
        assert (made["batch"], "tiny" in made, "scale" in made) == ({"global_size": 16, "per_device": 8}, False, False)

    def test_files_that_the_recipe_names_come_along(self, desk: Desk, dray: Any, tmp_path: Path) -> None:
        (tmp_path / "mapped.py").write_text("def up(row):\n    return {'text': row['text'].upper()}\n")
        (tmp_path / "texts.txt").write_text("a b c\n" * 40)
        settings = ["data.train=texts.txt", "data.map=mapped.py:up"]
        assert dray(desk.recipe, *settings, "train.loss=full,chunked")[0] == 0
        made, own = read_recipe(desk.study() / "best.toml"), read_recipe(desk.recipe, settings)
        assert made.data == own.data


class TestWrong:
    @pytest.mark.parametrize(
        ("words", "problem"),
        [
            (["batch.global_size=7"], "global batch 7 is not divisible by 2 ranks"),
            (["batch.per_device=3,4"], "batch.per_device cannot have this value"),
            (["train.strategy=ddp,fdsp"], "train.strategy cannot have this value"),
            (["train.lr=1e-3,4e-3"], "fix:    dray study sweep {recipe} train.lr=1e-3,4e-3"),
            (["train.stepz=3"], "unknown key"),
            (["--nodes=0"], "--nodes"),
            (["--steps=1"], "--steps"),
        ],
    )
    def test_it_is_said_before_anything_begins(self, words: list[str], problem: str, desk: Desk, dray: Any) -> None:
        code, _, err = dray(desk.recipe, *words)
        assert (code, problem.format(recipe=desk.recipe) in err, desk.calls(), desk.runs.exists()) == (
            78,
            True,
            [],
            False,
        ), err

    def test_a_command_and_a_recipe_without_train(self, desk: Desk, dray: Any) -> None:
        desk.recipe.write_text('name = "mine"\n[command]\nargv = ["true"]\n')
        assert "dray study tune is for dray's own trainer" in dray(desk.recipe)[2]
        desk.recipe.write_text('name = "mine"\n')
        assert "expected [batch] and [train], or [command]" in dray(desk.recipe)[2]
        assert "RECIPE" in dray()[2]
        assert "does not exist" in dray(desk.folder / "no.toml")[2]

    def test_no_candidate_fits(self, desk: Desk, dray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        small = study.local.facts

        def facts(*words: Any, **options: Any) -> Any:
            return small(*words, **options).model_copy(update={"gpu_memory_gb": 0.1})

        monkeypatch.setattr(study.local, "facts", facts)
        large = ["image=cuda", "model.config.n_embd=8192", "model.config.n_layer=96", "--ranks=2"]
        code, out, _ = dray(desk.recipe, *large, *AXES)
        assert (code, desk.calls()) == (1, [])
        assert "the recipe's own: the model does not fit" in out

    def test_a_table_that_is_not_there(self, desk: Desk, dray: Any) -> None:
        assert "there is no such study" in dray("show", "20-x")[2]


def test_ctrl_c_keeps_the_table_and_leaves_no_process(desk: Desk) -> None:
    marker = desk.folder / "hangs"
    desk.plant(hang={"train.loss=chunked": str(marker)})
    code = (
        "import sys; from dray.cli import study, main; "
        f"study.program = lambda: [sys.executable, {str(ROOT / 'tests/support/tuned.py')!r}]; main()"
    )
    argv = [sys.executable, "-c", code, "study", "tune", str(desk.recipe), "train.loss=full,chunked"]
    running = subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    deadline = time.monotonic() + 120
    while not (marker.exists() and marker.read_text()):
        assert time.monotonic() < deadline
        assert running.poll() is None, running.communicate()
        time.sleep(0.05)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal's Ctrl-C does
    out, _ = running.communicate(timeout=120)
    assert running.returncode == 130
    assert "best: the recipe's own: 1,000 tokens/s" in out
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)
    assert [row.state for row in study.look(desk.study(), study.load(desk.study()))] == ["done", "no result"]


class TestPlace:
    def test_each_candidate_takes_the_allocation(self, desk: Desk, dray: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """Also in a batch script, where `dray run` itself would be on this machine."""
        env = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2", "ENVIRONMENT": "BATCH"}
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        code, _, _ = dray(desk.recipe, "train.loss=full,chunked", "--site=generic")
        assert code == 0
        folder = desk.study()
        assert desk.calls()[0].startswith(f"run --run=001 --site=generic --runs={folder} {folder}/short.toml ")
        assert (desk.folder / "environment").read_text() == "None\n" * 2

    def test_in_an_allocation_it_has_the_jobs_nodes_and_gpus(self) -> None:
        recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", ["image=cuda"])
        env = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2",
               "SLURM_GPUS_PER_NODE": "a100:4", "ENVIRONMENT": "BATCH"}  # fmt: skip
        found = study.tuning_place(recipe, env)
        facts = found.facts
        assert (facts.scheduler, facts.nodelist, facts.nodes, facts.gpus_per_node) == ("slurm", "n[1-2]", 2, 4)
        assert (facts.login, facts.job, found.nodes, found.gpus) == ("", 17, None, 0)
        first = found.first(recipe)  # its own micro-batch of 4 is too large for 8 ranks
        assert (first.world.size, first.batch and first.batch.per_device) == (8, 2)
        with pytest.raises(ConfigError, match="a run in an allocation uses all of its nodes"):
            study.tuning_place(recipe, env, nodes=1)

    def test_what_the_memory_model_leaves_out(self) -> None:
        large = ["image=cuda", "model.config.n_embd=4096", "model.config.n_layer=32", "batch.global_size=32"]
        recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", large)
        env = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2",
               "SLURM_GPUS_PER_NODE": "4"}  # fmt: skip
        found = study.tuning_place(recipe, env)
        found = replace(found, facts=found.facts.model_copy(update={"gpu_memory_gb": 40}))
        with pytest.raises(ConfigError, match="the model does not fit: 6,") as refused:
            found.plan(recipe).refuse()
        assert refused.value.finding.wanted == "at most 40 GB on each GPU (--gpu-memory)"
        table = recipe.model_dump(mode="json", exclude_unset=True)
        table["train"]["strategy"] = "fsdp"
        found.plan(Recipe.model_validate_json(json.dumps(table))).refuse()


@pytest.mark.slow
def test_a_real_search_on_cpus(tmp_path: Path) -> None:
    """Two runs of two ranks: another micro-batch trains the same, and no model is left."""
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(TINY.replace("per_device = 4", "per_device = 8"))
    argv = [
        sys.executable,
        "-m",
        "dray",
        "study",
        "tune",
        str(recipe),
        "batch.per_device=4,8",
        "--steps=5",
    ]
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "DRAY_"))}
    ended = subprocess.run([*argv, f"--runs={tmp_path}/runs"], env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == exit_codes.DONE, ended.stdout + ended.stderr
    (path,) = (tmp_path / "runs").glob("*/study.json")
    rows = study.look(path.parent, study.load(path.parent))
    assert [(row.state, len(row.losses)) for row in rows] == [("done", 8)] * 2
    best = study.best_row(rows)
    assert best
    assert read_recipe(path.with_name("best.toml")).batch.per_device == best.values["batch.per_device"]  # type: ignore[union-attr]
    assert not list(path.parent.glob("*/checkpoints/*"))


@pytest.mark.slow
@pytest.mark.parametrize("text", [CAUSAL, MASKED], ids=["causal", "masked"])
def test_a_real_search_finds_what_the_grid_finds(text: str, tmp_path: Path) -> None:
    recipe = tmp_path / "tiny.toml"
    recipe.write_text(text)
    argv = [sys.executable, "-m", "dray", "study", "tune", str(recipe), "batch.per_device=1,8",
            "train.strategy=ddp,fsdp", "--steps=6"]  # fmt: skip
    env = {name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "DRAY_"))}
    found = []
    for kind in ([], ["--all"]):
        runs = tmp_path / f"runs{len(found)}"
        ended = subprocess.run([*argv, *kind, f"--runs={runs}"], env=env, capture_output=True, text=True, check=False)
        assert ended.returncode == exit_codes.DONE, ended.stdout + ended.stderr
        (path,) = runs.glob("*/study.json")
        found.append(study.look(path.parent, study.load(path.parent)))
        assert {row.state for row in found[-1]} == {"done"}, ended.stderr
    by_search, by_grid = found
    assert len(by_grid) == 4
    assert among_the_best(by_search, by_grid)
    best = study.best_row(by_search)
    assert best
    assert best.values["batch.per_device"] == 8
