"""What a model will hold in memory: known before it is queued, and refused there if it cannot fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from command import dray
from dray.planning.estimates import memory, model_shape
from dray.runs.prepare import read_recipe
from helpers import ROOT

OPT = {
    "model_type": "opt", "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "ffn_dim": 16384,
    "word_embed_proj_dim": 4096, "vocab_size": 50272, "max_position_embeddings": 2048,
}  # fmt: skip
LLAMA = {
    "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64,
    "intermediate_size": 8192, "vocab_size": 128256, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """As prefetch leaves it."""
    held = tmp_path / "hub" / "models--facebook--opt-6.7b"
    (held / "refs").mkdir(parents=True)
    (held / "refs" / "main").write_text("abc")
    (held / "snapshots" / "abc").mkdir(parents=True)
    (held / "snapshots" / "abc" / "config.json").write_text(json.dumps(OPT))
    return tmp_path


@pytest.mark.torch
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("gpt2", {}),
        ("gpt2", {"n_embd": 1024, "n_head": 16, "n_layer": 48, "n_positions": 102}),
        ("gpt_neo", {}),
        ("opt", OPT),
        ("bert", {}),
        ("llama", {}),
        ("llama", LLAMA),
        ("qwen2", {**LLAMA, "rms_norm_eps": 1e-6}),
        ("mistral", {**LLAMA, "rms_norm_eps": 1e-6}),
    ],
)
def test_parameters_are_counted_as_transformers_makes_them(kind: str, said: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    settings = {key: value for key, value in said.items() if key != "model_type"}
    made = AutoConfig.for_model(kind, **settings)
    with torch.device("meta"):
        network = (AutoModelForMaskedLM if kind == "bert" else AutoModelForCausalLM).from_config(made)
    real = sum(weight.numel() for weight in network.parameters())
    for known in ({"model_type": kind, **settings}, made.to_dict()):
        found = model_shape.of(known)
        assert found
        assert found.parameters == pytest.approx(real, rel=0.006)


def gpu(*words: str, ranks: int = 8, model: dict[str, Any] = OPT) -> dict[str, float]:
    recipe = read_recipe(ROOT / "recipes" / "gpt2-wikitext-ddp.toml", ["batch.global_size=64", *words])
    found = model_shape.of(model)
    assert found
    return memory.estimate(recipe, found, ranks=ranks, ranks_per_node=4).gpu


def test_who_parts_what_holds_less_of_it() -> None:
    """In bytes a parameter: 4 for a weight, 4 for a gradient, 8 for two averages; 2 and a master of 4 by DeepSpeed."""
    count = 6_658_473_984
    ddp, fsdp = gpu("train.strategy=ddp"), gpu("train.strategy=fsdp")
    assert [ddp[part] / count for part in ("weights", "their 16-bit copies", "gradients", "optimizer")] == [4, 2, 4, 8]
    assert [fsdp[part] / count for part in ("weights", "gradients", "optimizer")] == [0.5, 0.5, 1]
    stages = {stage: gpu(f"train.strategy=zero{stage}") for stage in (1, 2, 3)}
    for stage, each in {1: (2, 4, 1.5), 2: (2, 0.5, 1.5), 3: (0.25, 0.5, 1.5)}.items():
        assert tuple(stages[stage][part] / count for part in ("weights", "gradients", "optimizer")) == each
    away = gpu("train.strategy=zero3", "train.offload=all")
    assert set(away) == {"gathered layers", "activations", "the rest"}
    assert gpu("batch.per_device=1")["activations"] == pytest.approx(gpu()["activations"] / 8)
    assert gpu("train.activation_checkpointing=true")["activations"] < gpu()["activations"] / 3
    assert gpu("lora.rank=8")["optimizer"] < gpu()["optimizer"] / 100
    small = gpu("model.dtype=bf16")
    assert [small.get(part, 0) / count for part in ("weights", "their 16-bit copies", "gradients", "optimizer")] == [
        2, 0, 2, 4,
    ]  # fmt: skip


def test_fsdp_holds_all_that_is_in_no_layer_as_one_group() -> None:
    """A table of 128,256 words is gathered with the first layer and stays to the last: the mean of layers forgot it."""
    found = model_shape.of({"model_type": "llama", "rms_norm_eps": 1e-6, **LLAMA})
    assert found
    table = 128256 * 2048
    assert found.outside == pytest.approx(table, rel=1e-4)
    layer = (found.parameters - found.outside) / 16
    held = gpu("train.strategy=fsdp", model={"model_type": "llama", "rms_norm_eps": 1e-6, **LLAMA})
    assert held["gathered layers"] == 2 * (found.outside + 2 * layer)


def test_fsdp_by_node_and_weights_that_stay() -> None:
    count, whole = 6_658_473_984, gpu("train.strategy=fsdp")
    node = gpu("train.strategy=fsdp", "train.fsdp_shard=node")
    assert [node[part] for part in ("weights", "gradients", "optimizer")] == [count, count, 2 * count]
    assert node["gathered layers"] == whole["gathered layers"]
    assert gpu("train.strategy=fsdp", "train.reshard_after_forward=false")["gathered layers"] == 2 * count


def test_logits_are_there_with_their_gradients() -> None:
    one = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    small, large = (gpu(model={**one, "vocab_size": size})["activations"] for size in (1000, 129000))
    rows, length = 8, 1024
    assert large - small == rows * length * 128000 * 12
    masked = [
        gpu("train.objective=masked", model={**one, "vocab_size": size})["activations"] for size in (1000, 129000)
    ]
    assert masked[1] - masked[0] == pytest.approx((large - small) * 0.15)


def test_chunked_logits_are_there_in_part() -> None:
    one = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    small, large = (
        gpu("train.loss=chunked", model={**one, "vocab_size": size})["activations"] for size in (1000, 257000)
    )
    rows, length, table = 8, 1024, 4 * 64 * 256000
    assert large - small == 12 * 2**27 - rows * length * 1000 * 12 / 8 + table
    masked = gpu("train.loss=chunked", "train.objective=masked", model={**one, "vocab_size": 1000})["activations"]
    assert small - masked == pytest.approx(0.85 * rows * length * 1000 * 12 / 8)


def test_compiled_logits_and_their_gradients_have_16_bits() -> None:
    one = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}

    def grown(words: str, vocabulary: int) -> float:
        small, large = (
            gpu("train.compile=true", words, model={**one, "vocab_size": size})["activations"]
            for size in (1000, vocabulary)
        )
        return large - small

    rows, length, table = 8, 1024, 4 * 64 * 512000
    assert grown("train.loss=full", 129000) == rows * length * 128000 * 4
    assert grown("train.loss=chunked", 513000) == 4 * (2**28 - rows * length * 1000 / 8) + table


def test_compiled_layers_keep_less() -> None:
    """torch's partitioner keeps 44 bytes of a Llama's layer under autocast where eager keeps 66."""
    llama = {"model_type": "llama", "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024,
             "vocab_size": 10, "rms_norm_eps": 1e-6}  # fmt: skip
    for words, each in (((), 66), (("train.compile=true",), 44)):
        two, four = (gpu(*words, model={**llama, "num_hidden_layers": count})["activations"] for count in (2, 4))
        assert (four - two) / (2 * 8 * 1024 * 256) == each


def test_a_model_that_also_sees_has_its_words_in_a_part_of_its_configuration() -> None:
    words = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    words |= {"vocab_size": 100}
    assert model_shape.of({"model_type": "seer", "text_config": words, "vision_config": {}}) == model_shape.of(words)


def test_of_several_experts_each_has_its_own_size() -> None:
    qwen = {
        "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4,
        "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
        "vocab_size": 151936, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    }  # fmt: skip
    found = model_shape.of(qwen)
    assert found
    assert found.parameters == pytest.approx(30.5e9, rel=0.01)


@pytest.mark.seconds
def test_a_model_that_cannot_fit_is_refused_with_what_would(home: Path) -> None:
    plain = ("plan", "recipes/opt-billions-zero3-offload.toml", "train.deepspeed=", "--site", "iris", "-v")
    ended = dray(*plain, "train.strategy=ddp", "batch.per_device=2", HF_HOME=str(home))
    assert ended.returncode == 78
    refusal = ended.stderr[ended.stderr.index("dray: the model does not fit") :].splitlines()
    assert refusal[:3] == [
        "dray: the model does not fit: 6,658,473,984 parameters",
        "  wanted: at most 16 GB on each GPU (site iris)",
        "  found:  123.7 GB on each GPU: weights 26.63, their 16-bit copies 13.32, gradients 26.63, optimizer 53.27, "
        "activations 2.36, the rest 1.50",
    ]
    fix = "  fix:    set train.strategy=zero3 train.offload=optimizer, which takes 6.1 GB on each GPU: weights 1.66"
    assert refusal[3].startswith(fix)
    queued = dray("submit", *plain[1:-1], "train.strategy=ddp", "--sbatch=-Amine", HF_HOME=str(home))
    assert (queued.returncode, "the model does not fit" in queued.stderr) == (78, True)
    for words in (("--gpu-memory", "0"), ("--gpu-memory", "141")):
        assert dray(*plain, "train.strategy=ddp", *words, HF_HOME=str(home)).returncode == 0
    # What the fix says does fit.
    good = dray(*plain, "train.strategy=zero3", "train.offload=all", "batch.per_device=2", HF_HOME=str(home))
    assert good.returncode == 0
    assert "memory: an estimate for 6,658,473,984 parameters, on GPUs of 16 GB\n  4.2 GB on each GPU: " in good.stdout
    assert "GB on each node's host: weights 6.66, gradients 13.32, optimizer 39.95" in good.stdout


@pytest.mark.slow
@pytest.mark.seconds
def test_several_changes_may_be_needed_and_a_file_of_deepspeeds_gives_way(home: Path) -> None:
    words = (
        "plan",
        "recipes/opt-billions-zero3-offload.toml",
        "train.activation_checkpointing=false",
        "data.sequence_length=2048",
    )
    ended = dray(*words, "batch.global_size=64", "batch.per_device=8", "--gpus-per-node", "4", "--gpu-memory", "8",
                 HF_HOME=str(home))  # fmt: skip
    assert ended.returncode == 78
    assert "fix:    set batch.per_device=1 train.activation_checkpointing=true, which takes " in ended.stderr
    never = dray(*words, "--gpus-per-node", "4", "--gpu-memory", "1", HF_HOME=str(home))
    assert "fix:    use more nodes, a smaller model or [lora]" in never.stderr
    file = dray("plan", "recipes/gpt2-wikitext-zero2.toml", "model.name=facebook/opt-6.7b", "--gpus-per-node", "4",
                "--gpu-memory", "16", HF_HOME=str(home))  # fmt: skip
    words = "train.deepspeed= batch.per_device=1 train.activation_checkpointing=true train.strategy=zero3"
    assert f"fix:    set {words} train.offload=optimizer, which takes 6.1 GB on each GPU" in file.stderr


@pytest.mark.slow
@pytest.mark.seconds
def test_what_is_not_known_is_said_and_stops_nobody(home: Path) -> None:
    gone = dray("plan", "-v", "recipes/opt125m-yelp.toml", "--gpus-per-node", "8", HF_HOME=str(home))
    assert (
        "\nmemory: not estimated: facebook/opt-125m is not downloaded; dray data prefetch RECIPE downloads it\n"
        in gone.stdout
    )
    wanted = ("model.name=", "model.type=mamba", "--gpus-per-node", "8", "--gpu-memory", "40")
    strange = dray("plan", "-v", "recipes/opt125m-yelp.toml", *wanted)
    told = "the size of model type mamba is not known (so --gpu-memory is not checked)"
    assert f"\nmemory: not estimated: {told}\n" in strange.stdout
    empty = dray("plan", "-v", "recipes/opt125m-yelp.toml", f"model.name={home}", "--gpus-per-node", "8")
    assert f"\nmemory: not estimated: {home} has no config.json that can be read here\n" in empty.stdout
    command = dray("plan", "-v", "--", "true")
    assert (command.returncode, "memory:" in command.stdout) == (0, False)


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("n_embd", "fp16", "n_embd = 'fp16'"),
        ("n_layer", "[]", "n_layer = []"),
        ("n_head", "true", "n_head = True"),
        ("n_inner", "2.5", "n_inner = 2.5"),
        ("vocab_size", "{}", "vocab_size = {}"),
        ("num_experts_per_tok", "x", "num_experts_per_tok = 'x'"),
        ("sliding_window", '["x"]', "sliding_window = ['x']"),
    ],
)
def test_a_size_that_is_no_number_is_refused_with_its_key(key: str, value: str, found: str) -> None:
    """Of a recipe, on its command line."""
    ended = dray("plan", "recipes/smoke-cpu.toml", f"model.config.{key}={value}")
    assert ended.stderr.splitlines() == [
        "dray: a size in the model's configuration is not a whole number",
        f"  where:  model.config.{key} of the recipe, or {key} in the model's config.json",
        "  wanted: a whole number, such as 12",
        f"  found:  {found}",
        f"  fix:    set model.config.{key} in the recipe",
    ]
    assert ended.returncode == 78


@pytest.mark.seconds
@pytest.mark.parametrize(("key", "value"), [("hidden_size", "wide"), ("vocab_size", 10**80)])
def test_so_is_one_of_a_models_own_file(home: Path, key: str, value: object) -> None:
    file = home / "hub" / "models--facebook--opt-6.7b" / "snapshots" / "abc" / "config.json"
    file.write_text(json.dumps({**OPT, key: value}))
    words = ("plan", "recipes/opt125m-yelp.toml", "model.name=facebook/opt-6.7b", "--gpus-per-node", "8")
    ended = dray(*words, HF_HOME=str(home))
    assert ended.stderr.splitlines() == [
        "dray: a size in the model's configuration is not a whole number",
        f"  where:  model.config.{key} of the recipe, or {key} in the model's config.json",
        "  wanted: a whole number, such as 12",
        f"  found:  {key} = {value!r}",
        f"  fix:    set model.config.{key} in the recipe",
    ]
    assert ended.returncode == 78
    assert dray(*words, f"model.config.{key}=4096", HF_HOME=str(home)).returncode == 0


def test_of_sizes_for_each_layer_the_largest_counts() -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 100, "rms_norm_eps": 1}
    assert model_shape.of({**sizes, "intermediate_size": [32, 256]}) == model_shape.of(
        {**sizes, "intermediate_size": 256}
    )


@pytest.mark.parametrize("kind", [["gpt2"], {"a": 1}, None, 7])
def test_a_type_that_is_no_text_is_not_known(kind: object) -> None:
    assert model_shape.of({"model_type": kind}) is None
