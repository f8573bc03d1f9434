"""Memory and speed: parts that have the machine to themselves."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from processes import call
from right import DETERMINISTIC
from rows import Row, judged, left_out, tried
from training import HERE, Here, look, step, timed, without_triton

LOSSES = ("full", "chunked", "triton")
MFU = {"GPT-2 124M": 0.45, "Llama 1B": 0.50}  # on one H100 or H200
STOCK, HELD = 1.5, 0.1
SHAPES: dict[str, dict[str, Any]] = json.loads((HERE / "shapes.json").read_text(encoding="utf-8"))
"""By name: what differs from plan.json, and what the planner estimates for it, in GB: of its own, and for each row."""
ATTENTION = {"64 x 12 heads x 1,024 x 64": (64, 12, 1024, 64), "4 x 32 heads x 4,096 x 64": (4, 32, 4096, 64)}
"""What the two models' attention works on."""


def _small(changes: dict[str, Any]) -> dict[str, Any]:
    """The same on a CPU within a second."""
    sizes = {
        "n_layer": 2, "n_embd": 32, "n_head": 2, "n_positions": 32, "vocab_size": 512, "num_hidden_layers": 2,
        "hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 32,
    }  # fmt: skip
    config = {name: sizes.get(name, value) for name, value in changes["model.config"].items()}
    return {**changes, "model.config": config, "data.sequence_length": 32, "batch.per_device": 2}


def _changes(here: Here, name: str, **more: Any) -> dict[str, Any]:  # noqa: ANN401
    changes = {**SHAPES[name]["changes"], **{key.replace("_", ".", 1): value for key, value in more.items()}}
    changes["batch.per_device"] = sized(here, name)[0]
    return _small(changes) if here.on_cpu else changes


def sized(here: Here, name: str) -> tuple[int, float]:
    """Rows of a batch that leave a fifth of the memory, and the planner's estimate for them in GB."""
    own, row = SHAPES[name]["estimate_gb"]
    rows = SHAPES[name]["changes"]["batch.per_device"]
    while not here.on_cpu and rows > 1 and (own + rows * row) * 1e9 > 0.8 * here.memory:
        rows //= 2
    return rows, own + rows * row


def machine(here: Here) -> Iterator[Row]:
    """What it is, and the most that its matrix products reach."""
    about, tflops = call(_machine, here.variant, limit=here.limit(60), log=here.log("machine"))
    yield judged("machine", about, "", f"{tflops:.0f} TFLOP/s, bf16, 8,192 cubed" if tflops else "", good=None)
    for what, shape in ATTENTION.items() if not here.on_cpu else ():
        for kind in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
            yield from tried("machine", f"{kind}, {what}", partial(_attention, here, kind, what, shape))


def _attention(here: Here, kind: str, what: str, shape: tuple[int, ...]) -> Iterator[Row]:
    took = call(_backend, kind, shape, "cuda", limit=here.limit(60), log=here.log(f"attention-{kind}"))
    yield judged("machine", f"{kind}, {what}", "", f"{took * 1e3:.2f} ms forward and backward, bf16", good=None)


def _backend(kind: str, shape: tuple[int, ...], device: str) -> float:
    """Seconds. Which of these it takes by itself, torch decides by its version and the GPU's, and not by trial."""
    import torch  # noqa: PLC0415
    from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: PLC0415

    wait: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None
    tensors = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    def once() -> None:
        torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True).sum().backward()  # type: ignore[no-untyped-call]

    with sdpa_kernel([getattr(SDPBackend, kind)]):
        for _ in range(3):
            once()
        wait()
        began = time.monotonic()
        for _ in range(10):
            once()
        wait()
    return (time.monotonic() - began) / 10


def _machine(variant: str) -> tuple[str, float]:
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    about = f"torch {torch.__version__}, transformers {transformers.__version__}"
    if variant == "cpu":
        return f"a CPU; {about}", 0.0
    from dray.checks.device import ceiling  # noqa: PLC0415

    found = torch.cuda.get_device_properties(0)
    about = f"{found.name}, {found.total_memory / 2**30:.0f} GiB; {about}"
    return about, ceiling(torch.device("cuda", 0), torch.bfloat16)


def memory(here: Here) -> Iterator[Row]:
    """The most of the allocator's memory in three steps, beside the planner's estimate."""
    for name in list(SHAPES)[: 1 if here.on_cpu else None]:
        yield from tried("memory", name, partial(_memory, here, name))


def _memory(here: Here, name: str) -> Iterator[Row]:
    rows, estimate = sized(here, name)
    seen = look(here, f"memory-{name}", _changes(here, name), _peak, limit=120)
    if not seen:
        yield judged("memory", name, "", "three steps, without a figure on a CPU", good=None)
        return
    shown = f"{seen:.1f} GB, {estimate / seen:.2f} of it estimated"
    good = abs(estimate / seen - 1) <= 0.15
    yield judged("memory", f"{name}, batch {rows}", f"{estimate:.1f} GB to 15 %", shown, good=good)


def _peak(loop: Any) -> float:  # noqa: ANN401  dray's Loop
    import torch  # noqa: PLC0415

    loop.strategy.network.train()
    for number in range(3):
        step(loop, number)
    return torch.cuda.max_memory_allocated() / 1e9 if loop.strategy.device.type == "cuda" else 0.0


def speed(here: Here) -> Iterator[Row]:
    """Tokens a second and MFU of the trainer's own lines, the first ones left out; compiled first: it matters most."""
    for compiled in (True, False):
        for name in MFU:
            found: list[float] = []
            for loss in LOSSES:
                what = f"{name}, {'compiled' if compiled else 'eager'}, {loss}"
                if here.on_cpu and (compiled or loss == "chunked"):
                    continue
                if loss == "triton" and (why := without_triton(here)):
                    yield left_out("speed", what, why)
                    continue
                changes = {"train_compile": compiled, "train_loss": loss}
                yield from tried("speed", what, partial(_speed, here, name, what, changes, found))
            if found and compiled != here.on_cpu and name == "GPT-2 124M":
                what = f"{name}, the best of these beside the stock Trainer's"
                yield from tried("speed", what, partial(_beside, here, name, what, max(found)))
    if not here.on_cpu:  # where it has no price
        os.environ |= DETERMINISTIC
        what = "GPT-2 124M, eager, full, deterministic"
        changes = {"train_loss": "full", "train_deterministic": True}
        yield from tried("speed", what, partial(_speed, here, "GPT-2 124M", what, changes, []))


def _speed(here: Here, name: str, what: str, changes: dict[str, Any], found: list[float]) -> Iterator[Row]:
    """One run, whose tokens a second are also added to what was found."""
    steps = 6 if here.on_cpu else 24
    changes = _changes(here, name, **changes, train_steps=steps, train_log_every=steps // 3)
    lines = look(here, f"speed-{what}".replace(" ", "-"), changes, timed, limit=180)
    tokens = statistics.median(line["tokens_per_s"] for line in lines[2:])
    found.append(tokens)
    mfu, peak = lines[-1].get("mfu"), lines[-1]["memory_gb"]
    shown = f"{tokens:,.0f} tokens/s, {peak:.1f} GB" + (f", MFU {mfu:.1%}" if mfu else "")
    good = mfu >= MFU[name] if mfu and changes.get("train.compile") else None
    yield judged("speed", what, f"MFU {MFU[name]:.0%}", shown, good=good)


def _beside(here: Here, name: str, what: str, best: float) -> Iterator[Row]:
    """The stock Trainer with the same switches, in the same minute."""
    if find_spec("accelerate") is None:
        yield left_out("speed", what, "this Python lacks accelerate")
        return
    changes = _changes(here, name)
    steps = 4 if here.on_cpu else 24
    stock = call(_stock, here.variant, changes, here.folder, steps, limit=here.limit(180), log=here.log("stock"))
    good = best / stock >= STOCK if not here.on_cpu else None
    yield judged("speed", what, f"{STOCK}x", f"{best / stock:.2f}x of {stock:,.0f} tokens/s", good=good)


def _stock(variant: str, changes: dict[str, Any], folder: str, steps: int) -> float:
    """Tokens a second in the second half of the steps."""
    import torch  # noqa: PLC0415
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments  # noqa: PLC0415

    length, batch = changes["data.sequence_length"], changes["batch.per_device"]
    kind = changes.get("model.type", "gpt2")
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **changes["model.config"]))
    ids = torch.randint(256, (batch * steps, length))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    ends: list[float] = []

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_end(self, *_: object, **__: object) -> None:
            if variant != "cpu":
                torch.cuda.synchronize()
            ends.append(time.monotonic())

    arguments = TrainingArguments(
        output_dir=f"{folder}/stock", per_device_train_batch_size=batch, max_steps=steps, learning_rate=1e-4,
        bf16=True, torch_compile=variant != "cpu", save_strategy="no", report_to=[], disable_tqdm=True,
        logging_steps=steps, use_cpu=variant == "cpu",
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Clock()]).train()
    half = steps // 2
    return (steps - half) * batch * length / (ends[-1] - ends[half - 1])


def checkpoint(here: Here) -> Iterator[Row]:
    """How long a step is held up, beside a save that is waited for."""
    name = "GPT-2 124M"
    held, whole, plain, size = look(here, "checkpoint", _changes(here, name, train_precision="bf16"), _held, limit=120)
    aim = f"less than {HELD} of a save that is waited for"
    shown = f"{held * 1e3:.0f} ms of {whole * 1e3:.0f} ms, {held / whole:.2f}; {size / 1e9:.2f} GB"
    shown += f", a step of {plain * 1e3:.0f} ms"
    yield judged("checkpoint", "a step is held up", aim, shown, good=held / whole < HELD if not here.on_cpu else None)
    yield judged("checkpoint", "time to rename", "", f"{whole:.2f} s, {size / whole / 1e9:.2f} GB/s", good=None)


def _held(loop: Any) -> tuple[float, float, float, int]:  # noqa: ANN401  dray's Loop
    """Seconds that a step is longer, that a whole save takes, and that a step takes; and the bytes."""
    import torch  # noqa: PLC0415

    on_gpu = loop.strategy.device.type == "cuda"
    loop.strategy.network.train()
    read = loop._read(0)

    def took(do: Callable[[], object]) -> float:
        if on_gpu:
            torch.cuda.synchronize()
        began = time.monotonic()
        do()
        if on_gpu:
            torch.cuda.synchronize()
        return time.monotonic() - began

    number = iter(range(1, 100))

    def saved(*, wait: bool) -> None:
        loop.checkpoints.save(next(number), None)
        if wait:
            loop.checkpoints.settle()
        else:
            step(loop, 0, read)

    for _ in range(3):
        step(loop, 0, read)
    plain = statistics.median(took(lambda: step(loop, 0, read)) for _ in range(5))
    took(lambda: saved(wait=True))  # which also makes the buffers
    wholes, longer = [], []
    for _ in range(3):
        wholes.append(took(lambda: saved(wait=True)))
        longer.append(took(lambda: saved(wait=False)) - plain)
        loop.checkpoints.settle()
    newest = max(Path(loop.config.checkpoints).glob("step-*"), key=lambda path: path.stat().st_mtime)
    size = sum(file.stat().st_size for file in newest.iterdir())
    return max(0.0, statistics.median(longer)), statistics.median(wholes), plain, size


PARTS: dict[str, tuple[Callable[[Here], Iterator[Row]], float]] = {
    "machine": (machine, 90), "checkpoint": (checkpoint, 150), "memory": (memory, 260), "speed": (speed, 600),
}  # fmt: skip
"""Each with its limit in seconds."""
