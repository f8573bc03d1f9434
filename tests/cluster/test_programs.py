"""Programs that know nothing of dray, each unchanged on two nodes: for srun, Lightning and transformers' Trainer."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from dray.images.sif import record

pytestmark = pytest.mark.cluster

SCRIPTS = Path(__file__).parent / "scripts"
WORKDIR = "/shared/home/my programs"
QUICK = ("preflight.when=never", "ranks_per_node=2")
LAYER = "test-lightning"


@pytest.fixture
def folder(cluster) -> Path:
    """A folder of the cluster's user with all the scripts."""
    made = cluster.shared / "home" / "my programs"
    shutil.rmtree(made, ignore_errors=True)
    shutil.copytree(SCRIPTS, made)
    for path in (made, *made.iterdir()):
        path.chmod(0o777)
    return made


@pytest.fixture(scope="module")
def lightning(root: Path, sif: Path) -> Iterator[str]:
    """A layer with it, by its name; `sif` is what it is made for."""
    argv = [sys.executable, "-m", "dray", "image", "layer", "cpu", "--name", LAYER, "--pip", "lightning>=2.6,<2.7"]
    done = subprocess.run(argv, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    yield LAYER
    file = sif.with_name(f"dray-cpu-{LAYER}.sif")
    for path in (file, record.path_for(file), file.with_suffix(".lock")):
        path.unlink(missing_ok=True)


def wrote(folder: Path, name: str, ranks: int = 4) -> list[dict[str, object]]:
    return [json.loads((folder / f"{name}-{rank}.json").read_text()) for rank in range(ranks)]


def test_a_script_for_srun(sbatch, root: Path, folder: Path) -> None:
    ended = sbatch(
        f"{root}/slurm/multinode.sh", *QUICK, "launcher=python", "--", "slurm_strict.py", workdir=WORKDIR
    )  # fmt: skip
    assert ended.code == 0, ended.output
    seen = wrote(folder, "strict")
    assert {one.pop("SLURM_JOB_ID") for one in seen} != {""}
    same = {"sum": 6, "SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_TASKS_PER_NODE": "2(x2)"}
    same["SLURM_NPROCS"] = "4"
    assert seen == [{"rank": rank, "local": rank % 2, "node": rank // 2, **same} for rank in range(4)]
    assert "warning: " not in ended.output


@pytest.mark.slow
def test_a_script_that_takes_one_process_for_granted(sbatch, root: Path, folder: Path) -> None:
    """All ranks have the same weights: none has trained alone."""
    ended = sbatch(
        f"{root}/slurm/multinode.sh", *QUICK, "launcher=python", "--", "slurm_tolerant.py", workdir=WORKDIR
    )  # fmt: skip
    assert ended.code == 0, ended.output
    seen = wrote(folder, "tolerant")
    assert [(one["rank"], one["size"]) for one in seen] == [(rank, 4) for rank in range(4)]
    assert len({str(one["weights"]) for one in seen}) == 1


APART = """
import os, time, torch, torch.distributed as dist
rank = int(os.environ["RANK"])
if rank % 2 == 0:
    dist.init_process_group("gloo", rank=rank // 2, world_size=2)
    dist.destroy_process_group()
"""


@pytest.mark.slow
def test_ranks_that_train_apart_are_told(sbatch, root: Path, folder: Path) -> None:
    (folder / "apart.py").write_text(APART)
    ended = sbatch(f"{root}/slurm/multinode.sh", *QUICK, "--", "apart.py", workdir=WORKDIR)
    assert ended.code == 0, ended.output
    told = "warning: the largest process group has 2 of the 4 ranks: the other ranks trained separately"
    assert f"\n{told}" in ended.output
    assert "done: exit code 0, 4 ranks on n1 n2\n" in ended.output


@pytest.mark.parametrize(
    "launcher",
    ["torchrun", "python", "deepspeed"],
)
@pytest.mark.slow
def test_lightning(sbatch, root: Path, folder: Path, lightning: str, launcher: str) -> None:
    """It takes itself for started by torchrun, and so puts no job back into the queue."""
    ended = sbatch(
        f"{root}/slurm/multinode.sh", *QUICK, f"launcher={launcher}", f"layer={lightning}", "--", "lit.py",
        workdir=WORKDIR,
    )  # fmt: skip
    assert ended.code == 0, ended.output
    for rank, seen in enumerate(wrote(folder, "lit")):
        losses = seen.pop("losses")
        assert isinstance(losses, list)
        assert losses[-1] < 0.2 * losses[0], rank
        assert seen == {"world": 4, "environment": "TorchElasticEnvironment"}
    assert "warning: the largest" not in ended.output


@pytest.mark.parametrize(
    ("launcher", "words", "wrapped"),
    [
        ("torchrun", (), "DistributedDataParallel"),
        pytest.param("deepspeed", (), "DistributedDataParallel", marks=pytest.mark.slow),
        # On a CPU accelerate leaves DeepSpeed out.
        pytest.param("deepspeed", ("zero2.json",), "DistributedDataParallel", marks=pytest.mark.slow),
    ],
    ids=["torchrun", "deepspeed", "zero2"],
)
def test_the_trainer_of_transformers(
    sbatch, root: Path, folder: Path, launcher: str, words: tuple[str, ...], wrapped: str
) -> None:
    """It decides by its own argument whether DeepSpeed trains, whatever has started it."""
    settings = {"train_micro_batch_size_per_gpu": "auto", "zero_optimization": {"stage": 2}}
    (folder / "zero2.json").write_text(json.dumps(settings))
    options = (QUICK[0], "ranks_per_node=1", f"launcher={launcher}")
    ended = sbatch(f"{root}/slurm/multinode.sh", *options, "--", "hf_trainer.py", *words, workdir=WORKDIR)
    assert ended.code == 0, ended.output
    seen = json.loads((folder / "hf.json").read_text())
    losses = seen.pop("losses")
    assert losses[-1] < losses[0]
    assert seen == {"world": 2, "wrapped": wrapped}
