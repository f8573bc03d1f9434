"""Whole trainings of a tiny model: right on any number of ranks, and resumed to the last bit."""

from __future__ import annotations

import json
import math
import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from safetensors.torch import load_file  # noqa: E402

from dray.contract.trainer import image_tasks  # noqa: E402
from dray.runs.finish import finish  # noqa: E402
from dray.runs.result import summary  # noqa: E402
from dray.train.checkpoint import manifest  # noqa: E402
from trainings import Forks, Run  # noqa: E402

pytestmark = pytest.mark.torch

BEGUN = Callable[..., Run]


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("my runs")


@pytest.fixture(scope="module")
def run(forks: Forks, folder: Path) -> BEGUN:
    """A run under a name of its own; the tokens are made once for all."""
    count = iter(range(1000))
    return lambda ranks, *words, **model: Run(forks, folder / f"run-{next(count)}", ranks, *words, **model)


@pytest.fixture(scope="module")
def zero(request: pytest.FixtureRequest, folder: Path) -> BEGUN:
    """A run where there is DeepSpeed: here, or in the image."""
    forks = request.getfixturevalue("forks" if find_spec("deepspeed") else "image_forks")
    count = iter(range(1000))
    return lambda ranks, *words, **model: Run(forks, folder / f"zero-{next(count)}", ranks, *words, **model)


@pytest.fixture(scope="module")
def alone(run: BEGUN) -> Run:
    return run(1).end()


SIX = ("train.steps=6", "checkpoint.every=[[0, 2]]", "checkpoint.keep=9")


@pytest.fixture(scope="module")
def six(run: BEGUN) -> Run:
    """With checkpoints of the steps 2, 4 and 6."""
    return run(2, *SIX).end()


def reference(run: Run) -> tuple[list[float], dict[str, torch.Tensor]]:
    """One process, float32, no library of ours but the order of the tokens."""
    from dray.train.config import read
    from dray.train.data import datasets, tokenizer
    from dray.train.model import build

    config = read(str(run.paths.plan))
    tokens = tokenizer.load(config)
    training = datasets.load(config, tokens).training
    network = build.build(config, tokens, with_weights=True)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1.0, weight_decay=config.train.weight_decay)
    losses = []
    for step in range(config.steps):
        after = (step - config.train.warmup_steps) / (config.steps - config.train.warmup_steps)
        scale = (step + 1) / config.train.warmup_steps if after < 0 else 0.5 * (1 + math.cos(math.pi * after))
        rows = torch.tensor(training.rows(range(step * 8, step * 8 + 8)))
        loss = network(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = config.train.lr * scale
        optimizer.step()
        losses.append(loss.item())
    return losses, network.state_dict()


def same_weights(run: Run, other: dict[str, torch.Tensor]) -> None:
    for name, saved in run.weights().items():
        torch.testing.assert_close(saved, other[name], rtol=1e-3, atol=1e-4)


def test_it_is_what_a_plain_loop_makes(alone: Run) -> None:
    losses, weights = reference(alone)
    assert alone.losses() == pytest.approx(losses, rel=1e-5)
    same_weights(alone, weights)
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    ("ranks", "per_device", "strategy"),
    [
        (2, 4, "ddp"),
        pytest.param(4, 2, "ddp", marks=pytest.mark.slow),
        (1, 2, "ddp"),
        pytest.param(2, 2, "fsdp", marks=pytest.mark.slow),
        (4, 2, "fsdp"),
    ],
)
def test_ranks_and_passes_change_nothing(run: BEGUN, alone: Run, ranks: int, per_device: int, strategy: str) -> None:
    other = run(ranks, f"train.strategy={strategy}", f"batch.per_device={per_device}").end()
    assert other.losses() == pytest.approx(alone.losses(), rel=1e-6 if ranks == 1 else 2e-5)
    assert other.events("eval")[0]["loss"] == pytest.approx(alone.events("eval")[0]["loss"], rel=2e-5)
    same_weights(other, alone.weights())


def test_short_rows_at_the_start_are_the_same_on_any_ranks(run: BEGUN, alone: Run) -> None:
    words = ("train.sequence_length_warmup=[[2, 8], [4, 16]]",)
    one = run(1, *words, steps="steps=6").end()
    other = run(2, *words, "train.strategy=fsdp", steps="steps=6").end()
    assert other.losses() == pytest.approx(one.losses(), rel=2e-5)
    first, whole = one.events("step")[0], alone.events("step")[0]
    assert first["tokens"] == whole["tokens"]
    assert first["loss"] == pytest.approx(whole["loss"], rel=0.05)  # the same tokens, with fewer before them
    assert first["loss"] != whole["loss"]


@pytest.mark.parametrize(
    ("strategy", "offload"),
    [
        pytest.param("zero1", "", marks=pytest.mark.slow),
        ("zero2", ""),
        pytest.param("zero3", "", marks=pytest.mark.slow),
        pytest.param("zero2", "optimizer", marks=pytest.mark.slow),
        ("zero3", "all"),
    ],
)
@pytest.mark.deepspeed
def test_deepspeeds_stages_are_the_same_training(zero: BEGUN, alone: Run, strategy: str, offload: str) -> None:
    other = zero(2, f"train.strategy={strategy}", f"train.offload={offload}", "batch.per_device=2").end()
    assert other.losses() == pytest.approx(alone.losses(), rel=2e-5)
    same_weights(other, alone.weights())


def resumed(run: BEGUN, strategy: str, *more: str, ranks: int = 2) -> Run:
    words = (*more, "train.steps=12", f"train.strategy={strategy}", "checkpoint.every=[[0, 6]]", "checkpoint.keep=9")
    words += ("model.config.resid_pdrop=0.1",)
    whole = run(ranks, *words).end()
    again = run(ranks, *words)
    shutil.copytree(whole.folder / "checkpoints/step-6", again.folder / "checkpoints/step-6")
    again.end()
    assert again.events("start")[0]["first_step"] == 6
    assert again.losses() == whole.losses()[6:]
    assert all(torch.equal(weight, whole.weights()[name]) for name, weight in again.weights().items())
    return whole


def test_updates_that_another_program_skipped_stay_skipped(run: BEGUN) -> None:
    """In each later checkpoint too, or a second resume would correct AdamW's averages otherwise."""
    words = ("train.steps=12", "checkpoint.every=[[0, 4]]", "checkpoint.keep=9")
    first, again = run(1, *words).end(), run(1, *words)
    kept = shutil.copytree(first.folder / "checkpoints/step-8", again.folder / "checkpoints/step-8")
    found = manifest.read(kept)
    (kept / manifest.NAME).unlink()
    manifest.write(kept, found | {"updates": 5})
    again.end()
    assert manifest.read(again.folder / "checkpoints/step-12")["updates"] == 9


@pytest.mark.slow
def test_a_run_that_has_nothing_left_to_do_says_so(run: BEGUN) -> None:
    """And one that would take fewer steps than its checkpoint has taken is none."""
    words = ("checkpoint.every=2", "train.warmup_steps=0")
    first = run(1, *words, steps="steps=2").end()
    again, fewer = (run(1, *words, steps=f"steps={steps}") for steps in (2, 1))
    for other in (again, fewer):
        shutil.copytree(first.folder / "checkpoints/step-2", other.folder / "checkpoints/step-2")
    again.end()
    assert "nothing left to do: step 2 of 2\n" in again.said()
    result = finish(again.paths, code=0)
    assert (result.status, result.first_step, result.steps) == ("done", 2, 2)
    assert summary(result, again.paths).startswith("done: 2 steps, perplexity ")
    fewer.end(78)
    assert "the newest checkpoint is past the run's last step\n" in fewer.said()
    assert "  fix:    train.steps=2, or another checkpoint.folder\n" in fewer.said()


def test_on_a_cpu_the_bits_are_the_same_with_deterministic_and_without(run: BEGUN, alone: Run) -> None:
    other = run(1, "train.deterministic=true").end()
    assert other.losses() == alone.losses()
    assert all(torch.equal(weight, alone.weights()[name]) for name, weight in other.weights().items())


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_resumed_run_is_the_same_to_the_last_bit(run: BEGUN, strategy: str) -> None:
    resumed(run, strategy)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_resumed_run_with_weights_of_16_bits_is_the_same_to_the_last_bit(run: BEGUN, ranks: int) -> None:
    """fsdp on one rank, too: a checkpoint has the 32 bits, from which the 16 follow."""
    resumed(run, "fsdp", "train.precision=bf16", "batch.per_device=2", ranks=ranks)


@pytest.mark.deepspeed
@pytest.mark.parametrize("strategy", [pytest.param("zero2", marks=pytest.mark.slow), "zero3"])
def test_a_resumed_run_of_deepspeeds_is_the_same_to_the_last_bit(zero: BEGUN, strategy: str) -> None:
    resumed(zero, strategy)


def test_a_checkpoint_of_step_0_has_the_first_weights(run: BEGUN) -> None:
    whole = run(2, "train.steps=4", "checkpoint.at_start=true", "checkpoint.keep=9").end()
    again = run(2, "train.steps=4", "checkpoint.at_start=true", "model.config.initializer_range=0.5")
    shutil.copytree(whole.folder / "checkpoints/step-0", again.folder / "checkpoints/step-0")
    again.end()
    assert "resumed at step 0" in again.log().read_text()
    assert again.losses() == whole.losses()


DIVERGES = ("train.lr=1e30", "train.max_grad_norm=0", "train.warmup_steps=0", "train.log_every=7")
EIGHT = ("checkpoint.every=[[0, 8]]", "checkpoint.keep=9")
MUON = ("train.optimizer=muon", "train.weight_decay=0.1", "train.ema_decay=0.8", "train.attention_stats=true")


@pytest.mark.parametrize(("strategy", "then"), [("ddp", "fsdp"), pytest.param("fsdp", "ddp", marks=pytest.mark.slow)])
def test_muon_and_averages_are_the_same_on_any_ranks(
    run: BEGUN, alone: Run, forks: Forks, strategy: str, then: str
) -> None:
    """Its matrices are orthogonalized in 16 bits, so the last of these may differ."""
    reference = run(1, *MUON, "checkpoint.keep=9", *EIGHT[:1]).end()
    first, again = (
        run(4, *MUON, *EIGHT, f"train.strategy={strategy}").end(),
        run(2, *MUON, "checkpoint.every=[[0, 4]]", f"train.strategy={then}"),
    )
    shutil.copytree(first.folder / "checkpoints/step-8", again.folder / "checkpoints/step-8")
    again.end()
    assert first.losses() == pytest.approx(reference.losses(), rel=1e-4)
    assert again.losses() == pytest.approx(reference.losses()[8:], rel=1e-4)
    assert reference.losses()[1:] != pytest.approx(alone.losses()[1:], rel=1e-4)
    own, *others = (ended.events("eval")[-1]["loss"] for ended in (again, reference, first))
    assert others == pytest.approx([own, own], rel=1e-4)
    assert own > alone.losses()[-1]  # the average has the weights of earlier steps
    made, plan = again.folder / "model", json.loads(again.paths.plan.read_text())
    job = image_tasks.Export(str(again.folder / "checkpoints/step-20"), str(made), "fp32", plan)
    code, output = forks.job(job, again.folder / "job")
    assert code == 0, output
    exported = load_file(made / "model.safetensors")
    assert all(torch.equal(weight, exported[name]) for name, weight in again.weights().items())


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_resumed_run_of_muon_is_the_same_to_the_last_bit(run: BEGUN, strategy: str) -> None:
    resumed(run, strategy, *MUON)


def handed_on(first: Run, again: Run, alone: Run) -> None:
    if not first.codes:
        first.end()
    shutil.copytree(first.folder / "checkpoints/step-8", again.folder / "checkpoints/step-8")
    again.end()
    assert again.losses() == pytest.approx(alone.losses()[8:], rel=2e-5)
    same_weights(again, alone.weights())


@pytest.mark.parametrize(
    ("ranks", "strategy", "others", "then"),
    [(4, "ddp", 2, "fsdp"), pytest.param(2, "fsdp", 4, "ddp", marks=pytest.mark.slow)],
)
def test_any_ranks_go_on_from_any_others(
    run: BEGUN, alone: Run, ranks: int, strategy: str, others: int, then: str
) -> None:
    handed_on(run(ranks, *EIGHT, f"train.strategy={strategy}"), run(others, f"train.strategy={then}"), alone)


def test_two_nodes_that_each_have_all_weights_hand_them_on(run: BEGUN, alone: Run) -> None:
    """HSDP: what both nodes have is in the checkpoint once."""
    first = run(4, *EIGHT, "train.strategy=fsdp", "train.fsdp_shard=node").end(LOCAL_WORLD_SIZE="2")
    assert "fsdp: shards over the ranks of each node, " in first.said()
    handed_on(first, run(2, "train.strategy=fsdp"), alone)


@pytest.mark.deepspeed
@pytest.mark.parametrize(
    ("ranks", "strategy", "others", "then"),
    [
        (2, "zero3", 4, "zero2"),
        pytest.param(4, "zero1", 2, "ddp", marks=pytest.mark.slow),
        pytest.param(1, "ddp", 2, "zero3", marks=pytest.mark.slow),
    ],
)
def test_any_ranks_and_stages_go_on_from_any_others(
    zero: BEGUN, alone: Run, ranks: int, strategy: str, others: int, then: str
) -> None:
    handed_on(zero(ranks, *EIGHT, f"train.strategy={strategy}"), zero(others, f"train.strategy={then}"), alone)


@pytest.mark.parametrize(
    "harm", ["flip", "craft", *(pytest.param(harm, marks=pytest.mark.slow) for harm in ("cut", "lose", "manifest"))]
)
def test_a_broken_checkpoint_is_said_and_the_one_before_is_taken(run: BEGUN, six: Run, harm: str) -> None:
    again = run(2, *SIX)
    for step in (2, 4):
        shutil.copytree(six.folder / f"checkpoints/step-{step}", again.folder / f"checkpoints/step-{step}")
    newest = again.folder / "checkpoints/step-4"
    file = sorted(newest.glob("*.safetensors"))[0]
    if harm == "flip":
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
    elif harm == "cut":
        os.truncate(file, file.stat().st_size // 2)
    elif harm == "craft":
        manifest = json.loads((newest / "manifest.json").read_text())
        next(iter(manifest["tensors"].values()))["shards"][0][2] += 1
        (newest / "manifest.json").write_text(json.dumps(manifest))
    else:
        (file if harm == "lose" else newest / "manifest.json").unlink()
    again.end()
    assert again.events("start")[0]["first_step"] == 2
    assert f"checkpoint {newest} is skipped: " in again.log().read_text()
    assert again.losses() == six.losses()[2:]


def test_a_checkpoint_of_another_version_is_refused(run: BEGUN, six: Run) -> None:
    again = run(2, *SIX)
    newest = again.folder / "checkpoints/step-2"
    shutil.copytree(six.folder / "checkpoints/step-2", newest)
    found = manifest.read(newest)
    (newest / "manifest.json").unlink()
    manifest.write(newest, {**found, "version": 4})
    refused = (
        "the checkpoint was written by another version of dray\n"
        f"  where:  {newest}/manifest.json\n"
        "  wanted: checkpoint version 3\n"
        f"  found:  checkpoint version 4, written by dray {found['dray']}\n"
        "  fix:    resume with an image of that version; or start from its model: model.name=RUN/checkpoints/final, "
        "and another checkpoint.folder\n"
    )
    assert refused in again.end(code=78).log().read_text()


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on_from_the_newest_whole_one(run: BEGUN) -> None:
    """A checkpoint after each step, and SIGKILL to all at random moments: what is found is always whole."""
    other = run(2, "train.steps=100000", "checkpoint.every=[[0, 1]]", "checkpoint.keep=2")
    moments = random.Random(1)
    metrics = other.paths.metrics
    reached = 0
    for _ in range(10):
        before = metrics.read_text().count("\n") if metrics.exists() else 0
        with other.going() as pids:
            end = time.monotonic() + 60
            while not metrics.exists() or metrics.read_text().count("\n") < before + 4:
                assert time.monotonic() < end, other.said()
                time.sleep(0.01)
            time.sleep(moments.random() / 4)
            for pid in pids:
                os.kill(pid, signal.SIGKILL)
        first = other.events("start")[-1]["first_step"]
        assert first >= reached, other.said()
        reached = first
    assert reached > 10
    assert "is skipped" not in other.said()


def test_evaluation_is_what_a_hand_calculates(run: BEGUN, tmp_path: Path) -> None:
    """Of a text of which the last block is short, and which does not come out on two ranks."""
    text = tmp_path / "few.txt"
    text.write_text("a tiny set of words\nwith a last block that is short\n" * 3)
    other = run(2, f"data.validation={text}", "train.steps=3").end()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    final = other.folder / "checkpoints/final"
    network, tokens = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    ids = [token for line in text.read_text().splitlines() for token in [*tokens(line).input_ids, tokens.eos_token_id]]
    assert len(ids) % 32 > 1
    assert -(-len(ids) // 32) % 2
    losses, hits = [], []
    with torch.no_grad():
        for begin in range(0, len(ids), 32):
            row = torch.tensor([ids[begin : begin + 32]])
            said = network(input_ids=row).logits[0, :-1].log_softmax(1)
            losses += (-said[range(row.shape[1] - 1), row[0, 1:]]).tolist()
            hits += (said.argmax(1) == row[0, 1:]).tolist()
    (found,) = other.events("eval")
    assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(sum(losses) / len(losses)), rel=1e-5)
    assert found["accuracy"] == pytest.approx(sum(hits) / len(hits))


@pytest.mark.parametrize("strategy", [pytest.param("ddp", marks=pytest.mark.slow), "fsdp"])
def test_a_masked_model_has_the_same_loss_on_any_number_of_ranks(run: BEGUN, strategy: str) -> None:
    settings = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    settings |= {"max_position_embeddings": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    bert = ("model.type=bert", *(f"model.config.{name}={value}" for name, value in settings.items()))
    words = ("train.objective=masked", "train.steps=8")
    one = run(1, *words, model=bert).end()
    two = run(2, *words, "batch.per_device=2", f"train.strategy={strategy}", model=bert).end()
    assert two.losses() == pytest.approx(one.losses(), rel=2e-5)
    assert two.events("eval")[0]["loss"] == pytest.approx(one.events("eval")[0]["loss"], rel=2e-5)
    assert one.losses()[-1] < one.losses()[0]


def test_a_loss_in_chunks_is_the_same_training(run: BEGUN, alone: Run) -> None:
    """Where the head's weight is sharded, and in evaluation."""
    other = run(2, "train.loss=chunked", "train.strategy=fsdp", "train.activation_checkpointing=true").end()
    assert other.losses() == pytest.approx(alone.losses(), rel=2e-5)
    (found,), (wanted,) = other.events("eval"), alone.events("eval")
    assert found["loss"] == pytest.approx(wanted["loss"], rel=2e-5)
    assert found["accuracy"] == pytest.approx(wanted["accuracy"], abs=1e-3)


@pytest.mark.slow
def test_a_padded_vocabulary_is_nowhere_to_be_seen(run: BEGUN, alone: Run) -> None:
    """Neither in losses, nor in a saved model; a checkpoint of one is another's, whatever its strategy."""
    padded, plain = "model.pad_to_multiple_of=128", "model.pad_to_multiple_of=0"
    kept = ("checkpoint.every=[[0, 5]]", "checkpoint.keep=9")
    ways = [
        (2, padded),
        (2, padded, "train.strategy=fsdp", "train.loss=chunked"),
        (1, plain),
        (2, padded, "train.strategy=fsdp"),
    ]
    before: Run | None = None
    for step, (ranks, *words) in zip((0, 5, 10, 15), ways, strict=True):
        other = run(ranks, *words, *kept)
        if before:
            shutil.copytree(before.folder / f"checkpoints/step-{step}", other.folder / f"checkpoints/step-{step}")
        other.end()
        assert other.events("start")[0]["first_step"] == step
        assert other.losses() == pytest.approx(alone.losses()[step:], rel=2e-5)
        assert other.events("eval")[0]["loss"] == pytest.approx(alone.events("eval")[0]["loss"], rel=2e-5)
        same_weights(other, alone.weights())
        shapes = [{name: one.shape for name, one in each.weights().items()} for each in (other, alone)]
        assert shapes[0] == shapes[1]
        saved, wanted = (each.paths.final_model / "config.json" for each in (other, alone))
        assert saved.read_text() == wanted.read_text()
        before = other


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_compiled_model_with_a_padded_vocabulary(run: BEGUN, alone: Run, strategy: str) -> None:
    words = ("model.pad_to_multiple_of=128", "train.compile=true", f"train.strategy={strategy}")
    other = run(2, *words).end()
    assert other.losses() == pytest.approx(alone.losses(), rel=2e-5)
    same_weights(other, alone.weights())


def test_documents_apart_do_not_see_each_other(run: BEGUN, tmp_path: Path) -> None:
    """Two documents in a block: the second one's loss is what it is alone."""
    text = tmp_path / "two.txt"
    text.write_text("first words\nsecond is another\n")
    together = run(1, f"data.validation={text}", "data.document_mask=true", "train.steps=3").end()
    (found,) = together.events("eval")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    final = together.folder / "checkpoints/final"
    network, tokens = AutoModelForCausalLM.from_pretrained(final), AutoTokenizer.from_pretrained(final)
    losses = []
    for line in text.read_text().splitlines():
        row = torch.tensor([[*tokens(line).input_ids, tokens.eos_token_id]])
        said = network(input_ids=row).logits[0, :-1].log_softmax(1)
        losses += (-said[range(row.shape[1] - 1), row[0, 1:]]).tolist()
    assert found["loss"] == pytest.approx(sum(losses) / len(losses), rel=1e-5)


@pytest.mark.parametrize(
    "words",
    [
        "train.activation_checkpointing=true",
        pytest.param("model.attn_implementation=eager", marks=pytest.mark.slow),
    ],
)
def test_what_only_saves_memory_or_time_changes_nothing(run: BEGUN, alone: Run, words: str) -> None:
    assert run(1, words).end().losses() == pytest.approx(alone.losses(), rel=2e-5)


@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp", marks=pytest.mark.slow)])
def test_half_precision_is_near(run: BEGUN, alone: Run, strategy: str) -> None:
    for precision, near in (("bf16", 2e-2), ("fp16", 5e-3)):
        other = run(2, f"train.precision={precision}", f"train.strategy={strategy}").end()
        assert other.losses() == pytest.approx(alone.losses(), rel=near)
        assert [event.get("loss_scale") for event in other.events("step")][-1] == (
            4096.0 if precision == "fp16" else None
        )


def test_a_run_that_diverges_stops_with_the_step_and_the_last_whole_checkpoint(run: BEGUN) -> None:
    other = run(2, *DIVERGES, "checkpoint.every=[[0, 1]]")
    other.end(code=1)
    said = other.log().read_text()
    assert "is not finite any more" in said
    assert "  found:  NaN or Inf at step 2, on rank 0, 1; the newest checkpoint is of step 1\n" in said
    assert [path.name for path in (other.folder / "checkpoints").iterdir() if path.name[-1].isdigit()] == ["step-1"]


@pytest.mark.parametrize(
    ("first", "there"),
    [
        ("false", "there is no checkpoint yet"),
        pytest.param("true", "the newest checkpoint is of step 0", marks=pytest.mark.slow),
    ],
)
def test_a_run_that_diverges_stops_before_an_evaluation_too(run: BEGUN, first: str, there: str) -> None:
    words = (*DIVERGES, "train.eval_every=3")
    said = run(2, *words, f"checkpoint.at_start={first}").end(code=1).said()
    assert f"  found:  NaN or Inf at step 2, on rank 0, 1; {there}\n" in said


def test_a_model_that_cannot_be_is_told_before_the_text_is_read(run: BEGUN, tmp_path: Path) -> None:
    other = run(1, "model.config.n_layers=3", f"data.cache_dir={tmp_path}/tokens").end(code=78)
    assert "a gpt2 configuration has no 'n_layers'\n" in other.said()
    assert not (tmp_path / "tokens").exists()


def test_a_model_that_is_not_finite_in_the_end_is_not_saved(run: BEGUN) -> None:
    """An evaluation between steps says null; the one after the last step fails the run."""
    words = (*DIVERGES, "train.eval_every=1")
    last = run(2, *words, steps="steps=1")
    assert "the model is not finite\n" in last.end(code=1).said()
    assert not (last.folder / "checkpoints" / "final").exists()
    between = run(2, *words).end(code=1)
    assert [one["loss"] for one in between.events("eval")] == [None]
    assert "NaN or Inf at step 2" in between.said()


def test_fp16_leaves_out_steps_that_overflow(run: BEGUN) -> None:
    other = run(2, "train.precision=fp16", f"train.initial_loss_scale={2.0**24}", "train.steps=30").end()
    skipped = [event["skipped_steps"] for event in other.events("step")]
    scales = [event["loss_scale"] for event in other.events("step")]
    assert skipped[0] == 1
    assert 4 < skipped[-1] < 20
    assert scales[-1] == 2.0 ** (24 - skipped[-1])
    assert other.losses()[-1] < other.losses()[0] - 1


def test_a_run_resumes_where_fp16_has_just_left_out_a_step(run: BEGUN) -> None:
    whole = resumed(run, "ddp", "train.precision=fp16", f"train.initial_loss_scale={2.0**24}", "train.log_every=1")
    skipped = [event["skipped_steps"] for event in whole.events("step")]
    assert skipped[5] == 6
    assert skipped[-1] < 12


def test_metrics_and_tensorboard(run: BEGUN) -> None:
    other = run(2, "train.attention_stats=true", "train.eval_every=8", "train.log_every=4").end()
    steps = other.events("step")
    assert [event["step"] for event in steps] == [1, 4, 8, 12, 16, 20]
    assert [event["step"] for event in other.events("eval")] == [8, 16, 20]
    keys = {"loss", "lr", "grad_norm", "tokens", "tokens_per_s", "step_s", "data_s", "checkpoint_s",
            "memory_gb", "seconds_left", "attention_min", "attention_max"}  # fmt: skip
    assert set(steps[0]) == {"event", "time", "step", *keys}
    assert steps[1]["tokens"] == 4 * 8 * 32
    assert all(low < high for low, high in zip(steps[0]["attention_min"], steps[0]["attention_max"], strict=True))
    assert len(steps[0]["attention_min"]) == 2
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    board = EventAccumulator(str(other.paths.run / "trackers/tensorboard")).Reload()
    assert [(event.step, event.value) for event in board.Scalars("step/loss")] == [
        (event["step"], pytest.approx(event["loss"])) for event in steps
    ]
    assert [event.value for event in board.Scalars("step/attention_max/1")] == [
        pytest.approx(event["attention_max"][1]) for event in steps
    ]


def test_a_model_by_name_starts_from_its_weights_and_its_settings(run: BEGUN, alone: Run) -> None:
    final = alone.folder / "checkpoints/final"
    again = run(2, f"model.name={final}", "train.steps=2", model=()).end()
    assert again.events("start")[0]["parameters"] == alone.events("start")[0]["parameters"]
    assert again.losses()[0] < alone.losses()[0] - 1
    settings = json.loads((again.folder / "checkpoints/final/config.json").read_text())
    assert settings["n_embd"] == 32


def test_a_stream_is_the_same_on_any_ranks_and_goes_on_where_it_was(run: BEGUN, tmp_path: Path) -> None:
    """In another process, on other ranks, in the middle of a pass and of a document."""
    from dray.train.data import synthetic_corpus

    text = tmp_path / "text.jsonl"
    text.write_text("".join(json.dumps({"text": text}) + "\n" for text in list(synthetic_corpus.documents())[:30]))
    words = ("data.streaming=true", f"data.train={text}", f"data.validation={text}", "checkpoint.every=[[0, 9]]")
    one = run(1, *words, "checkpoint.keep=9", "train.steps=50").end()
    assert one.events("step")[-1]["tokens"] > 30 * 300  # more than a pass
    two = run(2, *words, "train.steps=50", "batch.per_device=2")
    shutil.copytree(one.folder / "checkpoints/step-18", two.folder / "checkpoints/step-18")
    two.end()
    assert two.losses() == pytest.approx(one.losses()[18:], rel=5e-5)


@pytest.fixture
def mix(tmp_path: Path) -> tuple[str, ...]:
    from dray.train.data import synthetic_corpus

    documents = list(synthetic_corpus.documents())
    for name, some in (("web", documents[:100]), ("code", [text[::-1] for text in documents[:40]])):
        (tmp_path / f"{name}.txt").write_text("\n".join(some))
    return (
        f"data.mix.web.dataset={tmp_path}/web.txt", "data.mix.web.weight=3",
        f"data.mix.code.dataset={tmp_path}/code.txt", "checkpoint.every=4", "checkpoint.keep=9",
    )  # fmt: skip


def test_each_source_of_a_mix_has_its_share_and_a_loss_of_its_own(run: BEGUN, mix: tuple[str, ...]) -> None:
    whole = run(2, *mix, "train.log_every=5", "train.eval_every=10").end()
    for mean, web, code in zip(*(whole.events(event) for event in ("eval", "eval-web", "eval-code")), strict=True):
        assert mean["loss"] == pytest.approx(0.75 * web["loss"] + 0.25 * code["loss"])
        assert mean["accuracy"] == pytest.approx(0.75 * web["accuracy"] + 0.25 * code["accuracy"])
        assert mean["perplexity"] == pytest.approx(math.exp(mean["loss"]))
        assert web["loss"] != code["loss"]
    assert len(whole.events("eval-web")) == 2
    card = (whole.paths.final_model / "README.md").read_text()
    assert '\ndata.mix.web.dataset = "web.txt"\n' in card
    assert "\n| web | " in card


@pytest.mark.slow
def test_a_mix_goes_on_on_other_ranks_after_a_kill(run: BEGUN, mix: tuple[str, ...]) -> None:
    """The same samples in the same steps."""
    whole = run(1, *mix).end()
    killed = run(2, *mix)
    wanted = killed.folder / "checkpoints/step-8"
    with killed.going() as pids:
        end = time.monotonic() + 120
        while not wanted.exists():
            assert time.monotonic() < end, killed.said()
            time.sleep(0.01)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    again = run(1, *mix)
    shutil.copytree(wanted, again.folder / "checkpoints/step-8")
    again.end()
    assert again.events("start")[0]["first_step"] == 8
    assert again.losses() == pytest.approx(whole.losses()[8:], rel=2e-5)
    said = run(1, *mix, "data.mix.web.weight=2", f"checkpoint.folder={again.folder}/checkpoints").end(code=78).said()
    assert "the data order differs from the checkpoint's\n" in said
    assert "  found:  dataset = web of " in said


@pytest.mark.deepspeed
def test_a_deepspeed_file_of_the_users_own(zero: BEGUN, alone: Run, tmp_path: Path) -> None:
    said = {"zero_optimization": {"stage": 3, "reduce_bucket_size": 5000}, "gradient_clipping": "auto"}
    (tmp_path / "ds.json").write_text(json.dumps(said))
    other = zero(2, f"train.deepspeed={tmp_path}/ds.json").end()
    assert other.losses() == pytest.approx(alone.losses(), rel=2e-5)
    (tmp_path / "ds.json").write_text(json.dumps({"zero_optimization": {"stage": 2, "reduce_bucket": 5000}}))
    assert "DeepSpeed refuses these settings" in zero(1, f"train.deepspeed={tmp_path}/ds.json").end(code=78).said()


def test_a_tracker_that_the_image_does_not_hold(run: BEGUN) -> None:
    said = run(1, 'train.trackers=["mlflow"]').end(code=78).said()
    assert "the tracker mlflow is not installed here\n" in said
    assert "dray image layer IMAGE --pip mlflow" in said


def test_a_checkpoint_that_does_not_fit_is_said_and_the_one_before_stays(run: BEGUN, alone: Run, six: Run) -> None:
    again = run(2, "checkpoint.every=[[0, 4]]", "checkpoint.keep=9")
    shutil.copytree(six.folder / "checkpoints/step-4", again.folder / "checkpoints/step-4")
    again.end(code=1, FILE_SIZE="150000")
    assert "the checkpoint cannot be written\n" in again.said()
    assert "  fix:    check the disk and its quota; the newest checkpoint is of step 4\n" in again.said()
    assert again.end().events("start")[-1]["first_step"] == 4
    assert again.losses()[-16:] == pytest.approx(alone.losses()[4:], rel=2e-2)


def test_epochs_in_place_of_steps(run: BEGUN, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("some words to learn\n" * 200)
    other = run(1, f"data.train={text}", steps="epochs=2").end()
    tokens = other.events("start")[0]["tokens"]
    assert other.events("start")[0]["steps"] == round(2 * tokens / (8 * 32))


def test_a_checkpoint_of_another_order_is_refused(run: BEGUN, six: Run) -> None:
    """Its step would stand for other samples."""
    kept = f"checkpoint.folder={six.paths.checkpoints}"
    for word, found in (("batch.global_size=16", "global_size = 16"), ("train.seed=7", "seed = 7")):
        said = run(2, kept, word).end(code=78).said()
        assert "the data order differs from the checkpoint's\n" in said
        assert f"  found:  {found}\n" in said


@pytest.mark.slow
@pytest.mark.deepspeed
@pytest.mark.parametrize("strategy", ["zero1", "zero2", "zero3"])
def test_deepspeeds_bf16_is_near(zero: BEGUN, alone: Run, strategy: str) -> None:
    other = zero(2, f"train.strategy={strategy}", "train.precision=bf16", "batch.per_device=2").end()
    assert other.losses() == pytest.approx(alone.losses(), rel=2e-2)


@pytest.mark.slow
def test_a_checkpoint_of_another_model_or_optimizer_is_refused(run: BEGUN, folder: Path) -> None:
    kept = f"checkpoint.folder={folder}/kept"
    run(1, kept, "checkpoint.every=[[0, 5]]").end()
    for word in ("model.config.n_embd=64", "train.optimizer=muon"):
        output = run(2, kept, word).end(code=78).said()
        assert "the checkpoint does not have this recipe's tensors\n" in output
        assert f"  found:  in {folder}/kept/step-20: " in output
