"""Analog layers: clipped and ranged where the weights really are, whoever keeps them."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from trainings import GPT, Run  # noqa: E402

HERE = bool(find_spec("deepspeed") and find_spec("aihwkit_lightning"))
pytestmark = [pytest.mark.torch] if HERE else [pytest.mark.torch, pytest.mark.docker_image]

BERT = (
    "model.type=bert", "train.objective=masked",
    *(f"model.config.{name}={value}" for name, value in (
        ("num_hidden_layers", 2), ("hidden_size", 32), ("num_attention_heads", 2), ("intermediate_size", 64),
        ("max_position_embeddings", 32), ("hidden_dropout_prob", 0.0), ("attention_probs_dropout_prob", 0.0),
    )),
)  # fmt: skip
SEED = (
    "analog.clip_type=gaussian", "analog.clip_sigma=2.5", "analog.forward_inp_res=254",
    "analog.modifier_type=add_gauss", "analog.modifier_std_dev=0.023",
    "analog.input_range_enable=true", "analog.input_range_init_from_data=10",
)  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("my runs")


@pytest.fixture(scope="module")
def run(request: pytest.FixtureRequest, folder: Path) -> Callable[..., Run]:
    """Runs where aihwkit-lightning and DeepSpeed are: here, or in the image."""
    forks = request.getfixturevalue("forks" if HERE else "image_forks")
    count = iter(range(1000))

    def begun(ranks: int, *words: str, model: tuple[str, ...] = BERT, steps: int = 60) -> Run:
        return Run(forks, folder / f"run-{next(count)}", ranks, *words, model=model, steps=f"steps={steps}")

    return begun


def linear(run: Run) -> dict[str, torch.Tensor]:
    """The weights of the layers that are analog, as they were saved: those that the optimizer moves."""
    found = run.weights()
    return {name: found[name] for name in found if name.replace("weight", "input_range") in found and "weight" in name}


WAYS = {
    "ddp": ("train.strategy=ddp",),
    "zero2": ("train.strategy=zero2",),
    "zero2 in bf16": ("train.strategy=zero2", "train.precision=bf16"),
    "zero2 with offload": ("train.strategy=zero2", "train.offload=optimizer"),
    "zero3": ("train.strategy=zero3",),
    "zero3 with offload in bf16": ("train.strategy=zero3", "train.offload=all", "train.precision=bf16"),
}


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_weights_are_within_the_limit_where_they_are_kept(run, way: str) -> None:
    ended = run(2, *SEED, *WAYS[way]).end()
    layers = linear(ended)
    assert len(layers) == 13  # six in each of two blocks, and the head's own
    ratios = {name: float(weight.abs().max() / weight.std()) for name, weight in layers.items()}
    assert max(ratios.values()) < 2.6, ratios
    assert ended.losses()[-1] < ended.losses()[0] - 0.5


@pytest.mark.slow
def test_without_clipping_they_are_beyond_it(run) -> None:
    """Else the test above could not fail."""
    ended = run(2, *SEED, "analog.clip_type=none").end()
    assert max(float(weight.abs().max() / weight.std()) for weight in linear(ended).values()) > 2.9


@pytest.mark.slow
def test_rows_are_clipped_each_by_its_own_in_every_strategy(run) -> None:
    """A rank that keeps a part of a weight may have parts of rows."""
    other = ("clip_type=gaussian_channel", "clip_sigma=1.5", "modifier_type=none", "modifier_std_dev=0")
    rows = (*SEED, *(f"analog.{word}" for word in other))
    found = {way: linear(run(2, *rows, *WAYS[way], steps=6).end()) for way in ("ddp", "zero2", "zero3")}
    for name, weight in found["ddp"].items():
        assert float((weight.abs().amax(1) / weight.std(1)).max()) < 1.75
        for way in ("zero2", "zero3"):
            torch.testing.assert_close(found[way][name], weight, rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_input_ranges_follow_the_data_alike_everywhere_and_are_then_learnt(run) -> None:
    followed = {way: run(2, *SEED, *WAYS[way], steps=8).end().weights() for way in ("ddp", "zero2", "zero3")}
    ranges = [name for name in followed["ddp"] if name.endswith("input_range")]
    assert len(ranges) == 13
    for name in ranges:
        assert float(followed["ddp"][name]) != 3.0
        for way in ("zero2", "zero3"):
            torch.testing.assert_close(followed[way][name], followed["ddp"][name], rtol=1e-3, atol=1e-3)
    learnt = run(2, *SEED, *WAYS["zero2"], steps=20).end().weights()
    assert any(float(learnt[name]) != float(followed["zero2"][name]) for name in ranges)
    assert float(learnt[ranges[0].replace("input_range", "input_range_update_idx")]) == 10


@pytest.mark.slow
def test_embeddings_stay_tied(run) -> None:
    found = run(1, *SEED, steps=2).end().weights()
    assert "cls.predictions.decoder.input_range" not in found
    assert "bert.encoder.layer.0.attention.self.query.input_range" in found


def test_off_it_is_the_digital_training(run) -> None:
    plain = run(1, steps=6).end()
    off = run(1, *SEED, "analog.enabled=false", steps=6).end()
    assert off.losses() == plain.losses()
    assert run(1, *SEED, steps=6).end().losses() != plain.losses()


@pytest.mark.slow
def test_what_was_learnt_is_taken_up(run) -> None:
    """Ranges come from the saved model, and go on from there."""
    first = run(1, *SEED, steps=20).end()
    named = (f"model.name={first.folder}/checkpoints/final", "train.objective=masked")
    before = first.weights()
    after = run(1, *SEED, "train.lr=1e-9", "train.warmup_steps=0", model=named, steps=1).end().weights()
    name = "bert.encoder.layer.1.output.dense.input_range"
    torch.testing.assert_close(after[name], before[name], rtol=1e-5, atol=0)
    assert float(after[name.replace("input_range", "input_range_update_idx")]) == 10


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "learns"), [("zero2", True), ("zero2", False), ("zero3", False)]
)  # an input range that is not learned follows the data all the same
def test_an_interrupted_run_goes_on_to_the_last_bit(run, folder: Path, way: str, learns: bool) -> None:
    words = (*SEED, *WAYS[way], f"analog.input_range_learn_input_range={str(learns).lower()}")
    whole = run(2, *words, steps=12).end()
    kept = ("checkpoint.every=4", f"checkpoint.folder={folder}/kept-{way}-{learns}")
    run(2, *words, *kept, steps=12).end()
    shutil.rmtree(folder / f"kept-{way}-{learns}" / "step-12")
    again = run(2, *words, *kept, steps=12).end()
    assert again.losses() == whole.losses()[8:]
    for name, weight in whole.weights().items():
        assert torch.equal(weight, again.weights()[name]), name


@pytest.mark.parametrize(
    ("words", "model", "found"),
    [(SEED, GPT, "GPT2LMHeadModel with lm_head"), (('analog.exclude=["bert.nothing"]',), BERT, "bert.nothing")],
)
def test_what_cannot_be_analog(run, words, model, found: str) -> None:
    output = run(1, *words, model=model, steps=2).end(78).said()
    assert "this model has no such layers to make analog, or to exclude" in output
    assert found in output
