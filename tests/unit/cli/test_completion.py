"""`dray completion`: what a shell shows at TAB, by the scripts that it gets and by the answers of dray."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from dray import cli
from dray.cli import completion
from helpers import PYTHON, ROOT


def answered(line: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], shell: str) -> list[str]:
    """What dray answers a shell that completes the end of a line."""
    settings = {"_DRAY_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_ARGS": line, "COMP_WORDS": line}
    settings |= {"COMP_CWORD": str(len(line.split(" ")) - 1), "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with contextlib.suppress(SystemExit):  # which typer ends an answer with
        completion.answer()
    return [line for line in capsys.readouterr().out.split("\n") if line]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("dray ru", ["run", "runs"]),
        ("dray run recipes/smo", []),  # the shell completes files
        ("dray run smo", ["smoke-cpu"]),
        ("dray run smoke-cpu train.strateg", ["train.strategy="]),
        ("dray run smoke-cpu train.strategy=f", ["train.strategy=fsdp"]),
        ("dray plan smoke-cpu train.compile=", ["train.compile=auto", "train.compile=false", "train.compile=true"]),
        ("dray run smoke-cpu model.conf", ["model.config."]),
        ("dray run --hostf", ["--hostfile"]),
        ("dray run --site le", ["leonardo"]),
        ("dray run --site=le", ["leonardo"]),
        ("dray run --engine d", ["docker"]),
        ("dray recipe l", ["list"]),
        ("dray site check lum", ["lumi"]),
        ("dray completion z", ["zsh"]),
        ("dray run -- tr", []),
        ("dray run --engine docker -- tr", []),
        ("dray nothing ", []),
        ("dray fin", []),
        ("dray recipe check 'a", []),
    ],
)
def test_words_that_may_follow(
    line: str, expected: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("DRAY_HOME", str(ROOT))
    assert answered(line, monkeypatch, capsys, "bash") == expected


def test_all_verbs_have_a_line_of_help_and_none_is_imported_for_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "dray.cli.app", None)  # an import of it fails
    lines = answered("dray ", monkeypatch, capsys, "fish")
    assert [line.split("\t")[0] for line in lines] == [*cli.SHOWN, "cluster", "completion"]
    assert f"why\t{cli.SHOWN['why']}" in lines


def test_recipes_are_those_that_the_list_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also in a checkout with a user's own folders."""
    for name in ("containers/steps", "recipes/trl", "recipes/tool/deeper", "project/recipes"):
        (tmp_path / name).mkdir(parents=True)
    for name in (
        "recipes/own.toml",
        "recipes/trl/own-dpo.toml",
        "recipes/tool/deeper/own.toml",
        "project/recipes/own-2.toml",
    ):
        (tmp_path / name).touch()
    monkeypatch.setenv("DRAY_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path / "project")
    assert answered("dray run ", monkeypatch, capsys, "bash") == ["own", "trl/own-dpo"]


def test_runs_by_their_names_and_none_that_a_shell_could_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("20261120-124439-mine-cea81f", "20261121-000000-other-1", "2$(touch x)", "2`id`", "2 3", "2\\$(id)"):
        (tmp_path / "runs" / name / "attempt-1").mkdir(parents=True)
    (tmp_path / "runs" / "20-no-run").mkdir()
    monkeypatch.chdir(tmp_path)
    assert answered("dray why 2", monkeypatch, capsys, "bash") == [
        "20261120-124439-mine-cea81f",
        "20261121-000000-other-1",
    ]
    monkeypatch.chdir("/")
    assert answered(f"dray why --runs {tmp_path}/runs 20261121", monkeypatch, capsys, "bash") == [
        "20261121-000000-other-1"
    ]


def test_bash_keeps_what_stands_before_the_equals_sign(tmp_path: Path) -> None:
    """The script itself, in the shell that it is for. A `dray` that says what it was asked stands in for dray."""
    fake = tmp_path / "dray"
    fake.write_text('#!/bin/sh\necho "$COMP_WORDS|$COMP_CWORD" >>asked\ncat answer\n')
    fake.chmod(0o755)
    (tmp_path / "script").write_text(script("bash"))
    driver = """
        source ./script
        compopt() { printf '(%s) ' "$*"; }
        try() { printf '%s\\n' "${@:2}" >answer; COMP_LINE=$1 COMP_POINT=${#1}; COMPREPLY=(); _dray_completion dray
            printf '[%s]' "${COMPREPLY[@]}"; echo; }
        try 'dray run x train.strategy=f' train.strategy=fsdp
        try 'dray run --site=l' leonardo lumi
        try 'dray run ' '*.toml' recipes/
        try 'dray run x train.st' train.steps=
        try 'dray why no' ''
    """
    argv = ["bash", "--norc", "-c", driver]
    ended = subprocess.run(
        argv, check=True, cwd=tmp_path, env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, capture_output=True, text=True
    )
    assert (ended.stderr, ended.stdout.splitlines()) == (
        "",
        ["[fsdp]", "[leonardo][lumi]", "[*.toml][recipes/]", "(-o nospace) [train.steps=]", "[]"],
    )
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked[:3] == ["dray run x train.strategy=f|3", "dray run --site=l|2", "dray run |2"]


def script(shell: str) -> str:
    return completion._SCRIPTS[shell]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_another_shell_takes_its_script(shell: str, tmp_path: Path) -> None:
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not on this machine")
    (tmp_path / "script").write_text(script(shell))
    subprocess.run([shell, "--no-execute" if shell == "fish" else "-n", "script"], cwd=tmp_path, check=True)


def test_the_verb_prints_the_script_and_dray_answers_a_shell(tmp_path: Path) -> None:
    """The whole way once, by the program."""
    program = [sys.executable, "-c", "import sys; sys.argv[0] = 'dray'; from dray.cli import main; main()"]
    printed = subprocess.run([*program, "completion", "bash"], capture_output=True, text=True, check=True, env=PYTHON)
    assert printed.stdout == script("bash")
    asked = {"_DRAY_COMPLETE": "complete_bash", "COMP_WORDS": "dray wh", "COMP_CWORD": "1"}
    answer = subprocess.run(
        program, capture_output=True, text=True, check=True, cwd=tmp_path,
        env={**PYTHON, **asked, "_TYPER_COMPLETE_ARGS": "dray wh"},
    )  # fmt: skip
    assert (answer.stdout, answer.stderr) == ("why\n", "")
