"""The local cluster, for real. What a test breaks, it sees healed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

SHORT = ("train.steps=5", "train.warmup_steps=0")


def up_again(cluster):
    """`up` with the sizes and folders that it has."""
    now = cluster.health()
    return cluster.up(
        nodes=now.size.nodes,
        gpus_per_node=now.size.gpus_per_node,
        base=now.base,
        share=Path(now.shared),
    )


@pytest.fixture(scope="module")
def healed(cluster):
    """The cluster is well before and after."""
    yield up_again(cluster)
    up_again(cluster)


@pytest.fixture
def broken(cluster, healed):
    """Whatever a test does to it, it is well for the next."""
    yield
    up_again(cluster)


def dray(*arguments):
    argv = [sys.executable, "-m", "dray", "cluster", *arguments]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)


def test_status_of_a_healthy_cluster(cluster, healed):
    nodes, gpus = healed.size.nodes, healed.size.gpus_per_node
    assert [(machine.name, machine.container, machine.gpus, machine.problem) for machine in healed.machines] == [
        ("controller", "running", "", None),
        *((f"n{number}", "running", f"gpu:{gpus}", None) for number in range(1, nodes + 1)),
    ]
    assert (healed.slurm[:6], healed.apptainer[:4]) == ("24.11.", "1.4.")
    ended = dray("status")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert f"/shared is {cluster.shared}" in ended.stdout


@pytest.mark.slow
def test_verbs_of_dray_as_at_a_login_node(cluster, healed, sif):
    """A job is submitted, waited for, found and explained, by a dray that is in the image alone."""
    submitted = dray("exec", "--", "dray", "submit", "recipes/smoke-cpu.toml", *SHORT, "--follow")
    assert submitted.returncode == 0, submitted.stderr
    run = submitted.stdout.split("run folder: ")[1].split("\n")[0]
    assert run.startswith("/shared/runs/")
    told = dray("exec", "--", "dray", "why", run)
    assert (told.returncode, told.stdout.splitlines()[0]) == (0, f"{run[13:]}, attempt 1: done, nothing failed")
    again = dray("exec", "--", "dray", "submit", f"--run={run}", "--dry-run")
    assert again.stderr.startswith(f"resumes {run[13:]} by the plan of attempt 1: recipe smoke-cpu")
    missing = dray("exec", "--", "dray", "submit", "recipes/smoke-cpu.toml", "--sbatch=--partition=mainx")
    assert missing.returncode == 78
    assert missing.stderr.endswith("  fix:    --sbatch=--partition=main\n")


def test_up_again_is_quick_and_keeps_everything(cluster, healed):
    names = [machine.name for machine in healed.machines]
    before = [(cluster.machine(name).id, cluster.machine(name).attrs["State"]["StartedAt"]) for name in names]
    begun = time.monotonic()
    up_again(cluster)
    assert time.monotonic() - begun < 20
    assert [(cluster.machine(name).id, cluster.machine(name).attrs["State"]["StartedAt"]) for name in names] == before


def test_gpus_are_given_to_jobs(cluster, healed):
    script = "echo $SLURM_GPUS_ON_NODE $CUDA_VISIBLE_DEVICES"
    arguments = ["srun", "--nodes=2", "--gpus-per-node=1", "bash", "-c", script]
    assert cluster.exec(arguments) == (0, "1 0\n1 0\n", "")


def test_more_gpus_than_there_are_is_refused(cluster, healed):
    assert cluster.exec(["srun", f"--gpus-per-node={healed.size.gpus_per_node + 1}", "true"]) == (
        1,
        "",
        "srun: error: Unable to allocate resources: Requested node configuration is not available\n",
    )


def test_exec_gives_code_and_both_streams(cluster, healed):
    assert cluster.exec(["bash", "-c", "echo out; echo err >&2; exit 7"]) == (7, "out\n", "err\n")
    ended = dray("exec", "--node", "n2", "--", "bash", "-c", "hostname; echo err >&2; exit 7")
    assert (ended.returncode, ended.stdout, ended.stderr) == (7, "n2\n", "err\n")


def test_the_user_is_ordinary_and_shares_its_files(cluster, healed):
    name = f"test-{time.time_ns()}"
    written = cluster.exec(["srun", "--nodes=1", "--nodelist=n2", "bash", "-c", f"id -un > $DRAY_RUNS/{name}"])
    assert written == (0, "", "")
    file = cluster.shared / "runs" / name
    assert file.read_text() == "dray\n"
    assert file.stat().st_uid == int(cluster.exec(["id", "-u"]).out) != 0
    file.unlink()


def test_a_batch_job_fails_with_its_own_code(cluster, healed):
    code, out, err = cluster.exec(["sbatch", "--wait", "--output=/dev/null", "--wrap", "exit 75"])
    assert (code, out.split()[:3], err) == (75, ["Submitted", "batch", "job"], "")


def test_a_killed_slurmd_is_seen_and_healed(cluster, broken):
    node = cluster.machine("n2")
    node.exec_run(["pkill", "-KILL", "slurmd"], detach=True)
    node.wait(timeout=20)
    ended = dray("status")
    assert ended.returncode == 69
    assert "n2: its container is exited" in ended.stderr
    assert "machine: slurmd or munged ended with exit code 137" in ended.stderr
    assert ended.stderr.endswith("  fix:    dray cluster up\n")
    assert up_again(cluster).problems == ()
    assert sorted(cluster.exec(["srun", "--nodes=2", "hostname"]).out.split()) == ["n1", "n2"]


def test_a_drained_node_is_seen_and_healed(cluster, broken):
    drain = ["scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=a test"]
    assert cluster.exec(drain, user="root") == (0, "", "")
    assert cluster.health().problems == ("n2: its state in Slurm is drained (a test)",)
    assert up_again(cluster).problems == ()


def test_a_machine_that_does_not_exist(cluster, healed):
    ended = dray("exec", "--node", "n99", "--", "true")
    wanted = ", ".join(sorted(machine.name for machine in healed.machines))
    assert (ended.returncode, ended.stdout, ended.stderr) == (
        69,
        "",
        f"dray: the cluster has no such machine\n  wanted: {wanted}\n  found:  n99\n",
    )
