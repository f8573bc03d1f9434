"""docs/reference/errors.md is what these bad inputs print. DRAY_GOLDEN=write writes it: read the diff then."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

import command
from dray.facts import Facts
from dray.runs.prepare import read_recipe, write
from helpers import GOLDEN, PYTHON, golden

HEAD = """\
# Errors

A message of dray says what is wrong, where, what dray wanted, what it found, and how to fix it. The exit code tells a
script what to do:

| exit code | meaning |
|---|---|
| 69 | a node or the fabric is unfit |
| 75 | temporary failure, or stopped after a checkpoint: submit again |
| 78 | the configuration is wrong |
| other | the run failed |

These are examples. A test produces each of them and compares it with this page.

"""

Said = tuple[str, int, str]
OTHERS = "other processes use the memory: leave this node out (sbatch --exclude)"


class Desk:
    """A folder with a recipe of its own, and dray run in it."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.root, self.folder = root, folder
        shutil.copy(root / "recipes" / "smoke-cpu.toml", folder / "my.toml")

    def dray(self, *words: str, **env: str) -> Said:
        given = {"DRAY_HOME": str(self.root), "HOME": str(self.folder), **env}
        ended = command.dray(*words, cwd=self.folder, **given)
        shown = [f"{name}={value}" for name, value in env.items()]
        return self.said(" ".join([*shown, "dray", *words]), ended.returncode, ended.stderr)

    def runner(self, port: int, *words: str, **env: str) -> Said:
        facts = Facts(
            scheduler="slurm", job=17, nodelist="n[1-2]", nodes=2, address="127.0.0.1",
            engine="bare", image=sys.executable,
        )  # fmt: skip
        _, paths = write(
            read_recipe(self.folder / "my.toml", [f"port={port}", *words]), facts, runs=self.folder / "runs"
        )
        ended = subprocess.run(
            [sys.executable, "-m", "dray.runner", paths.plan],
            env={**PYTHON, **env}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        record = json.loads((paths.failures / "node-0.json").read_text())
        assert record["why"] == ended.stderr.rstrip("\n")
        command = " ".join(["sbatch slurm/multinode.sh my.toml", *words, "  (cause in result.json)"])
        return self.said(command, ended.returncode, ended.stderr)

    def said(self, command: str, code: int, text: str) -> Said:
        for place, name in ((self.folder, "~"), (self.root, "~/dray")):
            text, command = text.replace(str(place), name), command.replace(str(place), name)
        return command, code, text


def cases(desk: Desk) -> dict[str, Said]:
    slurm = {"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "2", "SLURMD_NODENAME": "n1"}
    with socket.create_server(("", 0)) as busy:
        port = busy.getsockname()[1]
        command, code, text = desk.runner(port, **slurm)
    words = ("preflight.memory_gb=9999", "rendezvous_timeout_s=4")  # the other node never comes
    unfit, unfit_code, found = desk.runner(port, *words, **slurm)
    shown = re.sub(r"(?m)[0-9.]+ GB (available|allowed).*$", "251.377 GB available", found)
    memory = (unfit.replace(f" {words[1]}", ""), unfit_code, re.sub("fix:.*", f"fix:    {OTHERS}", shown))
    busy_port = (command, code, text.replace(str(port), "20017"))
    (desk.folder / "file").write_text("")
    return {
        "An unknown key": desk.dray("recipe", "check", "my.toml", "train.stesp=5"),
        "A value of the wrong type": desk.dray("recipe", "check", "my.toml", "batch.per_device=two", "train.lr=-1"),
        "A batch that is not divisible by the ranks": desk.dray("plan", "my.toml", "--nodes", "3"),
        "A missing image": desk.dray("submit", "my.toml", DRAY_IMAGE="gone.sif"),
        "An image without dray": (
            "DRAY_IMAGE=other.sif sbatch slurm/multinode.sh my.toml",
            78,
            (GOLDEN / "image-without-dray.txt").read_text(),
        ),
        "A run folder that cannot be made": desk.dray("run", "my.toml", "--runs", "file/runs"),
        "Another number of nodes than planned": desk.runner(port, **{**slurm, "SLURM_STEP_NUM_NODES": "3"}),
        "A busy port": busy_port,
        "A node that is unfit": memory,
        "An unknown site": desk.dray("submit", "my.toml", "--site", "lumy"),
        "A recipe that is not there": desk.dray("plan", "mine.toml"),
    }


def page(said: dict[str, Said]) -> str:
    rows = [
        f"| {number} | {title} | {code} | {text.splitlines()[0].removeprefix('dray: ')} |"
        for number, (title, (_, code, text)) in enumerate(said.items(), start=1)
    ]
    blocks = [
        f"## {number}. {title}\n\n```console\n$ {command}\n{text}```\n"
        for number, (title, (command, _, text)) in enumerate(said.items(), start=1)
    ]
    table = ["| | input | exit code | message |", "|---|---|---|---|", *rows]
    return HEAD + "\n".join(table) + "\n\n" + "\n".join(blocks)


@pytest.mark.seconds
@pytest.mark.torch
def test_the_page_is_what_is_printed(root: Path, tmp_path: Path) -> None:
    said = cases(Desk(root, tmp_path))
    assert [code for _, code, _ in said.values()] == [78, 78, 78, 78, 78, 78, 78, 75, 69, 78, 78]
    golden(root / "docs/reference/errors.md", page(said))


@pytest.mark.seconds
@pytest.mark.torch
def test_nothing_is_left_behind_by_a_run_that_cannot_be(root: Path, tmp_path: Path) -> None:
    desk = Desk(root, tmp_path)
    for words in (
        ["run", "my.toml", "train.stesp=5"],
        ["run", "my.toml", "--nodes", "3"],
        ["submit", "my.toml", "--site", "x"],
    ):
        assert desk.dray(*words)[1] == 78
    assert [path.name for path in tmp_path.iterdir()] == ["my.toml"]


@pytest.mark.seconds
@pytest.mark.parametrize(
    "words", [[], ["--help"], ["recipe"], ["plan", "--help"], ["cluster", "--help"], ["image", "--help"]]
)
def test_help_is_there_without_a_traceback(root: Path, tmp_path: Path, words: list[str]) -> None:
    _, code, err = Desk(root, tmp_path).dray(*words)
    assert code in (0, 78)
    assert "Traceback" not in err


RUBBISH = {
    "a name that no file can have": (["recipe", "check", "x" * 300], 78),
    "brackets without end": (["recipe", "check", "deep"], 78),
    "brackets without end in an override": (["recipe", "check", "my.toml", "model.type=" + "[" * 3000], 0),
    "a batch that cannot come out": (["recipe", "check", "my.toml", "batch.per_device=3"], 78),
    "an option that the plan would not know of": (["submit", "my.toml", "--dry-run", "--sbatch=--nodes=4"], 78),
    "secrets": (["recipe", "check", "my.toml", "env.HF_TOKEN=a", "env.WANDB_API_KEY=b", "env.X=hf_c"], 78),
    "what the launcher sets": (["recipe", "check", "my.toml", "env.RANK=1"], 78),
}


@pytest.mark.seconds
@pytest.mark.parametrize("case", RUBBISH)
def test_rubbish_ends_in_a_message(root: Path, tmp_path: Path, case: str) -> None:
    (tmp_path / "deep").write_text("name = " + "[" * 3000)
    words, expected = RUBBISH[case]
    _, code, err = Desk(root, tmp_path).dray(*words)
    assert code == expected, err
    assert "Traceback" not in err
    assert err.startswith("dray: ") or expected == 0


@pytest.mark.seconds
def test_all_secrets_of_a_recipe_are_named_and_none_is_shown(root: Path, tmp_path: Path) -> None:
    _, _, err = Desk(root, tmp_path).dray(*RUBBISH["secrets"][0])
    assert err == (
        "dray: recipe my.toml has 1 error\n"
        "  found:  env: HF_TOKEN, WANDB_API_KEY, X: this looks like a secret, and every run folder holds its recipe; "
        "set it where you submit and name it in pass_env\n"
    )
