"""Site files on the real cluster: what they bind and stage, and nodes that lack it."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

SHORT = ("ranks_per_node=1", "train.steps=2", "train.warmup_steps=0", "train.log_every=1")


@pytest.fixture
def site(cluster):
    """Write the site file of the cluster's user; the job's option that names it."""

    def write(text: str) -> str:
        file = cluster.shared / "home" / "my site.toml"
        file.write_text(f'name = "mine"\nabout = "a test"\n{text}\n')
        file.chmod(0o644)
        return "--export=ALL,DRAY_SITE=/shared/home/my site.toml"

    return write


@pytest.fixture
def fabric(cluster, library: Callable[..., Path]) -> Callable[..., str]:
    """A folder of libraries that the nodes share, and the part of a site file that puts them in."""

    def write(name: str, **headers: object) -> str:
        folder = cluster.shared / "home" / "fabric"
        path = library(folder / name, name, **headers)
        for one in (folder, path):
            one.chmod(0o755)
        return f'[fabric]\nkind = "slingshot"\nstrategy = "host"\nlibraries = ["/shared/home/fabric/{name}"]\n'

    return write


def test_a_site_of_ones_own_with_binds_staging_and_libraries(sbatch, site, fabric, cluster) -> None:
    """The smoke recipe with all that a site can ask for, and the preflight before it."""
    data = cluster.shared / "home" / "the data"
    data.mkdir(exist_ok=True)
    link = cluster.shared / "home" / "scratch"
    link.unlink(missing_ok=True)
    link.symlink_to("the data")
    option = site(
        'interfaces = ["eth0"]\nstage = "/tmp"\n'
        "[[binds]]\npath = '/shared/home/scratch'\nwhy = 'data'\nwrite = true\n"
        "[[binds]]\npath = '/no/flash'\nwhy = 'fast data'\nrequired = false\n"
        + fabric("libcxi.so.1", needed=["libc.so.6"], wants={"libc.so.6": ["GLIBC_2.2.5"]})
    )
    ended = sbatch(option, "slurm/multinode.sh", "recipes/smoke-cpu.toml", "launcher=python", *SHORT)
    assert ended.code == 0, ended.output
    assert ended.metrics("start")[0]["hosts"] == ["n1", "n2"]
    report = json.loads((ended.attempt / "preflight" / "report.json").read_text())
    assert {rank["transport"] for rank in report["ranks"]} == {"gloo over TCP"}
    assert ended.result()["preflight"].startswith("gloo over TCP, ")
    assert f"preflight: {ended.result()['preflight']}\n" in ended.output


@pytest.mark.slow
def test_what_is_put_in_is_in_the_library_path_of_ranks(sbatch, site, fabric, root: Path) -> None:
    option = site(fabric("libcxi.so.1"))
    looks = "import os; print(os.path.exists('/.singularity.d/libs/libcxi.so.1'), os.environ['LD_LIBRARY_PATH'])"
    ended = sbatch(
        option,
        f"{root}/slurm/multinode.sh",
        "preflight.when=never",
        "--",
        "python3",
        "-c",
        looks,
        workdir="/shared/home",
    )
    assert ended.code == 0, ended.output
    bound, path = (ended.attempt / "logs" / "rank-1.log").read_text().split()
    assert bound == "True"
    assert "/.singularity.d/libs" in path.split(":")


@pytest.mark.slow
def test_a_library_for_a_newer_glibc_stops_before_a_rank_starts(sbatch, site, fabric) -> None:
    option = site(fabric("libcxi.so.1", needed=["libc.so.6"], wants={"libc.so.6": ["GLIBC_2.2.5", "GLIBC_2.99"]}))
    ended = sbatch(option, "slurm/multinode.sh", "recipes/smoke-cpu.toml", *SHORT)
    assert ended.code == 69, ended.output
    why = ended.result()["cause"]["why"].splitlines()
    assert why[0] in [f"/.singularity.d/libs/libcxi.so.1 of {node} does not fit this image" for node in ("n1", "n2")]
    assert why[2].startswith("  found:  needs GLIBC_2.99 of libc.so.6; ")
    assert not (ended.attempt / "metrics.jsonl").exists()


@pytest.mark.parametrize("what", ["bind", pytest.param("plugin", marks=pytest.mark.slow)])
def test_what_one_node_alone_lacks(sbatch, site, cluster, what: str) -> None:
    """A site that expects a plugin which a node does not have: a silent fallback, on a real cluster."""
    contents = {
        "bind": '[[binds]]\npath = "/tmp/only here"\nwhy = "data"\n',
        "plugin": '[fabric]\nstrategy = "host"\nplugin = "/tmp/only here/librccl-net*.so"\n',
    }
    where = shlex.quote("/tmp/only here")
    assert cluster.exec(["bash", "-c", f"mkdir -p {where} && touch {where}/librccl-net.so"], node="n1").code == 0
    began = time.monotonic()
    try:
        ended = sbatch(site(contents[what]), "slurm/multinode.sh", "recipes/smoke-cpu.toml", *SHORT)
    finally:
        cluster.exec(["bash", "-c", f"rm -rf {where}"], node="n1")
    assert ended.code == 69, ended.output
    assert time.monotonic() - began < 60
    cause = ended.result()["cause"]
    assert cause["node"] == "n2"
    assert (
        cause["why"].splitlines()
        == {
            "bind": ["/tmp/only here does not exist", "  wanted: site mine: data"],
            "plugin": [
                "/tmp/only here/librccl-net*.so does not exist",
                "  wanted: a part of the fabric (site mine), without which ranks silently use TCP",
            ],
        }[what]
    )


@pytest.mark.slow
def test_a_users_own_file_that_names_the_cluster_is_found(sbatch, cluster) -> None:
    own = cluster.shared / "home" / "my sites"
    own.mkdir(exist_ok=True)
    own.chmod(0o755)
    file = own / "harbour.toml"
    file.write_text(
        'name = "harbour"\nabout = "a test"\nclusters = ["local"]\n[[binds]]\npath = "$MYDATA"\nwhy = "data"\n'
    )
    file.chmod(0o644)
    option = "--export=ALL,DRAY_SITES=/shared/home/my sites,MYDATA=/shared/home/my sites"
    ended = sbatch(option, "slurm/multinode.sh", "recipes/smoke-cpu.toml", "preflight.when=never", *SHORT)
    assert ended.code == 0, ended.output
    plan = json.loads((ended.attempt / "plan.json").read_text())
    assert plan["reasons"]["site"] == "harbour: Slurm calls this cluster local"
    assert ("/shared/home/my sites", "site harbour $MYDATA") in [
        (bind["path"], bind["source"]) for bind in plan["binds"]
    ]


@pytest.mark.slow
def test_a_rank_that_hangs_in_a_collective_is_named_at_the_deadline(sbatch, cluster) -> None:
    look = ["pgrep", "-o", "-a", "-f", "dray.checks.rank"]

    def waits() -> str:
        """The process of the rank once it has heard "go", after which its stack is written at a deadline."""
        process, *_, plan = cluster.exec(look, node="n2").out.split() or ["", ""]
        stack = f"{plan.removesuffix('plan.json')}preflight/rank-1.stack"
        return process if plan and cluster.exec(["test", "-e", stack], node="n2").code == 0 else ""

    with ThreadPoolExecutor() as pool:
        job = pool.submit(sbatch, "slurm/multinode.sh", "recipes/smoke-cpu.toml", "rendezvous_timeout_s=20", *SHORT)
        deadline = time.monotonic() + 60
        while not (process := waits()):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert cluster.exec(["kill", "-STOP", process], node="n2").code == 0
        ended = job.result()
    assert ended.code == 69, ended.output
    cause = ended.result()["cause"]
    assert cause["why"].splitlines()[0] == "rank 1 on n2 did not answer in 20 s"
    assert (cause["node"], cause["rank"]) == ("n2", 1)
    assert cluster.exec(["kill", "-0", process], node="n2").code != 0
