"""podman-hpc, which runs at NERSC: every word that it is told, and a job with a stand-in that takes no others."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from dray import render
from dray.config.site import Fabric, Site, SiteBind
from dray.contract.findings import ConfigError
from dray.facts import Facts
from dray.images import store
from dray.planning.plan import plan
from dray.planning.schema import Plan
from dray.render.node import start_argv
from dray.runs.prepare import read_recipe
from helpers import ROOT
from jobs import Job

# Podman's own words, each with what it may be, and podman-hpc's.
WORDS = {
    "--rm": "", "--init": "", "--interactive": "", "--gpu": "", "--nccl": "", "--network": "host",
    "--user": r"\d+:\d+", "--userns": "keep-id", "--shm-size": "1g", "--ulimit": "host|memlock=-1", "--label": ".+",
    "--env": r"[A-Za-z_]\w*(=.*)?", "--mount": r'type=bind,"src=/.*","dst=/.*"(,readonly)?', "--workdir": "/.+",
    "--device": "/dev/.+",
}  # fmt: skip
STAND_IN = f"""
import json, os, re, sys
argv, words = sys.argv[1:], {WORDS!r}
seen = open(os.environ["SEEN"], "a")
if argv[:2] == ["image", "inspect"]:
    assert argv[2] == "--format={{{{.Id}}}}", argv
    print("0123abcd")
    sys.exit()
assert argv.pop(0) == "run", argv
env, where = {{}}, "/"
while argv[0].startswith("--"):
    name, _, value = argv.pop(0).partition("=")
    assert re.fullmatch(words[name], value), (name, value)
    if name == "--env":
        variable, _, given = value.partition("=")
        env |= {{variable: given}} if "=" in value else {{k: v for k, v in os.environ.items() if k == variable}}
    where = value if name == "--workdir" else where
image, *command = argv
print(json.dumps([image, *command[:4]]), file=seen, flush=True)
os.chdir(where)
os.execvpe(command[0], command, {{"PATH": os.environ["PATH"], **env}})
"""
TASK = """#!/bin/bash
[[ "$1" != --help ]] || exit 0
SLURM_NODEID=0 SLURM_STEP_NUM_NODES=1 SLURMD_NODENAME=n1 exec "${!#}" >>logs/node-0.log 2>&1
"""


def made(*words: str, nodes: int = 2, **site: object) -> Plan:
    facts = Facts(
        scheduler="slurm", job=1, nodelist="n[1-2]" if nodes == 2 else "n1", nodes=nodes, engine="podman-hpc",
        image="localhost/dray:cuda", gpus_per_node=1, uid=1000, gid=1000,
    )  # fmt: skip
    recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", list(words))
    profile = Site.model_validate({"name": "s", "about": "", "engine": "podman-hpc", **site})
    return plan(recipe, profile, facts, run_folder=PurePosixPath("/r"), scratch="/tmp/dray-7-r", dray="0")


def options(decided: Plan) -> list[str]:
    """Its words, but for those of variables."""
    words = list(map(str, start_argv(decided)))
    return [word for word in words if not word.startswith("--env=")]


def test_the_whole_command_on_slingshot() -> None:
    fabric = Fabric(kind="slingshot", strategy="host", plugin="image", transport=("cxi",))
    decided = made("image=cuda", fabric=fabric)
    assert options(decided) == [
        "podman-hpc", "run", "--nccl", "--rm", "--init", "--label=dray.run=r", "--network=host", "--user=1000:1000",
        "--userns=keep-id", "--shm-size=1g", "--ulimit=host", '"${devices[@]}"', "--gpu", '"${mounts[@]}"',
        "--workdir=/r/attempt-1", "localhost/dray:cuda", "python3", "-m", "dray.runner", "/r/attempt-1/plan.json",
    ]  # fmt: skip
    text = render.text(decided)
    assert "  GPUs       the site's module for podman-hpc, by --gpu\n" in text
    assert "nothing is added: the site's module for podman-hpc does it, by --nccl\n" in text
    assert decided.fabric.transport == ("cxi",)  # the preflight proves it
    assert "NCCL_NET_PLUGIN" not in {variable.name for variable in decided.env}


@pytest.mark.parametrize(
    ("words", "nodes", "there"),
    [
        (["image=cuda"], 1, {"--gpu"}),
        (["image=rocm"], 2, {"--device=/dev/kfd", "--device=/dev/dri"}),
        ([], 2, set()),
    ],
)
def test_modules_are_asked_for_where_they_are_of_use(words: list[str], nodes: int, there: set[str]) -> None:
    decided = made(*words, nodes=nodes, fabric=Fabric(kind="slingshot", transport=("cxi",)))
    asked = {word for word in options(decided) if word in ("--gpu", "--nccl") or word.startswith("--device")}
    assert asked == there


def test_what_it_refuses() -> None:
    with pytest.raises(ConfigError, match="podman-hpc cannot check who signed an image"):
        made("image=cuda", f'image_signers=["{"A" * 40}"]').refuse()
    with pytest.raises(ConfigError, match="podman-hpc cannot check an image's digest"):
        made("image=cuda", f"image_digest=sha256:{'0' * 64}").refuse()


def test_an_image_is_a_name_in_its_store(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.delenv("DRAY_IMAGE", raising=False)
    assert store.required(tmp_path, "cuda", engine="podman-hpc") == Path("localhost/dray:cuda")
    monkeypatch.setenv("DRAY_IMAGE", "docker.io/me/dray:1")
    assert store.required(tmp_path, "cuda", engine="podman-hpc") == Path("docker.io/me/dray:1")


@pytest.mark.seconds
def test_a_job_from_the_plan_to_the_result(tmp_path: Path) -> None:
    job = Job(tmp_path)
    (job.bin / "apptainer").unlink()
    job.tool("srun", TASK)
    stand_in = tmp_path / "podman_hpc.py"
    stand_in.write_text(STAND_IN)
    job.tool("podman-hpc", f'#!/bin/sh\nexec {shlex.join([sys.executable, str(stand_in)])} "$@"\n')
    job.python()
    (tmp_path / 'a, "b"').mkdir()
    env = {
        **job.env, "PATH": f"{job.bin}:/usr/bin:/bin", "MY_TOKEN": "x y", "LEAK": "1",
        "SLURM_SUBMIT_DIR": str(tmp_path / 'a, "b"'),
    }  # fmt: skip
    argv = job.argv("launcher=python", 'pass_env=["MY_TOKEN"]', "--", "env", plan_only=False)
    ended = subprocess.run(argv, env=env, cwd=job.home, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    (run,) = job.runs.glob("[!.]*")
    calls = [json.loads(line) for line in job.seen.read_text().splitlines()]
    assert calls == [
        ["localhost/dray:cpu", "python3", "-m", "dray", "plan"],
        ["localhost/dray:cpu", "python3", "-m", "dray.runner", f"{run}/attempt-1/plan.json"],
        ["localhost/dray:cpu", "python3", "-m", "dray", "finish"],
    ]
    rank = (run / "attempt-1/logs/rank-0.log").read_text().splitlines()
    assert {"MY_TOKEN=x y", "DRAY_IMAGE_ID=0123abcd", "WORLD_SIZE=1"} <= set(rank)
    assert "LEAK=1" not in rank


def test_a_mount_that_nobody_may_write() -> None:
    script = render.node_script(made(binds=(SiteBind(path="/data", why="w"),)))
    assert "\nnode::bind /data ro\n" in script
    assert "read_only=readonly\n" in script
