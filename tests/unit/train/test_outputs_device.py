"""`dray model generate` and `dray model eval` use the GPU where there is one: which, and with which batch."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from dray.contract import node
from dray.contract.trainer import image_tasks
from dray.planning.schema import Plan
from dray.runs import local

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from dray.train import parallel  # noqa: E402
from dray.train.checkpoint import manifest  # noqa: E402
from dray.train.data import tokenizer  # noqa: E402
from dray.train.model import build  # noqa: E402
from dray.train.outputs import evaluate, generate  # noqa: E402
from trainings import config  # noqa: E402

pytestmark = pytest.mark.torch


class SeenError(Exception):
    """What was to be looked at has been."""


def raises(*found: Any) -> Any:
    raise SeenError(*found)


@pytest.fixture
def model(tmp_path: Path, monkeypatch) -> Path:
    """A run's final model, and its plan two folders above."""
    monkeypatch.setenv("RANK", "0")
    chosen = config(tmp_path, "batch.per_device=4")
    final = tmp_path / "final"
    build.build(chosen, tokenizer.load(chosen), with_weights=True).save_pretrained(final)
    tokenizer.load(chosen).save_pretrained(final)
    manifest.seal_model(final)
    return final


@pytest.mark.parametrize(
    ("variant", "seen", "wanted"),
    [("cuda", True, ("cuda", 4)), ("cuda", False, ("cpu", 1)), ("cpu", True, ("cpu", 1)), ("rocm", True, ("rocm", 4))],
)
def test_an_evaluation_is_by_the_gpu_that_the_run_was_planned_for(
    model: Path, monkeypatch, variant: str, seen: bool, wanted: tuple[str, int]
) -> None:
    joined: list[str] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen)
    monkeypatch.setattr(evaluate, "init_distributed", lambda variant: joined.append(variant) or torch.device("cpu"))
    monkeypatch.setattr(parallel, "make", lambda network, config, device: raises(network, config))
    plan = json.loads(next(model.parent.glob("run/attempt-1/plan.json")).read_text())
    with pytest.raises(SeenError) as found:
        evaluate.run(image_tasks.Evaluate(str(model), {**plan, "variant": variant}))
    network, made = found.value.args
    assert (joined, made.variant, made.per_device) == ([wanted[0]], *wanted)
    assert not any(weight.requires_grad for weight in network.parameters()), "AdamW's averages are twice the weights"


@pytest.mark.parametrize("seen", [True, False])
def test_a_model_generates_on_the_gpu_where_torch_sees_one(model: Path, monkeypatch, seen: bool) -> None:
    moved: list[str] = []

    def to(kind: Any) -> Any:
        usual = kind.to
        return lambda one, *to, **more: usual(one, *to, **more) if more else moved.append(str(*to)) or one

    monkeypatch.setattr(torch.cuda, "is_available", lambda: seen)
    for kind in (torch.nn.Module, torch.Tensor):
        monkeypatch.setattr(kind, "to", to(kind))
    from transformers import GPT2LMHeadModel

    monkeypatch.setattr(GPT2LMHeadModel, "generate", lambda *_, **__: raises())
    with pytest.raises(SeenError):
        generate.run(image_tasks.Generate(str(model), "causal", "one: ", 4, 0.0, 0, trust_remote_code=False))
    assert moved == ["cuda", "cpu"] if seen else ["cpu"], "the model, and the prompt to where it is"


@pytest.mark.parametrize(
    ("image", "by_gpu", "has", "variant"),
    [
        ("cuda", True, True, "cuda"),
        ("cuda", True, False, "cpu"),
        ("cuda", False, True, "cpu"),
        ("cpu", True, True, "cpu"),
    ],
)
def test_the_job_sees_a_gpu_where_this_machine_has_one_for_the_recipe_s_image(
    tmp_path: Path, monkeypatch, image: str, by_gpu: bool, has: bool, variant: str
) -> None:
    monkeypatch.setattr(node, "has_gpu", lambda accelerator: has and accelerator == "cuda")
    monkeypatch.setattr(local, "run", lambda plan, *_, **__: raises(plan))
    monkeypatch.setattr(local, "image_of", lambda *_: sys.executable)
    recipe = local.Recipe.model_validate({"name": "one", "image": image, "command": {"argv": ("true",)}})
    job = image_tasks.Push(str(tmp_path), "a/b", private=True)
    with pytest.raises(SeenError) as found:
        local.run_in_image(recipe, job, engine="bare", folder=tmp_path, by_gpu=by_gpu)
    plan: Plan = found.value.args[0]
    hidden = {one.name: one.value for one in plan.env}.get("CUDA_VISIBLE_DEVICES")
    assert (plan.variant, plan.world.size, hidden) == (variant, 1, None if variant == "cuda" else "")


def test_which_accelerators_a_machine_may_have(tmp_path: Path, monkeypatch) -> None:
    opened = {"/dev/kfd"}
    monkeypatch.setattr(node.os, "access", lambda path, mode: path in opened)
    assert [node.has_gpu(name) for name in ("cpu", "cuda", "rocm")] == [False, False, True]
