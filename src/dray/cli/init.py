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
from dray.cli.options import program
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
from dray.runs.write import recipe_name

_GPUS = {
    "cuda": "NVIDIA A100 and newer",
    "cuda12": "NVIDIA V100, or an older driver",
    "rocm": "AMD",
    "rocm6": "AMD, with an older driver",
    "cpu": "none",
}
# What Slurm calls a GPU in GRES, gpu:v100:4.
_OLD, _AMD = re.compile("v100|p100|gtx|rtx20", re.IGNORECASE), re.compile(r"mi\d|amd|radeon", re.IGNORECASE)
_SMALL = "small"
_UVX = "archive-v"
"""uvx runs dray in a folder of uv's cache with this name: no `dray` is there afterwards."""


def init(
    folder: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="A new or empty folder, or a checkout of dray.")
    ] = Path(),
    yes: Annotated[
        bool, typer.Option("--yes", help="Ask nothing and take each default, as without a terminal.")
    ] = False,
    name: Annotated[str, typer.Option(help="The recipe's name.")] = "mine",
    site: Annotated[
        str,
        typer.Option(help="This cluster's site. Default: the one that dray detects.", autocompletion=candidates.sites),
    ] = "",
    partition: Annotated[
        str, typer.Option(help="Slurm partition. Default: the site's, else the one with most GPUs.")
    ] = "",
    account: Annotated[str, typer.Option(help="Slurm account.")] = "",
    gpu: Annotated[
        str,
        typer.Option(
            help="Image variant: cuda, cuda12, rocm, rocm6 or cpu.", autocompletion=candidates.one_of(ACCELERATORS)
        ),
    ] = "",
    model: Annotated[
        str, typer.Option(help="A model of the hub, a folder, or small: a GPT-2 of 1 M parameters from scratch.")
    ] = "",
    data: Annotated[str, typer.Option(help="A file, a folder, hub:OWNER/NAME, or builtin: a made-up language.")] = "",
) -> None:
    """Write a folder from which you build images and submit jobs, with a first recipe, and print the next commands.

    On a terminal it asks what Slurm and this machine do not tell. It overwrites no file.

    dray init my-runs
    dray init my-runs --yes --model gpt2 --data ~/corpus
    """
    ask = _Ask(asks=not yes and sys.stdin.isatty() and sys.stdout.isatty())
    found = host.site(site)
    has_slurm = bool(process.which("sbatch"))
    partitions: list[slurm.Partition] = []
    try:
        partitions = slurm.partitions() if has_slurm else []
    except DrayError as silent:
        silent.amend(fix="run dray init again, or give --partition and --gpu")
        if not gpu and not found.site.image:  # whether the nodes have GPUs, only Slurm knows
            raise
        print(f"dray: warning: {silent}", file=sys.stderr)
    queue = _partition(ask, partition, partitions, found.site.sbatch)
    gres = next((one for one in partitions if one.name == queue), None)
    variant = _variant(ask, gpu, found.site.image, gres, has_slurm=has_slurm)
    gpus = 0 if variant == "cpu" else (gres.gpus if gres else 0) or found.site.gpus_per_node or 1
    options = _options(queue, found.site.sbatch, _account(ask, account, found.site.account, has_slurm=has_slurm))
    named = _model(model or ask.text("model: a name of the hub, a folder, or small (1 M, from scratch)", _SMALL))
    dataset = _dataset(data or ask.text("dataset: a file, a folder, hub:OWNER/NAME, or builtin", "builtin"))
    new = New(name=recipe_name(name), train=dataset, image=variant, gpus=gpus, model=named)
    require_good(new.text())  # before the checkout is written
    recipe = Path("recipes", f"{new.name}.toml")
    if not (folder / "containers" / "steps").is_dir():
        dray_home.write(folder)
    write(folder / recipe, new.text())
    print(f"site: {found.site.name} ({found.reason})")
    print(f"{folder}: containers/ to build, slurm/ to submit, recipes/ to train\n{folder / recipe}:\n\n{new.text()}")
    of_hub = (named and not named.startswith("/")) or dataset.startswith("hub:")
    commands = [["prefetch", str(recipe)]] if of_hub else []
    commands += _submit(recipe, variant, gpus, found.site, options) if has_slurm else _here(recipe, variant)
    _next(folder, commands)
    if has_slurm and found.site.name == sites.GENERIC:
        print("No site file knows this cluster: `dray site new` writes one, with its binds and its network.")
    if found.site.account and f"--sbatch=--account={found.site.account}" in options:
        print(f"{found.site.account} is the site's example: put your own account there.")


def _next(folder: Path, commands: Sequence[Sequence[str]]) -> None:
    """Print the commands to type next, complete."""
    dray, *rest = program()
    print("Next:")
    if folder.resolve() != Path().resolve():
        print(f"  cd {shlex.quote(str(folder))}")
        dray = str(Path(dray).absolute()) if "/" in dray else dray
    if Path(sys.prefix).parent.name.startswith(_UVX):
        print("  make install")
        dray, rest = ".venv/bin/dray", []
    for argv in commands:
        print(f"  {shlex.join([dray, *rest, *argv])}")


class _Ask:
    """Asks questions on a terminal; elsewhere takes the default of each."""

    def __init__(self, *, asks: bool) -> None:
        self.asks = asks

    def text(self, question: str, default: str) -> str:
        return str(typer.prompt(question, default=default or None)) if self.asks else default

    def one_of(self, question: str, choices: Sequence[str], default: str) -> str:
        """Ask for one of several choices; a single choice needs no question."""
        if len(choices) < 2:
            return default
        while (answer := self.text(f"{question} ({', '.join(choices)})", default)) not in choices:
            print(f"one of {', '.join(choices)}")
        return answer


def _partition(ask: _Ask, given: str, partitions: list[slurm.Partition], site: Sequence[str]) -> str:
    """The site's partition, else the user's choice, by default the one with most GPUs on a node."""
    names = [one.name for one in partitions]
    if given and names and given not in names:
        fix = f"--partition {nearest(given, names) or 'NAME'}"
        raise ConfigError("Slurm has no such partition", wanted=listed(names), found=given, fix=fix)
    known = next((option.partition("=")[2] for option in site if option.startswith("--partition=")), "")
    best = max(partitions, key=lambda one: (one.gpus, one.nodes), default=None)
    return given or known or (ask.one_of("partition", names, best.name) if best else "")


def _variant(ask: _Ask, given: str, site: str | None, gres: slurm.Partition | None, *, has_slurm: bool) -> str:
    """The image for the GPUs: from the site, else from Slurm's names of the GPUs, else from this machine."""
    if given and given not in _GPUS:
        raise ConfigError("there is no image for such a GPU", wanted=", ".join(_GPUS), found=given, fix="--gpu cuda")
    if given or site:
        return given or str(site)
    if has_slurm and not (gres and gres.gpus):
        return "cpu"
    if has_slurm and gres:
        guess = "rocm" if _AMD.search(gres.gres) else "cuda12" if _OLD.search(gres.gres) else "cuda"
        sure = guess != "cuda" or re.search("a100|h100|h200|gh200|b200|l40|a40", gres.gres, re.IGNORECASE)
        what = "; ".join(f"{one}: {about}" for one, about in _GPUS.items())
        return guess if sure else ask.one_of(f"GPUs, {gres.gres}: {what}", list(_GPUS), guess)
    return next((one for one in ("cuda", "rocm") if node.has_gpu(ACCELERATORS[one])), "cpu")


def _account(ask: _Ask, given: str, example: str, *, has_slurm: bool) -> str:
    """The account to charge; the site's example if Slurm knows none."""
    accounts = slurm.accounts() if has_slurm and not given else []
    if given or (len(accounts) == 1 and not example):
        return given  # Slurm's default is the only one
    if accounts:
        return ask.one_of("account", accounts, accounts[0]) if len(accounts) > 1 else accounts[0]
    return ask.text("account", example) if example else ""


def _model(given: str) -> str:
    """The model for the recipe; empty for a new one."""
    if given == _SMALL or not (given.startswith(("/", "~", ".")) or Path(given).is_dir()):
        return "" if given == _SMALL else given
    if not Path(given).expanduser().is_dir():
        raise ConfigError("the model's folder does not exist", where=given, fix="--model small makes a new model")
    return _path(given)


def _dataset(given: str) -> str:
    """The dataset for the recipe; a file or folder by its absolute path, since the recipe may move."""
    if given == "builtin" or re.match(r"(hub|[a-z0-9]{2,}):", given):
        return given
    if not Path(given).expanduser().exists() and not re.search(r"[*?\[]", given):
        raise ConfigError(
            "the dataset does not exist", where=given, wanted="a file, a folder, hub:OWNER/NAME or builtin",
            fix="--data builtin trains on a small made-up language",
        )  # fmt: skip
    return _path(given)


def _path(given: str) -> str:
    return str(Path(given).expanduser().absolute())


def _options(partition: str, site: Sequence[str], account: str) -> list[str]:
    """The options that sbatch needs in addition to the site's."""
    wanted = {"--partition": partition, "--account": account}
    found = [f"{option}={value}" for option, value in wanted.items() if value]
    return [f"--sbatch={option}" for option in found if option not in site]


def _submit(recipe: Path, variant: str, gpus: int, site: Site, options: Sequence[str]) -> list[list[str]]:
    engine = site.engine or "apptainer"
    absent = store.absent(store.job_file(dray_home.root(), variant, engine), variant, engine)
    named = [] if site.name == host.site().site.name else ["--site", site.name]
    argv = ["submit", str(recipe), "--nodes", "1", *(["--gpus-per-node", str(gpus)] if gpus else []), *named, *options]
    return [*([["image", "build", variant]] if absent else []), [*argv, "--dry-run"], argv]


def _here(recipe: Path, variant: str) -> list[list[str]]:
    """The commands without Slurm: run on this machine, in this Python or in Docker."""
    if variant == "cpu" and find_spec("torch"):
        return [["plan", str(recipe)], ["run", str(recipe)]]
    build = ["image", "build", variant, "--format", "docker"]
    return [build, ["plan", str(recipe)], ["run", str(recipe), "--engine", "docker"]]
