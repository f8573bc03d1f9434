"""What sbatch refuses, told by `dray submit` with what the cluster has."""

from __future__ import annotations

from pathlib import Path

import pytest

from dray.contract.findings import ConfigError, DrayError
from dray.runs import submit as queue

SINFO = r"""#!/bin/bash
case "$*" in
  *'%P|%D|%c|%G'*) printf '%s\n' 'main*|2|8|(null)' 'gpu|4|64|gpu:a100:4' 'gpu|1|64|gpu:a100:8' ;;
  *'%R|%l'*) printf '%s\n' 'main|infinite' 'gpu|2-00:00:00' ;;
  *%f*) printf '%s\n' '(null)' 'a100,nvme' ;;
esac
"""
SACCTMGR = r"""#!/bin/bash
case "$*" in
  *format=account*) printf '%s\n' p123 p124 ;;
  *format=qos*) printf '%s\n' 'normal,long' ;;
esac
"""
SAYS = "sbatch: error: Batch job submission failed: {}"
TABLE = "main: 2 nodes with 8 CPUs, 0 GPUs\ngpu: 4 nodes with 64 CPUs, 4 GPUs\ngpu: 1 node with 64 CPUs, 8 GPUs"
FIX = (
    "another --sbatch=--partition=NAME; or less: --nodes, --gpus-per-node, --sbatch=--cpus-per-task=N or "
    "--sbatch=--mem=SIZE"
)
NOT_AVAILABLE = "Requested node configuration is not available"


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in (("sinfo", SINFO), ("sacctmgr", SACCTMGR)):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("PARTITION", "ACCOUNT", "QOS", "CONSTRAINT"):
        monkeypatch.delenv(f"SBATCH_{name}", raising=False)
    return tmp_path


def told(says: str, *options: str, begins: str = "") -> tuple[int, str, str, str]:
    """The exit code, the problem, what is wanted, and the fix."""
    argv = ["sbatch", "--parsable", "--nodes=2", *options, "multinode.sh", "--run=r"]
    refused = DrayError("sbatch failed with exit code 1", where=" ".join(argv), found=SAYS.format(says))
    found = queue.explain_refusal(refused, argv).finding
    assert SAYS.format(says) in found.found
    assert found.found.startswith(begins)
    return found.code, found.problem, found.wanted, found.fix


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("says", "options", "problem", "wanted", "fix"),
    [
        ("Invalid partition name specified", ("-p", "gpuu"), "Slurm refuses this partition", "one of main, gpu",
         "--sbatch=--partition=gpu"),
        ("Invalid partition name specified", ("--partition=mainx",), "Slurm refuses this partition", "one of main, gpu",
         "--sbatch=--partition=main"),
        ("No partition specified or system default partition", (), "Slurm needs --partition", "one of main, gpu",
         "--sbatch=--partition=main"),
        ("Invalid account or account/partition combination specified", ("-Ap12",), "Slurm refuses this account",
         "one of p123, p124", "--sbatch=--account=p124"),
        ("Invalid account or account/partition combination specified", (), "Slurm needs --account",
         "one of p123, p124", "--sbatch=--account=p123"),
        ("Invalid qos specification", ("--qos=lang",), "Slurm refuses this qos", "one of long, normal",
         "--sbatch=--qos=long"),
        ("Invalid feature specification", ("-C", "a10"), "Slurm refuses this constraint", "one of a100, nvme",
         "--sbatch=--constraint=a100"),
        ("Requested time limit is invalid (missing or exceeds some limit)", ("--time=9-0",),
         "Slurm refuses this --time", "main: at most infinite\ngpu: at most 2-00:00:00",
         "use --sbatch=--time=HH:MM:SS within the partition's limit"),
    ],
)  # fmt: skip
def test_a_name_that_is_not_there(says: str, options: tuple[str, ...], problem: str, wanted: str, fix: str) -> None:
    assert told(says, *options) == (78, problem, wanted, fix)


@pytest.mark.usefixtures("cluster")
@pytest.mark.parametrize(
    ("says", "options", "found"),
    [
        (NOT_AVAILABLE, ("--gpus-per-node=4", "--time=8"), "--nodes=2 --gpus-per-node=4"),
        (NOT_AVAILABLE, ("--gres=gpu:4", "-pmain"), "--nodes=2 --gres=gpu:4 -pmain\n"),
        ("Node count specification invalid", ("-N9",), "--nodes=2 -N9"),
        ("More processors requested than permitted", ("--cpus-per-task=99",), "--nodes=2 --cpus-per-task=99"),
    ],
)
def test_a_size_that_no_partition_has(says: str, options: tuple[str, ...], found: str) -> None:
    problem = "no nodes of the partition match what this job requests"
    assert told(says, *options, begins=found) == (78, problem, TABLE, FIX)


def test_no_more_than_six_partitions_are_listed(cluster: Path) -> None:
    (cluster / "sinfo").write_text("#!/bin/bash\nprintf '%s\\n' p{1..9}'|2|8|(null)'\n")
    assert [line.partition(":")[0] for line in told(NOT_AVAILABLE)[2].splitlines()] == [f"p{n}" for n in range(1, 7)]


def test_without_an_answer_the_words_of_sbatch_stay(cluster: Path) -> None:
    for name in ("sinfo", "sacctmgr"):
        (cluster / name).write_text("#!/bin/bash\nexit 1\n")
    assert told("Invalid account or account/partition combination specified", "--account=x") == (
        78, "Slurm refuses this account", "a value of --account on this cluster", "--sbatch=--account=ACCOUNT",
    )  # fmt: skip
    assert told("Invalid partition name specified", "--partition=x")[2:] == (
        "a value of --partition on this cluster", "--sbatch=--partition=PARTITION",
    )  # fmt: skip
    assert told(NOT_AVAILABLE)[1] == "no nodes of the partition match what this job requests"
    refused = DrayError("sbatch failed with exit code 1", found="sbatch: error: Access/permission denied")
    assert queue.explain_refusal(refused, ["sbatch"]) is refused


def test_dray_submit_tells_it_and_leaves_no_folder(cluster: Path, tmp_path: Path) -> None:
    (cluster / "sbatch").write_text(
        f"#!/bin/bash\necho '{SAYS.format('Invalid partition name specified')}' >&2\nexit 1\n"
    )
    (cluster / "sbatch").chmod(0o755)
    with pytest.raises(ConfigError) as refused:
        queue.submit(["sbatch", "--partition=gpuu"], tmp_path / "runs" / "r", "none", tmp_path)
    assert refused.value.finding.fix == "--sbatch=--partition=gpu"
    assert [*(tmp_path / "runs").iterdir()] == []
