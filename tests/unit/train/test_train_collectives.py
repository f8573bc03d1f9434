"""What a step sends between ranks and what it casts: counted, on two nodes of two ranks over gloo."""

from __future__ import annotations

import json
import math

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from helpers import ROOT  # noqa: E402
from trainings import Forks, config  # noqa: E402

pytestmark = pytest.mark.torch

FULL = {"memory": [1e3] * 4}  # then each micro-batch's gradients are summed over ranks at once
LEAN = {"strategy": "fsdp", "fsdp_shard": "all", "reshard_after_forward": True, **FULL}
CASES = {
    "ddp": {"strategy": "ddp"},
    "lean": LEAN,
    "kept weights": {**LEAN, "reshard_after_forward": False},
    "one sync": {"strategy": "fsdp", "fsdp_shard": "all", "reshard_after_forward": True},
    "both": {"strategy": "fsdp", "fsdp_shard": "all", "reshard_after_forward": False},
    "hsdp": {**LEAN, "fsdp_shard": "node"},
    "two of four nodes": {**LEAN, "fsdp_shard": 2, "local": 1},
    "auto": {"strategy": "fsdp"},
    "a GPU of another size": {"strategy": "fsdp", "memory": [1e12, 1e12, 1e3, 1e12]},
    "ddp with muon": {"strategy": "ddp", "optimizer": "muon"},
    "fsdp with muon": {"strategy": "fsdp", "fsdp_shard": "all", "optimizer": "muon"},
    "hsdp with muon": {"strategy": "fsdp", "fsdp_shard": "node", "optimizer": "muon"},
    "fsdp with averaged weights": {"strategy": "fsdp", "ema_decay": 0.5},
    "ddp bf16": {"strategy": "ddp", "precision": "bf16"},
    "fsdp bf16": {"strategy": "fsdp", "precision": "bf16"},
}
MAIN = ("ddp", "lean", "hsdp", "auto", "ddp with muon", "hsdp with muon", "ddp bf16", "fsdp bf16")


def cases(*names: str) -> list:
    """Slow tests look at the others."""
    return [case(name) for name in names]


def case(name: str, *counts: int):
    return pytest.param(name, *counts, marks=() if name in MAIN else pytest.mark.slow)


@pytest.fixture(scope="module")
def seen(request: pytest.FixtureRequest, tmp_path_factory, forks: Forks) -> dict[str, dict]:
    """Of the cases that the selected tests look at."""
    items = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    asked = {*MAIN, *(item.callspec.params.get("case") for item in items)}
    chosen = {name: case for name, case in CASES.items() if name in asked}
    folder = tmp_path_factory.mktemp("collectives")
    config(folder)
    told = "".join(f"{json.dumps(case)}\n" for case in chosen.values())
    script, plan = ROOT / "tests/support/collectives.py", folder / "run/attempt-1/plan.json"
    done = forks.python(script, plan, stdin=told)
    assert done.returncode == 0, done.stderr
    return dict(zip(chosen, map(json.loads, done.stdout.splitlines()), strict=True))


# Groups of weights: three layers, embeddings, head, and the root's. Two micro-batches a step, and one sum for the norm.
@pytest.mark.parametrize(
    ("case", "gathers", "scatters", "reduces"),
    [
        # Each layer but the last is gathered a second time for its backward pass.
        case("lean", 2 * (6 + 2), 2 * 6, 1),
        case("kept weights", 6, 2 * 6, 1),
        case("one sync", 2 * (6 + 2), 6, 1),
        case("both", 6, 6, 1),
        case("hsdp", 2 * (6 + 2), 2 * 6, 6 + 1),
        case("two of four nodes", 2 * (6 + 2), 2 * 6, 6 + 1),
        case("auto", 6, 6, 6 + 1),
        case("a GPU of another size", 2 * (6 + 2), 2 * 6, 1),  # all ranks have its layout
    ],
)
def test_fsdp_gathers_and_reduces_no_more_than_it_has_to(
    seen: dict[str, dict], case: str, gathers: int, scatters: int, reduces: int
) -> None:
    found = {"allreduce_": 0, **seen[case]["found"]}
    wanted = {"_allgather_base_": gathers, "_reduce_scatter_base_": scatters, "allreduce_": reduces}
    assert {name: count for name, count in found.items() if name != "cast"} == wanted


@pytest.mark.parametrize("case", cases("fsdp with muon", "hsdp with muon"))
def test_muon_is_the_same_with_sharded_matrices(seen: dict[str, dict], case: str) -> None:
    own, ddp = seen[case], seen["ddp with muon"]
    assert own["losses"] == pytest.approx(ddp["losses"], rel=1e-4)
    assert own["losses"][1:] != pytest.approx(seen["ddp"]["losses"][1:], rel=1e-3)
    assert own["weights"] == pytest.approx(ddp["weights"], rel=1e-2, abs=1e-2)


@pytest.mark.parametrize("case", cases(*(case for case in CASES if not {"bf16", "muon"} & {*case.split()})))
def test_the_training_is_the_same(seen: dict[str, dict], case: str) -> None:
    own, ddp = seen[case], seen["ddp"]
    assert own["losses"] == pytest.approx(ddp["losses"], rel=2e-5)
    assert own["norm"] == pytest.approx(ddp["norm"], rel=1e-4)
    assert own["weights"].keys() == ddp["weights"].keys()


@pytest.mark.parametrize("case", cases(*CASES))
def test_the_ranks_write_each_number_of_a_checkpoint_once(seen: dict[str, dict], case: str) -> None:
    ranks = seen[case]["kept"]
    for name in {name for rank in ranks for name in rank}:
        shards = sorted(tuple(rank[name][:2]) for rank in ranks if name in rank and rank[name][1])
        ends = [begin + length for begin, length in shards]
        shape = next(rank[name][2] for rank in ranks if name in rank)
        assert [begin for begin, _ in shards] == [0, *ends[:-1]]
        assert ends[-1] == math.prod(shape)
    assert all(any(rank[name][1] for name in rank) for rank in ranks)


@pytest.mark.parametrize("case", cases(*CASES))
def test_a_checkpoint_is_on_all_ranks_again(seen: dict[str, dict], case: str) -> None:
    assert seen[case]["restored"] == [True] * 4


def test_ddp_sends_gradients_alone(seen: dict[str, dict]) -> None:
    """Llama has buffers, the frequencies of its positions, and no pass writes them."""
    assert {name for name in seen["ddp"]["found"] if name != "cast"} == {"allreduce_"}


def test_in_16_bits_fsdp_casts_each_weight_once_in_a_step(seen: dict[str, dict]) -> None:
    """Autocast casts each matrix in each micro-batch, and its gradient back."""
    assert seen["ddp bf16"]["found"]["cast"] >= 2 * 2 * 3 * 7
    assert seen["fsdp bf16"]["found"].get("cast", 0) <= 3 * 7 + 2
    assert seen["fsdp bf16"]["losses"] == pytest.approx(seen["ddp"]["losses"], rel=5e-3)
    assert seen["fsdp bf16"]["norm"] == pytest.approx(seen["ddp"]["norm"], rel=5e-2)
