"""Runs whose documents are kept whole: the loss is each document's own, and a run that resumes reads the same."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from trainings import Forks, Run  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def run(forks: Forks, tmp_path_factory) -> Callable[..., Run]:
    folder, count = tmp_path_factory.mktemp("my runs"), iter(range(1000))
    return lambda ranks, *words: Run(forks, folder / f"run-{next(count)}", ranks, *words)


def test_the_loss_is_that_of_each_document_alone(run: Callable[..., Run], tmp_path: Path) -> None:
    """However many are in a sample, and with padding behind them; of the longest what fits."""
    text = tmp_path / "some.txt"
    text.write_text(
        "first words\nsecond is another\nthe third one is a little long\n4\nand the fifth, which is cut off\n"
    )
    together = run(2, f"data.validation={text}", "data.packing=bfd", "data.document_mask=true", "train.steps=3").end()
    (found,) = together.events("eval")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    final = together.folder / "checkpoints/final"
    network, tokens = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    losses = []
    for line in text.read_text().splitlines():
        row = torch.tensor([[*tokens(line).input_ids, tokens.eos_token_id][:32]])
        logits = network(input_ids=row).logits[0, :-1].log_softmax(1)
        losses += (-logits[range(row.shape[1] - 1), row[0, 1:]]).tolist()
    assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


@pytest.mark.slow
def test_ranks_and_a_resume_change_nothing(run: Callable[..., Run], tmp_path: Path) -> None:
    given = ("data.packing=bfd_split", "checkpoint.every=4", "checkpoint.keep=9")
    whole, alone = run(2, *given).end(), run(1, *given).end()
    assert whole.losses() == pytest.approx(alone.losses(), rel=2e-5)
    again = run(2, *given)
    shutil.copytree(whole.folder / "checkpoints/step-8", again.folder / "checkpoints/step-8")
    again.end()
    assert again.losses() == whole.losses()[8:]
    weights, wanted = again.weights(), whole.weights()
    assert all(torch.equal(weights[name], wanted[name]) for name in wanted)
    (start,) = whole.events("start")
    packing = start["packing"]
    assert (packing["documents"], packing["longer_than_a_sample"], packing["dropped_tokens"]) == (570, 570, 0)
    assert packing["padding"] > 0
    assert f"{start['tokens']:,} tokens" in whole.log().read_text()
    assert "packing bfd_split of data.train: " in whole.log(1).read_text()
    for other, named in (("bfd", "bfd"), ("wrapped", "")):
        ended = run(1, f"data.packing={other}", f"checkpoint.folder={again.folder}/checkpoints").end(code=78)
        assert "the data order differs from the checkpoint's\n" in ended.said()
        assert f" tokens{', ' * bool(named)}{named}\n" in ended.said()
