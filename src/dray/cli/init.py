"""`dray init`: from an empty folder to a first submitted job."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path

from dray import process
from dray.cli.args import program
from dray.cli.recipe import absolute, require_good, write_new
from dray.config import dray_home, sites
from dray.config.image_definition import ACCELERATORS
from dray.config.new_recipe import New
from dray.config.site import Site
from dray.contract import node
from dray.contract.findings import ConfigError
from dray.fitness import network_and_site
from dray.images import store
from dray.runs import slurm

_GPUS = (
    "cuda: NVIDIA A100 and newer; cuda12: NVIDIA V100, or an older driver; rocm: AMD; "
    "rocm6: AMD, with an older driver; cpu: none"
)
# What Slurm calls a GPU in GRES, gpu:v100:4.
_OLD, _AMD = re.compile("v100|p100|gtx|rtx20", re.IGNORECASE), re.compile(r"mi\d|amd|radeon", re.IGNORECASE)
_RECIPE = Path("recipes", "mine.toml")


def init(
    folder: Path = Path(),
    gpu: str = "",
    model: str = "",
    data: str = "builtin",
) -> None:
    """Write a folder from which you build images and submit jobs, with a first recipe, and print the next commands.

    It takes the partition, the account and the GPUs from Slurm and this machine, and overwrites no file.

    FOLDER: A new or empty folder, or a checkout of dray.
    --gpu VARIANT: Image variant: cuda, cuda12, rocm, rocm6 or cpu. Default: by the names of the GPUs.
    --model MODEL: A model of the hub, or a folder. Default: a GPT-2 of 1 M parameters from scratch.
    --data DATASET: A file, a folder, hub:OWNER/NAME, or builtin: a made-up language.

    dray init my-runs
    dray init my-runs --model gpt2 --data ~/corpus
    """
    chosen = network_and_site.site()
    found = chosen.site
    queue = _partition(found) if process.which("sbatch") else None
    variant = gpu or found.image or _variant(queue)
    if variant not in ACCELERATORS:
        raise ConfigError("there is no image for such a GPU", wanted=_GPUS, found=variant, fix="--gpu cuda")
    gpus = 0 if variant == "cpu" else (queue and queue.gpus) or found.gpus_per_node or 1
    data = data if data == "builtin" or re.match("[a-z0-9]{2,}:", data) else absolute("--data", data)
    if model and (model.startswith(("/", "~", ".")) or Path(model).is_dir()):
        model = absolute("--model", model)
    text = New(name="mine", train=data, image=variant, gpus=gpus, model=model).text()
    require_good(text)  # before the checkout is written
    if not (folder / "containers/steps").is_dir():
        dray_home.write(folder)
    write_new(folder / _RECIPE, text, "the recipe", fix="dray init ANOTHER-FOLDER, or remove this file")
    print(f"site: {found.name} ({chosen.reason})")
    print(f"{folder}: containers/ to build, slurm/ to submit, recipes/ to train\n{folder / _RECIPE}:\n\n{text}")
    commands = []
    if data.startswith("hub:") or (model and not model.startswith("/")):
        commands.append(["data", "prefetch", str(_RECIPE)])
    account = ""
    if queue:
        accounts = slurm.offered("account")
        if found.account or len(accounts) > 1:
            account = [*accounts, found.account][0]
        commands += _submit(variant, gpus, found, {"--partition": queue.name, "--account": account})
    else:
        commands += _here(variant)
    _next(folder, commands)
    if queue and found.name == sites.GENERIC:
        print("No site file knows this cluster: `dray site new` writes one, with its binds and its network.")
    if account and account == found.account:
        print(f"{account} is the site's example: put your own account there.")


def _partition(site: Site) -> slurm.Partition:
    """The site's partition, else the one with most GPUs on a node."""
    partitions = {partition.name: partition for partition in slurm.partitions()}
    for option in site.sbatch:
        if option.startswith("--partition="):
            name = option.partition("=")[2]
            return partitions.get(name, slurm.Partition(name=name, nodes=1, cpus=0, gres=""))
    none = slurm.Partition(name="", nodes=1, cpus=0, gres="")
    return max(partitions.values(), key=lambda partition: (partition.gpus, partition.nodes), default=none)


def _variant(queue: slurm.Partition | None) -> str:
    """The image for the partition's GPUs by Slurm's names of them; without Slurm, for this machine's."""
    if not queue:
        return next((variant for variant in ("cuda", "rocm") if node.has_gpu(ACCELERATORS[variant])), "cpu")
    if not queue.gpus:
        return "cpu"
    if _AMD.search(queue.gres):
        return "rocm"
    return "cuda12" if _OLD.search(queue.gres) else "cuda"


def _submit(variant: str, gpus: int, site: Site, options: Mapping[str, str]) -> list[list[str]]:
    """The commands on a cluster; of these options of sbatch those that the site does not add itself."""
    argv = ["submit", str(_RECIPE), "--nodes", "1"]
    if gpus:
        argv += ["--gpus-per-node", str(gpus)]
    for option, value in options.items():
        if value and f"{option}={value}" not in site.sbatch:
            argv.append(f"--sbatch={option}={value}")
    engine = site.engine or "apptainer"
    absent = store.absent(store.job_file(dray_home.root(), variant, engine), variant, engine)
    return [*([["image", "build", variant]] if absent else []), [*argv, "--dry-run"], argv]


def _here(variant: str) -> list[list[str]]:
    """The commands without Slurm: run on this machine, in this Python or in Docker."""
    plan, run = ["plan", str(_RECIPE)], ["run", str(_RECIPE)]
    if variant == "cpu" and find_spec("torch"):
        return [plan, run]
    return [["image", "build", variant, "--format", "docker"], plan, [*run, "--engine", "docker"]]


def _next(folder: Path, commands: Sequence[Sequence[str]]) -> None:
    """Print the commands to type next, complete."""
    dray, *rest = program()
    print("Next:")
    if folder.resolve() != Path().resolve():
        print(f"  cd {shlex.quote(str(folder))}")
        dray = str(Path(dray).absolute()) if "/" in dray else dray
    if Path(sys.prefix).parent.name.startswith("archive-v"):  # of uvx, which leaves no `dray` to call
        print("  make install")
        dray, rest = ".venv/bin/dray", []
    for argv in commands:
        print(f"  {shlex.join([dray, *rest, *argv])}")
