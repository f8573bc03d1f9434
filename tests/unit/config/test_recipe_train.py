"""What a recipe may say of training, and the word about what does not go together."""

from __future__ import annotations

import pytest

from dray.contract.findings import ConfigError
from dray.runs.prepare import read_recipe
from helpers import ROOT


def told(*words: str) -> str:
    with pytest.raises(ConfigError) as refused:
        read_recipe(ROOT / "tests" / "tiny.toml", words)
    return str(refused.value)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ((), "expected one of steps and epochs; neither is set"),
        (("train.steps=5", "train.epochs=2"), "both are set: steps = 5, epochs = 2.0"),
        (("train.steps=5", "train.warmup_steps=6"), "warmup_steps = 6 is more than steps = 5"),
        (("train.steps=20", "train.profile=12-10"), "the first step is after the last; set train.profile=10-12"),
        (("train.steps=20", "train.profile=0-3"), "the first being 1; set train.profile=10-12"),
        (("train.steps=20", "train.profile=x"), "expected the first and the last step"),
        (("train.steps=20", "train.profile=10-"), "expected the first and the last step"),
        (
            ("train.steps=20", "train.profile=20-21"),
            "profile = 20-21 is past steps = 20; set train.profile=20-20, or earlier steps",
        ),
        (("train.steps=5", "train.min_lr=1.0"), "min_lr = 1.0 is more than lr = 0.01"),
        (
            ("train.steps=5", "train.lr_scheduler_kwargs.num_cycles=3"),
            'lr_scheduler_kwargs.num_cycles: lr_scheduler_type = "cosine" has no options',
        ),
        (
            ("train.steps=5", "train.lr_scheduler_type=polynomial", "train.lr_scheduler_kwargs.lr_end=0.1"),
            'lr_scheduler_kwargs.lr_end: lr_scheduler_type = "polynomial" has power',
        ),
        *(
            (("train.steps=5", f"train.lr_scheduler_type={kind}", f"train.lr_scheduler_kwargs.{option}"), found)
            for kind, option, found in (
                ("polynomial", "power=linear", "power = linear is not a number"),
                ("warmup_stable_decay", "decay_type=2", "decay_type = 2.0: expected cosine, linear or 1-sqrt"),
                (
                    "warmup_stable_decay",
                    "num_decay_steps=6",
                    "set train.lr_scheduler_kwargs.num_decay_steps=3, or less",
                ),
            )
        ),
        (
            ("train.steps=5", "train.sequence_length_warmup=[[4, 16], [2, 8]]"),
            "whose first numbers increase, found [4, 2]",
        ),
        (("train.steps=5", "train.lr_scheduler_kwargs.power=-1"), "train.lr_scheduler_kwargs.power=-1"),
        (("train.steps=5", "train.lr_scheduler_type=polynomial", "train.lr_scheduler_kwargs.power=linear"), "power=1"),
        (
            ("train.steps=5", "train.lr_scheduler_type=warmup_stable_decay", "train.lr_scheduler_kwargs.decay_type=3"),
            "decay_type = 3.0: expected cosine, linear or 1-sqrt; set train.lr_scheduler_kwargs.decay_type=cosine",
        ),
        (
            (
                "train.steps=5",
                "train.warmup_steps=2",
                "train.lr_scheduler_type=warmup_stable_decay",
                "train.lr_scheduler_kwargs.num_decay_steps=4",
            ),
            "more than the steps after the warm-up, 3; set train.lr_scheduler_kwargs.num_decay_steps=3, or less",
        ),
        (("train.steps=5", "train.sequence_length_warmup=[[2, 60]]"), "60 must divide data.sequence_length"),
        (
            ("train.steps=5", "train.sequence_length_warmup=[[3, 16], [1, 8]]"),
            "found [3, 1]; set train.sequence_length_warmup=[[1, 8], [3, 16]]",
        ),
        (
            ("train.steps=5", "train.sequence_length_warmup=[[2, 16]]", "data.document_mask=true"),
            "set data.document_mask=false",
        ),
        (("train.steps=5", "train.optimizer=muon", "train.strategy=zero1"), "muon needs strategy ddp or fsdp"),
        (
            ("train.steps=5", "train.ema_decay=0.9", "train.strategy=zero3"),
            "ema_decay = 0.9 needs strategy ddp or fsdp",
        ),
        (("train.steps=5", "train.ema_decay=0.9", "analog.enabled=true"), "before [analog] clips them; set train.ema"),
        (("train.steps=5", "train.offload=all"), "offload = all needs strategy zero3, but it is ddp"),
        (("train.steps=5", "train.offload=optimizer", "train.strategy=fsdp"), "needs strategy zero1, zero2 or zero3"),
        (("train.epochs=1", "data.streaming=true", "data.validation=v"), "set train.steps, not train.epochs"),
        (("train.steps=5", "data.streaming=true", "data.train=t"), "data.streaming needs data.validation"),
        (("train.steps=5", "data.streaming=true", "data.validation=v"), "the built-in dataset is not a stream"),
        (("train.steps=5", "data.train=~/corpus"), "dray does not expand ~ and $"),
        (
            ("train.steps=5", "checkpoint.folder=$SCRATCH/x"),
            "checkpoint.folder = $SCRATCH/x: dray does not expand ~ and $",
        ),
        (("train.steps=5", "data.train=data/**/*.jsonl"), "* may be in a file's name alone"),
        (("train.steps=5", "checkpoint.every=[[0, 50], [100, 10]]"), "expected pairs whose first numbers increase"),
        (("train.steps=5", "checkpoint.every=0"), "checkpoint.every"),
        (("train.steps=5", "checkpoint.every=true"), "checkpoint.every=true"),
        (("train.steps=5", "checkpoint.every=[[1]]"), "a list of 2 entries"),
        (("train.steps=5", "checkpoint.mirror=/far"), "none is saved before the end; set checkpoint.every"),
        *(
            (("train.steps=5", "checkpoint.every=5", f"checkpoint.mirror={wrong}"), found)
            for wrong, found in (
                ("s3://", "expected s3://BUCKET/FOLDER, gs://BUCKET/FOLDER, or a folder"),
                ("s3://b/x", "expected s3://BUCKET/FOLDER"),
                ("s3://bucket/a b", "expected s3://BUCKET/FOLDER"),
                ("s3://bucket/../x", "expected s3://BUCKET/FOLDER"),
                ("hf://datasets/a/b", "expected s3://BUCKET/FOLDER"),
                ("https://host/x", "expected s3://BUCKET/FOLDER"),
                ("file://host/x", "expected s3://BUCKET/FOLDER"),
                ("$SCRATCH/x", "dray does not expand ~ and $"),
                ("s3://key:hunter2hunter2@bucket/x", "would appear in plans and run folders"),
                ("s3://bucket/x?X-Amz-Signature=hunter2hunter2", "would appear in plans and run folders"),
            )
        ),
        (("train.steps=5", "train.on_divergence=skip"), "train.on_divergence"),
        (("train.steps=5", "train.precision=int8"), "train.precision=int8"),
        (("train.steps=5", "train.precision=fp8", "train.strategy=zero2"), "needs ddp or fsdp, without [analog]"),
        (("train.steps=5", "train.precision=fp8", "data.sequence_length=24"), "that is divisible by 16"),
        *(
            (("train.steps=5", f"train.{word}"), "start torchtitan or Megatron-Bridge by [command]")
            for word in ("tensor_parallel_size=2", "pp=4", "expert_parallel=2", "context_parallel=2")
        ),
    ],
)
def test_what_does_not_go_together(words: tuple[str, ...], said: str) -> None:
    assert said in told(*words)
    assert "hunter2" not in told(*words)


def test_a_number_alone_is_how_often_for_ever() -> None:
    recipe = read_recipe(ROOT / "tests" / "tiny.toml", ["train.steps=5", "checkpoint.every=500"])
    assert recipe.checkpoint.every == ((0, 500),)


@pytest.mark.parametrize(
    ("mirror", "place"),
    [
        ("s3://bucket/a/b/", "s3://bucket/a/b"), ("gs://bucket", "gs://bucket"), ("file:///far away", "/far away"),
        ("/far", "/far"), ("far", str(ROOT / "tests" / "far")),
    ],
)  # fmt: skip
def test_a_mirror_is_a_bucket_or_a_folder(mirror: str, place: str) -> None:
    recipe = read_recipe(
        ROOT / "tests" / "tiny.toml", ["train.steps=5", "checkpoint.every=5", f"checkpoint.mirror={mirror}"]
    )
    assert recipe.checkpoint.mirror == place


def test_paths_begin_beside_the_recipe() -> None:
    words = ("data.train=a b", "data.cache_dir=c", "checkpoint.folder=../k", "model.name=./m", "model.tokenizer=gpt2")
    recipe = read_recipe(ROOT / "tests" / "tiny.toml", ["train.steps=5", "data.validation=hub:a/b", *words])
    tests = str(ROOT / "tests")
    assert (recipe.data.train, recipe.data.cache_dir, recipe.data.validation) == (
        f"{tests}/a b",
        f"{tests}/c",
        "hub:a/b",
    )
    assert (recipe.checkpoint.folder, recipe.model.name) == (f"{tests}/../k", f"{tests}/m")
    assert recipe.model.tokenizer == "gpt2"
