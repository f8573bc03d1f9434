"""Speed, memory and checkpoints: parts that have the machine to themselves."""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import handwritten
from processes import call
from rows import Row, judged, left_out, tried
from training import HERE, Here, looks, step

GPT2, LLAMA = "GPT-2 124M", "Llama 1B"
AIMS = {GPT2: 0.45, LLAMA: 0.50}  # MFU, attention counted whole, on one H100 or H200
STOCK, HELD = 1.5, 0.1
WARM, STEPS = 8, 48  # steps that are not measured, and those that are
LONGEST = 10  # kernels that are named
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


def _changes(here: Here, name: str, changes: dict[str, Any]) -> dict[str, Any]:
    merged = {**SHAPES[name]["changes"], **changes}
    return _small(merged) if here.on_cpu else merged


def machine(here: Here) -> Iterator[Row]:
    """What it is, and the most that its matrix products reach."""
    about, tflops = call(_machine, here.variant, limit=here.limit(60), log=here.log("machine"))
    shown = f"{tflops:.0f} TFLOP/s, bf16, 8,192 cubed" if tflops else ""
    yield judged("machine", about, "", shown, good=None, tflops=tflops)
    for what, shape in ATTENTION.items() if not here.on_cpu else ():
        for kind in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
            yield from tried("machine", f"{kind}, {what}", partial(_attention, here, kind, what, shape))


def _attention(here: Here, kind: str, what: str, shape: tuple[int, ...]) -> Iterator[Row]:
    took = call(_backend, kind, shape, "cuda", limit=here.limit(60), log=here.log(f"attention-{kind}"))
    yield judged(
        "machine", f"{kind}, {what}", "", f"{took * 1e3:.2f} ms forward and backward, bf16", good=None, ms=took * 1e3
    )


def _backend(kind: str, shape: tuple[int, ...], device: str) -> float:
    """Seconds. Which of these it takes by itself, torch decides by its version and the GPU's, and not by trial."""
    import torch  # noqa: PLC0415
    from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: PLC0415

    wait: Callable[[], object] = torch.cuda.synchronize if device == "cuda" else lambda: None
    tensors = [torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]

    change = torch.ones(shape, device=device, dtype=torch.bfloat16)

    def once() -> None:
        found = torch.nn.functional.scaled_dot_product_attention(*tensors, is_causal=True)
        torch.autograd.grad(found, tensors, change)

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
    """The most of the allocator's memory in three compiled steps, beside the planner's estimate."""
    for name in (GPT2, LLAMA)[: 1 if here.on_cpu else None]:
        yield from tried("memory", name, partial(_memory, here, name))


def _memory(here: Here, name: str) -> Iterator[Row]:
    rows, estimate = SHAPES[name]["changes"]["batch.per_device"], SHAPES[name]["estimate_gb"]
    changes = {"train.compile": not here.on_cpu, "train.loss": "full"}
    peak = next(looks(here, f"memory-{name}".replace(" ", "-"), _changes(here, name, changes), _peak))
    if here.on_cpu:
        yield judged("memory", name, "", "three steps, without a figure on a CPU", good=None)
        return
    shown = f"{peak:.1f} GB, {estimate / peak:.2f} of it estimated"
    good = abs(estimate / peak - 1) <= 0.1
    what = f"{name}, compiled, batch {rows}"
    yield judged("memory", what, f"{estimate:.1f} GB to 10 %", shown, good=good, gb=peak, estimated_gb=estimate)


def _peak(loop: Any) -> Iterator[float]:  # noqa: ANN401  dray's Loop
    import torch  # noqa: PLC0415

    loop.strategy.network.train()
    for number in range(3):
        step(loop, number)
    yield torch.cuda.max_memory_allocated() / 1e9 if loop.strategy.device.type == "cuda" else 0.0


class Speed(NamedTuple):
    """A row: a model, how it differs from shapes.json, and whether it has an aim."""

    part: str
    model: str
    what: str
    changes: dict[str, Any]
    aim: bool = False
    kernels: bool = False


def _longer(length: int) -> dict[str, Any]:
    """Llama with rows of this length, and the same tokens in a batch."""
    config = {**SHAPES[LLAMA]["changes"]["model.config"], "max_position_embeddings": length}
    return {"data.sequence_length": length, "batch.per_device": 4 * 4096 // length, "model.config": config}


SPEEDS = (
    Speed("gpt2", GPT2, "compiled, full", {}, aim=True, kernels=True),
    Speed("llama", LLAMA, "compiled, full", {}, aim=True),
    Speed("llama-2048", LLAMA, "compiled, full, 8 x 2,048", _longer(2048)),
    Speed("llama-8192", LLAMA, "compiled, full, 2 x 8,192", _longer(8192)),
    Speed("fsdp", GPT2, "compiled, full, fsdp", {"train.strategy": "fsdp"}),
    Speed("eager", GPT2, "eager, full, 32 rows", {"train.compile": False, "batch.per_device": 32}),
)


def _speed(speed: Speed, here: Here) -> Iterator[Row]:
    """Tokens a second of the trainer's own loop, without its first steps."""
    warm, steps = (2, 4) if here.on_cpu else (WARM, STEPS)
    changes = {
        "train.compile": not here.on_cpu, "train.loss": "full", "train.steps": warm + steps, "train.log_every": 16,
        **speed.changes,
    }  # fmt: skip
    seen = looks(here, f"speed-{speed.part}", _changes(here, speed.model, changes), _timed, warm, limit=240)
    timing = next(seen)
    Path(here.folder, f"{speed.part}.json").write_text(json.dumps(timing))
    aim = AIMS[speed.model]
    good = timing["mfu"] >= aim if speed.aim and timing["mfu"] else None
    what = f"{speed.model}, {speed.what}"
    yield judged(speed.part, what, f"MFU {aim:.0%}", _shown(timing), good=good, **timing)
    if speed.kernels:
        for name, milliseconds in next(seen):
            yield judged(speed.part, f"kernel {name[:80]}", "", f"{milliseconds:.3f} ms a step", good=None, kernel=name,
                         ms=milliseconds)  # fmt: skip
    list(seen)  # how it ended


def _shown(timing: dict[str, Any]) -> str:
    low, middle, high = timing["ms"]
    parts = [
        f"{timing['tokens_per_s']:,.0f} tokens/s",
        f"{low:.2f} / {middle:.2f} / {high:.2f} ms (least, median, most)",
    ]
    if timing["mfu"]:
        parts.append(f"MFU {timing['mfu']:.1%} with attention counted whole, {timing['mfu_causal']:.1%} causal")
    parts.append(f"first step {timing['first_s']:.1f} s longer (compiles)")
    if timing["allocated_gb"]:
        parts.append(f"{timing['allocated_gb']:.1f} GB, {timing['reserved_gb']:.1f} reserved")
    return ", ".join(parts)


def _timed(loop: Any, warm: int) -> Iterator[Any]:  # noqa: ANN401  dray's Loop
    """The figures of its steps, and then the longest kernels of one more."""
    import torch  # noqa: PLC0415

    clock, original = handwritten.Clock(loop.strategy.device), loop._step

    def marked(*arguments: Any) -> Any:  # noqa: ANN401
        norm = original(*arguments)
        clock.mark()
        return norm

    loop._step = marked
    clock.mark()
    loop.run(lambda _: None)
    loop._step = original
    config = loop.strategy.network.config.get_text_config()
    length = loop.config.data.sequence_length
    attention = 12 * config.num_hidden_layers * config.hidden_size * length
    yield clock.figures(warm, loop.config.step_tokens, loop.speed._flops(length), attention, loop.speed._peak)
    on_gpu = loop.strategy.device.type == "cuda"
    read = loop._read(0)
    activity = torch.profiler.ProfilerActivity.CUDA if on_gpu else torch.profiler.ProfilerActivity.CPU
    with torch.profiler.profile(activities=[activity]) as seen:
        step(loop, 0, read)
        if on_gpu:
            torch.cuda.synchronize()
    kernels = [
        (event.key, (event.self_device_time_total if on_gpu else event.self_cpu_time_total) / 1e3)
        for event in seen.key_averages()
    ]
    yield sorted(kernels, key=lambda kernel: -kernel[1])[:LONGEST]


def by_hand(here: Here) -> Iterator[Row]:
    """The same model as a person writes it for one GPU, compiled, on the same rows."""
    yield from tried("handwritten", f"{GPT2}, compiled", partial(_by_hand, here))


def _by_hand(here: Here) -> Iterator[Row]:
    rows, length = (2, 32) if here.on_cpu else (SHAPES[GPT2]["changes"]["batch.per_device"], 1024)
    warm, steps = (2, 4) if here.on_cpu else (WARM, STEPS)
    timing = call(
        handwritten.train, rows, length, warm, steps, here.on_cpu, limit=here.limit(120), log=here.log("handwritten")
    )
    yield judged("handwritten", f"{GPT2}, compiled", "", _shown(timing), good=None, **timing)
    yield from _beside(here, "handwritten", timing, None)


def _beside(here: Here, part: str, timing: dict[str, Any], aim: float | None) -> Iterator[Row]:
    """Dray's own speed in the same minutes, if it is known."""
    dray = Path(here.folder, "gpt2.json")
    if not dray.exists():
        return
    ratio = json.loads(dray.read_text())["tokens_per_s"] / timing["tokens_per_s"]
    good = ratio >= aim if aim and not here.on_cpu else None
    yield judged(part, f"{GPT2}, dray's tokens/s beside it", f"{aim}x", f"{ratio:.2f}x", good=good, ratio=ratio)


def stock(here: Here) -> Iterator[Row]:
    """The stock Trainer with the same switches, in the same minutes."""
    what = f"{GPT2}, compiled"
    if find_spec("accelerate") is None:
        yield left_out("stock", what, "this Python lacks accelerate")
        return
    yield from tried("stock", what, partial(_stock_row, here, what))


def _stock_row(here: Here, what: str) -> Iterator[Row]:
    warm, steps = (2, 4) if here.on_cpu else (WARM, STEPS)
    timing = call(
        _stock,
        here.variant,
        _changes(here, GPT2, {}),
        here.folder,
        warm,
        steps,
        limit=here.limit(120),
        log=here.log("stock"),
    )
    yield judged("stock", what, "", _shown(timing), good=None, **timing)
    yield from _beside(here, "stock", timing, STOCK)


def _stock(variant: str, changes: dict[str, Any], folder: str, warm: int, steps: int) -> dict[str, Any]:
    import torch  # noqa: PLC0415
    from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments  # noqa: PLC0415

    length, batch = changes["data.sequence_length"], changes["batch.per_device"]
    device = torch.device("cpu" if variant == "cpu" else "cuda")
    with device:  # a CPU takes many seconds to initialise it
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **changes["model.config"]))
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(256, (batch * (warm + steps), length))]
    clock = handwritten.Clock(device)

    class Marks(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, *_: object, **__: object) -> None:
            clock.mark()

        def on_step_end(self, *_: object, **__: object) -> None:
            clock.mark()

    arguments = TrainingArguments(
        output_dir=f"{folder}/stock", per_device_train_batch_size=batch, max_steps=warm + steps, learning_rate=1e-4,
        bf16=True, torch_compile=variant != "cpu", save_strategy="no", report_to=[], disable_tqdm=True,
        logging_steps=16, use_cpu=variant == "cpu",
    )  # fmt: skip
    Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Marks()]).train()
    flops, attention = handwritten.flops(model, model.config.n_layer, model.config.n_embd, length)
    return clock.figures(warm, batch * length, flops, attention, handwritten.peak(device))


def checkpoint(here: Here) -> Iterator[Row]:
    """What the first save takes, and how long a step is held up by the second."""
    changes = _changes(here, GPT2, {"train.compile": False, "batch.per_device": 8})
    seen = looks(here, "checkpoint", changes, _held)
    first = next(seen)
    shown = f"{first['seconds']:.2f} s, {first['pinned_gb']:.2f} GB of pinned memory"
    yield judged("checkpoint", "the first save, waited for", "", shown, good=None, **first)
    second = next(seen)
    held, whole, size = second["held_s"], second["whole_s"], second["gb"]
    aim = f"less than {HELD} of a save that is waited for"
    shown = (
        f"{held * 1e3:.0f} ms of {whole * 1e3:.0f} ms, {held / whole:.2f}; a step of {second['step_s'] * 1e3:.0f} ms"
    )
    good = held / whole < HELD if not here.on_cpu else None
    yield judged("checkpoint", "a step is held up", aim, shown, good=good, **second)
    yield judged(
        "checkpoint", "time to rename", "", f"{whole:.2f} s, {size / whole:.2f} GB/s of {size:.2f} GB", good=None
    )
    list(seen)  # how it ended


def _held(loop: Any) -> Iterator[dict[str, float]]:  # noqa: ANN401  dray's Loop
    """Seconds and pinned memory of the first save; and what the second costs a step."""
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

    def first() -> None:
        loop.checkpoints.save(1, None)
        loop.checkpoints.settle()

    def second() -> None:
        loop.checkpoints.save(2, None)
        step(loop, 0, read)

    for _ in range(3):
        step(loop, 0, read)
    plain = statistics.median(took(lambda: step(loop, 0, read)) for _ in range(5))
    staging = loop.checkpoints._staging  # whose memory is there since the start
    yield {"seconds": took(first), "pinned_gb": staging._buffer.nbytes / 1e9 if staging._pinned else 0.0}
    began = time.monotonic()
    held = max(0.0, took(second) - plain)
    loop.checkpoints.settle()
    whole = time.monotonic() - began
    newest = Path(loop.config.checkpoints, "step-2")
    size = sum(file.stat().st_size for file in newest.iterdir())
    yield {"held_s": held, "whole_s": whole, "step_s": plain, "gb": size / 1e9}


Part = tuple[Callable[[Here], Iterator[Row]], float]
_SPEEDS: dict[str, Part] = {speed.part: (partial(_speed, speed), 240) for speed in SPEEDS}
FIRST: dict[str, Part] = {
    "machine": (machine, 90), "gpt2": _SPEEDS.pop("gpt2"), "handwritten": (by_hand, 120), "stock": (stock, 120),
    "llama": _SPEEDS.pop("llama"),
}  # fmt: skip
"""What is worth most, each with its limit in seconds: three and a half minutes."""
THEN: dict[str, Part] = {"checkpoint": (checkpoint, 120), "memory": (memory, 120), **_SPEEDS}
