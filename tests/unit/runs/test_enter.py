"""`dray enter`: what starts the shell, and that the script starts what the run's own starts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from command import dray
from dray import render
from dray.contract import processes
from dray.contract.findings import ConfigError
from dray.facts import Facts, Layer
from dray.runs.active_run import enter
from dray.runs.finish import finish
from dray.runs.prepare import read_recipe, write
from dray.runs.status import status
from dray.runs.store import RunPaths
from dray.runs.store import plan_of as read
from helpers import ROOT
from slurms import Slurm

FACTS = Facts(
    scheduler="slurm", job=17, nodelist="n[1-2]", nodes=2, engine="apptainer", image="/i.sif", home="/home/me"
)


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Slurm:
    return Slurm(tmp_path, monkeypatch)


def begun(tmp_path: Path, *words: str, **facts: object) -> RunPaths:
    seen = FACTS.model_copy(update=facts)
    return write(read_recipe(ROOT / "recipes" / "smoke-cpu.toml", words), seen, runs=tmp_path / "my runs", run="mine")[
        1
    ]


def test_by_srun_on_the_node(slurm: Slurm, tmp_path: Path) -> None:
    paths = begun(tmp_path)
    slurm.has(17, "RUNNING")
    argv = enter.argv(status(paths.run), "n2", ["bash"], terminal=True)
    assert argv == [
        "srun", "--jobid=17", "--overlap", "--export=ALL", "--nodes=1", "--ntasks=1", "--ntasks-per-node=1",
        "--nodelist=n2", "--cpu-bind=none", f"--chdir={paths.folder}", "--pty", f"{paths.folder}/enter.sh", "bash",
    ]  # fmt: skip


@pytest.mark.parametrize("share", ["none", "group"])
def test_no_group_may_write_what_its_user_runs(slurm: Slurm, tmp_path: Path, share: str) -> None:
    """Whatever the umask is: members of a group read a shared run, and its user runs the scripts in it."""
    before = os.umask(0o002)
    try:
        paths = begun(tmp_path, f"runs.share={share}")
        os.umask(0o002)  # of the shell in which the user types `dray enter`
        slurm.has(17, "RUNNING")
        enter.argv(status(paths.run), "n1", ["bash"], terminal=False)
    finally:
        os.umask(before)
    assert {paths.node_script, paths.enter_script} <= {*paths.folder.iterdir()}
    written = [path for path in paths.run.rglob("*") if path.is_file()]
    assert [path for path in written if path.stat().st_mode & 0o022] == []


@pytest.mark.parametrize(
    ("engine", "options"),
    [
        ("edf", "--environment={folder}/edf.toml"),
        ("pyxis", "--container-image=/i.sqsh --container-mounts={run}:{run},{caches}:{caches} "
         "--container-workdir={folder} --no-container-mount-home --no-container-remap-root --container-writable"),
    ],
)  # fmt: skip
def test_where_slurm_starts_the_container(slurm: Slurm, tmp_path: Path, engine: str, options: str) -> None:
    paths = write(
        read_recipe(ROOT / "recipes" / "smoke-cpu.toml"),
        FACTS.model_copy(update={"engine": engine, "image": "/i.sqsh"}),
        runs=tmp_path,
        run="mine",
    )[1]
    slurm.has(17, "RUNNING")
    argv = enter.argv(status(paths.run), "n1", ["nvidia-smi", "-L"], terminal=False)
    caches = paths.run.with_name(f".cache-{FACTS.uid}")
    own = options.format(folder=paths.folder, run=paths.run, caches=caches).split(" ")
    assert argv[10:] == [*own, f"{paths.folder}/enter.sh", "nvidia-smi", "-L"]
    assert paths.enter_script.read_text().endswith('\nnode::start "$@"\n')


APPTAINER = """#!/bin/sh
[ "$1" != buildcfg ] || exit 0
printf '%s\\n' "$@" >"$SEEN"
env | grep ^APPTAINERENV_ | sort >>"$SEEN"
exit 3
"""


def started(script: str, tmp_path: Path, *words: str) -> tuple[int, list[str]]:
    tool = tmp_path / "bin" / "apptainer"
    tool.parent.mkdir(exist_ok=True)
    tool.write_text(APPTAINER)
    tool.chmod(0o755)
    env = {"PATH": f"{tool.parent}:{os.environ['PATH']}", "SEEN": str(tmp_path / "seen"), "SLURMD_NODENAME": "n2"}
    (tmp_path / "seen").unlink(missing_ok=True)
    ended = subprocess.run(
        ["bash", "-c", script, "node.sh", *words], env=env, capture_output=True, text=True, check=False
    )
    return ended.returncode, (tmp_path / "seen").read_text().splitlines() if (tmp_path / "seen").exists() else []


def test_it_starts_what_the_run_starts(tmp_path: Path) -> None:
    """The same engine, mounts and environment; another command, and nothing of the run's is taken away."""
    image = tmp_path / "i.sif"
    image.write_text("image")
    plan = read(begun(tmp_path, image=str(image)))
    before = sorted(path for path in tmp_path.rglob("*"))
    code, entered = started(render.enter_script(plan), tmp_path, "python3", "-c", "print('a b')")
    assert code == 3
    assert sorted(path for path in tmp_path.rglob("*") if "bin" not in str(path) and path.name != "seen") == before
    code, own = started(render.node_script(plan), tmp_path)
    assert code == 3
    environment = {word for word in entered if word.startswith("APPTAINERENV_")}
    assert {f"APPTAINERENV_{variable.name}={variable.value}" for variable in plan.env} <= environment
    own, entered = ([word for word in argv if not word.startswith("APPTAINERENV_")] for argv in (own, entered))
    at = own.index(str(image)) + 1
    assert entered == [*own[:at], "python3", "-c", "print('a b')", *own[at + 4 :]]


def test_what_a_node_lacks_is_no_failure_of_the_run(tmp_path: Path) -> None:
    paths = begun(tmp_path)
    assert started(render.enter_script(read(paths)), tmp_path, "bash") == (69, [])
    assert list(paths.failures.iterdir()) == []


def test_a_staged_image_is_not_copied_again(tmp_path: Path) -> None:
    plan = read(begun(tmp_path)).model_copy(update={"stage": "/local/dray-7-r.sif"})
    assert "node::stage" in render.node_script(plan)
    assert "node::stage" not in render.enter_script(plan)


def test_a_container_of_docker_is_entered_by_docker(tmp_path: Path) -> None:
    """The fix is a line that does it."""
    paths = begun(tmp_path, scheduler="local", job=0, engine="docker", image="dray:cpu")
    paths.process.write_text(json.dumps(processes.mark(os.getpid())))
    with pytest.raises(ConfigError, match="dray enter opens no container of docker") as refused:
        enter.active_plan(status(paths.run))
    fix = "docker exec -it $(docker ps --quiet --filter label=dray.run=mine | head -n1) bash"
    assert refused.value.finding.fix == fix


@pytest.mark.parametrize(
    ("state", "found"),
    [
        ("PENDING", "queued (job 18, PENDING)"),
        ("CONFIGURING", "running (job 18, CONFIGURING)"),
        ("", "failed"),
    ],
)
def test_no_run_that_goes_on(slurm: Slurm, tmp_path: Path, state: str, found: str) -> None:
    paths = begun(tmp_path)
    finish(paths, code=75)
    if state:
        slurm.has(18, state, command=f"multinode.sh --run={paths.run} x.toml")
    with pytest.raises(ConfigError, match="no attempt of the run is active") as refused:
        enter.active_plan(status(paths.run))
    assert refused.value.finding.found == found


@pytest.mark.parametrize(("word", "node"), [("", "n1"), ("1", "n2"), ("n2", "n2")])
def test_which_node(tmp_path: Path, word: str, node: str) -> None:
    assert enter.node_of(read(begun(tmp_path)), word) == node


@pytest.mark.hostile("enter")
@pytest.mark.parametrize("word", ["2", "-1", "n3", "\u0663", "9" * 5000, "\x1b[2J"])
def test_a_node_that_is_none(tmp_path: Path, word: str) -> None:
    with pytest.raises(ConfigError, match="the run has no such node") as refused:
        enter.node_of(read(begun(tmp_path)), word)
    assert str(refused.value).isprintable() or "\n" in str(refused.value)


def test_the_shell_of_another_job_decides_nothing() -> None:
    env = {"SLURM_NNODES": "4", "SLURM_CONF": "/etc/slurm.conf", "SRUN_X": "1", "HF_TOKEN": "t"}
    assert enter.environment(env) == {"SLURM_CONF": "/etc/slurm.conf", "HF_TOKEN": "t"}


@pytest.mark.seconds
def test_a_bare_run_and_no_terminal(tmp_path: Path) -> None:
    """The whole verb: a command runs with the run's environment; a shell is refused."""

    facts = {"scheduler": "local", "job": 0, "engine": "bare", "image": sys.executable, "nodelist": "node1", "nodes": 1}
    paths = begun(tmp_path, **facts)
    paths.process.write_text(json.dumps(processes.mark(os.getpid())))
    ended = dray("enter", paths.run, "--", "sh", "-c", 'echo "$OMP_NUM_THREADS"; exit 7')
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "1\n", "")
    ended = dray("enter", paths.run)
    assert (ended.returncode, ended.stderr.splitlines()[0]) == (78, "dray: a shell needs a terminal")


# It writes down how it is started.
SERVER = """
import json, os, stat, sys
folder = os.environ["JUPYTER_RUNTIME_DIR"]
json.dump([*sys.argv[1:], folder, os.environ["HOME"], oct(os.stat(folder).st_mode)], open(os.environ["SEEN"], "w"))
"""


def here(runs: Path) -> RunPaths:
    """An active bare run, in this very process."""
    paths = begun(runs, scheduler="local", job=0, engine="bare", image=sys.executable, nodelist="node1", nodes=1)
    paths.process.write_text(json.dumps(processes.mark(os.getpid())))
    return paths


@pytest.mark.seconds
def test_jupyterlab_on_a_terminal(tmp_path: Path) -> None:
    paths = here(tmp_path / "my runs")
    module = tmp_path / "modules" / "jupyterlab"
    module.mkdir(parents=True)
    (module / "__init__.py").touch()
    (module / "__main__.py").write_text(SERVER)
    ours, theirs = os.openpty()
    env = {**os.environ, "PYTHONPATH": str(module.parent), "SEEN": str(tmp_path / "seen")}
    argv = [sys.executable, "-m", "dray", "enter", "--jupyter", "--port=8889", str(paths.run)]
    ended = subprocess.run(argv, env=env, stdin=theirs, stdout=theirs, stderr=subprocess.PIPE, check=False, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, b"")
    tunnel, url, missing = os.read(ours, 4096).decode().splitlines()
    os.close(ours)
    os.close(theirs)
    assert re.fullmatch(r"on your own machine: ssh -N -L 8889:127\.0\.0\.1:8889 \S+@\S+", tunnel)
    assert url == "then open the last URL that JupyterLab prints here; Ctrl-C ends it"
    assert missing == f"if JupyterLab is missing: {sys.executable} -m pip install jupyterlab"
    *words, folder, home, mode = json.loads((tmp_path / "seen").read_text())
    assert words[:4] == ["--no-browser", "--ip=127.0.0.1", "--port=8889", "--ServerApp.port_retries=0"]
    assert f"--ServerApp.root_dir={paths.run}" in words
    assert (folder, home, mode) == (f"{paths.folder}/jupyter-8889",) * 2 + ("0o40700",)


@pytest.mark.seconds
def test_no_token_goes_into_a_file(tmp_path: Path) -> None:
    """JupyterLab prints it, and others may read the file: they would have a shell as this user."""
    paths = here(tmp_path)
    ended = dray("enter", "--jupyter", paths.run)
    problem = "dray: JupyterLab, whose token only you may see, needs a terminal"
    assert (ended.returncode, ended.stdout, ended.stderr.splitlines()[0]) == (78, "", problem)


def test_the_layer_with_jupyterlab(slurm: Slurm, tmp_path: Path) -> None:
    """It is bound where the run has none."""
    slurm.has(17, "RUNNING")
    paths = begun(tmp_path)
    layer = Layer(file="/b/dray-cpu-jupyterlab.sif", digest=f"sha256:{'a' * 64}", variant="cpu", packages={})
    argv = enter.argv(status(paths.run), "n2", ["python3"], terminal=False, layer=layer)
    assert argv[-2:] == [str(paths.enter_script), "python3"]
    assert 'src=/b/dray-cpu-jupyterlab.sif","dst=/opt/layer",image-src=/' in paths.enter_script.read_text()


def test_the_tunnel_of_a_node() -> None:
    assert re.fullmatch(r"ssh -N -L 8888:127\.0\.0\.1:8888 -J (\S+)@\S+ \1@n2", enter.tunnel("n2", 8888))
