"""What is added to the trainer lands in one file: an objective, a strategy, a job. No circle, and nothing pickled."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any, get_args

import pytest

from dray.config.training import STRATEGIES, Train
from dray.contract.trainer import image_tasks
from helpers import ROOT

TRAIN = ROOT / "src/dray/train"
FILES = sorted(TRAIN.rglob("*.py"))


def values(key: str) -> tuple[str, ...]:
    return get_args(Train.model_fields[key].annotation)


def test_each_objective_is_a_file() -> None:
    assert {path.stem for path in (TRAIN / "objectives").glob("*.py")} == {*values("objective"), "__init__", "base"}


def test_each_strategy_is_a_file_and_has_its_sharding() -> None:
    assert values("strategy") == tuple(STRATEGIES)
    assert {name.rstrip("123") for name in STRATEGIES} < {path.stem for path in (TRAIN / "parallel").glob("*.py")}


@pytest.mark.parametrize("kind", image_tasks.KINDS)
def test_each_job_is_a_file_and_comes_back_from_its_json(kind: str) -> None:
    fields: dict[str, Any] = dict.fromkeys(image_tasks.KINDS[kind]._fields, "x")
    job = image_tasks.KINDS[kind](**fields)
    assert image_tasks.of_json(image_tasks.to_json(job)) == job
    assert "def run(" in (TRAIN / "outputs" / f"{kind}.py").read_text()


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(TRAIN)))
def test_nothing_is_pickled_between_ranks(path: Path) -> None:
    """torch's collectives of objects run what they receive."""
    named = {node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)}
    assert not {name for name in named if name.endswith(("_object", "_object_list"))}


@pytest.mark.parametrize("path", [path for path in FILES if path.stem != "pickles"], ids=lambda path: path.stem)
def test_no_pickle_is_written_or_read(path: Path) -> None:
    """One file reads them: torch's by torch's safe unpickler, and DCP's index by one that knows inert records.

    Who leaves dray gets DCP's index, which torch writes as a pickle.
    """
    named = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            named |= {one.name for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            named |= {f"{node.module}.{one.name}" for one in node.names}
        elif isinstance(node, ast.Attribute):
            named.add(ast.unparse(node))
    start = ("pickle", "torch.distributed.checkpoint", "torch.load", "torch.save", "numpy.load", "np.load")
    written = {"torch.distributed.checkpoint.state_dict_saver.save"} if path.stem == "export" else set()
    assert {name for name in named if name.startswith(start)} == written


def module(path: Path) -> str:
    parts = path.relative_to(ROOT / "src").with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_import_goes_in_a_circle() -> None:
    modules = {module(path): path for path in FILES}
    uses: dict[str, set[str]] = {}
    for name, path in modules.items():
        found = set()
        for node in ast.parse(path.read_text()).body:  # what a function imports, it imports later
            if isinstance(node, ast.ImportFrom) and node.module:
                found |= {f"{node.module}.{one.name}" for one in node.names} | {node.module}
        uses[name] = found & set(modules) - {name}
    while free := [name for name, used in uses.items() if not used]:
        uses = {name: used - set(free) for name, used in uses.items() if name not in free}
    assert not uses
