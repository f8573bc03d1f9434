"""`dray init`: what it finds out, what it asks, and that the commands that it prints are right."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from command import dray
from dray.cli import recipe as verb
from dray.config import dray_home
from dray.config.load_toml import load
from dray.config.recipe import Recipe
from dray.contract.findings import ConfigError, DrayError
from dray.runs import slurm as slurm_commands
from helpers import ROOT

GPUS = "cpu|4|32|(null)\ngpu|8|64|gpu:a100:4(S:0-1)\ndebug|1|64|gpu:a100:2\n"
Slurm = Callable[..., None]


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    """Programs of Slurm that say what they are told to; and an empty folder to be in."""

    def make(cluster: str = "harbour", sinfo: str = GPUS, accounts: str = "") -> None:
        outputs = {"scontrol": f"ClusterName = {cluster}\n", "sinfo": sinfo, "sacctmgr": accounts, "sbatch": ""}
        for name, output in outputs.items():
            (tmp_path / "bin" / name).write_text(f"#!/bin/sh\ncat <<'END'\n{output}END\n")
            (tmp_path / "bin" / name).chmod(0o755)

    (tmp_path / "bin").mkdir()
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    for name in ("SLURM_CLUSTER_NAME", "DRAY_SITE", "DRAY_IMAGE", "SBATCH_ACCOUNT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("DRAY_SITES", str(tmp_path / "sites"))
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "argv", ["/opt/dray"])
    return make


def next_(out: str) -> list[str]:
    return [line.strip() for line in out.partition("Next:\n")[2].splitlines()]


def test_without_slurm_it_runs_here_and_the_folder_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    monkeypatch.setattr(sys, "argv", ["venv/dray"])
    monkeypatch.setattr(verb, "find_spec", lambda name: name)
    monkeypatch.setattr(verb.node, "has_gpu", lambda accelerator: False)
    verb.init(Path("my runs"))
    out = capsys.readouterr().out
    assert next_(out) == [
        "cd 'my runs'",
        f"{tmp_path}/venv/dray plan recipes/mine.toml",
        f"{tmp_path}/venv/dray run recipes/mine.toml",
    ]
    assert (tmp_path / "my runs/slurm/multinode.sh").is_file()
    assert (tmp_path / "my runs/recipes/mine.toml").read_text() in out
    with pytest.raises(ConfigError, match="cannot write the recipe"):  # and over no file
        verb.init(Path("my runs"))
    (tmp_path / "my runs/recipes/mine.toml").unlink()
    verb.init(Path("my runs"), gpu="cuda")
    assert next_(capsys.readouterr().out)[1:] == [
        f"{tmp_path}/venv/dray image build cuda --format docker",
        f"{tmp_path}/venv/dray plan recipes/mine.toml",
        f"{tmp_path}/venv/dray run recipes/mine.toml --engine docker",
    ]


def test_after_uvx_make_installs_the_dray_that_the_commands_name(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm()
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".cache/uv/archive-v0/En-YZyuXAY0BWY3f"))
    verb.init(Path("runs"))
    commands = next_(capsys.readouterr().out)
    assert commands[:2] == ["cd runs", "make install"]
    assert commands[2].startswith(".venv/bin/dray ")
    assert not [command for command in commands if command.startswith("/opt/dray")]


def test_on_a_cluster_the_commands_have_what_slurm_told(slurm: Slurm, capsys: pytest.CaptureFixture[str]) -> None:
    slurm()
    verb.init(Path("runs"), model="gpt2", data="hub:Salesforce/wikitext/wikitext-2-raw-v1")
    line = "/opt/dray submit recipes/mine.toml --nodes 1 --gpus-per-node 4 --sbatch=--partition=gpu"
    assert next_(capsys.readouterr().out) == [
        "cd runs",
        "/opt/dray data prefetch recipes/mine.toml",
        "/opt/dray image build cuda",
        f"{line} --dry-run",
        line,
        "No site file knows this cluster: `dray site new` writes one, with its binds and its network.",
    ]
    recipe = load(Recipe, Path("runs/recipes/mine.toml"))
    assert (recipe.image, recipe.batch and recipe.batch.global_size, recipe.model.name) == ("cuda", 16, "gpt2")


@pytest.mark.seconds
def test_the_dry_run_that_it_prints_works_word_for_word(slurm: Slurm, capsys: pytest.CaptureFixture[str]) -> None:
    slurm(cluster="lumi", accounts="project_7\n")
    verb.init(Path())
    *_, dry, real = next_(capsys.readouterr().out)
    assert dry == f"{real} --dry-run"
    assert real == "/opt/dray submit recipes/mine.toml --nodes 1 --gpus-per-node 8 --sbatch=--account=project_7"
    ended = dray(*shlex.split(dry)[1:], cwd=Path.cwd())
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("sbatch --parsable ")
    assert "--account=project_7" in ended.stdout.splitlines()[0]


@pytest.mark.parametrize(
    ("sinfo", "accounts", "line"),
    [
        (GPUS, "a\nb\na\n", "--gpus-per-node 4 --sbatch=--partition=gpu --sbatch=--account=a"),
        ("gpu|8|64|gpu:4\n", "a\n", "--gpus-per-node 4 --sbatch=--partition=gpu"),
        ("gpu|8|64|gpu:mi250:8\n", "", "--gpus-per-node 8 --sbatch=--partition=gpu"),
        ("one|8|64|(null)\n", "", "--sbatch=--partition=one"),
    ],
)
def test_what_slurm_tells(
    sinfo: str, accounts: str, line: str, slurm: Slurm, capsys: pytest.CaptureFixture[str]
) -> None:
    slurm(sinfo=sinfo, accounts=accounts)
    verb.init(Path("x"))
    assert next_(capsys.readouterr().out)[-2] == f"/opt/dray submit recipes/mine.toml --nodes 1 {line}"


def test_what_a_site_s_wrapper_prints_is_no_partition(slurm: Slurm, capsys: pytest.CaptureFixture[str]) -> None:
    slurm(sinfo=f"Welcome to harbour\n{GPUS}")
    verb.init(Path("x"))
    assert "--sbatch=--partition=gpu" in capsys.readouterr().out


def test_a_controller_that_does_not_answer_is_told(
    slurm: Slurm, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm()
    (tmp_path / "bin" / "sinfo").write_text("#!/bin/sh\nexec sleep 60\n")
    monkeypatch.setattr(slurm_commands, "_QUICK_S", 0.2)
    with pytest.raises(DrayError, match="sinfo gave no answer"):  # it would write a recipe for CPUs
        verb.init(Path("x"))
    assert not Path("x").exists()


def test_it_names_what_is_an_example(slurm: Slurm, capsys: pytest.CaptureFixture[str]) -> None:
    slurm(cluster="lumi")
    verb.init(Path("x"))
    *_, line, note = next_(capsys.readouterr().out)
    assert line.endswith("--sbatch=--account=project_465000000")
    assert note == "project_465000000 is the site's example: put your own account there."


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"gpu": "h100"}, "there is no image for such a GPU"),
        ({"data": "gone.txt"}, "--data names nothing"),
        ({"data": "hub:"}, "the recipe has 1 error"),
        ({"model": "/gone"}, "--model names nothing"),
    ],
)
def test_what_is_wrong_is_said_before_anything_is_written(wrong: dict[str, str], problem: str, slurm: Slurm) -> None:
    slurm()
    with pytest.raises(ConfigError, match=problem):
        verb.init(Path("x"), **wrong)
    assert list(Path().iterdir()) == []


def test_in_an_image_there_is_nothing_to_write(slurm: Slurm, monkeypatch: pytest.MonkeyPatch) -> None:
    slurm()
    monkeypatch.setattr(dray_home, "_CLONE", Path().absolute())
    monkeypatch.setenv("DRAY_HOME", str(ROOT))
    with pytest.raises(ConfigError, match="this dray has no files to write a checkout from"):
        verb.init(Path("x"))
    assert list(Path().iterdir()) == []
