"""Run folders, how a run is concluded, and what reaches sbatch."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from command import dray
from dray.config.recipe import Recipe
from dray.contract.findings import ConfigError
from dray.facts import Facts
from dray.images import store
from dray.images.sif import record as records
from dray.runner.plan import of
from dray.runs import prepare as writing
from dray.runs import store as store_module
from dray.runs.finish import finish
from dray.runs.prepare import read_recipe, write
from dray.runs.result import Cause, summary
from dray.runs.status import Stop
from dray.runs.store import RunPaths, make_run_folder, new_id, newest_attempt
from dray.runs.store import plan_of as read
from helpers import PYTHON

FACTS = Facts(
    scheduler="slurm", job=17, nodelist="n[1-2]", nodes=2, engine="apptainer", image="/i.sif"
)  # fmt: skip


def begun(root: Path, runs: Path) -> RunPaths:
    return write(recipe(root), FACTS, runs=runs)[1]


def recipe(root: Path) -> Recipe:
    return read_recipe(root / "recipes" / "smoke-cpu.toml", ["train.steps=20"])


def trained(paths: RunPaths) -> None:
    """The model that a training leaves."""
    paths.final_model.mkdir()
    (paths.final_model / "config.json").write_text("{}")


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


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    RunPaths(tmp_path / "r1").create(new=True)
    with pytest.raises(FileExistsError):
        RunPaths(tmp_path / "r1", 2).create(new=True)
    with pytest.raises(FileExistsError):
        RunPaths(tmp_path / "r1", 1).create(new=False)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="the run folder cannot be created"):
        RunPaths(tmp_path / "file" / "r1").create(new=True)


def test_two_steps_of_one_job_that_begin_in_the_same_second(root: Path, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(writing, "new_id", lambda name, job: f"then-{name}-{job}")
    runs = [write(recipe(root), FACTS, runs=tmp_path)[0] for _ in range(3)]
    assert [run.run for run in runs] == ["then-smoke-cpu-17", "then-smoke-cpu-17-2", "then-smoke-cpu-17-3"]
    assert {run.attempt for run in runs} == {1}


class TestAttempts:
    """One run folder, whoever starts the run again."""

    def test_a_run_that_is_named_again(self, root: Path, tmp_path: Path) -> None:
        first, paths = write(recipe(root), FACTS, runs=tmp_path, run="mine")
        (paths.checkpoints / "kept").write_text("")
        second, again = write(recipe(root), FACTS, runs=tmp_path, run="mine")
        assert (first.run, first.attempt, first.folder) == ("mine", 1, f"{tmp_path}/mine/attempt-1")
        assert (second.run, second.attempt, second.folder) == ("mine", 2, f"{tmp_path}/mine/attempt-2")
        assert second.run_folder == f"{tmp_path}/mine"
        found = sorted(path.name for path in (tmp_path / "mine").iterdir())
        assert found == ["attempt-1", "attempt-2", "checkpoints"]
        assert (again.checkpoints / "kept").exists()
        assert newest_attempt(tmp_path / "mine").attempt == 2
        assert newest_attempt(paths.folder).attempt == 1

    def test_a_job_that_dray_submit_queued(self, root: Path, tmp_path: Path) -> None:
        make_run_folder(tmp_path / "queued")
        with pytest.raises(ConfigError, match="this is not a run folder"):
            newest_attempt(tmp_path / "queued")
        assert write(recipe(root), FACTS, runs=tmp_path, run="queued")[0].attempt == 1

    def test_a_job_that_slurm_requeues(self, root: Path, tmp_path: Path, monkeypatch) -> None:
        """It may have begun several runs, and another job's number may begin like its own."""
        monkeypatch.setattr(store_module.time, "time", lambda: 0)
        other = read_recipe(root / "recipes" / "smoke-cpu.toml", ["train.steps=30"])
        more = FACTS.model_copy(update={"job": 170})
        names = [write(one, facts, runs=tmp_path)[0].run for one, facts in
                 ((recipe(root), FACTS), (other, FACTS), (recipe(root), more))]  # fmt: skip
        again = FACTS.model_copy(update={"restarts": 1})
        for one, name in ((recipe(root), names[0]), (other, names[1])):
            plan = write(one, again, runs=tmp_path)[0]
            assert (plan.run, plan.attempt) == (name, 2)
        new = read_recipe(root / "recipes" / "smoke-cpu.toml", ["train.steps=40"])
        assert write(new, again, runs=tmp_path)[0].attempt == 1

    def test_a_number_that_slurm_gives_again(self, root: Path, tmp_path: Path, monkeypatch) -> None:
        """As after it was installed anew: the job's own run is the newest, and the other is nobody's."""
        for seconds in (0, 10**8):
            monkeypatch.setattr(store_module.time, "time", lambda now=seconds: now)
            newest = write(recipe(root), FACTS, runs=tmp_path)[0].run
        plan = write(recipe(root), FACTS.model_copy(update={"restarts": 1}), runs=tmp_path)[0]
        assert (plan.run, plan.attempt) == (newest, 2)

    def test_a_requeued_job_whose_first_plan_is_damaged(self, root: Path, tmp_path: Path) -> None:
        """The plan of a later attempt may be for fewer nodes, and so is not compared."""
        first, paths = write(recipe(root), FACTS, runs=tmp_path)
        write(recipe(root), FACTS, runs=tmp_path, run=first.run)
        paths.plan.write_text("half of")
        with pytest.raises(ConfigError, match="the run's plan is damaged"):
            write(recipe(root), FACTS.model_copy(update={"restarts": 1}), runs=tmp_path)

    def test_a_late_end_does_not_hide_the_next_attempt(self, root: Path, tmp_path: Path) -> None:
        paths = write(recipe(root), FACTS, runs=tmp_path, run="mine")[1]
        write(recipe(root), FACTS.model_copy(update={"job": 18}), runs=tmp_path, run="mine")
        finish(paths, code=1)
        assert not (paths.run / "summary.json").exists()

    def test_the_fix_for_a_plan_of_another_version_can_be_typed(self, root: Path, tmp_path: Path) -> None:
        paths = write(recipe(root), FACTS, runs=tmp_path / "my runs", run="mine")[1]
        paths.plan.write_text('{"version": 99}')
        with pytest.raises(ConfigError, match="the run's plan is damaged, or of another version of dray") as refused:
            read(paths)
        assert refused.value.finding.fix.endswith(f": dray run RECIPE --run='{tmp_path}/my runs/mine'")

    def test_each_has_a_secret_of_its_own_that_nobody_else_reads(self, root: Path, tmp_path: Path) -> None:
        paths = [write(recipe(root), FACTS, runs=tmp_path, run="mine")[1] for _ in range(2)]
        secrets = [bytes.fromhex(one.secret.read_text()) for one in paths]
        assert [len(secret) for secret in secrets] == [32, 32]
        assert secrets[0] != secrets[1]
        assert {one.secret.stat().st_mode & 0o777 for one in paths} == {0o600}

    def test_machines_that_share_no_disk_count_their_own(self, root: Path, tmp_path: Path) -> None:
        """One may have failed where the other had not begun."""
        plans = [json.loads(write(recipe(root), FACTS, runs=tmp_path, run="m")[1].plan.read_text()) for _ in range(2)]
        other = json.loads(write(recipe(root), FACTS, runs=tmp_path, run="n")[1].plan.read_text())
        assert of(plans[0]).digest == of(plans[1]).digest != of(other).digest

    def test_a_plan_of_another_version_is_not_read(self, root: Path, tmp_path: Path) -> None:
        paths = begun(root, tmp_path)
        paths.plan.write_text(paths.plan.read_text().replace('"version": 1', '"version": 0', 1))
        with pytest.raises(ConfigError, match="the run's plan is damaged, or of another version of dray"):
            read(paths)

    def test_the_attempt_before_is_no_cause(self, root: Path, tmp_path: Path) -> None:
        paths = begun(root, tmp_path)
        record(paths, "rank-3", 10.0)
        paths.metrics.write_text('{"event": "step", "step": 7, "loss": 1.0}\n')
        _, again = write(recipe(root), FACTS, runs=tmp_path, run=paths.run.name)
        record(again, "rank-0", 99.0, rank=0, code=9)
        result = finish(again, code=1)
        assert (result.exit_code, result.steps) == (9, None)


def test_a_run_that_ended_well(root: Path, tmp_path: Path) -> None:
    paths = begun(root, tmp_path)
    events = [
        {"event": "start", "time": 0.0, "first_step": 0, "steps": 20},
        {"event": "step", "step": 1, "loss": 5.5},
        {"event": "step", "step": 20, "loss": 0.25},
        {"event": "slow", "step": 12, "rank": 3, "node": "n2", "times": 1.5},
        *({"event": "slow", "step": 12, "rank": 1, "times": times} for times in ("2", None)),
        {"event": "eval", "loss": 0.2, "perplexity": 1.25},
        {"event": "end", "tokens_per_s": 1234.5, "train_seconds": 3.5, "sample": "two: the guard"},
    ]
    paths.metrics.write_text("".join(json.dumps(event) + "\n" for event in events) + '{"event": "ste')
    paths.preflight.mkdir()
    trained(paths)
    seen = {"seconds": {"meet": 1.25, "bandwidth": 3.0}, "sweep": [{"bus_gb_s": 0.5}, {"bus_gb_s": 122.5}]}
    ranks = [{"transport": "cxi", "warning": "GPU Direct RDMA is disabled"}] * 2
    (paths.preflight / "report.json").write_text(json.dumps({**seen, "ranks": ranks}))
    result = finish(paths, code=0)
    written = json.loads(paths.result.read_text())
    assert written.pop("finished").endswith("Z")
    assert written == {
        "run": paths.run.name,
        "status": "done",
        "exit_code": 0,
        "world_size": 4,
        "hosts": ["n1", "n2"],
        "first_step": 0,
        "steps": 20,
        "loss_first": 5.5,
        "loss_last": 0.25,
        "perplexity": 1.25,
        "tokens_per_s": 1234.5,
        "train_seconds": 3.5,
        "sample": "two: the guard",
        "preflight": "cxi, 122.50 GB/s of bus bandwidth; GPU Direct RDMA is disabled",
        "cause": None,
        "reason": None,
        "restarts": 0,
        "restart_cause": None,
        "at": None,
        "checkpoint": None,
        "saved_step": None,
        "save_s": None,
        "failing_nodes": [],
        "next": None,
        "history": [],
        "command": False,
        "cost": None,
        "spent": None,
        "startup": None,
        "version": 1,
        "warnings": ["slow: rank 3 on n2, 1.50 times the median rank"],
    }
    assert summary(result, paths) == (
        "done: 20 steps, loss 5.500 -> 0.250, perplexity 1.25, 1,234 tokens/s, 4 ranks on n1 n2\n"
        "preflight: cxi, 122.50 GB/s of bus bandwidth; GPU Direct RDMA is disabled\n"
        f"sample: two: the guard\nwarning: slow: rank 3 on n2, 1.50 times the median rank\nrun folder: {paths.run}"
    )


def test_the_first_to_die_is_the_cause_and_its_code_is_the_runs(root: Path, tmp_path: Path) -> None:
    paths = begun(root, tmp_path)
    record(paths, "rank-0", 20.0, node="n1", rank=0, code=1, why="exit code 1")
    record(paths, "rank-3", 10.0)
    result = finish(paths, code=1)
    assert (result.status, result.exit_code) == ("failed", 3)
    assert summary(result, paths) == (
        f"failed: rank 3 on n2: exit code 3\n  | x\n  log: l\nrun folder: {paths.run}\nexit code: 3"
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
    result = finish(paths, code=143, stopped=Stop("scancel", "2026-11-22T21:00:00Z"))
    assert (result.status, result.exit_code, result.cause) == ("stopped", 143, None)
    assert (result.reason, result.at, result.steps, result.checkpoint) == (
        "scancel",
        "2026-11-22T21:00:00Z",
        None,
        None,
    )
    stopped, folder = "stopped by scancel at 2026-11-22T21:00:00Z", f"run folder: {paths.run}"
    assert summary(result, paths) == (
        f"{stopped}, before the first step was logged\n"
        "  safe:   nothing yet; checkpoint.every=N saves every N steps\n"
        f"  again:  dray submit --run={paths.run}  # or sbatch slurm/multinode.sh with the same --run\n{folder}"
    )
    command = result.model_copy(update={"command": True})
    assert summary(command, paths, again="dray run --run=r -- t.py") == (
        f"{stopped}\n  safe:   what the command itself saved\n  again:  dray run --run=r -- t.py\n{folder}"
    )
    kept = {"checkpoint": "/a b/checkpoints/step-50", "saved_step": 50, "steps": 57}
    left = f"  safe:   all up to step 50, in /a b/checkpoints/step-50\n  resume: dray run x --run=r\n{folder}"
    assert summary(result.model_copy(update=kept), paths, again="dray run x --run=r") == (
        f"{stopped}, after step 57\n{left}"
    )
    cause = Cause(node="n1", rank=1, code=9, why="exit code 9", log="l", last_lines=[])
    failed = result.model_copy(update={**kept, "status": "failed", "cause": cause, "exit_code": 9})
    assert summary(failed, paths, again="dray run x --run=r") == (
        f"failed: rank 1 on n1: exit code 9\n  log: l\n{left}\nexit code: 9"
    )


def test_a_rank_that_ends_as_asked_before_the_first_step_is_no_failure(root: Path, tmp_path: Path) -> None:
    """The ranks that lose it fail, and srun reports their code."""
    paths = begun(root, tmp_path)
    paths.stop.write_text("dray stop\n")
    record(paths, "rank-3", 10.0, rank=3, code=75, why="it was asked to save and end")
    record(paths, "rank-0", 10.5, rank=0, code=1, why="Connection closed by peer")
    result = finish(paths, code=1)
    assert (result.status, result.reason, result.exit_code, result.cause) == ("stopped", "dray stop", 75, None)


def test_what_was_shown_is_not_shown_again(root: Path, tmp_path: Path) -> None:
    """The output of the first rank is on the terminal already; a launch's last lines are its reason."""
    paths = begun(root, tmp_path)
    record(paths, "rank-0", 10.0, rank=0, node="n1", why="exit code 9", code=9, last_lines=["a", "b"])
    result = finish(paths, code=9)
    head, *_ = summary(result, paths, shown=0).splitlines()
    assert summary(result, paths, shown=0).count("  | ") == 0
    assert summary(result, paths, shown=1).splitlines()[:3] == [head, "  | a", "  | b"]
    assert result.cause
    launch = result.cause.model_copy(
        update={"rank": None, "why": "a\n  found: x", "last_lines": ["y", "a", "  found: x"]}
    )
    lines = summary(result.model_copy(update={"cause": launch}), paths, shown=0).splitlines()
    assert lines[:3] == ["failed: the launch on n1: a", "  found: x", "  | y"]


def test_a_code_that_looks_like_a_stop_does_not_hide_a_cause(root: Path, tmp_path: Path) -> None:
    """srun ends with the highest code of all tasks, and it stops the others with SIGTERM."""
    paths = begun(root, tmp_path)
    record(paths, "node-0", 10.0, rank=None, code=75, why="port 20017 is busy on n1")
    result = finish(paths, code=143)
    assert (result.status, result.exit_code) == ("failed", 75)


def test_records_of_a_run_that_ended_well_are_no_cause(root: Path, tmp_path: Path) -> None:
    paths = begun(root, tmp_path)
    record(paths, "rank-3", 10.0)
    trained(paths)
    paths.metrics.write_text('{"event": "end", "tokens_per_s": 1.0, "train_seconds": 1.0, "sample": ""}\n')
    assert finish(paths, code=0).cause is None


@pytest.mark.seconds
@pytest.mark.parametrize("given", [("--sbatch=--account=p1",), ("--sbatch=-Ap1",), ("SBATCH_ACCOUNT",)])
def test_a_cluster_that_wants_an_account_is_told_one(root: Path, tmp_path: Path, given: tuple[str, ...]) -> None:
    words = ["recipes/smoke-cpu.toml", "--site", "lumi", "--dry-run", "--runs", tmp_path, "batch.global_size=16"]

    def submitted(*more: str, **account: str) -> subprocess.CompletedProcess[str]:
        return dray("submit", *words, *more, DRAY_IMAGE=str(root / "Makefile"), **account)

    said = {given[0]: "p1"} if given[0].isupper() else {}
    assert submitted(*(() if said else given), **said).returncode == 0
    refused = submitted()
    assert refused.returncode == 78
    assert refused.stderr.endswith(
        "dray: this site requires --account\n"
        "  where:  site lumi\n"
        "  wanted: an account such as project_465000000\n"
        "  found:  no --account, and SBATCH_ACCOUNT is not set\n"
        "  fix:    dray submit --sbatch=--account=project_465000000, or export SBATCH_ACCOUNT\n"
    )


@pytest.mark.seconds
def test_an_image_of_another_variant_is_not_queued(root: Path, tmp_path: Path, monkeypatch) -> None:
    file = tmp_path / "mine.sif"
    file.write_text("")
    assert (store.variant(file), store.variant()) == ("", "")  # no record, and no image at all
    digest = "0" * 64
    known = records.Record(
        variant="rocm", dray="0", base="x", inputs=digest, epoch=0, tools={}, sif=records.File(sha256=digest, size=0)
    )
    records.path_for(file).write_text(known.model_dump_json())
    ended = dray("submit", "recipes/smoke-cpu.toml", "--dry-run", HOME=str(tmp_path), DRAY_IMAGE=str(file))
    assert ended.returncode == 78
    assert "wanted: cpu\n  found:  rocm\n  fix:    image=rocm; or unset DRAY_IMAGE, or" in ended.stderr
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (tmp_path / "image.json").write_text('{"variant": "cpu"}')
    assert store.variant() == "cpu"


@pytest.mark.seconds
def test_what_reaches_sbatch(root: Path, tmp_path: Path) -> None:
    """The whole command and its environment, in a place with a hostile name; sbatch writes down what it got."""
    tool = tmp_path / "bin" / "sbatch"
    tool.parent.mkdir()
    tool.write_text('#!/bin/bash\nprintf "%s\\0" "$@" > "$SEEN/argv"\necho "42;local"\n')
    tool.chmod(0o755)
    runs = tmp_path / """a b,c%j'"$(touch pwned)"""
    image = tmp_path / "i.sif"
    image.write_bytes(b"hsqs")
    site = tmp_path / "mine.toml"
    site.write_text('name = "mine"\nabout = "x"\nsbatch = ["--partition=gpu", "--comment=a b"]\n')
    env = {"PATH": f"{tool.parent}:{os.environ['PATH']}", "SEEN": str(tmp_path), "DRAY_IMAGE": str(image)}
    words = ["--runs", runs, "--site", "mine.toml", "--nodes", "4", "--sbatch=--time=10", "batch.global_size=32"]
    ended = dray("submit", root / "recipes" / "smoke-cpu.toml", *words, cwd=tmp_path, **env)
    assert ended.returncode == 0, ended.stderr
    (folder,) = runs.glob("[!.]*")
    assert ended.stdout == f"job 42 is in the queue\nrun folder: {folder}\n"
    assert (tmp_path / "argv").read_text().split("\0")[:-1] == [
        "--parsable",
        f"--output={str(folder).replace('%', '%%')}/job-%j.log",
        "--job-name=smoke-cpu",
        "--nodes=4",
        "--ntasks-per-node=1",
        "--partition=gpu",
        "--comment=a b",
        "--time=10",
        f"{root}/slurm/multinode.sh",
        f"--run={folder}",
        f"--image={image}",
        f"--site={site}",
        f"{root}/recipes/smoke-cpu.toml",
        "batch.global_size=32",
    ]
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.seconds
def test_a_job_that_slurm_refuses_leaves_no_folder(tmp_path: Path) -> None:
    tool = tmp_path / "bin" / "sbatch"
    tool.parent.mkdir()
    tool.write_text("#!/bin/bash\necho 'sbatch: error: invalid account' >&2\nexit 1\n")
    tool.chmod(0o755)
    (tmp_path / "i.sif").write_bytes(b"hsqs")
    env = {"PATH": f"{tool.parent}:{os.environ['PATH']}", "DRAY_IMAGE": str(tmp_path / "i.sif")}
    ended = dray("submit", "recipes/smoke-cpu.toml", "--runs", tmp_path / "runs", **env)
    assert ended.returncode == 1
    assert "found:  sbatch: error: invalid account" in ended.stderr
    assert list((tmp_path / "runs").iterdir()) == []
    tool.unlink()
    ended = dray("submit", "recipes/smoke-cpu.toml", "--runs", tmp_path / "runs", **env)
    assert ended.returncode == 69
    assert "fix:    submit on a login node of the cluster; without Slurm use dray run or make cluster\n" in ended.stderr


def probe(root: Path, image: str = "/a b/i.sif", **env: str) -> dict[str, str]:
    slurm = {"SLURM_JOB_ID": "17", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_JOB_NUM_NODES": "2"}
    ended = subprocess.run(
        [root / "slurm" / "probe.sh", "apptainer", image, "generic"],
        env={**PYTHON, **slurm, **env}, capture_output=True, text=True, check=True,
    )  # fmt: skip
    facts = dict(line.split("=", 1) for line in ended.stdout.splitlines())
    told = ("HF_HOME", "NCCL_DEBUG")
    given = {name: value if name in told else "(set)" for name, value in {**slurm, **env}.items()}
    assert {name: facts.pop(f"shell.{name}") for name in given if "\n" not in given[name]} == given
    return {key: value for key, value in facts.items() if not key.startswith("shell.")}


def test_the_probe_tells_what_slurm_gave(root: Path) -> None:
    own = {"HF_HOME": str(root), "NCCL_DEBUG": "INFO", "X": "a=b c", "HF_TOKEN": "secret"}
    assert probe(root, SLURM_GPUS_ON_NODE="4", **own) == {
        "scheduler": "slurm",
        "job": "17",
        "task": "",
        "restarts": "0",
        "nodelist": "n[1-2]",
        "nodes": "2",
        "gpus_per_node": "4",
        "hf_home": str(root),
        "engine": "apptainer",
        "image": "/a b/i.sif",
        "image_sha256": "",
        "site": "generic",
        "cluster": "",
        "home": "",
        "uid": str(os.getuid()),
        "gid": str(os.getgid()),
    }


def test_the_probe_tells_which_task_of_an_array_it_is(root: Path) -> None:
    assert probe(root, SLURM_ARRAY_JOB_ID="17", SLURM_ARRAY_TASK_ID="3")["task"] == "17_3"


def test_the_probe_reads_the_image_s_record_and_the_gpus_of_an_salloc(root: Path, tmp_path: Path) -> None:
    known = records.Record(
        variant="cpu", dray="0", base="b", inputs="1" * 64, epoch=0, tools={}, sif=records.File(sha256="2" * 64, size=1)
    )
    records.write(tmp_path / "i.sif", known)
    said = probe(root, str(tmp_path / "i.sif"), SLURM_GPUS_PER_NODE="a100:4")
    assert (said["image_sha256"], said["gpus_per_node"]) == ("2" * 64, "4")
    assert probe(root, HF_HOME=str(tmp_path / "not yet"))["hf_home"] == probe(root, HF_HOME="relative")["hf_home"] == ""


def test_a_node_that_srun_alone_has_seen_to_be_lost(root: Path, tmp_path: Path) -> None:
    """It kills the tasks of the other nodes before one of them notices. The same again may go well."""
    paths = begun(root, tmp_path)
    (paths.logs / "srun.log").write_text(
        "srun: error: _server_write write failed: Bad file descriptor\n"
        "srun: error: Aborting, io error and missing step on node 1\n"
        "srun: Job step aborted: Waiting up to 7 seconds for job step to finish.\n"
    )
    cause = finish(paths, code=137).cause
    assert cause
    assert (cause.name, cause.code) == ("node failure", 75)
    assert cause.evidence == ["Slurm: srun: error: Aborting, io error and missing step on node 1"]
