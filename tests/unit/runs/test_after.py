"""After a run: its model is scored again, its checkpoints become models, and who asks for it sends one to the hub."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

import torch.distributed.checkpoint as dcp  # noqa: E402
from huggingface_hub import ModelCard  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from torch.distributed.checkpoint import DefaultLoadPlanner  # noqa: E402
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import command  # noqa: E402
from dray.contract.findings import DrayError  # noqa: E402
from dray.contract.trainer import image_tasks  # noqa: E402
from dray.train.checkpoint.shards import open_checkpoint, whole_shards  # noqa: E402
from dray.train.data import hub  # noqa: E402
from dray.train.outputs import card  # noqa: E402
from helpers import ROOT  # noqa: E402
from hubs import Repositories, serving  # noqa: E402
from trainings import Forks, Run  # noqa: E402

pytestmark = pytest.mark.torch
TEXT = f"{ROOT}/recipes/tiny/validation.jsonl"
WORDS = (f"evaluate.words.dataset={TEXT}", "evaluate.words.last_word=true", f"data.test={TEXT}")


def dray(*words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return command.dray(*words, cwd="/", **env)


@pytest.fixture(scope="module")
def runs(tmp_path_factory, forks: Forks) -> dict[str, Run]:
    folder = tmp_path_factory.mktemp("my runs")
    return {
        "ended": Run(forks, folder / "ended", 2, *WORDS, "checkpoint.every=10", "train.strategy=fsdp").end(),
        "other": Run(forks, folder / "other", 1, steps="steps=2").end(),
        "streamed": Run(
            forks,
            folder / "streamed",
            1,
            "data.streaming=true",
            f"data.train={TEXT}",
            f"data.validation={TEXT}",
            steps="steps=2",
        ).end(),
        "unfinished": Run(forks, folder / "unfinished", 1),
    }


@pytest.mark.slow
def test_a_model_scores_again_what_it_did_when_it_ended(runs) -> None:
    ended = dray("model", "eval", runs["ended"].folder)
    assert (ended.returncode, ended.stderr) == (0, "")
    figures = [runs["ended"].events(event)[-1] for event in ("eval", "eval-words", "test")]
    names = ("evaluation", "evaluation words", "test")
    for line, name, was in zip(ended.stdout.splitlines(), names, figures, strict=True):
        shown, perplexity = line.split(", perplexity ")
        assert shown == f"{name} loss {was['loss']:.4f}"
        assert float(perplexity) == pytest.approx(was["perplexity"], rel=1e-4)


@pytest.mark.slow
def test_a_model_that_learned_from_a_stream_scores_too(runs) -> None:
    ended = dray("model", "eval", runs["streamed"].folder)
    was = runs["streamed"].events("eval")[-1]
    assert ended.stdout == f"evaluation loss {was['loss']:.4f}, perplexity {was['perplexity']:.3f}\n"


@pytest.mark.slow
def test_it_is_scored_on_other_texts(runs, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("one: the tug pulls the red box against the tide.\n" * 9)
    words = (f"evaluate.mine.dataset={tmp_path}/mine.txt", "evaluate.mine.stride=8", "data.test=")
    ended = dray("model", "eval", runs["ended"].folder, *words)
    assert [line.split(" loss")[0] for line in ended.stdout.splitlines()] == [
        "evaluation", "evaluation words", "evaluation mine",
    ]  # fmt: skip
    wrong = dray("model", "eval", runs["ended"].folder, "evaluate.mine.datset=x")
    assert (wrong.returncode, "unknown key: did you mean" in wrong.stderr) == (78, True)
    for ignored in ("model.name=/another/model", "scale=tiny", "lora.rank=4"):
        refused = dray("model", "eval", runs["ended"].folder, ignored)
        assert (refused.returncode, "has no effect" in refused.stderr, ignored in refused.stderr) == (78, True, True)
    lost = dray("model", "eval", runs["ended"].folder, "evaluate.mine.dataset=/not/there.txt")
    assert (lost.returncode, "the dataset does not exist" in lost.stdout + lost.stderr) == (78, True)


@pytest.mark.slow
def test_a_checkpoint_becomes_the_model_that_it_is_of(runs, tmp_path: Path) -> None:
    run = runs["ended"]
    ended = dray("model", "export", run.folder)
    assert (ended.returncode, ended.stderr) == (0, "")
    made = run.folder / "exports" / "step-20"
    assert ended.stdout.startswith(f"{made}: 0.1 MB of fp32 weights")
    whole, final = load_file(made / "model.safetensors"), run.weights()
    assert whole.keys() == final.keys()
    assert all(torch.equal(whole[name], final[name]) for name in final)
    again = dray("model", "export", run.folder)
    assert (again.returncode, "the target exists already" in again.stderr) == (78, True)
    half = tmp_path / "in bf16"
    assert dray("model", "export", run.folder, "--to", half, "--dtype", "bf16").returncode == 0
    network = AutoModelForCausalLM.from_pretrained(half)
    assert network.dtype == torch.bfloat16
    for name, weight in network.named_parameters():
        assert torch.equal(weight, final[name].bfloat16()), name
    assert len(AutoTokenizer.from_pretrained(half)) == 257


def test_a_script_of_torch_resumes_from_an_export_as_dcp(runs, tmp_path: Path, forks: Forks) -> None:
    """As docs/train.md has it: with weights and AdamW's state."""
    run = runs["ended"]
    checkpoint, plan = run.folder / "checkpoints" / "step-20", json.loads(run.paths.plan.read_text())
    job = image_tasks.Export(str(checkpoint), str(tmp_path / "dcp"), "fp32", plan, "dcp")
    code, output = forks.job(job, tmp_path / "job")
    assert (code, " MB of weights and optimizer state, as torch's DCP" in output) == (0, True), output

    torch.manual_seed(1)
    network = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(run.paths.final_model))
    optimizer = torch.optim.AdamW(network.parameters())
    model, averages = get_state_dict(network, optimizer)
    state = {"model": model, "optimizer": averages}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(state, checkpoint_id=tmp_path / "dcp", planner=DefaultLoadPlanner(allow_partial_load=True))
    set_state_dict(network, optimizer, model_state_dict=model, optim_state_dict=averages)
    final, reader = run.weights(), open_checkpoint(checkpoint)
    for name, weight in network.named_parameters():
        assert torch.equal(weight, final[name]), name
        assert optimizer.state[weight]["step"] == 20
        for kind in ("exp_avg", "exp_avg_sq"):
            written = torch.empty_like(weight)
            reader.fill(whole_shards(kind, {name: written}))
            assert torch.equal(optimizer.state[weight][kind], written), f"{kind} of {name}"


@pytest.mark.slow
def test_it_takes_the_memory_of_one_file(tmp_path: Path, forks: Forks) -> None:
    wide = (
        "model.config.n_layer=8",
        "model.config.n_embd=1024",
        "model.config.n_head=4",
        "model.config.n_positions=32",
    )
    run = Run(forks, tmp_path / "run", 1, "checkpoint.every=2", "train.lr=1e-5", model=wide, steps="steps=2")
    run.end()
    weights = (run.folder / "checkpoints" / "final" / "model.safetensors").stat().st_size
    assert weights > 100e6

    def peak(gigabytes: float) -> int:
        checkpoint, plan = run.folder / "checkpoints" / "step-2", json.loads(run.paths.plan.read_text())
        target = str(tmp_path / f"{gigabytes}")
        job = image_tasks.Export(str(checkpoint), target, "fp32", plan, shard_gb=gigabytes)
        code, output = forks.job(job, tmp_path / "job")
        assert code == 0, output
        return forks.peak

    assert peak(0.025) < peak(4.0) - 0.6 * weights


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("run", "words", "said"),
    [
        ("ended", ("--step", "11"), "found:  steps 10, 20"),
        ("other", (), "checkpoint.every=N"),
        (
            "unfinished",
            (),
            "checkpoint.every=N in the recipe keeps checkpoints\n",
        ),
        ("nowhere", (), "this is not a run folder"),
    ],
)
def test_what_cannot_be_exported(runs, tmp_path: Path, run: str, words: tuple[str, ...], said: str) -> None:
    folder = runs[run].folder if run in runs else tmp_path
    ended = dray("model", "export", folder, *words)
    assert (ended.returncode, said in ended.stderr) == (78, True), ended.stderr


def test_a_checkpoint_that_is_not_whole_is_not_exported(runs, tmp_path: Path, forks: Forks) -> None:
    run, made = runs["ended"], tmp_path / "model"
    checkpoint, plan = run.folder / "checkpoints" / "step-10", json.loads(run.paths.plan.read_text())
    file = next(checkpoint.glob("*.safetensors"))
    kept = file.read_bytes()
    changed = kept[:-1] + bytes([kept[-1] ^ 1])
    for damage, said in ((changed, "is not what was written"), (None, "No such file or directory")):
        file.unlink()
        if damage:
            file.write_bytes(damage)
        code, output = forks.job(image_tasks.Export(str(checkpoint), str(made), "fp32", plan), tmp_path / "job")
        assert (code, said in output, made.exists()) == (1, True, False), output
        file.write_bytes(kept)


def test_a_model_that_somebody_changed_is_not_used(runs, tmp_path: Path, forks: Forks) -> None:
    """Code beside a model is run by transformers, and a recipe may trust it."""
    run, changed = runs["ended"], tmp_path / "final"
    shutil.copytree(run.folder / "checkpoints" / "final", changed)
    (changed / "modeling_mine.py").write_text("")
    plan = json.loads(run.paths.plan.read_text())
    for job in (
        image_tasks.Evaluate(str(changed), plan),
        image_tasks.Generate(str(changed), "causal", "", 1, 0.0, 0, trust_remote_code=False),
        image_tasks.Push(str(changed), "me/mine", private=True),
    ):
        code, output = forks.job(job, tmp_path / "job")
        assert (code, "modeling_mine.py was added" in output) == (78, True), output
    with pytest.raises(DrayError, match="the model's files differ from those that its run wrote"):  # as model.name
        hub.model(str(changed), "main", weights=True, code=False)


@pytest.mark.slow
def test_a_card_says_what_it_is(runs) -> None:
    card = (runs["ended"].folder / "checkpoints" / "final" / "README.md").read_text()
    run = runs["ended"]
    data = ModelCard(card).data
    assert (data.library_name, data.pipeline_tag, data.model_name) == ("transformers", "text-generation", "tiny")
    assert "\n---\n\n# tiny\n" in card
    assert "20 steps of 8 samples of 32 tokens, on 2 ranks." in card
    for event, name in (("eval", "eval"), ("eval-words", "words"), ("test", "test")):
        was = run.events(event)[-1]
        assert f"| {name} | {was['loss']:.4f} | {was['perplexity']:.3f} | {was['accuracy']:.4f} |" in card
    assert 'data.test = "validation.jsonl"' in card
    assert str(run.folder.parent) not in card  # whose folders these are is nobody's business
    assert str(ROOT) not in card


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("/home/me/a.jsonl:train[:1%]", "a.jsonl:train[:1%]"),
        ("json:/home/me/a.jsonl", "json:a.jsonl"),
        ("s3://my-bucket/secret-project/*.jsonl", "*.jsonl"),
        ("hf://datasets/me/texts/*.jsonl", "hf://datasets/me/texts/*.jsonl"),
        ("hub:me/texts:train[:1%]", "hub:me/texts:train[:1%]"),
    ],
)
def test_a_model_s_card_names_no_folder_and_no_bucket(name: str, shown: str) -> None:
    assert [*card._lines({"data": {"train": name}})] == [f"data.train = {json.dumps(shown)}"]


@pytest.mark.slow
def test_a_model_is_sent_to_the_hub_when_somebody_asks(runs, tmp_path: Path) -> None:
    folder, hub = runs["ended"].folder, Repositories()
    with serving(hub) as address:
        env = {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path), "HF_TOKEN": "hf_may_write"}
        ended = dray("model", "push", folder, "me/mine", **env)
        assert (ended.returncode, ended.stderr, ended.stdout) == (0, "", f"{address}/me/mine\n")
        final = folder / "checkpoints" / "final"
        files = {path.name: path.read_bytes() for path in final.iterdir() if path.name != "manifest.json"}
        assert hub == {"models/me/mine": {"visibility": b"private", **files}}
        assert dray("model", "push", folder, "me/open", "--public", **env).returncode == 0
        assert hub["models/me/open"]["visibility"] == b"public"
        open_to_all = dray("model", "push", folder, "me/open", **env)
        assert (open_to_all.returncode, "is public" in open_to_all.stdout) == (78, True)
        wrong = dray("model", "push", folder, "me/mine", **{**env, "HF_TOKEN": "hf_may_read"})
        assert (wrong.returncode, "use a token that may write" in wrong.stdout) == (78, True)
        assert "hf_may" not in wrong.stdout + wrong.stderr
        nobody = dray("model", "push", folder, "me/mine", HF_ENDPOINT=address, HF_HOME=str(tmp_path))
        assert nobody.stdout.startswith("dray: pushing a model to the hub needs a token\n")
        assert (nobody.returncode, "export HF_TOKEN" in nobody.stdout) == (78, True)
        for words, said in (
            (("mine",), "OWNER/NAME"),
            (("me/mine", "--adapter"), "the run trained no LoRA"),
        ):
            refused = dray("model", "push", folder, *words, **env)
            assert (refused.returncode, said in refused.stderr) == (78, True)
    gone = dray("model", "push", folder, "me/mine", **env)
    assert (gone.returncode, "check the name and the network" in gone.stdout) == (1, True)
