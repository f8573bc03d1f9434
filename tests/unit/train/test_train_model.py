"""Models that are, and the word about those that are not."""

from __future__ import annotations

import errno
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

import torch.distributed as dist  # noqa: E402
from tokenizers import Tokenizer, models  # noqa: E402
from transformers import AutoConfig, PreTrainedTokenizerFast  # noqa: E402

import hubs  # noqa: E402
import syncs  # noqa: E402
from dray.contract import failures  # noqa: E402
from dray.contract.findings import DrayError  # noqa: E402
from dray.train import errors  # noqa: E402
from dray.train.data import tokenizer  # noqa: E402
from dray.train.loop import metrics  # noqa: E402
from dray.train.model import build  # noqa: E402
from dray.train.parallel import ddp, optimizer  # noqa: E402
from dray.train.parallel.scaler import Scaler  # noqa: E402
from trainings import config  # noqa: E402

pytestmark = pytest.mark.torch


def refused(chosen) -> str:
    with pytest.raises(DrayError) as stopped:
        build.build(chosen, tokenizer.load(chosen), with_weights=True)
    assert stopped.value.finding.code == 78
    return f"{stopped.value}\n"


def saved(folder: Path) -> Path:
    chosen = config(folder)
    tokens = tokenizer.load(chosen)
    build.build(chosen, tokens, with_weights=True).save_pretrained(folder / "model")
    tokens.save_pretrained(folder / "model")
    return folder / "model"


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("model.config.n_layers=1", "a gpt2 configuration has no 'n_layers'"),
        ("data.sequence_length=64", "a sample is longer than the model's max_position_embeddings"),
        ("model.config.vocab_size=100", "the tokenizer has tokens that the model lacks"),
        ("model.attn_implementation=flash_attention_2", "transformers cannot build the model"),
        ("train.objective=masked", "transformers cannot build the model"),
        ("model.config.attn_pdrop=x", "transformers cannot build the model"),
        ("model.config.activation_function=nope", "transformers cannot build the model"),
        ("model.config.n_embd=-4", "transformers cannot build the model"),
        ("model.config.n_embd=0", "transformers cannot build the model"),
    ],
)
def test_models_that_are_not(tmp_path: Path, said: str, message: str) -> None:
    assert refused(config(tmp_path, said)).splitlines()[0] == message


def test_a_tokenizer_with_few_tokens_and_a_great_id(tmp_path: Path) -> None:
    crafted = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "b": 999}, unk_token="a"))
    PreTrainedTokenizerFast(tokenizer_object=crafted, eos_token="</s>").save_pretrained(tmp_path / "tokens")
    told = refused(config(tmp_path, f"model.tokenizer={tmp_path}/tokens", "model.config.vocab_size=999"))
    assert told.splitlines()[:3] == [
        "the tokenizer has tokens that the model lacks",
        "  wanted: ids below 999, the model's vocab_size",
        "  found:  ids up to 999 in the tokenizer",
    ]


@pytest.mark.parametrize(
    ("kind", "message"),
    [("gpt9", "transformers cannot build the model"), ("t5", "a t5 configuration has no 'n_layer'")],
)
def test_a_type_that_the_plan_let_through(tmp_path: Path, kind: str, message: str) -> None:
    """As it does where it knows another version of transformers."""
    chosen = config(tmp_path)
    assert refused(replace(chosen, model=replace(chosen.model, type=kind))).splitlines()[0] == message


def test_a_model_that_also_sees_has_its_sizes_in_a_part_of_its_configuration(tmp_path: Path) -> None:
    words_ = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1,
              "head_dim": 8, "intermediate_size": 16, "vocab_size": 300, "max_position_embeddings": 32}  # fmt: skip
    sees = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
            "image_size": 28, "patch_size": 14}  # fmt: skip
    chosen = config(tmp_path)
    folder = tmp_path / "gemma"
    AutoConfig.for_model("gemma3", text_config=words_, vision_config=sees).save_pretrained(folder)
    tokenizer.load(chosen).save_pretrained(folder)
    named = replace(chosen, model=replace(chosen.model, name=str(folder), weights=False, type="", config={}))
    network = build.build(named, tokenizer.load(named), with_weights=True)
    assert metrics.flops_per_token(network, named, 32) > 0
    long = replace(named, data=replace(named.data, sequence_length=64))
    assert refused(long).startswith("a sample is longer than the model's max_position_embeddings\n")


def test_time_of_an_evaluation_is_no_step_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Also where a line comes between two evaluations."""
    now = [0.0]
    monkeypatch.setattr(metrics.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(metrics, "flops_per_token", lambda *_: 1.0)
    speed = metrics.Speed(config(tmp_path), SimpleNamespace(device=torch.device("cpu"), network=None))
    speed.begin(0)
    for step in range(1, 11):
        now[0] += 2.0
        if step == 5:
            with speed.spent("evaluation"):
                now[0] += 100.0
        with speed.spent("data_s"):
            now[0] += 1.0
    found = speed.measured(10)
    assert (found["step_s"], found["data_s"], found["checkpoint_s"]) == (3.0, 10.0, 0.0)


def test_documents_are_not_masked_in_a_model_without_positions(tmp_path: Path) -> None:
    chosen = config(tmp_path, "data.document_mask=true", "model.attn_implementation=eager")
    small = replace(chosen.model, type="bloom", config={"n_layer": 1, "hidden_size": 8, "n_head": 1})
    told = refused(replace(chosen, model=small))
    assert told.startswith("this model cannot mask documents\n")


@pytest.mark.parametrize(
    ("kind", "words", "found"),
    [
        ("opt", (), "causal opt, batch.per_device = 8"),
        ("gpt2", ("train.objective=masked",), "masked bert, batch.per_device = 8"),
        ("gpt2", (), None),
        ("llama", (), None),
    ],
)
def test_documents_are_masked_or_the_run_is_refused(tmp_path: Path, kind: str, words: tuple, found: str | None) -> None:
    chosen = config(tmp_path, "data.document_mask=true", *words)
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    sizes |= {"opt": {"ffn_dim": 16, "word_embed_proj_dim": 16}, "llama": {"intermediate_size": 16}}.get(kind, {})
    kind = "bert" if words else kind
    chosen = replace(chosen, model=replace(chosen.model, type=kind, config=sizes))
    if found is None:
        build.build(chosen, tokenizer.load(chosen), with_weights=True)
    else:
        assert f"  found:  {found}\n" in refused(chosen)


def test_folders_that_are_no_model(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / "config.json").unlink()
    chosen = config(tmp_path / "a", f"model.name={folder}")
    told = refused(replace(chosen, model=replace(chosen.model, tokenizer=str(saved(tmp_path / "other")))))
    assert told.splitlines()[:2] == ["transformers cannot build the model", f"  where:  {folder}"]
    with pytest.raises(DrayError, match="the tokenizer cannot be read"):
        tokenizer.load(config(tmp_path / "b", f"model.tokenizer={tmp_path}/none"))


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (KeyError("x"), 78),
        (RuntimeError("size mismatch"), 78),
        (OSError("no file named model.safetensors"), 78),
        (OSError(errno.EIO, "Input/output error"), 69),
        (RuntimeError("I/O error: Stale file handle (os error 116)"), 69),
        (torch.OutOfMemoryError("CUDA out of memory"), 1),
        (DrayError("x", code=75), 75),
    ],
)
def test_what_a_library_raises_is_the_users_or_the_machines(raised: Exception, code: int) -> None:
    def read() -> None:
        with errors.refusing("it cannot be read", wanted="x", fix="y"):
            raise raised

    with pytest.raises(Exception) as stopped:  # noqa: PT011  any
        read()
    found = errors._known(stopped.value) or failures.unexpected_error(stopped.value)
    assert found.finding.code == code
    assert (found.problem == "it cannot be read") == (code == 78)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("model.safetensors", "x" * 4096, "transformers cannot build the model"),
        (
            "config.json",
            '{"model_type": "gpt2", "attn_pdrop": "x"}',
            "transformers cannot build the model",
        ),
        ("config.json", '{"model_type": "gpt2", "auto_map": 7}', "transformers cannot build the model"),
        ("config.json", "[1]", "transformers cannot build the model"),
    ],
)
def test_a_named_model_with_a_damaged_file(tmp_path: Path, name: str, content: str, message: str) -> None:
    folder = saved(tmp_path)
    own = saved(tmp_path / "other")
    (folder / name).write_text(content)
    told = refused(config(tmp_path / "a", f"model.name={folder}", f"model.tokenizer={own}"))
    assert told.splitlines()[:2] == [message, f"  where:  {folder}"]


def test_the_named_models_settings_can_be_overridden_and_its_weights_left(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    chosen = config(tmp_path / "a", f"model.name={folder}", "model.config.attn_pdrop=0.5")
    built = build.build(chosen, tokenizer.load(chosen), with_weights=True)
    assert (built.config.attn_pdrop, built.config.n_embd) == (0.5, 32)
    kept = build.build(config(tmp_path / "c"), tokenizer.load(chosen), with_weights=True).state_dict()
    assert all(torch.equal(weight, kept[name]) for name, weight in built.state_dict().items())
    fresh = config(tmp_path / "b", f"model.name={folder}", "model.weights=false", "train.seed=7", "model.dtype=bf16")
    other = build.build(fresh, tokenizer.load(chosen), with_weights=True)
    assert other.dtype == torch.bfloat16
    assert not torch.equal(other.transformer.h[0].mlp.c_fc.weight.float(), built.transformer.h[0].mlp.c_fc.weight)


def test_a_rank_that_has_no_weights_yet_has_the_same_model_with_its_ties(tmp_path: Path) -> None:
    chosen = config(tmp_path)
    tokens = tokenizer.load(chosen)
    empty, full = (build.build(chosen, tokens, with_weights=with_weights) for with_weights in (False, True))
    shapes = [
        {name: (weight.shape, weight.dtype) for name, weight in built.named_parameters()} for built in (empty, full)
    ]
    assert shapes[0] == shapes[1]
    assert empty.lm_head.weight is empty.transformer.wte.weight


@pytest.mark.parametrize("kind", ["gpt2", "llama", "bert"])
def test_a_model_that_a_checkpoint_overwrites_is_not_initialized(tmp_path: Path, kind: str) -> None:
    """What no checkpoint has, such as rotary frequencies, is the same as in a new one."""
    sizes = {"hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 300}
    sizes |= {} if kind == "gpt2" else {"intermediate_size": 16}
    chosen = config(tmp_path, *(("train.objective=masked",) if kind == "bert" else ()))
    chosen = replace(chosen, model=replace(chosen.model, type=kind, config=sizes))
    tokens = tokenizer.load(chosen)
    new, again = (build.build(chosen, tokens, with_weights=True, resumes=resumes) for resumes in (False, True))
    matrices = [name for name, weight in new.named_parameters() if weight.dim() > 1]
    assert not any(torch.equal(new.get_parameter(name), again.get_parameter(name)) for name in matrices)
    for name, buffer in new.named_buffers():
        assert torch.equal(buffer, again.get_buffer(name)), name


@pytest.mark.parametrize("words", [("lora.rank=2",), ("data.document_mask=true", "model.attn_implementation=eager")])
def test_a_model_whose_weights_are_needed_has_them_though_a_checkpoint_follows(tmp_path: Path, words: tuple) -> None:
    folder = saved(tmp_path)
    chosen = config(tmp_path / "a", f"model.name={folder}", *words)
    tokens = tokenizer.load(chosen)
    new, again = (build.build(chosen, tokens, with_weights=True, resumes=resumes) for resumes in (False, True))
    assert all(torch.equal(weight, again.get_parameter(name)) for name, weight in new.named_parameters())


def test_a_resumed_model_has_the_generation_config_of_its_base(tmp_path: Path) -> None:
    folder = saved(tmp_path)
    (folder / "generation_config.json").write_text('{"temperature": 0.25, "do_sample": true}')
    chosen = config(tmp_path / "a", f"model.name={folder}")
    built = build.build(chosen, tokenizer.load(chosen), with_weights=True, resumes=True)
    assert built.generation_config.temperature == 0.25


@pytest.mark.parametrize(
    ("words", "small", "memory", "device"),
    [
        ((), 1, 1 << 30, "meta"),
        ((), 1 << 30, 1 << 30, "cpu"),  # it has the same weights on all machines
        ((), 1, 1 << 10, "cpu"),
        (("lora.rank=2",), 1, 1 << 30, "cpu"),
    ],
)
def test_a_large_new_model_is_initialized_on_a_gpu_with_room_for_two(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple, small: int, memory: int, device: str
) -> None:
    """A base of LoRA is not: its weights are drawn again at each start."""
    monkeypatch.setattr(build.head, "check", lambda *_: None)
    monkeypatch.setattr(build, "_SMALL", small)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=memory))
    chosen = config(tmp_path, *words)
    network = build.build(chosen, tokenizer.load(chosen), with_weights=True, device=torch.device("meta"))
    assert network.device.type == device


ROOM = """
import os, sys
import torch
from dray.train.data import tokenizer
from dray.train.model import build
from dray.train.config import read
config = read(sys.argv[1])
tokens = tokenizer.load(config)
def memory():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
before = memory()
network = build.build(config, tokens, with_weights=sys.argv[2] == "with_weights")
print((memory() - before) / sum(weight.numel() * 4 for weight in network.parameters()))
"""


@pytest.mark.slow
def test_a_rank_that_has_no_weights_yet_has_no_memory_for_them(tmp_path: Path) -> None:
    plan = tmp_path / "run" / "attempt-1" / "plan.json"
    config(tmp_path, "model.config.n_embd=1024", "model.config.n_layer=6")  # 300 MB
    shares = [
        float(subprocess.check_output([sys.executable, "-c", ROOM, plan, which], text=True))
        for which in ("with_weights", "empty")
    ]
    assert shares[0] > 0.9
    assert shares[1] < 0.1


def test_biases_and_norms_are_not_drawn_to_zero(tmp_path: Path) -> None:
    chosen = config(tmp_path, "train.weight_decay=0.1", "train.betas=[0.8, 0.95]", "train.eps=1e-6")
    built = build.build(chosen, tokenizer.load(chosen), with_weights=True)
    made = optimizer.adamw(built.parameters(), chosen)
    assert [group["weight_decay"] for group in made.param_groups] == [0.1, 0.0]
    assert {weight.dim() for weight in made.param_groups[1]["params"]} == {1}
    assert sum(len(group["params"]) for group in made.param_groups) == len(list(built.parameters()))
    assert (made.defaults["betas"], made.defaults["eps"]) == ((0.8, 0.95), 1e-6)


def test_the_loss_scale_ends_at_its_minimum() -> None:
    """The host learns of it where it reads the numbers the next time, and not from a number read between."""
    scaler, good = Scaler(4.0, torch.device("cpu")), torch.tensor(1.0)
    with syncs.guard():
        left_out = [scaler.update(good) for _ in range(1000)]
    assert not torch.stack(left_out).any()
    assert scaler.state() == [4.0, 0, 0]
    scaler.observe(*scaler.numbers.tolist())
    assert scaler.state() == [8.0, 0, 1000]
    for norm in ("nan", "inf", "-inf"):
        assert scaler.update(torch.tensor(float(norm))) == 1.0
    scaler.observe(*scaler.numbers.tolist())
    assert scaler.state() == [1.0, 3, 0]
    again = Scaler(4.0, torch.device("cpu"))
    again.load(scaler.state())
    assert again.numbers.tolist() == scaler.numbers.tolist()
    scaler.update(good * math.inf)
    scaler.update(good)
    with pytest.raises(DrayError, match="fp16's loss scale is at its minimum") as stopped:
        scaler.observe(*scaler.numbers.tolist())
    assert stopped.value.finding.code == 1
    assert scaler.state() == [1.0, 3, 1]


def test_a_step_that_fp16_leaves_out_changes_nothing(tmp_path: Path) -> None:
    """Neither weights nor averages nor AdamW's own count, whatever the gradients are."""
    chosen = config(tmp_path, "train.precision=fp16", "train.initial_loss_scale=4.0")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        module = torch.nn.Module()
        module.network = torch.nn.Linear(3, 2)
        strategy = ddp.Ddp(module, chosen, torch.device("cpu"))
    finally:
        dist.destroy_process_group()
    seen = []
    for gradient in (4.0, math.inf, math.nan, 4.0):
        for weight in module.network.parameters():
            weight.grad = torch.full_like(weight, gradient)
        norm = strategy.update(lr=0.5)
        assert norm.isfinite() == math.isfinite(gradient)
        states = [strategy._optimizers[0].state[weight] for weight in module.network.parameters()]
        parts = [*module.network.parameters(), *(one[name] for one in states for name in sorted(one))]
        seen.append(torch.cat([part.detach().flatten() for part in parts]))
        assert [float(one["step"]) for one in states] == [1 + (len(seen) > 3)] * 2
    assert torch.equal(seen[0], seen[1])
    assert torch.equal(seen[0], seen[2])
    assert not torch.equal(seen[0], seen[3])
    assert strategy.scaler.numbers.tolist() == [1.0, 2, 1, 0]


FETCH = """
import sys
from dray.train.data import formats, hub, resolve
from dray.train.errors import guarded
def fetch(kind, name):
    if kind == "model":
        print(hub.model(name, "main", weights=True, code=False))
        return
    reading = formats.Reading("text")
    pieces = resolve.dataset(name, "train").pieces(reading)
    print([text for piece in pieces for text in formats.documents(piece, reading)])
guarded(fetch, *sys.argv[1:])
"""


class TestHub:
    """Against a hub of our own: the real one is not reached from here."""

    @pytest.fixture
    def hub(self, tmp_path: Path):
        import pyarrow as pa
        import pyarrow.parquet as pq

        pq.write_table(pa.table({"text": ["one", "two"]}), tmp_path / "t.parquet")
        table = (tmp_path / "t.parquet").read_bytes()
        tables = {"small/train/0000.parquet": table, "huge/partial-train/0000.parquet": table}

        with hubs.serving({"datasets/me/mine": tables}) as address:

            def fetch(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
                place = {"HF_ENDPOINT": address, "HF_HOME": f"{tmp_path}/hf", "PATH": "/bin"}
                argv = [sys.executable, "-c", FETCH, *words]
                return subprocess.run(
                    argv, env={**place, **env}, capture_output=True, text=True, check=False, timeout=120
                )

            yield fetch

    @pytest.mark.slow
    def test_a_dataset_is_fetched_once_and_read_offline(self, hub) -> None:
        first = hub("data", "hub:me/mine/small")
        assert (first.stdout, first.returncode) == ("['one', 'two']\n", 0), first.stderr
        again = hub("data", "hub:me/mine/small", HF_HUB_OFFLINE="1", HF_ENDPOINT="http://127.0.0.1:9")
        assert again.stdout == first.stdout, again.stderr

    @pytest.mark.parametrize(
        ("words", "env", "said"),
        [
            (("data", "hub:me/mine/large"), {}, "dataset me/mine has no such split"),
            pytest.param(
                ("data", "hub:me/mine/huge:partial-train"),
                {},
                "no such split, or the hub has converted only a part of it\n"
                "  wanted: huge/partial-train/*.parquet\n"
                "  found:  small/train\n"
                "  fix:    name a subset and a split of these; or name its original files: hf://datasets/me/mine/",
                marks=pytest.mark.slow,
            ),
            pytest.param(("data", "hub:mine"), {}, "the dataset's name is incomplete", marks=pytest.mark.slow),
            pytest.param(
                ("data", "hub:me/none"),
                {},
                "check its name and revision; a private one needs HF_TOKEN exported",
                marks=pytest.mark.slow,
            ),
            pytest.param(
                ("data", "hub:me/gated"),
                {},
                "accept the terms on its page, and export HF_TOKEN",
                marks=pytest.mark.slow,
            ),
            pytest.param(
                ("model", "me/gated"), {}, "accept the terms on its page, and export HF_TOKEN", marks=pytest.mark.slow
            ),
            (("model", "me/none"), {}, "model me/none is missing"),
            pytest.param(("model", "me/none"), {"HF_HUB_OFFLINE": "1"}, "dray data prefetch", marks=pytest.mark.slow),
            (("data", "hub:me/none"), {"HF_HUB_OFFLINE": "1"}, "HF_HUB_OFFLINE is set, and "),
        ],
    )
    def test_what_is_missing(self, hub, words: tuple[str, ...], env: dict[str, str], said: str) -> None:
        done = hub(*words, **env)
        assert said in done.stderr
        assert "Traceback" not in done.stderr
        assert done.returncode == 78
