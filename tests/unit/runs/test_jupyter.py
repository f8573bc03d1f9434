"""`dray jupyter`: what starts it, how it is reached, and that its token is nobody else's. The server is a stand-in."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from dray.contract import processes
from dray.contract.findings import ConfigError
from dray.facts import Facts, Layer
from dray.runs import jupyter, layers, live
from dray.runs.paths import RunPaths
from dray.runs.write import read_recipe, write
from helpers import ROOT
from slurms import Slurm

FACTS = Facts(
    scheduler="slurm", job=17, nodelist="n[1-2]", nodes=2, engine="apptainer", image="/i.sif", home="/home/me"
)
# As the real one: it writes down how it is reached, and waits.
SERVER = """
import json, os, signal, sys
folder = os.environ["JUPYTER_RUNTIME_DIR"]
json.dump(sys.argv[1:] + [os.environ["HOME"]], open(os.environ["SEEN"], "w"))
json.dump({"port": 8889, "token": "x"}, open(folder + "/jpserver-7.json", "w"))
signal.pause()
"""


def begun(runs: Path, **facts: object) -> RunPaths:
    recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml")
    return write(recipe, FACTS.model_copy(update=facts), runs=runs, run="mine")[1]


def here(runs: Path) -> RunPaths:
    """An active bare run, in this very process."""
    paths = begun(runs, scheduler="local", job=0, engine="bare", image=sys.executable, nodelist="node1", nodes=1)
    paths.process.write_text(json.dumps(processes.mark(os.getpid())))
    return paths


def dray(*words: str | Path, **env: str) -> subprocess.Popen[str]:
    argv = [sys.executable, "-m", "dray", "jupyter", *words]
    pipe = subprocess.PIPE
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job would ignore it
    try:
        return subprocess.Popen(argv, env={**os.environ, **env}, stdout=pipe, stderr=pipe, text=True)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.seconds
def test_it_runs_until_ctrl_c(tmp_path: Path) -> None:
    paths = here(tmp_path / "my runs")
    module = tmp_path / "modules" / "jupyterlab"
    module.mkdir(parents=True)
    (module / "__init__.py").touch()
    (module / "__main__.py").write_text(SERVER)
    with dray(paths.run, PYTHONPATH=str(module.parent), SEEN=str(tmp_path / "seen")) as lab:
        assert lab.stdout
        said = [lab.stdout.readline().rstrip("\n") for _ in range(4)]
        (folder,) = paths.folder.glob("jupyter-*")
        token = (folder / "token").read_text()
        modes = {path.name: path.stat().st_mode & 0o777 for path in (folder, folder / "token", folder / "server.log")}
        lab.send_signal(signal.SIGINT)
        rest = lab.communicate(timeout=30)
    assert re.fullmatch(r"on your own machine: ssh -N -L 8889:127\.0\.0\.1:8889 \S+@\S+", said[1])
    assert [said[0], *said[2:]] == [
        "JupyterLab runs on this machine; Ctrl-C here ends it",
        "and open:            http://127.0.0.1:8889/lab",
        f"the token is in {folder}/token, which only you can read",
    ]
    # A signal between the write of a line and its end has the line written again.
    assert (rest[0].splitlines()[-1], rest[1]) == ("JupyterLab has ended", "")
    *argv, home = json.loads((tmp_path / "seen").read_text())
    allow = ["--allow-root"] if os.geteuid() == 0 else []
    assert argv == ["--no-browser", "--ip=127.0.0.1", "--port=8888", f"--ServerApp.root_dir={paths.run}", *allow]
    assert home == str(folder)
    assert len(token) > 40
    assert (modes[folder.name], modes["token"]) == (0o700, 0o600)
    assert not folder.exists()


@pytest.mark.seconds
def test_an_image_without_it(tmp_path: Path) -> None:
    paths = here(tmp_path)
    with dray(paths.run) as lab:
        out, told = lab.communicate(timeout=30)
    assert (lab.returncode, out) == (78, "")
    assert told.splitlines() == [
        "dray: JupyterLab is not in the image",
        "  wanted: jupyterlab",
        "  found:  not installed",
        f"  fix:    {sys.executable} -m pip install jupyterlab",
    ]
    assert not list(paths.folder.glob("jupyter-*"))


def test_on_a_node_with_the_layer_of_that_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is bound where the run has none; the run's own script stays what it is."""
    Slurm(tmp_path, monkeypatch).has(17, "RUNNING")
    paths = begun(tmp_path / "runs")
    layer = Layer(file="/b/dray-cpu-jupyterlab.sif", digest=f"sha256:{'a' * 64}", variant="cpu", packages={})
    monkeypatch.setattr(
        layers, "made", lambda variant, name: layer if (variant, name) == ("cpu", "jupyterlab") else None
    )
    place = jupyter.in_run(live.look(paths.run), "1", tmp_path)
    script = paths.folder / "enter-aaaaaaaaaaaa.sh"
    assert place.start(["python3"])[-2:] == [str(script), "python3"]
    assert 'src=/b/dray-cpu-jupyterlab.sif","dst=/opt/layer",image-src=/' in script.read_text()
    assert (place.host, place.python, place.root, place.fix) == (
        "n2",
        "python3",
        str(paths.run),
        "dray image layer cpu --pip jupyterlab",
    )


def test_here_in_an_image(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image, tool = tmp_path / "i.sif", tmp_path / "bin" / "apptainer"
    image.write_bytes(b"")
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tool.parent}:{os.environ['PATH']}")
    folder = tmp_path / 'my "work"'
    folder.mkdir()
    monkeypatch.chdir(folder)
    quoted = str(folder).replace('"', '""')
    assert jupyter.in_image(str(image), tmp_path / "own").start(["python3", "-m", "x"]) == [
        "apptainer", "--quiet", "exec", "--cleanenv", "--no-eval", "--no-mount=home,cwd",
        f'--mount=type=bind,"src={quoted}","dst={quoted}"',
        f'--mount=type=bind,"src={tmp_path}/own","dst={tmp_path}/own"',
        f"--pwd={folder}", str(image), "python3", "-m", "x",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="the image does not exist"):
        jupyter.in_image("gone", tmp_path)


def test_a_container_whose_loopback_is_its_own(tmp_path: Path) -> None:
    paths = begun(tmp_path, scheduler="local", job=0, engine="docker", image="dray:cpu")
    with pytest.raises(ConfigError, match="a container of docker has a private loopback"):
        jupyter.in_run(live.State("running", paths.run, paths, process=5), "", tmp_path)


def test_the_tunnel_of_a_node() -> None:
    first, way, url = jupyter.lines("n2", 8888, "t0k")
    assert first == "JupyterLab runs on n2; Ctrl-C here ends it"
    assert re.fullmatch(r"on your own machine: ssh -N -L 8888:127\.0\.0\.1:8888 -J (\S+)@\S+ \1@n2", way)
    assert url == "and open:            http://127.0.0.1:8888/lab?token=t0k"
