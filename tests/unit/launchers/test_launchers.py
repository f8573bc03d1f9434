"""Every launcher's whole command line, and recipes that name a launcher or a command."""

from __future__ import annotations

import shlex
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest

import command
from dray.config.recipe import Launcher
from dray.contract.findings import ConfigError
from dray.planning import launchers
from dray.runs.prepare import read_recipe
from helpers import PYTHON

JOB = launchers.Job(python="python3", folder="/my runs/r1", hosts=("n1", "n2"), each=4)
COMMANDS = {
    "torchrun": """python3 -m torch.distributed.run --nnodes=2 --nproc-per-node=4 --rdzv-backend=dray
        --rdzv-endpoint {endpoint} --max-restarts=0 --no-python""",
    "accelerate": """python3 -m accelerate.commands.launch --config_file '/my runs/r1/accelerate.json'
        --num_machines=2 --num_processes=8 --machine_rank {node_rank} --main_process_ip {master}
        --main_process_port=0 --rdzv_backend=dray --max_restarts=0 --no_python""",
    "deepspeed": """python3 -m deepspeed.launcher.runner --hostfile '/my runs/r1/hostfile' --no_ssh
        --node_rank {node_rank} --master_addr {master} --master_port {port} --no_python --no_local_rank""",
    "python": "python3 -S -E {ranks} 2 4 {node_rank} {master} {port}",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_the_whole_command(name: str) -> None:
    assert list(launchers.LAUNCHERS[name](JOB).argv) == shlex.split(COMMANDS[name])


def test_a_recipe_may_name_every_launcher() -> None:
    assert get_args(Launcher) == tuple(launchers.LAUNCHERS)


def test_the_files_that_launchers_read() -> None:
    job = replace(JOB, accelerate={"accelerate.json": "{}"})
    files = {name: launcher(job).files for name, launcher in launchers.LAUNCHERS.items()}
    assert files.pop("deepspeed") == {"hostfile": "n1 slots=4\nn2 slots=4\n"}
    assert files.pop("accelerate") == {"accelerate.json": "{}"}
    assert files == {"torchrun": {}, "python": {}, "ray": {}}


class TestCommands:
    """Programs of the user's own."""

    def test_a_command_alone_is_a_recipe(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        recipe = read_recipe(None, ["launcher=python", "nodes=3"], ["My Train.py", "--lr", "1e-4", "a=b"])
        assert (recipe.name, recipe.launcher, recipe.nodes) == ("my-train", "python", 3)
        assert recipe.command
        assert recipe.command.argv == ("My Train.py", "--lr", "1e-4", "a=b")
        assert recipe.command.folder == str(tmp_path)
        assert (recipe.batch, recipe.train) == (None, None)

    @pytest.mark.parametrize(("command", "name"), [("./-x.sh", "x"), ("/usr/bin/???", "run"), ("é.py", "run")])
    def test_any_program_gives_a_name(self, command: str, name: str) -> None:
        assert read_recipe(None, [], [command]).name == name

    def test_a_recipe_s_command_runs_beside_it(self, tmp_path: Path) -> None:
        (tmp_path / "r.toml").write_text('name = "r"\n[command]\nargv = ["train.py"]\nfolder = "src"\n')
        recipe = read_recipe(tmp_path / "r.toml")
        assert recipe.command
        assert recipe.command.folder == f"{tmp_path}/src"

    @pytest.mark.parametrize(
        ("text", "said"),
        [
            ('name = "r"\n', "missing: expected [batch] and [train], or [command] argv"),
            ('name = "r"\n[batch]\nglobal_size = 8\n', "missing: expected [train], or [command] argv"),
            (
                'name = "r"\n[command]\nargv = ["x"]\n[batch]\nglobal_size = 8\n',
                "[batch] and [train] are for dray's own trainer, which [command] replaces",
            ),
            ('name = "r"\n[command]\nargv = []\n', "command.argv"),
            ('name = "r"\n[command]\nargv = ["x"]\nfolder = "/"\n', "command.folder is /, which would hide"),
            ('name = "r"\nlauncher = "mpirun"\n[command]\nargv = ["x"]\n', 'expected one of "torchrun", "accelerate"'),
            (
                'name = "r"\npass_env = ["RANK"]\n[command]\nargv = ["x"]\n',
                "RANK: the scheduler or the launcher sets this",
            ),
            (
                'name = "r"\npass_env = ["A"]\n[env]\nA = "1"\n[command]\nargv = ["x"]\n',
                "A: in env and in pass_env; leave it out of one",
            ),
            (
                'name = "r"\naccelerate = "a.yaml"\n[command]\nargv = ["x"]\n',
                "accelerate names a file for that launcher, but the launcher is torchrun",
            ),
        ],
    )
    def test_recipes_that_do_not_fit(self, tmp_path: Path, text: str, said: str) -> None:
        (tmp_path / "r.toml").write_text(text)
        with pytest.raises(ConfigError) as refused:
            read_recipe(tmp_path / "r.toml")
        assert said in str(refused.value)


class TestWords:
    """What the command line takes for a recipe, a setting and a command."""

    @staticmethod
    def plan(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
        return command.dray("plan", "-v", *words, cwd=folder)

    @pytest.mark.seconds
    def test_settings_and_a_command(self, tmp_path: Path) -> None:
        (tmp_path / "t.py").touch()
        shown = self.plan(tmp_path, "launcher=deepspeed", "ranks_per_node=2", "--", "t.py", "--nodes", "7", "--", "x=1")
        assert (shown.returncode, shown.stderr) == (0, "")
        assert f"\n  in  {tmp_path}\n" in shown.stdout
        assert "--no_python --no_local_rank python3 t.py --nodes 7 -- x=1\n\nfindings\n" in shown.stdout

    @pytest.mark.seconds
    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ((), "there is nothing to run"),
            (("nodes=2",), "there is nothing to run"),
            (("nodes=2", "--"), "there is nothing to run"),
            (("r.toml", "--", "t.py"), "a recipe and a command were given, but a run has only one of them"),
            (("nodes=two", "--", "t.py"), "the command's recipe has 1 error"),
            (("launcher=mpirun", "--", "t.py"), "the command's recipe has 1 error"),
            (("gone.toml",), "recipe gone.toml does not exist"),
            (("t.py", "nodes=2"), "a program was given instead of a recipe"),
        ],
    )
    def test_what_cannot_be(self, tmp_path: Path, words: tuple[str, ...], said: str) -> None:
        (tmp_path / "r.toml").touch()
        refused = self.plan(tmp_path, *words)
        assert (refused.returncode, refused.stderr.splitlines()[0]) == (78, f"dray: {said}")


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.parametrize("launcher", ["python", "torchrun"])
def test_ranks_outside_slurm_see_nothing_of_a_job(tmp_path: Path, launcher: str) -> None:
    """`dray run` in a job's shell starts nodes of its own: the shell's task is none of them."""
    show = "import os; print(*(name for name in os.environ if name.startswith('SLURM')))"
    argv = [sys.executable, "-m", "dray", "run", f"launcher={launcher}", "ranks_per_node=1", "--run=mine", "--local"]
    task = {"SLURM_JOB_ID": "17", "SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"}
    ended = subprocess.run(
        [*argv, "--", "python3", "-c", show], cwd=tmp_path, env={**PYTHON, **task}, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "runs" / "mine" / "attempt-1" / "logs" / "rank-0.log").read_text() == "\n"
