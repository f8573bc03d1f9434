"""CSCS's Container Engine, which runs on Alps alone: the EDF as its documentation has it, and a job with a stand-in."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path, PurePosixPath

import pytest

from command import dray
from dray import render
from dray.config import sites
from dray.config.load_toml import load
from dray.config.site import Fabric, Site, SiteBind
from dray.contract.findings import ConfigError
from dray.facts import Facts
from dray.fitness import doctor
from dray.images import store
from dray.planning.plan import plan
from dray.planning.schema import Plan
from dray.runs.prepare import read_recipe
from helpers import ROOT
from jobs import Job

SLINGSHOT = Fabric(kind="slingshot", transport=("cxi",))
SQUASHFS = b"hsqs and more"
SIF = b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\0"


def made(*words: str, site: Site, nodes: int = 2, run: str = "/runs/r1", image: str = "/i/dray.sqsh") -> Plan:
    facts = Facts(
        scheduler="slurm", job=1, nodelist="n[1-2]" if nodes == 2 else "n1", nodes=nodes, engine="edf", image=image,
        gpus_per_node=1, variables={"SCRATCH": "/capstor/me"},
    )  # fmt: skip
    recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", list(words))
    return plan(recipe, site, facts, run_folder=PurePosixPath(run), scratch="/tmp/dray-7-r", dray="0")


def edf(decided: Plan) -> str:
    (text,) = render.engine_files(decided).values()
    return text


def site(**more: object) -> Site:
    return Site.model_validate({"name": "s", "about": "", "engine": "edf", **more})


def test_the_whole_environment_on_alps() -> None:
    decided = made("image=cuda", site=sites.find("alps"))
    assert render.srun_options(decided) == "--environment=/runs/r1/attempt-1/edf.toml\n"
    assert (
        edf(decided)
        == """\
# The containers of run r1. dray wrote this file from plan.json: change the recipe instead.
image = "/i/dray.sqsh"
mounts = [
  "/runs/r1:/runs/r1",
  "/capstor/me:/capstor/me",
  "/runs/.cache-0:/runs/.cache-0",
  "/i/dray.sqsh:/i/dray.sqsh:ro",
]
workdir = "/runs/r1/attempt-1"
entrypoint = false
writable = true

[env]
NVIDIA_VISIBLE_DEVICES = "all"
NVIDIA_DRIVER_CAPABILITIES = "compute,utility"

[annotations]
com.hooks.netstack.source = "host"
com.hooks.cxi.enabled = "true"
com.hooks.aws_ofi_nccl.enabled = "true"
com.hooks.aws_ofi_nccl.variant = "cuda13"
"""
    )


def test_the_plan_says_why() -> None:
    decided = made("image=cuda", site=sites.find("alps"))
    text = render.text(decided)
    for line in (
        "  GPUs       the Container Engine's hook for NVIDIA, by NVIDIA_VISIBLE_DEVICES in the EDF\n",
        "  kind   slingshot, nothing is added: hooks of the Container Engine do it: cxi with the host's libfabric, ",
        "\nannotations\n  com.hooks.netstack.source       host\n",
        "\nsrun\n  --environment=/runs/r1/attempt-1/edf.toml\n",
    ):
        assert line in text, text
    assert "NCCL_NET_PLUGIN" not in {variable.name for variable in decided.env}  # the hook sets it
    assert (decided.fabric.strategy, decided.fabric.transport) == ("none", ("cxi",))  # and the preflight proves it


@pytest.mark.parametrize(
    ("words", "nodes", "plugin"),
    [
        (["image=cuda"], 2, "cuda13"),
        (["image=cuda12"], 2, "cuda12"),
        (["image=rocm6"], 2, "rocm6"),
        (["image=rocm"], 2, None),  # there is no plugin for ROCm 7
        (["image=cuda"], 1, None),  # one node has no network between nodes
        ([], 2, None),
    ],
)
def test_hooks_and_gpus_are_those_of_the_image(words: list[str], nodes: int, plugin: str | None) -> None:
    content = tomllib.loads(edf(made(*words, site=site(fabric=SLINGSHOT), nodes=nodes)))
    hooks = content.get("annotations", {}).get("com", {}).get("hooks", {})
    assert hooks.get("aws_ofi_nccl", {}).get("variant") == plugin
    assert ("NVIDIA_VISIBLE_DEVICES" in content.get("env", {})) == any("cuda" in word for word in words)


def test_the_site_s_annotations_beat_ours() -> None:
    """In the spelling of an EDF; other clusters of Alps have other hooks."""
    own = {"com": {"hooks": {"netstack": {"source": "artifact"}, "ssh": {"enabled": "true"}}}}
    content = tomllib.loads(edf(made("image=cuda", site=site(fabric=SLINGSHOT, annotations=own))))
    hooks = content["annotations"]["com"]["hooks"]
    assert (hooks["netstack"], hooks["ssh"]) == ({"source": "artifact"}, {"enabled": "true"})
    assert hooks["aws_ofi_nccl"] == {"enabled": "true", "variant": "cuda13"}
    alone = tomllib.loads(edf(made(site=site(annotations=own), nodes=1)))
    assert alone["annotations"] == own


def test_a_mount_is_read_only_where_nobody_writes_and_what_only_some_nodes_have_is_left_out() -> None:
    binds = (
        SiteBind(path="/data", why="w"), SiteBind(path="/out", why="w", write=True),
        SiteBind(path="/flash", why="w", required=False),
    )  # fmt: skip
    mounts = tomllib.loads(edf(made(site=site(binds=binds))))["mounts"]
    assert mounts[1:-2] == ["/data:/data:ro", "/out:/out"]


@pytest.mark.parametrize("name", ['a "b"', "a\\b", "a b", "é", "it's", "[x]", "#", "%n", "😀"])
def test_any_other_name_arrives(name: str) -> None:
    content = tomllib.loads(edf(made(site=site(), run=f"/runs/{name}", image=f"/i/{name}.sqsh")))
    run, _, image = content["mounts"]
    assert (run, image) == (f"/runs/{name}:/runs/{name}", f"/i/{name}.sqsh:/i/{name}.sqsh:ro")
    assert (content["image"], content["workdir"]) == (f"/i/{name}.sqsh", f"/runs/{name}/attempt-1")


@pytest.mark.parametrize("name", ["a:b", "a,b", "$HOME", "${X}"])
def test_a_path_that_it_would_take_apart_is_refused(name: str) -> None:
    for given in ({"run": f"/runs/{name}"}, {"image": f"/i/{name}.sqsh"}):
        with pytest.raises(ConfigError, match="edf cannot mount a path with , or : or \\$ in it") as refused:
            made(site=site(), **given).refuse()
        assert refused.value.details["found"] == next(iter(given.values()))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('engine = "rkt"', 'engine = "rkt"'),
        ('annotations = {com.x = "b"}', "annotations need"),
        ('engine = "edf"\nannotations = "x"', "annotations"),
        ('engine = "edf"\nannotations = {a = "b"}', "annotations.a"),
        ('engine = "edf"\nannotations = {com.x = true}', "annotations.com.x = true"),
        ('engine = "edf"\nannotations = {"com.a b" = "x"}', "annotations.com.a b"),
        ('engine = "edf"\nannotations = {com.x = "hf_abcdefghijklmnopqrstuvwxyz"}', "looks like a secret"),
        ('engine = "edf"\nstage = "/tmp"', "stage: with edf"),
        ('engine = "pyxis"\nannotations = {com.x = "1"}', 'annotations need engine = "edf"'),
    ],
)
def test_a_site_file_that_is_wrong(tmp_path: Path, line: str, found: str) -> None:
    (tmp_path / "mine.toml").write_text(f'name = "mine"\nabout = "x"\n{line}\n')
    with pytest.raises(ConfigError) as refused:
        load(Site, tmp_path / "mine.toml")
    assert found in str(refused.value)


@pytest.mark.seconds
def test_slurm_alone_starts_it() -> None:
    ended = dray("run", "smoke-cpu", "--engine", "edf")
    assert (ended.returncode, ended.stdout) == (78, "")
    assert ended.stderr == (
        "dray: invalid value for '--engine': 'edf' is not one of 'bare', 'docker', 'podman', 'apptainer', "
        "'singularity'\n  found:  edf\n"
        "  fix:    dray run -h\n"
    )


class TestTheImage:
    """It is a squashfs; another kind is refused before anything is queued, and again by the job."""

    @pytest.mark.parametrize(("content", "found"), [(SIF, "sif"), (None, "folder"), (SQUASHFS, None)])
    def test_before_the_queue(self, tmp_path: Path, monkeypatch, content: bytes | None, found: str | None) -> None:
        file = tmp_path / "image"
        file.mkdir() if content is None else file.write_bytes(content)
        monkeypatch.setenv("DRAY_IMAGE", str(file))
        if found is None:
            assert store.required(ROOT, "cuda", engine="edf") == file
            return
        with pytest.raises(ConfigError) as refused:
            store.required(ROOT, "cuda", engine="edf")
        assert refused.value.problem == "edf does not start an image of this kind"
        assert (refused.value.details["wanted"], refused.value.details["found"]) == ("squashfs", found)

    def test_the_usual_place(self, tmp_path: Path, monkeypatch) -> None:
        monkeypatch.delenv("DRAY_IMAGE", raising=False)
        assert store.job_file(tmp_path, "cuda", "edf") == tmp_path / "build/dray-cuda.sqsh"
        with pytest.raises(ConfigError, match="the image does not exist") as refused:
            store.required(tmp_path, "cuda", engine="edf")
        assert "docs/reference/engines.md" in refused.value.details["fix"]


class TestTheJob:
    """The real batch script, planner, node.sh and runner; srun is a stand-in that has read CSCS's documentation."""

    @pytest.fixture
    def job(self, tmp_path: Path) -> Job:
        made = Job(tmp_path)
        (made.bin / "apptainer").unlink()
        stand_in = shlex.join([sys.executable, str(ROOT / "tests" / "support" / "container_engine.py")])
        made.tool("srun", f'#!/bin/sh\nexec {stand_in} "$@"\n')
        made.python()
        (made.home / "build" / "dray-cpu.sqsh").write_bytes(SQUASHFS * 9)
        (tmp_path / "mine.toml").write_text('name = "mine"\nabout = "x"\nengine = "edf"\n')
        made.env["PATH"] = f"{made.bin}:/usr/bin:/bin"
        made.env["DRAY_SITE"] = str(tmp_path / "mine.toml")
        return made

    @pytest.mark.seconds
    def test_from_the_plan_to_the_result(self, job: Job, tmp_path: Path) -> None:
        (job.home / "work").mkdir()
        argv = job.argv("launcher=python", "--", "true", plan_only=False)
        env = {**job.env, "SLURM_SUBMIT_DIR": str(job.home / "work")}
        ended = subprocess.run(argv, env=env, cwd=job.home, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert "done: exit code 0, 1 rank on n1\n" in ended.stdout
        calls = [json.loads(line) for line in job.seen.read_text().splitlines()]
        first, second, last = (call["command"] for call in calls)
        assert (first[:4], last[:4]) == (["python3", "-m", "dray", "plan"], ["python3", "-m", "dray", "finish"])
        assert (second[:2], second[3].endswith("/attempt-1")) == (["bash", "-c"], True)
        image, where = f"{job.home}/build/dray-cpu.sqsh", f"{job.home}/work"
        folders = [str(job.home), f"{tmp_path}/mine.toml", str(job.runs)]
        assert calls[0]["edf"] == {
            "image": image, "workdir": where, "entrypoint": False, "mounts": [f"{one}:{one}" for one in folders],
        }  # fmt: skip
        (run,) = job.runs.glob("[!.]*")  # the planner's own description is gone
        caches = f"{job.runs}/.cache-{os.getuid()}"
        assert calls[1]["edf"] == {
            "image": image, "workdir": f"{run}/attempt-1", "entrypoint": False, "writable": True,
            "mounts": [f"{run}:{run}", f"{where}:{where}", f"{caches}:{caches}", f"{image}:{image}:ro"],
        }  # fmt: skip
        said = json.loads((run / "attempt-1" / "result.json").read_text())
        assert (said["status"], said["exit_code"]) == ("done", 0)

    @pytest.mark.parametrize(
        ("content", "problem", "found"),
        [
            (SIF, "edf does not start an image of this kind", "sif"),
            (b"", "edf does not start an image of this kind", "unknown"),
            (None, "the image does not exist", None),
        ],
    )
    def test_an_image_of_another_kind(self, job: Job, content: bytes | None, problem: str, found: str | None) -> None:
        image = job.home / "build" / "x.sif"
        image.mkdir() if content is None else image.write_bytes(content)
        ended = job.plan("recipes/smoke-cpu.toml", DRAY_IMAGE=str(image))
        assert (ended.returncode, ended.stdout) == (78, "")
        assert ended.stderr.startswith(f"dray: {problem}\n"), ended.stderr
        assert found is None or f"  wanted: squashfs\n  found:  {found}\n" in ended.stderr
        assert not job.seen.exists()

    @pytest.mark.parametrize("name", ["a:b", "a,b", "a$b"])
    def test_a_path_that_it_would_take_apart(self, job: Job, tmp_path: Path, name: str) -> None:
        ended = job.plan("recipes/smoke-cpu.toml", DRAY_RUNS=str(tmp_path / name))
        assert (ended.returncode, ended.stdout) == (78, "")
        assert ended.stderr.startswith("dray: edf cannot mount a path with one of ,:$ in it\n"), ended.stderr
        assert f"  found:  {tmp_path}/{name}\n" in ended.stderr

    @pytest.mark.seconds
    def test_a_name_with_quotes_arrives(self, job: Job, tmp_path: Path) -> None:
        ended = job.plan("recipes/smoke-cpu.toml", DRAY_RUNS=str(tmp_path / 'a "b" \\c'))
        assert ended.returncode == 0, ended.stderr
        assert "engine edf\n" in ended.stdout

    @pytest.mark.seconds
    def test_the_planner_s_refusal_keeps_its_code(self, job: Job) -> None:
        ended = job.plan("recipes/smoke-cpu.toml", "no.such=1")
        assert (ended.returncode, ended.stdout) == (78, "")
        assert list(job.runs.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "found"),
    [
        ("--environment=FILE", ["edf, CSCS's Container Engine (srun has --environment)"]),
        ("--environment --container-image", ["edf, CSCS's Container Engine (srun has --environment)",
                                             "Pyxis (srun has --container-image)"]),
    ],
)  # fmt: skip
def test_doctor_sees_slurm_s_plugins(tmp_path: Path, monkeypatch, options: str, found: list[str]) -> None:
    (tmp_path / "srun").write_text(f"#!/bin/sh\necho {shlex.quote(options)}\n")
    (tmp_path / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(doctor, "_ENGINES", ())
    said = list(doctor._engines())
    assert ([one.found for one in said], {one.code for one in said}) == (found, {0})


def test_a_login_node_plans_with_a_folder_that_only_the_job_knows() -> None:
    facts = Facts(
        scheduler="slurm", nodelist="node[1-2]", nodes=2, engine="edf", image="/i/dray.sqsh", gpus_per_node=4,
        login="me", account="g000",
    )  # fmt: skip
    recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", ["image=cuda", "batch.global_size=32"])
    decided = plan(recipe, sites.find("alps"), facts, run_folder=PurePosixPath("/r"), scratch="/tmp/s", dray="0")
    assert [bind.path for bind in decided.binds if bind.source == "site alps"] == ["$SCRATCH"]
    assert not [one for one in decided.findings if one.code]
