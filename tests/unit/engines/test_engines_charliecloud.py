"""Charliecloud: a whole job by the real ch-run, both kinds of image, and what a node must tell it."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import pytest

from dray import render
from dray.config.site import Site, SiteBind
from dray.contract.findings import ConfigError
from dray.engines.charliecloud import PATH
from dray.facts import Facts
from dray.images.sif import format as sif_format
from dray.planning import caches
from dray.planning.plan import plan
from dray.planning.schema import Plan
from dray.runs.write import read_recipe
from helpers import ROOT, python
from jobs import Job

SYSTEM = "/usr/bin:/bin:/usr/sbin:/sbin"
TASK = """#!/bin/bash
[[ "$1" != --help ]] || exit 0
SLURM_NODEID=0 SLURM_STEP_NUM_NODES=1 SLURMD_NODENAME=n1 exec "${!#}" >>logs/node-0.log 2>&1
"""
# What it is told, and what it reads from the pipe.
STAND_IN = """#!/bin/bash
[[ "$1" != --help ]] || { echo "$HELP"; exit 0; }
for word; do
  case "$word" in
    --set-env=/dev/fd/*) echo environment; sort "${word#*=}" ;;
    *) printf '%s\\n' "$word" ;;
  esac
done
echo "TMPDIR=${TMPDIR-unset}"
"""


def made(folder: Path, *words: str, image: Path | str, binds: Sequence[SiteBind] = (), **given: object) -> Plan:
    """A plan for one node."""
    facts = Facts(scheduler="slurm", job=1, nodelist="n1", nodes=1, engine="charliecloud", image=str(image), **given)
    recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", ["launcher=python", *words])
    site = Site(name="s", about="", engine="charliecloud", binds=tuple(binds))
    return plan(recipe, site, facts, run_folder=PurePosixPath(folder), scratch=f"{folder}-node", dray="0")


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """An image that starts: a shell, its libraries, and a python3 that tells what it was given."""
    image = tmp_path / "tree"
    for name in ("dev", "proc", "sys", "tmp", "etc", "bin", "opt/dray/bin"):
        (image / name).mkdir(parents=True)
    listed = subprocess.run(["ldd", "/bin/sh", "/usr/bin/env"], capture_output=True, text=True, check=True)
    libraries = {word for word in listed.stdout.split() if word.startswith("/") and not word.endswith(":")}
    for file in ("/bin/sh", "/usr/bin/env", *libraries):
        (image / file.lstrip("/")).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(os.path.realpath(file), image / file.lstrip("/"))
    for name in ("passwd", "group"):
        (image / "etc" / name).touch()  # ch-run has its own over them
    python = image / "opt/dray/bin/python3"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@" "in $(pwd)"\necho wrote >written\n/usr/bin/env\n')
    python.chmod(0o755)
    (image / "opt/dray/image.json").write_text('{"variant": "cpu"}\n')
    return image


def start(decided: Plan, *, tools: str = "", **env: str) -> subprocess.CompletedProcess[str]:
    """Its node.sh, as Slurm would start it."""
    Path(decided.folder, "failures").mkdir(parents=True, exist_ok=True)
    node = {"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURMD_NODENAME": "n1", "PATH": f"{tools}:{SYSTEM}"}
    return subprocess.run(
        ["bash", "-c", render.node_script(decided)], env={**node, **env}, capture_output=True, text=True, check=False
    )


@pytest.mark.charliecloud
@pytest.mark.parametrize("kind", ["folder", "squashfs"])
def test_a_planned_command_for_real(tmp_path: Path, tree: Path, kind: str) -> None:
    """Nothing of the host's environment is inside, and what is arrives to the letter."""
    image = tree
    if kind == "squashfs":
        image = tmp_path / "my image.sqsh"
        subprocess.run(["mksquashfs", tree, image, "-quiet", "-no-progress"], check=True, capture_output=True)
    words = ['pass_env=["MY_TOKEN"]', "env.ODD='a \"b\" $HOME : \\ é'"]
    decided = made(tmp_path / "my run", *words, image=image)
    token = "x'y'z $(id) \\n 'q'"
    ended = start(decided, MY_TOKEN=token, LEAK="1", TMPDIR="/var/tmp", HOME="/root", USER="me")
    assert (ended.returncode, ended.stderr) == (0, "")
    lines = ended.stdout.splitlines()
    folder = f"{tmp_path}/my run/attempt-1"
    assert lines[:4] == ["-m", "dray.runner", f"{folder}/plan.json", f"in {folder}"]
    inside = dict(line.split("=", 1) for line in lines[4:])
    assert set(inside.pop("DRAY_IMAGE_ID")) <= set("0123456789abcdef")
    assert re.fullmatch("boot=[0-9a-f-]{36} step=  began=[0-9.]+", inside.pop("DRAY_STARTED"))
    planned = {variable.name: variable.value for variable in decided.env}
    assert inside == {
        **planned, "MY_TOKEN": token, "PATH": PATH, "PWD": folder, "SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1",
        "SLURMD_NODENAME": "n1", "CH_RUNNING": "Weird Al Yankovic",
    }  # fmt: skip
    assert inside["ODD"] == 'a "b" $HOME : \\ é'
    assert Path(folder, "written").read_text() == "wrote\n"


@pytest.mark.charliecloud
def test_each_image_has_an_id_of_its_own(tmp_path: Path, tree: Path) -> None:
    def identity(image: Path) -> str:
        lines = start(made(tmp_path / "run", image=image)).stdout.splitlines()
        return next(line for line in lines if line.startswith("DRAY_IMAGE_ID="))

    first = identity(tree)
    assert identity(tree) == first
    (tree / "opt/dray/image.json").write_text('{"variant": "cuda"}\n')
    assert identity(tree) != first


@pytest.mark.charliecloud
def test_a_place_that_the_image_lacks_is_made_or_named(tmp_path: Path, tree: Path) -> None:
    """Newer versions of ch-run make it in memory; an older one says what it cannot make."""
    ended = start(made(tmp_path / "run", image=tree, binds=[SiteBind(path="/var/lib", why="w")]))
    assert ended.returncode == 0 or f"{tree}/var" in ended.stderr, ended.stderr
    assert not (tree / "var").exists()


@pytest.mark.seconds
@pytest.mark.charliecloud
def test_a_whole_job_for_real(tmp_path: Path) -> None:
    """Batch script, planner, node.sh, runner and a rank; the image is this machine's tree, with this Python in it."""
    job = Job(tmp_path)
    (job.bin / "apptainer").unlink()
    job.tool("srun", TASK)
    image, opt = tmp_path / "image", tmp_path / "opt"
    image.mkdir()
    (opt / "dray/bin").mkdir(parents=True)
    (opt / "dray/image.json").write_text("{}\n")
    python = opt / "dray/bin/python3"
    python.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)
    mounts = f'mount --rbind / "{image}" && mount --bind "{opt}" "{image}/opt" && exec "$@"'
    own = ["unshare", "--map-root-user", "--mount", "--propagation", "private", "bash", "-c", mounts, "x"]
    env = {**job.env, "PATH": f"{job.bin}:{SYSTEM}", "DRAY_IMAGE": str(image), "LEAK": "1"}
    argv = [*own, *job.argv("launcher=python", "--", "env", plan_only=False)]
    ended = subprocess.run(argv, env=env, cwd=job.home, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "done: exit code 0, 1 rank on n1\n" in ended.stdout
    (run,) = job.runs.glob("[!.]*")
    assert json.loads((run / "attempt-1/result.json").read_text())["status"] == "done"
    rank = (run / "attempt-1/logs/rank-0.log").read_text().splitlines()
    assert "CH_RUNNING=Weird Al Yankovic" in rank
    assert "WORLD_SIZE=1" in rank
    assert "LEAK=1" not in rank


@pytest.mark.slow
@pytest.mark.charliecloud
@pytest.mark.sif
def test_our_own_image_trains(tmp_path: Path, sif: Path) -> None:
    """The squashfs in the SIF, as it is; all else is below /tmp, which it need not have a place for."""
    system = sif_format.read(sif).system
    image = tmp_path / "dray-cpu.sqsh"
    with sif.open("rb") as source, image.open("wb") as out:
        source.seek(system.offset)
        copied = 0
        while copied < system.size:
            copied += os.copy_file_range(source.fileno(), out.fileno(), system.size - copied)
    job = Job(tmp_path)
    (job.bin / "apptainer").unlink()
    job.tool("srun", TASK)
    for name in ("slurm", "recipes", "containers", "src", "pyproject.toml"):
        (job.home / name).unlink()
    for name in ("slurm", "recipes", "containers"):
        shutil.copytree(ROOT / name, job.home / name)
    shutil.copy(ROOT / "pyproject.toml", job.home)
    env = {**job.env, "PATH": f"{job.bin}:{SYSTEM}", "DRAY_IMAGE": str(image)}
    words = ["recipes/smoke-cpu.toml", "nodes=1", "train.steps=2", "train.warmup_steps=1"]
    argv = job.argv(*words, plan_only=False)
    ended = subprocess.run(argv, env=env, cwd=job.home, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (run,) = job.runs.glob("[!.]*")
    result = json.loads((run / "attempt-1/result.json").read_text())
    assert (result["status"], (run / "checkpoints/final").is_dir()) == ("done", True)


class TestWords:
    """The real bash; ch-run is a stand-in that tells every word, and what it reads."""

    @pytest.fixture
    def tools(self, tmp_path: Path) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "ch-run").write_text(STAND_IN)
        (folder / "ch-run").chmod(0o755)
        return folder

    def test_all_of_them(self, tmp_path: Path, tools: Path, tree: Path) -> None:
        (tmp_path / "data").mkdir()
        (tmp_path / "link").symlink_to("data")
        binds = [SiteBind(path=f"{tmp_path}/link", why="w"), SiteBind(path="/nowhere", why="w", required=False)]
        decided = made(tmp_path / "run", 'pass_env=["MY_TOKEN"]', image=tree, binds=binds)
        ended = start(decided, tools=str(tools), MY_TOKEN="hush", HELP="--write-fake", TMPDIR="/x", SHELLOPTS="xtrace")
        assert ended.returncode == 0, ended.stderr
        before, after = ended.stdout.split("environment\n")
        assert before.splitlines() == [
            "--unset-env=*", "--env-no-expand", f"--set-env=PATH={PATH}", "--write-fake",
        ]  # fmt: skip
        lines = [
            line
            for line in after.splitlines()
            if not line.startswith(("DRAY_IMAGE_ID", "DRAY_STARTED", *caches.NAMES, "TRITON", "TORCH"))
        ]
        assert lines == [
            "ACCELERATE_USE_CPU='true'", "CUDA_VISIBLE_DEVICES=''", "HF_HUB_OFFLINE='1'", "MY_TOKEN='hush'",
            "OMP_NUM_THREADS='1'", "PYTHONFAULTHANDLER='1'", "PYTHONNOUSERSITE='1'", "PYTHONUNBUFFERED='1'",
            "SLURMD_NODENAME='n1'", "SLURM_NODEID='0'", "SLURM_STEP_NUM_NODES='1'", "TOKENIZERS_PARALLELISM='false'",
            *(f"--bind={tmp_path}/{name}:{tmp_path}/{name}" for name in (".cache-0", "data", "link", "run")),
            f"--cd={tmp_path}/run/attempt-1", str(tree), "--", "python3", "-m", "dray.runner",
            f"{tmp_path}/run/attempt-1/plan.json", "TMPDIR=unset",
        ]  # fmt: skip
        assert "hush" not in ended.stderr  # bash shows its commands, and not this value

    def test_nvidia_s_libraries_are_copies_in_the_node_s_own_folder(
        self, tmp_path: Path, tools: Path, tree: Path
    ) -> None:
        libraries = tmp_path / "lib"
        libraries.mkdir()
        listed = "1000 libs found in cache `/etc/ld.so.cache'\n"
        for name, kind in (
            ("libcuda.so.1", "libc6,x86-64"), ("libcuda.so", "libc6,x86-64"), ("libnvidia-ml.so.1", "libc6,AArch64"),
            ("libnvidia-ptxjitcompiler.so.1", "libc6,x86-64"), ("libnvidia-glcore.so.580.1", "libc6,x86-64"),
            ("libnvidia-gpucomp.so.580.1", "libc6,x86-64"), ("libc.so.6", "libc6,x86-64, OS ABI: Linux 3.2.0"),
        ):  # fmt: skip
            (libraries / name).write_text(name)
            listed += f"\t{name} ({kind}) => {libraries}/{name}\n"
        listed += f"\tlibcuda.so.1 (libc6) => {libraries}/of-32-bits\n"
        (tools / "ldconfig").write_text(f"#!/bin/sh\ncat <<'LISTED'\n{listed}LISTED\n")
        (tools / "ldconfig").chmod(0o755)
        decided = made(tmp_path / "run", "image=cuda", image=tree, gpus_per_node=1)
        (tools / "ch-run").write_text(STAND_IN + f'ls "{tmp_path}/run-node/driver"\n')
        ended = start(decided, tools=str(tools), HELP="")
        assert ended.returncode == 0, ended.stderr
        lines = ended.stdout.splitlines()
        assert lines[3:5] == [f"--set-env=LD_LIBRARY_PATH={tmp_path}/run-node/driver", "environment"]
        assert lines[-4:] == [
            "libcuda.so.1", "libnvidia-gpucomp.so.580.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1",
        ]  # fmt: skip
        assert not (tmp_path / "run-node").exists()  # gone with the node's own folder
        assert "the driver's libraries, copied to" in render.text(decided)
        rocm = start(made(tmp_path / "run", "image=rocm", image=tree, gpus_per_node=1), tools=str(tools), HELP="")
        assert "LD_LIBRARY_PATH" not in rocm.stdout  # /dev is the host's, and ROCm is in the image

    def test_a_line_break_would_set_another_variable(self, tmp_path: Path, tools: Path, tree: Path) -> None:
        decided = made(tmp_path / "run", 'pass_env=["MY_TOKEN"]', image=tree)
        ended = start(decided, tools=str(tools), HELP="", MY_TOKEN="hush\nPATH=/evil")
        assert (ended.returncode, ended.stdout) == (78, "")
        assert ended.stderr == (
            "dray: MY_TOKEN has a line break, which charliecloud cannot pass on\n  where:  node n1\n"
            "  fix:    leave it out of pass_env\n"
        )

    def test_a_link_that_leads_to_a_colon(self, tmp_path: Path, tools: Path, tree: Path) -> None:
        (tmp_path / "a:b").mkdir()
        (tmp_path / "link").symlink_to("a:b")
        decided = made(tmp_path / "run", image=tree, binds=[SiteBind(path=f"{tmp_path}/link", why="w")])
        ended = start(decided, tools=str(tools), HELP="")
        assert (ended.returncode, ended.stdout) == (69, "")
        assert ended.stderr == (
            f"dray: charliecloud cannot mount a path with : in it\n  where:  node n1\n  found:  {tmp_path}/a:b\n"
        )

        record = json.loads((tmp_path / "run/attempt-1/failures/node-0.json").read_text())
        assert (record["node"], record["code"]) == ("n1", 69)

    @pytest.mark.shellcheck
    def test_shellcheck(self, tmp_path: Path) -> None:
        script = render.node_script(made(tmp_path / "run", image="/i.sqsh"))
        checked = subprocess.run(["shellcheck", "-"], input=script, capture_output=True, text=True, check=False)
        assert checked.stdout == ""


def test_what_it_refuses(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="charliecloud cannot mount a path with : in it"):
        made(tmp_path / "a:b", image="/i.sqsh").refuse()
    with pytest.raises(ConfigError, match="charliecloud cannot check who signed an image"):
        made(tmp_path / "r", f'image_signers=["{"A" * 40}"]', image="/i.sqsh").refuse()


def test_the_path_is_that_of_every_image() -> None:
    assert f"PATH={PATH}" in (ROOT / "containers" / "environment").read_text().splitlines()


class TestTheJob:
    @pytest.mark.seconds
    def test_a_digest_pins_a_file(self, tmp_path: Path) -> None:
        job = Job(tmp_path)
        (job.bin / "apptainer").unlink()
        job.tool("ch-run", f'#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift 2\nexec {python()} "$@"\n')
        job.env["PATH"] = f"{job.bin}:{SYSTEM}"
        (tmp_path / "image").mkdir()
        pinned = f"image_digest=sha256:{'0' * 64}"
        ended = job.plan("recipes/smoke-cpu.toml", pinned, DRAY_IMAGE=str(tmp_path / "image"))
        assert (ended.returncode, ended.stdout) == (78, "")
        assert ended.stderr.startswith("dray: image_digest pins a file, and the image is a folder\n"), ended.stderr
        (tmp_path / "image.sqsh").write_bytes(b"hsqs and more")
        ended = job.plan("recipes/smoke-cpu.toml", pinned, DRAY_IMAGE=str(tmp_path / "image.sqsh"))
        assert ended.stderr.startswith("dray: the image has another digest than the recipe\n"), ended.stderr
