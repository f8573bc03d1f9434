"""Whether the vocabulary is padded, and why; what that takes."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from dray.config.recipe import Recipe
from dray.planning import trainer_defaults
from dray.planning.estimates import memory, model_shape

GPT = {"model_type": "gpt2"}
SLOW = "GPUs are slow at products of other sizes"


def recipe(**tables: Any) -> Recipe:
    train = {"steps": 1, "lr": 1e-3, **tables.pop("train", {})}
    given = {"name": "x", "image": "cuda", "train": train, "batch": {"global_size": 8}, **tables}
    return Recipe.model_validate({**given, "data": {"sequence_length": 1024}})


@pytest.mark.parametrize(
    ("tables", "multiple", "why"),
    [
        ({}, 128, f"padded in the head to a multiple of 128: {SLOW}"),
        ({"image": "rocm"}, 128, f"padded in the head to a multiple of 128: {SLOW}"),
        ({"train": {"strategy": "fsdp"}}, 128, f"padded in the head to a multiple of 128: {SLOW}"),
        ({"image": "cpu"}, 1, "not padded: padding makes nothing faster on a CPU"),
        ({"train": {"strategy": "zero3"}}, 128, f"padded in the head to a multiple of 128: {SLOW}"),
        ({"analog": {"enabled": True}}, 1, "not padded: the head may be analog"),
        ({"model": {"pad_to_multiple_of": 0}}, 0, "not padded: set in the recipe"),
        ({"model": {"pad_to_multiple_of": 64}, "image": "cpu"}, 64,
         "padded in the head to a multiple of 64: set in the recipe"),
    ],
)  # fmt: skip
def test_the_multiple_is_chosen_with_its_reason(tables: dict[str, Any], multiple: int, why: str) -> None:
    found = trainer_defaults.vocabulary(recipe(**tables))
    assert found == (multiple, why)


@pytest.mark.parametrize("wrong", [-1, 1025, 1 << 62, 1.5, 128.0, True, None, "", "128", "Auto", [128], {}])
def test_what_is_no_multiple_is_refused(wrong: Any) -> None:
    with pytest.raises(ValidationError, match="pad_to_multiple_of"):
        recipe(model={"pad_to_multiple_of": wrong})


@pytest.mark.parametrize(
    ("train", "logit", "copy"), [({}, 12, 2), ({"precision": "fp32"}, 12, 4), ({"strategy": "fsdp"}, 12, 2)]
)
def test_the_estimate_counts_the_padded_size(train: dict[str, Any], logit: int, copy: int) -> None:
    """The logits of 47 words more, and the weight's copy with rows for them."""
    sizes = []
    for multiple in (1, 128):
        made = recipe(train={"precision": "bf16", **train}, model={"pad_to_multiple_of": multiple})
        model = model_shape.of(GPT)
        assert model
        sizes.append(memory.estimate(made, model, ranks=1, ranks_per_node=1).gpu["activations"])
    assert sizes[1] - sizes[0] == 8 * 1024 * 47 * logit + 50304 * 768 * copy
