"""The house: imports go downwards, the runner is standard library only, and host and image never import each other."""

from __future__ import annotations

import ast
import graphlib
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

import dray

SRC = Path(dray.__file__).parent

FLOORS = {
    "contract": 0,
    "hostlist": 1,
    "config": 1,
    "facts": 1,
    "engines": 1,
    "planning": 2,
    "render": 3,
    "interrupts": 4,
    "process": 4,
    "clients": 4,
    "images": 5,
    "cluster": 5,
    "remote": 6,
    "runs": 6,
    "fitness": 6,
    "cli": 7,
    "__main__": 8,
}
IN_IMAGE = {"runner": {"contract"}, "tcp_store": {"contract"}, "checks": {"contract"}, "train": {"contract"},
            "ray": {"contract", "runner"}}  # fmt: skip
SUBPROCESS = {"subprocess", "multiprocessing", "pty"}


def modules() -> list[Path]:
    return sorted(SRC.rglob("*.py"))


def room(path: Path) -> str:
    return path.relative_to(SRC).parts[0].removesuffix(".py")


@cache
def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} uses a relative import"
            found |= {f"{node.module}.{name.name}" for name in node.names}
    return found


def rooms_used(path: Path) -> set[str]:
    return {name.split(".")[1] for name in imports(path) if name.startswith("dray.") and name != "dray.__version__"}


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(SRC)))
def test_a_module_stays_in_its_place(path: Path) -> None:
    mine = room(path)
    if mine == "__init__":
        assert not rooms_used(path)
        return
    used = rooms_used(path) - {mine}
    if mine in IN_IMAGE:
        assert used <= IN_IMAGE[mine], f"{mine} lives in the image alone"
    else:
        upwards = {name for name in used if FLOORS.get(name, 99) > FLOORS[mine]}
        assert not upwards, f"{mine} is on floor {FLOORS[mine]} and imports from above: {upwards}"


@pytest.mark.parametrize("path", sorted((SRC / "runner").glob("*.py")), ids=lambda path: path.name)
def test_the_runner_needs_the_standard_library_only(path: Path) -> None:
    outside = {name.split(".")[0] for name in imports(path)} - set(sys.stdlib_module_names) - {"dray"}
    assert not outside


@pytest.mark.seconds
def test_only_process_opens_subprocesses() -> None:
    users = {
        str(path.relative_to(SRC))
        for path in modules()
        if room(path) not in IN_IMAGE and {name.split(".")[0] for name in imports(path)} & SUBPROCESS
    }
    assert users == {"process.py"}


def test_hosts_speak_to_apptainer_by_one_client() -> None:
    """It finds the program, and ends what hangs. Beside it are those that docs/adr/0004 names, with their reasons."""
    names = re.compile(r"process\.apptainer\(|apptainer\.name\(|builder\.APPTAINER")
    users = {str(path.relative_to(SRC)) for path in modules() if names.search(path.read_text(encoding="utf-8"))}
    client = {"clients/builder.py", "clients/apptainer.py"}
    in_words = {"fitness/build.py", "fitness/doctor.py"}
    at_a_terminal = {"images/sif/sign.py"}
    in_the_builder = {f"images/{name}" for name in ("rootfs/__main__.py", "rootfs/make.py")}
    assert users == client | in_words | at_a_terminal | in_the_builder


@pytest.mark.seconds
def test_only_these_rooms_import_torch() -> None:
    users = {
        room(path) for path in modules() if {name.split(".")[0] for name in imports(path)} & {"torch", "transformers"}
    }
    assert users == {"checks", "tcp_store", "train"}


def test_nothing_is_unpickled_but_by_the_file_that_vets_it() -> None:
    """torch's *_object collectives unpickle what other ranks send."""
    reads = re.compile(r"(gather|broadcast|scatter|send|recv)_object|import (pickle|shelve|marshal|dill)|torch\.load\(")
    users = {str(path.relative_to(SRC)) for path in modules() if reads.search(path.read_text(encoding="utf-8"))}
    assert users == {"train/importing/pickles.py"}


def test_one_module_of_the_trainer_knows_its_rank() -> None:
    """Where a strategy splits more than the batch, a rank and a data rank differ: one module tells them apart."""
    reads = re.compile(r"get_(rank|world_size)\(|environ.*\b(LOCAL_)?(RANK|WORLD_SIZE)\b")
    users = {str(path.relative_to(SRC)) for path in (SRC / "train").rglob("*.py") if reads.search(path.read_text())}
    assert users == {"train/ranks.py"}


@pytest.mark.seconds
def test_a_job_s_plan_loads_no_docker() -> None:
    """It takes a third of a second, which every job would wait."""
    loaded = "import sys, dray.cli.run, dray.planning.missing_facts; sys.exit('docker' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], check=False).returncode == 0


def test_a_list_of_runs_loads_no_recipe() -> None:
    """The classes of a recipe, a site and a plan take half a second, which each TAB would wait too."""
    slow = {"dray.config.recipe", "dray.config.site", "dray.remote.ssh", "rich"}
    loaded = f"import sys, dray.cli.report, dray.cli.runs; sys.exit(bool({slow} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", loaded], check=False).returncode == 0


def test_the_builder_container_needs_the_standard_library_only() -> None:
    """It has Debian's Python and no packages: -S leaves out this environment's."""
    code = f"import sys; sys.path.insert(0, {str(SRC.parent)!r}); import dray.images.rootfs.__main__"
    ended = subprocess.run([sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.seconds
def test_no_modules_import_each_other() -> None:
    """Also not inside functions: who imports whom has no circle."""
    names = {".".join(("dray", *path.relative_to(SRC).with_suffix("").parts)): path for path in modules()}
    # `from dray.config import load_toml` names a module, `from dray.config.load_toml import load` something in one.
    graph = {
        name: {found if found in names else found.rpartition(".")[0] for found in imports(path)} & set(names)
        for name, path in names.items()
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as circle:
        pytest.fail(" imports ".join(circle.args[1]))
