"""Shifter, which runs at NERSC: every word that it is told, and a job with a stand-in that takes no others."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from dray import render
from dray.config.model import load
from dray.config.site import Fabric, Site, SiteBind
from dray.contract.findings import ConfigError
from dray.facts import Facts
from dray.fitness import doctor
from dray.images import store
from dray.planning.plan import plan
from dray.planning.schema import Plan
from dray.render.node import start_argv
from dray.runs.write import read_recipe
from helpers import ROOT
from jobs import Job

IMAGE = "docker:registry.example.org/me/dray:cuda"
VISIBLE = (ROOT / "src/dray/engines/visible.sh").read_text()
# shifter's own words, each with what it may be, by its source (84b7d34). It reads the file inside, trims its lines, and
# takes no empty value of --env.
STAND_IN = r"""
import json, os, re, sys
words = {
    "--image": r"(docker|custom|id):[A-Za-z0-9_.:+@/-]+", "--module": r"none|[\w.-]+(,[\w.-]+)*", "--clearenv": "",
    "--env": r"[A-Za-z_]\w*=.+", "--env-file": "/dev/fd/.+", "--workdir": "/.+",
}
argv, inner, where, kept = sys.argv[1:], {}, None, os.environ
while argv[0] != "--":
    name, _, value = argv.pop(0).partition("=")
    assert re.fullmatch(words[name], value, re.DOTALL), (name, value)
    if name == "--clearenv":
        kept = {}
    if name == "--env":
        inner |= [value.split("=", 1)]
    if name == "--env-file":
        inner |= [line.strip().split("=", 1) for line in open(value)]
    image, where = value if name == "--image" else image, value if name == "--workdir" else where
command = argv[1:]
print(json.dumps([image, *command[command.index("--") + 1 :][:4]]), file=open(os.environ["SEEN"], "a"))
os.chdir(where if os.path.isdir(where) else "/")
hidden = os.environ.get("HIDDEN")
if hidden and hidden in command:  # a folder that the site does not mount
    command[command.index(hidden)] = "/nonexistent" + hidden
os.execvpe(command[0], command, {"PATH": os.environ["PATH"], **kept, **inner})
"""
TASK = """#!/bin/bash
[[ "$1" != --help ]] || exit 0
SLURM_NODEID=0 SLURM_STEP_NUM_NODES=1 SLURMD_NODENAME=n1 exec "${!#}" >>logs/node-0.log 2>&1
"""


def made(*words: str, nodes: int = 2, image: str = IMAGE, **site: object) -> Plan:
    facts = Facts(
        scheduler="slurm", job=1, nodelist="n[1-2]" if nodes == 2 else "n1", nodes=nodes, engine="shifter", image=image,
        gpus_per_node=1, uid=1000, gid=1000,
    )  # fmt: skip
    recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", list(words))
    profile = Site.model_validate({"name": "s", "about": "", "engine": "shifter", **site})
    return plan(recipe, profile, facts, run_folder=PurePosixPath("/r"), scratch="/tmp/dray-7-r", dray="0")


def test_the_whole_command_on_slingshot() -> None:
    fabric = Fabric(kind="slingshot", strategy="host", plugin="image", transport=("cxi",))
    decided = made("image=cuda", 'pass_env=["MY_TOKEN"]', fabric=fabric)
    *options, environment, workdir, separator = list(map(str, start_argv(decided)))[:7]
    assert options == ["shifter", f"--image={IMAGE}", "--module=gpu,nccl-cu13-plugin", "--clearenv"]
    assert environment.startswith("--env-file=<(node::environment ")
    assert " MY_TOKEN " in environment
    assert [workdir, separator] == ["--workdir=/r/attempt-1", "--"]
    assert list(map(str, start_argv(decided)))[7:] == [
        "/bin/sh", "-c", VISIBLE, "sh", '"${mounts[@]}"', "--", "python3", "-m", "dray.runner",
        "/r/attempt-1/plan.json",
    ]  # fmt: skip
    text = render.text(decided)
    assert "  GPUs       the site's module for Shifter, by --module\n" in text
    assert "nothing is added: the site's module for Shifter does it, by --module\n" in text
    assert re.search(r"\nannotations\n  shifter.module +gpu,nccl-cu13-plugin\n", text)
    assert decided.fabric.transport == ("cxi",)  # the preflight proves it
    assert "NCCL_NET_PLUGIN" not in {variable.name for variable in decided.env}


@pytest.mark.parametrize(
    ("words", "nodes", "site", "module"),
    [
        (["image=cuda"], 1, {}, "gpu"),
        (["image=cuda12"], 2, {}, "gpu,nccl-plugin"),
        (["image=rocm"], 2, {}, "none"),
        ([], 2, {}, "none"),
        (["image=cuda"], 2, {"annotations": {"shifter.module": "gpu,nccl-2.18"}}, "gpu,nccl-2.18"),
    ],
)
def test_modules(words: list[str], nodes: int, site: dict[str, object], module: str) -> None:
    decided = made(*words, nodes=nodes, fabric=Fabric(kind="slingshot", transport=("cxi",)), **site)
    assert f"--module={module}" in list(map(str, start_argv(decided)))


def test_what_it_refuses() -> None:
    with pytest.raises(ConfigError, match="shifter cannot check who signed an image"):
        made("image=cuda", f'image_signers=["{"A" * 40}"]').refuse()
    with pytest.raises(ConfigError, match="image_digest pins a SIF"):
        made("image=cuda", f"image_digest=sha256:{'0' * 64}").refuse()
    with pytest.raises(ConfigError, match="the shifter engine does not know this annotation") as refused:
        made(annotations={"com.hooks.x": "1"})
    assert refused.value.details == {"wanted": "shifter.module", "found": "com.hooks.x"}


@pytest.mark.parametrize(
    "image", ["", "dray:cuda", "registry.example.org/me/dray", "docker:me/dray;id", "docker:", "/i.sif"]
)
def test_an_image_that_no_gateway_has(tmp_path: Path, monkeypatch, image: str) -> None:
    """It would drop the other characters, and look for what is left. The job says the same as `dray submit`."""
    monkeypatch.setenv("DRAY_IMAGE", image)
    with pytest.raises(ConfigError, match="shifter starts images of its gateway") as refused:
        store.required(tmp_path, "cuda", engine="shifter")
    job = Job(tmp_path)
    (job.bin / "apptainer").unlink()
    job.tool("shifter", "")
    ended = job.plan("recipes/smoke-cpu.toml", DRAY_IMAGE=image, PATH=f"{job.bin}:/usr/bin:/bin")
    assert (ended.returncode, ended.stdout) == (78, "")
    assert ended.stderr == f"dray: {refused.value.problem}\n" + "".join(
        f"  {name + ':':<7} {refused.value.details[name]}\n" for name in ("wanted", "found", "fix")
    )


def test_an_image_is_a_name_at_its_gateway(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setenv("DRAY_IMAGE", IMAGE)
    assert store.required(tmp_path, "cuda", engine="shifter") == Path(IMAGE)


def test_annotations_of_a_site_that_has_another_engine(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('name = "mine"\nabout = "x"\nannotations = {shifter.module = "gpu"}\n')
    with pytest.raises(ConfigError, match="has 1 error") as refused:
        load(Site, tmp_path / "mine.toml")
    assert 'annotations need engine = "edf" or "shifter"' in str(refused.value)


class TestTheJob:
    @pytest.fixture
    def job(self, tmp_path: Path) -> Job:
        job = Job(tmp_path)
        (job.bin / "apptainer").unlink()
        job.tool("srun", TASK)
        stand_in = tmp_path / "shifter.py"
        stand_in.write_text(STAND_IN)
        job.tool("shifter", f'#!/bin/sh\nexec {shlex.join([sys.executable, str(stand_in)])} "$@"\n')
        job.tool("shifterimg", f'#!/bin/sh\n[ "$*" = "lookup {IMAGE}" ] && echo 0123abcd\n')
        job.tool("python3", f'#!/bin/sh\nexec {shlex.quote(sys.executable)} "$@"\n')
        (tmp_path / 'a, "b"').mkdir()
        job.env |= {
            "PATH": f"{job.bin}:/usr/bin:/bin", "MY_TOKEN": 'x "y" #', "LEAK": "1", "DRAY_IMAGE": IMAGE,
            "SLURM_SUBMIT_DIR": str(tmp_path / 'a, "b"'),
        }  # fmt: skip
        return job

    def run(self, job: Job, **env: str) -> subprocess.CompletedProcess[str]:
        argv = job.argv("launcher=python", 'pass_env=["MY_TOKEN"]', "--", "env", plan_only=False)
        return subprocess.run(
            argv, env={**job.env, **env}, cwd=job.home, capture_output=True, text=True, check=False, timeout=120
        )

    @pytest.mark.seconds
    def test_from_the_plan_to_the_result(self, job: Job) -> None:
        ended = self.run(job)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        (run,) = job.runs.glob("[!.]*")
        calls = [json.loads(line) for line in job.seen.read_text().splitlines()]
        assert calls == [
            [IMAGE, "python3", "-m", "dray", "plan"],
            [IMAGE, "python3", "-m", "dray.runner", f"{run}/attempt-1/plan.json"],
            [IMAGE, "python3", "-m", "dray", "finish"],
        ]
        rank = (run / "attempt-1/logs/rank-0.log").read_text().splitlines()
        assert {'MY_TOKEN=x "y" #', "DRAY_IMAGE_ID=0123abcd", "WORLD_SIZE=1"} <= set(rank)
        assert "LEAK=1" not in rank

    def test_a_folder_that_the_site_does_not_mount(self, job: Job, tmp_path: Path) -> None:
        hidden = str(tmp_path / 'a, "b"')
        ended = self.run(job, HIDDEN=hidden)
        assert ended.returncode == 69
        assert ended.stderr.startswith(
            f"dray: shifter does not mount a folder of the run\n  found:  /nonexistent{hidden}\n"
            "  wanted: a folder on a file system that the site mounts in Shifter (docs/reference/engines.md)\n"
        )

    @pytest.mark.seconds
    @pytest.mark.parametrize("value", ["a\nLEAK=1", "blank "])
    def test_a_value_that_it_would_cut(self, job: Job, value: str) -> None:
        ended = self.run(job, MY_TOKEN=value)
        assert ended.returncode != 0
        (run,) = job.runs.glob("[!.]*")
        assert (
            "dray: MY_TOKEN has a line break or ends with a blank, which shifter cannot pass on\n"
            in (run / "attempt-1/logs/node-0.log").read_text()
        )
        assert value not in ended.stdout + ended.stderr


def test_a_mount_is_a_path_that_the_container_must_have() -> None:
    script = render.node_script(made(binds=(SiteBind(path="/data", why="w"),)))
    assert "\nnode::bind /data ro\n" in script
    assert '\n  mounts+=("$1")\n' in script


def test_doctor_asks_it_nothing(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "shifter").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "shifter").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(doctor, "_ENGINES", ("shifter",))
    assert [(one.found, one.kind) for one in doctor._engines()] == [("shifter", "ok")]
