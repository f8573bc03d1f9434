"""The cluster on your desk, for real. What a test breaks, it sees healed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster


def up_again(desk):
    """`up` with the sizes and folders that it has."""
    now = desk.look()
    return desk.up(
        nodes=now.size.nodes,
        gpus_per_node=now.size.gpus_per_node,
        base=now.base,
        share=Path(now.shared),
    )


@pytest.fixture(scope="module")
def healed(desk):
    """The desk is well before and after."""
    yield up_again(desk)
    up_again(desk)


@pytest.fixture
def broken(desk, healed):
    """Whatever a test does to it, it is well for the next."""
    yield
    up_again(desk)


def dray(*words):
    argv = [sys.executable, "-m", "dray", "cluster", *words]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)


def test_status_of_a_healthy_cluster(desk, healed):
    nodes, gpus = healed.size.nodes, healed.size.gpus_per_node
    assert [(part.name, part.container, part.gpus, part.trouble) for part in healed.parts] == [
        ("controller", "running", "", None),
        *((f"n{number}", "running", f"gpu:{gpus}", None) for number in range(1, nodes + 1)),
    ]
    assert (healed.slurm[:6], healed.apptainer[:4]) == ("24.11.", "1.4.")
    said = dray("status")
    assert (said.returncode, said.stderr) == (0, "")
    assert f"/shared is {desk.shared}" in said.stdout


def test_up_again_is_quick_and_keeps_everything(desk, healed):
    parts = [part.name for part in healed.parts]
    before = [(desk.part(name).id, desk.part(name).attrs["State"]["StartedAt"]) for name in parts]
    begun = time.monotonic()
    up_again(desk)
    assert time.monotonic() - begun < 20
    assert [(desk.part(name).id, desk.part(name).attrs["State"]["StartedAt"]) for name in parts] == before


def test_gpus_are_given_to_jobs(desk, healed):
    words = ["srun", "--nodes=2", "--gpus-per-node=1", "bash", "-c", "echo $SLURM_GPUS_ON_NODE $CUDA_VISIBLE_DEVICES"]
    assert desk.exec(words) == (0, "1 0\n1 0\n", "")


def test_more_gpus_than_there_are_is_refused(desk, healed):
    assert desk.exec(["srun", f"--gpus-per-node={healed.size.gpus_per_node + 1}", "true"]) == (
        1,
        "",
        "srun: error: Unable to allocate resources: Requested node configuration is not available\n",
    )


def test_exec_gives_code_and_both_streams(desk, healed):
    assert desk.exec(["bash", "-c", "echo out; echo err >&2; exit 7"]) == (7, "out\n", "err\n")
    said = dray("exec", "--node", "n2", "--", "bash", "-c", "hostname; echo err >&2; exit 7")
    assert (said.returncode, said.stdout, said.stderr) == (7, "n2\n", "err\n")


def test_the_user_is_ordinary_and_shares_its_files(desk, healed):
    name = f"test-{time.time_ns()}"
    written = desk.exec(["srun", "--nodes=1", "--nodelist=n2", "bash", "-c", f"id -un > $DRAY_RUNS/{name}"])
    assert written == (0, "", "")
    file = desk.shared / "runs" / name
    assert file.read_text() == "dray\n"
    assert file.stat().st_uid == int(desk.exec(["id", "-u"]).out) != 0
    file.unlink()


def test_a_batch_job_fails_with_its_own_code(desk, healed):
    code, out, err = desk.exec(["sbatch", "--wait", "--output=/dev/null", "--wrap", "exit 75"])
    assert (code, out.split()[:3], err) == (75, ["Submitted", "batch", "job"], "")


def test_a_killed_slurmd_is_seen_and_healed(desk, broken):
    node = desk.part("n2")
    node.exec_run(["pkill", "-KILL", "slurmd"], detach=True)
    node.wait(timeout=20)
    said = dray("status")
    assert said.returncode == 69
    assert "n2: its container is exited" in said.stderr
    assert "part: slurmd or munged ended with exit code 137" in said.stderr
    assert said.stderr.endswith("  fix:    dray cluster up\n")
    assert up_again(desk).troubles == ()
    assert sorted(desk.exec(["srun", "--nodes=2", "hostname"]).out.split()) == ["n1", "n2"]


def test_a_drained_node_is_seen_and_healed(desk, broken):
    drain = ["scontrol", "update", "NodeName=n2", "State=DRAIN", "Reason=a test"]
    assert desk.exec(drain, user="root") == (0, "", "")
    assert desk.look().troubles == ("n2: Slurm calls it drained (a test)",)
    assert up_again(desk).troubles == ()


def test_a_part_that_does_not_exist(desk, healed):
    said = dray("exec", "--node", "n99", "--", "true")
    wanted = ", ".join(sorted(part.name for part in healed.parts))
    assert (said.returncode, said.stdout, said.stderr) == (
        69,
        "",
        f"dray: the cluster has no such part\n  wanted: {wanted}\n  found:  n99\n",
    )
