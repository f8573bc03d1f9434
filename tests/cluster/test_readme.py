"""Every `bash` block of README.md and docs/start.md is run: here, or by .ci/run around these tests."""

from __future__ import annotations

import os
import pty
import re
import subprocess

import pytest

from helpers import ROOT


def commands() -> list[str]:
    text = "".join((ROOT / page).read_text(encoding="utf-8") for page in ("README.md", "docs/start.md"))
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return list(dict.fromkeys(line for block in blocks for line in block.splitlines() if line))


def by_ci() -> set[str]:
    """What .ci/run runs, word for word; it runs the tests in two halves."""
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    return {re.sub(r"^ci::beside \w+ ", "", line.strip()).partition(" TESTS=")[0] for line in lines}


HERE = [command for command in commands() if command not in by_ci()]


def test_what_ci_runs_is_in_the_readme() -> None:
    assert [command for command in commands() if command in by_ci()] == [
        "make demo",
        "make cluster",
        "make image-cpu-docker",
        "make smoke",
    ]
    assert {"make test", "make docs", "make image-cpu BASE=build/base/bookworm.tar"} <= by_ci()


@pytest.mark.parametrize("target", sorted({*re.findall(r"`?make ([a-z][\w-]*)", (ROOT / "README.md").read_text())}))
def test_a_target_of_the_readme_is_one_of_make(target: str) -> None:
    """Also those that run where this machine cannot: an image of another kind takes half an hour and GPUs."""
    argv = ["make", "--dry-run", "--question", target]
    ended = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "No rule to make target" not in ended.stderr
    if variant := re.fullmatch(r"image-(\w+)(?:-docker)?", target):
        assert (ROOT / "containers" / variant[1] / "image.toml").is_file()


def test_a_job_of_the_readme_names_what_is_there() -> None:
    jobs = re.findall(r"^ *sbatch .*$", (ROOT / "README.md").read_text().replace("\\\n", ""), re.MULTILINE)
    assert jobs
    for job in jobs:
        files = re.findall(r"slurm/\w+\.sh|recipes/\S+\.toml", job)
        assert files, job
        assert [name for name in files if not (ROOT / name).is_file()] == []


@pytest.mark.cluster
@pytest.mark.parametrize("command", [command for command in HERE if command != "make image-cpu"])
def test_a_command_of_the_readme(command: str, full_run) -> None:
    """`make image-cpu` alone pulls its base; .ci/run runs it with BASE."""
    if " sbatch " in command:
        assert full_run.code == 0, full_run.output
        return
    ended = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.cluster
def test_the_shell_of_the_readme() -> None:
    """`dray cluster shell` wants a terminal, so it gets one."""
    ours, theirs = pty.openpty()
    shell = subprocess.Popen(
        [".venv/bin/dray", "cluster", "shell"], cwd=ROOT, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    os.write(ours, b"sinfo --noheader --format=%D; whoami; exit\n")
    seen = b""
    while True:
        try:
            seen += os.read(ours, 4096)
        except OSError:  # the shell has closed its side
            break
    assert shell.wait(30) == 0
    assert re.search(rb"\b2\r\ndray\r\n", seen)
