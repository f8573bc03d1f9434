"""Every command that README.md tells a reader to type is run: here, or by .ci/run around these tests."""

from __future__ import annotations

import os
import pty
import re
import subprocess

import pytest

from helpers import ROOT


def commands() -> list[str]:
    blocks = re.findall(r"^```bash\n(.*?)^```", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    return [line for block in blocks for line in block.splitlines() if line]


def by_ci() -> set[str]:
    """What .ci/run runs, word for word; it runs the tests in two halves."""
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    return {re.sub(r"^ci::beside \w+ ", "", line.strip()).partition(" TESTS=")[0] for line in lines}


HERE = [command for command in commands() if command not in by_ci()]


def test_what_ci_runs_is_in_the_readme() -> None:
    assert [command for command in commands() if command in by_ci()] == [
        "make demo",
        "make test",
        "containers/base/make-base.sh bookworm build/base/bookworm.tar",
        "containers/base/make-base.sh trixie build/base/trixie.tar",
        "make image-cpu BASE=build/base/bookworm.tar",
        "make cluster",
        "make image-cpu-docker",
        "make smoke",
    ]


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
