"""`dray run` on this machine: bare and Docker end alike, show how it goes, and leave nothing behind."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from helpers import ROOT, until

# Where the tests run in the background, a shell has made them deaf to SIGINT.
DRAY = ["env", "--default-signal", sys.executable, "-m", "dray"]
RECIPE = "recipes/smoke-cpu.toml"
SHORT = ("train.steps=4", "train.warmup_steps=0", "train.log_every=1")
ALONE = ("nodes=1", "ranks_per_node=1")


def run(root: Path, runs: Path, *words: str) -> tuple[subprocess.CompletedProcess[str], Path]:
    ended = subprocess.run(
        [*DRAY, "run", RECIPE, *words, "--runs", runs], cwd=root, capture_output=True, text=True, check=False
    )
    (folder,) = runs.glob("[!.]*")
    return ended, folder


def steps(folder: Path) -> list[dict[str, Any]]:
    events = [json.loads(line) for line in (folder / "attempt-1" / "metrics.jsonl").read_text().splitlines()]
    return [event for event in events if event["event"] == "step"]


def earlier(name: str) -> tuple[subprocess.CompletedProcess[str], Path] | None:
    """A run that has ended already, if this variable names its output."""
    if not (where := os.environ.get(name)):
        return None
    out, err = (Path(f"{where}.{stream}").read_text() for stream in ("out", "err"))
    out = re.sub(r"\nreport: .*\n\Z", "\n", out)  # which make demo makes of the run
    folder = Path(out.splitlines()[-1].removeprefix("run folder: "))
    return subprocess.CompletedProcess([], 0, out, err), folder


@pytest.fixture(scope="module")
def demo(tmp_path_factory):
    """What `make demo` runs, whole."""
    return earlier("DRAY_TEST_DEMO") or run(ROOT, tmp_path_factory.mktemp("my demo") / "runs")


@pytest.mark.torch
def test_the_demo_learns(demo) -> None:
    ended, folder = demo
    assert (ended.returncode, ended.stderr) == (0, "")
    losses = [step["loss"] for step in steps(folder)]
    assert losses[0] > 5.4  # knows nothing: ln(257) is 5.55
    assert losses[-1] < 0.6
    result = json.loads((folder / "attempt-1" / "result.json").read_text())
    assert (result["status"], result["world_size"], result["hosts"]) == ("done", 4, ["node1", "node2"])
    assert result["train_seconds"] > 0


@pytest.mark.torch
def test_the_demo_shows_plain_lines_when_nobody_watches(demo) -> None:
    ended, folder = demo
    begun, first, *middle, evaluated, last, sample, where = ended.stdout.splitlines()
    assert first == "smoke-cpu: 4 ranks on 2 nodes (bare)"
    assert len(middle) == 21
    for line in middle:
        assert re.fullmatch(r"step \d+  loss \d\.\d{3}  [\d,]+ tokens/s  (\d+ min )?\d+ s left", line)
    assert re.fullmatch(
        r"done: 200 steps, loss 5\.\d{3} -> 0\.\d{3}, perplexity \d\.\d\d, [\d,]+ tokens/s, 4 ranks on node1 node2",
        last,
    )
    assert sample.startswith("sample: two: the guard watches the ")
    assert re.fullmatch(r"evaluation at step 200  loss 0\.\d{3}  perplexity 1\.\d\d  accuracy 0\.\d{3}", evaluated)
    assert begun == where == f"run folder: {folder}"


@pytest.mark.torch
def test_a_site_file_holds_here_too(root: Path, tmp_path: Path) -> None:
    site = tmp_path / "my site.toml"
    site.write_text('name = "mine"\nabout = "a"\nenv = [{ name = "WHERE", value = "a \'place\'", why = "w" }]\n')
    options = ["run", "--site", site, "--runs", tmp_path / "runs", "launcher=python", "--", "sh", "-c", "echo $WHERE"]
    ended = subprocess.run([*DRAY, *options], cwd=root, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
    (log,) = (tmp_path / "runs").glob("*/attempt-1/logs/rank-0.log")
    assert log.read_text() == "a 'place'\n"


@pytest.mark.torch
@pytest.mark.docker_image
def test_docker_and_bare_learn_the_same(demo, root: Path, tmp_path: Path) -> None:
    """What `make smoke` runs, and the demo."""
    words = ("--engine", "docker", "train.steps=50")
    smoke, folder = earlier("DRAY_TEST_SMOKE") or run(root, tmp_path / "my runs", *words)
    assert (smoke.returncode, smoke.stderr) == (0, ""), smoke.stdout
    # The rate still rises in these steps, whatever number of them there is to be.
    in_docker, bare = ([step["loss"] for step in steps(where)][:3] for where in (folder, demo[1]))
    # Same wheels, same order of samples; only the processors' code paths may round otherwise.
    assert len(in_docker) == 3
    assert in_docker == pytest.approx(bare, rel=1e-5)
    starts = json.loads((folder / "attempt-1" / "metrics.jsonl").read_text().splitlines()[0])
    assert starts["hosts"] == ["node1", "node1", "node2", "node2"]
    seen = [(folder / "attempt-1" / "logs" / f"rank-{rank}.log").read_text() for rank in (0, 2)]  # one on each node
    of_node1, of_node2 = (re.findall(r"^evaluation loss .*$", log, re.MULTILINE) for log in seen)
    assert of_node1 == of_node2
    assert len(of_node1) == 1
    assert nothing_left(folder)


@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.cluster
def test_slurm_and_bare_learn_the_same(demo, full_run) -> None:
    # The rate still rises in these steps, whatever number of them there is to be.
    on_slurm, bare = ([step["loss"] for step in of[:3]] for of in (full_run.metrics("step"), steps(demo[1])))
    assert on_slurm == pytest.approx(bare, rel=1e-3)


@pytest.mark.slow
@pytest.mark.docker_image
def test_ctrl_c_leaves_no_container_and_no_network(root: Path, tmp_path: Path) -> None:
    started = subprocess.Popen(
        [*DRAY, "run", RECIPE, "--engine", "docker", "--runs", tmp_path / "runs"],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        assert started.stdout
        for line in started.stdout:
            if line.startswith("step "):
                break
        os.killpg(started.pid, signal.SIGINT)
        out, err = started.communicate(timeout=60)
    finally:
        started.kill()
    assert (started.returncode, err) == (130, "")
    assert "stopped by Ctrl-C at " in out
    (folder,) = (tmp_path / "runs").glob("[!.]*")
    assert nothing_left(folder)


@pytest.mark.torch
@pytest.mark.parametrize(
    ("number", "ranks"),
    [pytest.param(signal.SIGTERM, (), marks=pytest.mark.slow), (signal.SIGHUP, (*ALONE, "launcher=python"))],
)
def test_a_stopped_run_leaves_no_process(root: Path, tmp_path: Path, number: signal.Signals, ranks) -> None:
    runs = tmp_path / "runs"
    started = subprocess.Popen(
        [*DRAY, "run", RECIPE, *ranks, "--runs", runs],
        cwd=root,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert started.stdout
    for line in started.stdout:
        if line.startswith("step "):
            break
    started.send_signal(number)
    out, err = started.communicate(timeout=60)
    assert (started.returncode, err) == (128 + number, "")
    assert f"stopped by {number.name} at " in out
    (folder,) = runs.glob("[!.]*")
    assert json.loads((folder / "attempt-1" / "result.json").read_text())["status"] == "stopped"
    until(lambda: not processes(str(runs)), lambda: processes(str(runs)))


@pytest.mark.slow
@pytest.mark.torch
def test_a_failing_rank_ends_the_run_with_its_code_and_cause(root: Path, tmp_path: Path) -> None:
    ended, folder = run(root, tmp_path / "runs", *ALONE, *SHORT, "model.config.n_layers=3")
    assert ended.returncode == 78
    result = json.loads((folder / "attempt-1" / "result.json").read_text())
    assert (result["status"], result["cause"]["why"], result["cause"]["code"]) == ("failed", "exit code 78", 78)
    assert "a gpt2 configuration has no 'n_layers'" in ended.stdout


@pytest.mark.slow
@pytest.mark.torch
def test_a_loss_that_is_no_number_fails_the_run(root: Path, tmp_path: Path) -> None:
    ended, folder = run(root, tmp_path / "runs", *ALONE, *SHORT, "train.lr=1e18")
    assert ended.returncode == 1
    cause = json.loads((folder / "attempt-1" / "result.json").read_text())["cause"]
    assert cause["name"] == "the loss is not finite"
    found = r"\Athe loss is not finite any more\n  wanted: finite numbers\n  found:  NaN or Inf at step \d, on rank 0"
    assert re.match(found, "\n".join(cause["last_lines"]))
    assert [step["step"] for step in steps(folder)] == list(range(1, len(steps(folder)) + 1))


def processes(text: str) -> list[str]:
    commands = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it ended while we looked
            commands.append(path.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [command for command in commands if text in command]


def nothing_left(folder: Path) -> bool:
    from dray.clients import docker

    client = docker.client()
    try:
        return not client.containers.list(
            all=True, filters={"label": f"dray.run={folder.name}"}
        ) and not client.networks.list(filters={"label": f"dray.run={folder.name}"})
    finally:
        client.close()
