"""Which loss is planned, and why; which is refused."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import Any

import pytest

from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.config.training import Batch
from dray.facts import Facts, Files
from dray.planning import trainer_defaults
from dray.planning.plan import plan
from dray.planning.schema import World

LLAMA = {"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
         "vocab_size": 128256}  # fmt: skip


def recipe(**tables: Any) -> Recipe:
    train = {"steps": 1, "lr": 1e-3, **tables.pop("train", {})}
    given = {"name": "x", "image": "cuda", "train": train, "batch": {"global_size": 8}, **tables}
    return Recipe.model_validate({**given, "data": {"sequence_length": 1024}})


def chosen(
    made: Recipe, configuration: dict[str, Any] | None = None, each: int = 8, gpu_memory: float = 0
) -> tuple[str, str]:
    shares, ranks = Batch(global_size=each, per_device=each), World.model_construct(size=1, ranks_per_node=1)
    found = trainer_defaults.loss(made, shares, Files(configuration=configuration), ranks, gpu_memory)
    return found.value, found.why


@pytest.mark.parametrize(
    ("tables", "configuration", "each", "why"),
    [
        ({}, LLAMA, 8, "chunked: whole logits of 8,192 tokens x 128,256 words would take 6.3 GB"),
        ({}, LLAMA, 1, "full: whole logits of 1,024 tokens x 128,256 words would take 0.8 GB"),
        ({"image": "cpu"}, LLAMA, 8, "full: fastest on a CPU"),
        ({}, None, 8,
         "full: the model's configuration is not known here, and the model may change logits after its head"),
        ({}, {**LLAMA, "final_logit_softcapping": 30.0}, 8,
         "full: this model changes logits after its head (final_logit_softcapping = 30.0)"),
        ({}, {"text_config": {**LLAMA, "logit_scale": 0.0625}}, 8,
         "full: this model changes logits after its head (logit_scale = 0.0625)"),
        ({}, {**LLAMA, "logits_scaling": 1.0, "final_logit_softcapping": None}, 8,
         "chunked: whole logits of 8,192 tokens x 128,256 words would take 6.3 GB"),
        ({"train": {"loss": "chunked"}}, None, 8, "chunked: set in the recipe"),
    ],
)  # fmt: skip
def test_the_loss_is_chosen_with_its_reason(
    tables: dict[str, Any], configuration: dict[str, Any] | None, each: int, why: str
) -> None:
    assert ": ".join(chosen(recipe(**tables), configuration, each)) == why


@pytest.mark.parametrize(
    ("memory", "why"),
    [
        (0, "whole logits of 8,192 tokens x 128,256 words would take 6.3 GB"),
        (80, "compiled, the run with whole logits would take NEEDED of 80 GB"),
    ],
)
def test_a_compiled_run_has_whole_logits_where_they_fit(memory: float, why: str) -> None:
    made = recipe(train={"compile": True})
    needed = re.search(r"take ([0-9.]+) of", chosen(made, LLAMA, gpu_memory=80)[1])
    assert needed
    assert chosen(made, LLAMA, gpu_memory=memory)[1] == why.replace("NEEDED", needed[1])
    edge = float(needed[1]) / 0.9
    assert chosen(made, LLAMA, gpu_memory=edge + 0.1)[0] == "full"
    small = f"{edge - 0.1:g}"
    assert chosen(made, LLAMA, gpu_memory=float(small)) == (
        "chunked",
        f"compiled, the run with whole logits would take {needed[1]} of {small} GB, and a tenth is to be free",
    )


@pytest.mark.parametrize(
    ("image", "kind", "bf16", "changes", "found"),
    [
        ("cpu", "chunked", True, {}, []),
        ("cuda", "chunked", True, {"logits_scaling": 8}, ["logits_scaling = 8"]),
        ("cuda", "full", True, {"logits_scaling": 8}, []),
        ("cuda", "auto", True, {"logits_scaling": 8}, []),
        ("cuda", "chunked", False, {}, []),
    ],
)
def test_a_loss_that_cannot_be_is_refused(image: str, kind: str, bf16: bool, changes: Any, found: list[str]) -> None:
    site, files = Site(name="old", about="V100", bf16=bf16), Files(configuration={**LLAMA, **changes})
    facts = Facts(scheduler="local", nodelist="n1", nodes=1, gpus_per_node=int(image != "cpu"), engine="apptainer",
                  image="/i.sif")  # fmt: skip
    made = plan(
        recipe(image=image, train={"loss": kind}), site, facts, files,
        run_folder=PurePosixPath("/runs/r"), scratch="/s", dray="0",
    )  # fmt: skip
    refused = [one for one in made.findings if one.problem.startswith("train.loss")]
    assert [one.found for one in refused] == found
    assert all(one.code == 78 and one.fix and f"train.loss = {kind} " in one.problem for one in refused)
