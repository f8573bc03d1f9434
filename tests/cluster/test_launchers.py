"""All launchers on the real cluster: the same losses, anybody's script, and worlds that are refused."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cluster

QUICK = "preflight.when=never"
SHORT = ("ranks_per_node=1", "train.steps=4", "train.warmup_steps=0", "train.log_every=1", QUICK)
SCRIPTS = Path(__file__).parent / "scripts"


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("accelerate", marks=pytest.mark.slow),
        pytest.param("deepspeed", marks=pytest.mark.slow),
        pytest.param("python", marks=pytest.mark.slow),
    ],
)
def test_every_launcher_trains_the_same(sbatch, plain, losses_of, short, launcher: str) -> None:
    ended = sbatch("slurm/multinode.sh", "recipes/smoke-cpu.toml", f"launcher={launcher}", *short)
    assert losses_of(ended) == pytest.approx(plain, rel=1e-6)
    assert plain[-1] < plain[0]


@pytest.mark.slow
def test_one_rank_alone_is_a_world_too_for_accelerate(sbatch) -> None:
    """Its own way to start one process would leave out the variables that tell a rank who it is."""
    ended = sbatch("--nodes=1", "slurm/multinode.sh", "recipes/smoke-cpu.toml", "launcher=accelerate", *SHORT)
    assert ended.code == 0, ended.output
    assert ended.metrics("start")[0]["world_size"] == 1


@pytest.fixture
def folder(cluster) -> Path:
    """A folder of the cluster's user with scripts that know nothing of dray."""
    made = cluster.shared / "home" / "my scripts"
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(SCRIPTS, made)
    for path in (made, *made.iterdir()):
        path.chmod(0o777)
    return made


def wrote(folder: Path, name: str) -> dict[str, Any]:
    return json.loads((folder / f"{name}.json").read_text())


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("python", marks=pytest.mark.slow)])
def test_a_script_for_torchrun(sbatch, root: Path, folder: Path, launcher: str) -> None:
    hostile = """a b'"$(touch pwned);`touch pwned`\\*"""
    ended = sbatch(
        f"{root}/slurm/multinode.sh", QUICK, f"launcher={launcher}", "ranks_per_node=2",
        "--", "ddp.py", "--note", hostile,
        workdir="/shared/home/my scripts",
    )  # fmt: skip
    assert ended.code == 0, ended.output
    said = wrote(folder, "ddp")
    assert said["losses"][-1] < 0.2 * said.pop("losses")[0]
    assert said == {"folder": "/shared/home/my scripts", "world": 4, "local": "2", "note": hostile}
    assert not list(folder.glob("pwned"))
    assert ended.output.splitlines()[-2] == "done: exit code 0, 4 ranks on n1 n2"


@pytest.mark.slow
def test_a_script_for_accelerate(sbatch, root: Path, folder: Path) -> None:
    ended = sbatch(
        f"{root}/slurm/multinode.sh", QUICK, "launcher=accelerate", "ranks_per_node=2", "--", "accelerated.py",
        workdir="/shared/home/my scripts",
    )  # fmt: skip
    assert ended.code == 0, ended.output
    said = wrote(folder, "accelerated")
    assert said["losses"][-1] < said["losses"][0]
    assert (said["world"], said["kind"]) == (4, "DistributedType.MULTI_CPU")


@pytest.mark.slow
def test_a_script_for_deepspeed(sbatch, root: Path, folder: Path) -> None:
    ended = sbatch(
        f"{root}/slurm/multinode.sh", QUICK, "launcher=deepspeed", "ranks_per_node=2", "--", "zero.py",
        workdir="/shared/home/my scripts",
    )  # fmt: skip
    assert ended.code == 0, ended.output
    said = wrote(folder, "zero")
    assert said["losses"][-1] < said["losses"][0]
    assert (said["world"], said["stage"]) == (4, 2)


def test_a_script_that_is_not_there(sbatch, root: Path, folder: Path) -> None:
    ended = sbatch(f"{root}/slurm/multinode.sh", QUICK, "--", "gone.py", workdir="/shared/home/my scripts")
    assert ended.code == 78, ended.output
    cause = ended.result()["cause"]
    assert cause["why"].splitlines()[:2] == [
        "the program is not in the container: gone.py",
        "  wanted: a file /shared/home/my scripts/gone.py",
    ]


@pytest.mark.parametrize(
    "launcher",
    [
        pytest.param("torchrun", marks=pytest.mark.slow),
        pytest.param("accelerate", marks=pytest.mark.slow),
        pytest.param("deepspeed", marks=pytest.mark.slow),
        pytest.param("python", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_dies_before_the_first_collective(sbatch, root: Path, folder: Path, launcher: str) -> None:
    """Its own exit code is the job's, whatever the launcher makes of it."""
    dies = "import os, sys, time; sys.exit(41) if os.environ['RANK'] == '3' else time.sleep(60)"
    ended = sbatch(
        f"{root}/slurm/multinode.sh", QUICK, f"launcher={launcher}", "ranks_per_node=2", "--", "python3", "-c", dies,
        workdir="/shared/home/my scripts",
    )  # fmt: skip
    assert ended.code == 41, ended.output
    cause = ended.result()["cause"]
    assert (cause["rank"], cause["node"], cause["code"], cause["why"]) == (3, "n2", 41, "exit code 41")


def test_what_was_compiled_on_a_node_is_gone(sbatch, cluster, root: Path, folder: Path) -> None:
    writes = "import os; os.makedirs(os.environ['TRITON_CACHE_DIR']); print(os.environ['TRITON_CACHE_DIR'])"
    ended = sbatch(
        f"{root}/slurm/multinode.sh",
        QUICK,
        "launcher=python",
        "--",
        "python3",
        "-c",
        writes,
        workdir="/shared/home/my scripts",
    )
    assert ended.code == 0, ended.output
    scratch = (ended.attempt / "logs" / "rank-0.log").read_text().strip().removesuffix("/triton")
    assert scratch.startswith("/tmp/dray-")
    for node in ("n1", "n2"):
        assert cluster.exec(["test", "-e", scratch], node=node).code == 1


@pytest.mark.slow
def test_ranks_that_compile_at_once_do_not_break_one_another(sbatch, root: Path, folder: Path) -> None:
    ended = sbatch(
        "--nodes=1", f"{root}/slurm/singlenode.sh", "launcher=python", "ranks_per_node=4", "--", "compiles.py",
        workdir="/shared/home/my scripts",
    )  # fmt: skip
    assert ended.code == 0, ended.output
    logs = [path.read_text() for path in (ended.attempt / "logs").glob("rank-*.log")]
    assert logs == ["compiled 8\n"] * 4


@pytest.mark.slow
def test_a_run_inside_an_salloc_and_two_at_once(cluster, root: Path, folder: Path) -> None:
    """The ports of two steps of one job must not meet."""
    start = f"bash {shlex.quote(str(root))}/slurm/multinode.sh {QUICK} ranks_per_node=1 -- ddp.py --note"
    both = f"{start} one & {start} two & wait %1 && wait %2"
    code, out, err = cluster.exec(
        ["salloc", "--quiet", "--nodes=2", "--overcommit", "bash", "-c", both], workdir="/shared/home/my scripts"
    )
    assert code == 0, out + err
    assert out.count("done: exit code 0, 2 ranks on n1 n2") == 2


def test_a_heterogeneous_job_is_refused(sbatch) -> None:
    ended = sbatch("--nodes=1", ":", "--nodes=1", "slurm/multinode.sh", "recipes/smoke-cpu.toml")
    assert ended.code == 78, ended.output
    assert "dray: a heterogeneous job has several node lists, and one part would train alone\n" in ended.output


def test_half_of_slurms_variables(sbatch) -> None:
    ended = sbatch("--wrap=unset SLURM_JOB_NODELIST; exec bash slurm/multinode.sh recipes/smoke-cpu.toml")
    assert ended.code == 78, ended.output
    assert "dray: this is not a complete Slurm job: SLURM_JOB_NODELIST is not set\n" in ended.output


def test_a_node_with_another_image(sbatch, cluster, sif: Path) -> None:
    """Each node has a file of that name on its own disk, as after a copy that went wrong on one."""
    own = shlex.quote(str(sif))
    other = f"(head --bytes=48 {own}; head --bytes=16 /dev/zero; tail --bytes=+65 {own}) >/tmp/own.sif"
    for node, script in (("n1", f"cp {own} /tmp/own.sif"), ("n2", other)):
        assert cluster.exec(["bash", "-c", script], node=node).code == 0
    try:
        ended = sbatch("--export=ALL,DRAY_IMAGE=/tmp/own.sif", "slurm/multinode.sh", "recipes/smoke-cpu.toml", *SHORT)
    finally:
        for node in ("n1", "n2"):
            cluster.exec(["rm", "-f", "/tmp/own.sif"], node=node)
    assert ended.code == 78, ended.output
    assert ended.result()["cause"]["why"].splitlines()[0] == "node 1 (n2) has a different image"


def test_a_node_without_the_image(sbatch, cluster, sif: Path) -> None:
    assert cluster.exec(["cp", str(sif), "/tmp/own.sif"], node="n1").code == 0
    try:
        ended = sbatch("--export=ALL,DRAY_IMAGE=/tmp/own.sif", "slurm/multinode.sh", "recipes/smoke-cpu.toml", *SHORT)
    finally:
        cluster.exec(["rm", "-f", "/tmp/own.sif"], node="n1")
    assert ended.code == 69, ended.output
    cause = ended.result()["cause"]
    assert (cause["node"], cause["why"]) == ("n2", "/tmp/own.sif does not exist\n  wanted: the image")


@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=pytest.mark.slow), "python"])
def test_all_ranks_start_again(sbatch, root: Path, folder: Path, launcher: str) -> None:
    dies_once = (
        "import os, sys, time; again = os.environ['TORCHELASTIC_RESTART_COUNT']; print('again', again, flush=True); "
        "sys.exit(0) if again == '1' else time.sleep(5 if os.environ['RANK'] == '1' else 60) or sys.exit(5)"
    )
    ended = sbatch(
        f"{root}/slurm/multinode.sh", QUICK, f"launcher={launcher}", "max_restarts=1", "ranks_per_node=1",
        "--", "python3", "-c", dies_once,
        workdir="/shared/home/my scripts",
    )  # fmt: skip
    assert ended.code == 0, ended.output
    logs = "".join(path.read_text() for path in (ended.attempt / "logs").glob("rank-*.log"))
    assert (logs.count("again 0"), logs.count("again 1")) == (2, 2)
    result = ended.result()
    cause = result["restart_cause"]
    assert (result["restarts"], cause["rank"], cause["node"], cause["code"]) == (1, 1, "n2", 5)
    assert "restarts: 1, first after rank 1 on n2: exit code 5\n" in ended.output


@pytest.mark.slow
def test_a_site_s_interface_and_its_nodes_own_disks(sbatch, cluster, root: Path, folder: Path) -> None:
    """Ranks meet at the interface's address, and start from a copy of the image that is gone afterwards."""
    site = cluster.shared / "home" / "my site.toml"
    site.write_text('name = "mine"\nabout = "a test"\ninterfaces = ["hsn0", "eth0"]\nstage = "/tmp"\n')
    site.chmod(0o644)
    show = "import os; print(os.environ['MASTER_ADDR'], os.environ['APPTAINER_CONTAINER'])"
    ended = sbatch(
        "--export=ALL,DRAY_SITE=/shared/home/my site.toml", f"{root}/slurm/multinode.sh", QUICK,
        "--", "python3", "-c", show, workdir="/shared/home/my scripts",
    )  # fmt: skip
    assert ended.code == 0, ended.output
    address = cluster.exec(["hostname", "-I"], node="n1").out.split()[0]
    for rank in (0, 1):
        master, image = (ended.attempt / "logs" / f"rank-{rank}.log").read_text().split()
        assert master == address
        assert re.fullmatch(r"/tmp/dray-\d+-[0-9a-f]+\.sif", image)
        assert cluster.exec(["bash", "-c", "ls /tmp/dray-*.sif 2>/dev/null"], node=f"n{rank + 1}").out == ""
