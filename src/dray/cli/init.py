"""`dray init`: from an empty folder to a first submitted job."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer

from dray import process
from dray.cli import candidates
from dray.cli.args import program
from dray.cli.recipe import require_good, write
from dray.config import dray_home, sites
from dray.config.image_definition import ACCELERATORS
from dray.config.new_recipe import New
from dray.config.site import Site
from dray.contract import node
from dray.contract.findings import ConfigError, DrayError, listed, nearest
from dray.fitness import host
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
    yes: bool = False,
    site: Annotated[
        str,
        typer.Option(help="This cluster's site. Default: the one that dray detects.", autocompletion=candidates.sites),
    ] = "",
    partition: str = "",
    account: str = "",
    gpu: Annotated[
        str,
        typer.Option(
            help="Image variant: cuda, cuda12, rocm, rocm6 or cpu.", autocompletion=candidates.one_of(ACCELERATORS)
        ),
    ] = "",
    model: str = "",
    data: str = "",
) -> None:
    """Write a folder from which you build images and submit jobs, with a first recipe, and print the next commands.

    On a terminal it asks what Slurm and this machine do not tell. It overwrites no file.

    FOLDER: A new or empty folder, or a checkout of dray.
    --yes: Ask nothing and take each default, as without a terminal.
    --partition NAME: Slurm partition. Default: the site's, else the one with most GPUs.
    --account NAME: Slurm account.
    --model MODEL: A model of the hub, a folder, or small: a GPT-2 of 1 M parameters from scratch.
    --data DATASET: A file, a folder, hub:OWNER/NAME, or builtin: a made-up language.

    dray init my-runs
    dray init my-runs --yes --model gpt2 --data ~/corpus
    """
    ask = _Ask(asks=not yes and sys.stdin.isatty() and sys.stdout.isatty())
    chosen = host.site(site)
    found = chosen.site
    queue = _partition(ask, partition, found, needed=not gpu and not found.image)
    variant = gpu or found.image or _variant(ask, queue)
    if variant not in ACCELERATORS:
        raise ConfigError("there is no image for such a GPU", wanted=_GPUS, found=variant, fix="--gpu cuda")
    gpus = 0 if variant == "cpu" else (queue and queue.gpus) or found.gpus_per_node or 1
    account = account or _account(ask, found)
    model = _absolute(
        "--model", model or ask("model: a name of the hub, a folder, or small (1 M, from scratch)", "small")
    )
    data = _absolute("--data", data or ask("dataset: a file, a folder, hub:OWNER/NAME, or builtin", "builtin"))
    text = New(name="mine", train=data, image=variant, gpus=gpus, model="" if model == "small" else model).text()
    require_good(text)  # before the checkout is written
    if not (folder / "containers" / "steps").is_dir():
        dray_home.write(folder)
    write(folder / _RECIPE, text)
    print(f"site: {found.name} ({chosen.reason})")
    print(f"{folder}: containers/ to build, slurm/ to submit, recipes/ to train\n{folder / _RECIPE}:\n\n{text}")
    commands = []
    if data.startswith("hub:") or not (model == "small" or model.startswith("/")):
        commands.append(["data", "prefetch", str(_RECIPE)])
    if queue:
        wanted = {"--partition": queue.name, "--account": account}
        options = [f"{option}={value}" for option, value in wanted.items() if value]
        commands += _submit(variant, gpus, found, [option for option in options if option not in found.sbatch])
    else:
        commands += _here(variant)
    _next(folder, commands)
    if queue and found.name == sites.GENERIC:
        print("No site file knows this cluster: `dray site new` writes one, with its binds and its network.")
    if account and account == found.account:
        print(f"{account} is the site's example: put your own account there.")


class _Ask:
    """Asks questions on a terminal; elsewhere takes the default of each."""

    def __init__(self, *, asks: bool) -> None:
        self.asks = asks

    def __call__(self, question: str, default: str, choices: Sequence[str] = ()) -> str:
        if not self.asks:
            return default
        if choices:
            question = f"{question} ({', '.join(choices)})"
        while True:
            answer = str(typer.prompt(question, default=default))
            if not choices or answer in choices:
                return answer


def _partition(ask: _Ask, given: str, site: Site, *, needed: bool) -> slurm.Partition | None:
    """The user's or the site's partition, else the one with most GPUs on a node; None without Slurm."""
    if not process.which("sbatch"):
        return None
    partitions: dict[str, slurm.Partition] = {}
    try:
        partitions = {partition.name: partition for partition in slurm.partitions()}
    except DrayError as silent:
        silent.amend(fix="run dray init again, or give --partition and --gpu")
        if needed:  # whether the nodes have GPUs, only Slurm knows
            raise
        print(f"dray: warning: {silent}", file=sys.stderr)
    if given and partitions and given not in partitions:
        fix = f"--partition {nearest(given, partitions) or 'NAME'}"
        raise ConfigError("Slurm has no such partition", wanted=listed(partitions), found=given, fix=fix)
    of_site = next((option.partition("=")[2] for option in site.sbatch if option.startswith("--partition=")), "")
    best = max(partitions.values(), key=lambda partition: (partition.gpus, partition.nodes), default=None)
    name = given or of_site
    if best and not name:
        name = ask("partition", best.name, list(partitions)) if len(partitions) > 1 else best.name
    return partitions.get(name, slurm.Partition(name=name, nodes=1, cpus=0, gres=""))


def _variant(ask: _Ask, queue: slurm.Partition | None) -> str:
    """The image for the partition's GPUs by Slurm's names of them; without Slurm, for this machine's."""
    if not queue:
        return next((variant for variant in ("cuda", "rocm") if node.has_gpu(ACCELERATORS[variant])), "cpu")
    if not queue.gpus:
        return "cpu"
    if _AMD.search(queue.gres):
        return "rocm"
    if _OLD.search(queue.gres):
        return "cuda12"
    has_type = re.search("gpu:[a-z]", queue.gres, re.IGNORECASE)
    return "cuda" if has_type else ask(f"GPUs, {queue.gres}: {_GPUS}", "cuda", list(ACCELERATORS))


def _account(ask: _Ask, site: Site) -> str:
    """The account to charge; the site's example if Slurm knows none, and empty if Slurm's default is the only one."""
    known = slurm.accounts() if process.which("sbatch") else []
    if len(known) > 1:
        return ask("account", known[0], known)
    if site.account and not known:
        return ask("account", site.account)
    return known[0] if known and site.account else ""


def _absolute(option: str, given: str) -> str:
    """A name as it is; a file or folder by its absolute path, since the recipe may move."""
    path = Path(given).expanduser().absolute()
    if given in ("small", "builtin"):
        return given
    if path.exists() or any(path.parent.glob(path.name)):
        return str(path)
    is_name = re.match("[a-z0-9]{2,}:", given) if option == "--data" else given[0] not in "/~."
    if not is_name:
        wanted = "a file, a folder, a name of the hub, or the default"
        raise ConfigError(f"{option} names nothing", where=path, wanted=wanted, found=given, fix=f"leave out {option}")
    return given


def _submit(variant: str, gpus: int, site: Site, options: Sequence[str]) -> list[list[str]]:
    engine = site.engine or "apptainer"
    argv = ["submit", str(_RECIPE), "--nodes", "1"]
    if gpus:
        argv += ["--gpus-per-node", str(gpus)]
    if site.name != host.site().site.name:
        argv += ["--site", site.name]
    argv += [f"--sbatch={option}" for option in options]
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
    for argv in commands:
        print(f"  {shlex.join([dray, *rest, *argv])}")
