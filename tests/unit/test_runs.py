"""Run folders, how a run is concluded, and what reaches sbatch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dray.config.recipe import Recipe
from dray.contract.findings import ConfigError
from dray.facts import Facts
from dray.images import store
from dray.images.sif import record as records
from dray.runs import write as writing
from dray.runs.finish import finish, summary
from dray.runs.paths import RunPaths, create, new_id
from dray.runs.write import read_recipe, write

FACTS = Facts(
    scheduler="slurm", job=17, nodelist="n[1-2]", nodes=2, engine="apptainer", image="/i.sif", port=20017
)  # fmt: skip


def begun(root: Path, runs: Path) -> RunPaths:
    return RunPaths(Path(write(recipe(root), FACTS, runs=runs).folder))


def recipe(root: Path) -> Recipe:
    return read_recipe(root / "recipes" / "smoke-cpu.toml", ["train.steps=20"])


def record(paths: RunPaths, name: str, time: float, **fields: object) -> None:
    entry = {"time": time, "node": "n2", "rank": 3, "code": 3, "why": "exit code 3", "log": "l", "last_lines": ["x"]}
    (paths.failures / f"{name}.json").write_text(json.dumps({**entry, **fields}))


def test_ids_sort_by_time_and_name_the_job() -> None:
    assert new_id("smoke", job=17, now=0) == "19700101-000000-smoke-17"
    ids = [new_id("smoke", job=job, now=now) for now, job in ((9, 200), (10, 3), (100, 1))]
    assert sorted(ids) == ids


def test_ids_without_a_job_do_not_collide() -> None:
    # Of 16 million: thirty in one second are alike once in 40,000 times.
    assert len({new_id("smoke", now=0) for _ in range(30)}) == 30


def test_a_folder_is_never_shared(tmp_path: Path) -> None:
    create(tmp_path, "r1")
    with pytest.raises(ConfigError, match="there is a run of this name already"):
        create(tmp_path, "r1")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="the run folder cannot be made"):
        create(tmp_path / "file", "r1")


def test_two_steps_of_one_job_that_begin_in_the_same_second(root: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(writing, "new_id", lambda name, job: f"then-{name}-{job}")
    recipe = read_recipe(root / "recipes" / "smoke-cpu.toml")
    seen = Facts(scheduler="slurm", job=7, nodelist="n[1-2]", nodes=2, port=1, engine="bare", image="/python")
    runs = [write(recipe, seen, runs=tmp_path) for _ in range(3)]
    assert [run.run for run in runs] == ["then-smoke-cpu-7", "then-smoke-cpu-7-2", "then-smoke-cpu-7-3"]
    with pytest.raises(ConfigError, match="there is a run of this name already"):
        write(recipe, seen, runs=tmp_path, name="then-smoke-cpu-7")


def test_a_run_that_ended_well(root: Path, tmp_path: Path) -> None:
    paths = begun(root, tmp_path)
    events = [
        {"event": "start", "time": 0.0},
        {"event": "step", "step": 1, "loss": 5.5},
        {"event": "step", "step": 20, "loss": 0.25},
        {"event": "eval", "loss": 0.2, "perplexity": 1.25},
        {"event": "end", "tokens_per_s": 1234.5, "train_seconds": 3.5, "sample": "two: the guard"},
    ]
    paths.metrics.write_text("".join(json.dumps(event) + "\n" for event in events) + '{"event": "ste')
    paths.preflight.mkdir()
    seen = {"seconds": {"meet": 1.25, "bandwidth": 3.0}, "sweep": [{"bus_gb_s": 0.5}, {"bus_gb_s": 122.5}]}
    (paths.preflight / "report.json").write_text(json.dumps({**seen, "ranks": [{"wire": "cxi"}, {"wire": "cxi"}]}))
    result = finish(paths, code=0)
    written = json.loads(paths.result.read_text())
    assert written.pop("finished").endswith("Z")
    assert written == {
        "run": paths.folder.name,
        "status": "done",
        "exit_code": 0,
        "world_size": 4,
        "hosts": ["n1", "n2"],
        "steps": 20,
        "loss_first": 5.5,
        "loss_last": 0.25,
        "perplexity": 1.25,
        "tokens_per_s": 1234.5,
        "train_seconds": 3.5,
        "sample": "two: the guard",
        "preflight": "cxi, 122.50 GB/s of bus bandwidth, in 4.2 s",
        "cause": None,
    }
    assert summary(result, paths) == (
        "done: 20 steps, loss 5.500 -> 0.250, perplexity 1.25, 1,234 tokens/s, 4 ranks on n1 n2\n"
        "preflight: cxi, 122.50 GB/s of bus bandwidth, in 4.2 s\n"
        f"sample: two: the guard\nrun folder: {paths.folder}"
    )


def test_the_first_to_die_is_the_cause_and_its_code_is_the_runs(root: Path, tmp_path: Path) -> None:
    paths = begun(root, tmp_path)
    record(paths, "rank-0", 20.0, node="n1", rank=0, code=1, why="exit code 1")
    record(paths, "rank-3", 10.0)
    result = finish(paths, code=1)
    assert (result.status, result.exit_code) == ("failed", 3)
    assert summary(result, paths) == (
        f"failed: rank 3 on n2: exit code 3\n  | x\n  log: l\nrun folder: {paths.folder}\nexit code: 3"
    )


def test_a_failure_without_a_record_shows_the_nodes_last_lines(root: Path, tmp_path: Path) -> None:
    paths = begun(root, tmp_path)
    paths.node_log(0).write_text("one\ntwo\n")
    result = finish(paths, code=137)
    assert result.exit_code == 137
    assert result.cause is not None
    assert (result.cause.rank, result.cause.last_lines) == (None, ["one", "two"])


def test_a_run_that_was_stopped_has_no_cause(root: Path, tmp_path: Path) -> None:
    paths = begun(root, tmp_path)
    record(paths, "rank-3", 10.0, code=135, why="killed by SIGBUS")
    result = finish(paths, code=143, stopped=True)
    assert (result.status, result.exit_code, result.cause) == ("stopped", 143, None)
    assert summary(result, paths) == f"stopped after 0 steps\nrun folder: {paths.folder}"


def test_a_code_that_looks_like_a_stop_does_not_hide_a_cause(root: Path, tmp_path: Path) -> None:
    """srun ends with the highest code of all tasks, and it stops the others with SIGTERM."""
    paths = begun(root, tmp_path)
    record(paths, "node-0", 10.0, rank=None, code=75, why="port 20017 is busy on n1")
    result = finish(paths, code=143)
    assert (result.status, result.exit_code) == ("failed", 75)


def test_a_requeued_job_does_not_answer_for_the_attempt_before(root: Path, tmp_path: Path) -> None:
    paths = begun(root, tmp_path)
    record(paths, "rank-3", 10.0)
    paths.metrics.write_text('{"event": "step", "step": 7, "loss": 1.0}\n')
    (paths.checkpoints / "kept").write_text("")
    write(recipe(root), FACTS, runs=tmp_path, run=paths.folder.name)
    record(paths, "rank-0", 99.0, rank=0, code=9)
    result = finish(paths, code=1)
    assert (result.exit_code, result.steps) == (9, None)
    assert (paths.folder / "attempts" / "1" / "failures" / "rank-3.json").exists()
    assert (paths.checkpoints / "kept").exists()


def test_records_of_a_run_that_ended_well_are_no_cause(root: Path, tmp_path: Path) -> None:
    paths = begun(root, tmp_path)
    record(paths, "rank-3", 10.0)
    assert finish(paths, code=0).cause is None


@pytest.mark.parametrize("given", [("--sbatch=--account=p1",), ("--sbatch=-Ap1",), ("SBATCH_ACCOUNT",)])
def test_a_cluster_that_wants_an_account_is_told_one(root: Path, tmp_path: Path, given: tuple[str, ...]) -> None:
    env = {**os.environ, "DRAY_HOME": str(root), "HOME": "/nonexistent"}
    words = ["recipes/smoke-cpu.toml", "--site", "lumi", "--dry-run", "--runs", tmp_path, "batch.global_size=16"]

    def submitted(*more: str, **account: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "dray", "submit", *words, *more],
            cwd=root, env={**env, "DRAY_IMAGE": str(root / "Makefile"), **account}, capture_output=True, text=True,
            check=False,
        )  # fmt: skip

    said = {given[0]: "p1"} if given[0].isupper() else {}
    assert submitted(*(() if said else given), **said).returncode == 0
    refused = submitted()
    assert refused.returncode == 78
    assert refused.stderr == (
        "dray: this cluster wants to know which project pays\n"
        "  where:  site lumi\n"
        "  wanted: an account such as project_465000000\n"
        "  found:  no --account, and SBATCH_ACCOUNT is not set\n"
        "  fix:    dray submit --sbatch --account=project_465000000, or export SBATCH_ACCOUNT\n"
    )


def test_an_image_of_another_variant_is_not_queued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.sif"
    file.write_text("")
    monkeypatch.setenv("DRAY_IMAGE", str(file))
    digest = "0" * 64
    known = records.Record(
        variant="rocm", dray="0", base="x", inputs=digest, epoch=0, tools={}, sif=records.File(sha256=digest, size=0)
    )
    records.path_for(file).write_text(known.model_dump_json())
    assert store.required(tmp_path, "rocm") == file
    with pytest.raises(ConfigError) as refused:
        store.required(tmp_path, "cuda")
    assert "wanted: cuda\n  found:  rocm\n  fix:    set image=rocm, or start the cuda image" in str(refused.value)
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    store.require_variant("cuda")  # no image at all
    (tmp_path / "image.json").write_text('{"variant": "cpu"}')
    store.require_variant("cpu")
    with pytest.raises(ConfigError):
        store.require_variant("cuda")


def test_what_reaches_sbatch(root: Path, tmp_path: Path) -> None:
    """The whole command and its environment, in a place with a hostile name; sbatch writes down what it got."""
    tool = tmp_path / "bin" / "sbatch"
    tool.parent.mkdir()
    tool.write_text('#!/bin/bash\nprintf "%s\\0" "$@" > "$SEEN/argv"\necho "42;desk"\n')
    tool.chmod(0o755)
    runs = tmp_path / """a b,c%j'"$(touch pwned)"""
    image = tmp_path / "i.sif"
    image.write_text("")
    site = tmp_path / "mine.toml"
    site.write_text('name = "mine"\nabout = "x"\nsbatch = ["--partition=gpu", "--comment=a b"]\n')
    env = {
        **os.environ, "PATH": f"{tool.parent}:{os.environ['PATH']}",
        "SEEN": str(tmp_path), "DRAY_IMAGE": str(image), "DRAY_HOME": str(root),
    }  # fmt: skip
    words = ["--runs", runs, "--site", "mine.toml", "--nodes", "4", "--sbatch=--time=10", "batch.global_size=32"]
    ended = subprocess.run(
        [sys.executable, "-m", "dray", "submit", root / "recipes" / "smoke-cpu.toml", *words],
        cwd=tmp_path, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    (folder,) = runs.iterdir()
    assert ended.stdout == f"job 42 is in the queue\nrun folder: {folder}\n"
    assert (tmp_path / "argv").read_text().split("\0")[:-1] == [
        "--parsable",
        f"--output={str(folder).replace('%', '%%')}/job-%j.log",
        "--job-name=smoke-cpu",
        "--nodes=2",
        "--ntasks-per-node=1",
        "--partition=gpu",
        "--comment=a b",
        "--nodes=4",
        "--time=10",
        f"{root}/slurm/multinode.sh",
        f"--run={folder}",
        f"--image={image}",
        f"--site={site}",
        f"{root}/recipes/smoke-cpu.toml",
        "batch.global_size=32",
    ]
    assert not list(tmp_path.rglob("pwned"))


def test_a_job_that_slurm_refuses_leaves_no_folder(root: Path, tmp_path: Path) -> None:
    tool = tmp_path / "bin" / "sbatch"
    tool.parent.mkdir()
    tool.write_text("#!/bin/bash\necho 'sbatch: error: invalid account' >&2\nexit 1\n")
    tool.chmod(0o755)
    (tmp_path / "i.sif").write_text("")
    env = {**os.environ, "PATH": f"{tool.parent}:{os.environ['PATH']}", "DRAY_IMAGE": str(tmp_path / "i.sif")}
    ended = subprocess.run(
        [sys.executable, "-m", "dray", "submit", "recipes/smoke-cpu.toml", "--runs", tmp_path / "runs"],
        cwd=root, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    assert "found:  sbatch: error: invalid account" in ended.stderr
    assert list((tmp_path / "runs").iterdir()) == []


def probe(root: Path, image: str = "/a b/i.sif", **env: str) -> dict[str, str]:
    slurm = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    ended = subprocess.run(
        [root / "slurm" / "probe.sh", "apptainer", image, "generic"],
        env={"PATH": os.environ["PATH"], **slurm, **env}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return dict(line.split("=", 1) for line in ended.stdout.splitlines())


def test_the_probe_tells_what_slurm_gave(root: Path) -> None:
    own = {"HF_HOME": str(root), "NCCL_DEBUG": "INFO", "MY_NCCL_X": "1", "HF_TOKEN": "secret"}
    assert probe(root, SLURM_GPUS_ON_NODE="4", **own) == {
        "scheduler": "slurm",
        "job": "17",
        "nodelist": "n[1-2]",
        "nodes": "2",
        "gpus_per_node": "4",
        "port": "20017",
        "hf_home": str(root),
        "environment": "HF_HOME HF_TOKEN NCCL_DEBUG ",
        "engine": "apptainer",
        "image": "/a b/i.sif",
        "image_sha256": "",
        "site": "generic",
        "cluster": "",
        "home": "",
        "uid": str(os.getuid()),
        "gid": str(os.getgid()),
    }


def test_the_probe_reads_the_image_s_record_and_the_gpus_of_an_salloc(root: Path, tmp_path: Path) -> None:
    known = records.Record(
        variant="cpu", dray="0", base="b", inputs="1" * 64, epoch=0, tools={}, sif=records.File(sha256="2" * 64, size=1)
    )
    records.write(tmp_path / "i.sif", known)
    said = probe(root, str(tmp_path / "i.sif"), SLURM_GPUS_PER_NODE="a100:4")
    assert (said["image_sha256"], said["gpus_per_node"]) == ("2" * 64, "4")
    assert probe(root, HF_HOME=str(tmp_path / "not yet"))["hf_home"] == probe(root, HF_HOME="relative")["hf_home"] == ""


@pytest.mark.parametrize("address", ["127.0.0.1", "::"])
def test_the_probe_passes_over_a_port_where_something_listens(root: Path, address: str) -> None:
    import socket

    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.create_server((address, 20018), family=family):
        assert probe(root, SLURM_JOB_ID="18")["port"] == "20119"
