"""Commands that are interrupted leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess

import pytest

from dray import interrupts, process


@pytest.mark.parametrize("run", [process.run, lambda argv: process.follow(argv, on_line=print)], ids=["run", "follow"])
def test_a_command_whose_start_is_interrupted_is_ended(run, monkeypatch) -> None:
    """A quick child may have its parent signalled before Popen is done."""
    started = []

    class Early(subprocess.Popen):
        def __init__(self, *args, **options) -> None:
            super().__init__(*args, **options)
            started.append(self)
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(subprocess, "Popen", Early)
    with interrupts.stoppable(), pytest.raises(KeyboardInterrupt, match="SIGTERM"):
        run(["sleep", "60"])
    assert started[0].returncode in (-signal.SIGTERM, -signal.SIGKILL)
