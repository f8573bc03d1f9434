"""Whether it is right: parts that run beside one another, since none of them measures time."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from processes import call
from rows import Row, judged, left_out, tried
from training import HERE, Here, joined, look, planned, step, train, train_two

GPT2 = {
    "n_layer": 2, "n_embd": 128, "n_head": 2, "n_positions": 64,
    "resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0,
}  # fmt: skip
LLAMA = {
    "num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64,
}  # fmt: skip
DOCUMENTS: dict[str, Any] = {
    "model.type": "llama", "model.config": {**LLAMA, "max_position_embeddings": 512},
    "data.document_mask": True, "data.sequence_length": 512,  # of several documents a row
}  # fmt: skip
MIXTRAL = {**LLAMA, "num_local_experts": 4, "router_aux_loss_coef": 0.1}
SAME = 5e-3  # of a loss near 5.5: TF32 rounds products to 10 bits, and nothing else differs
HALF = 5e-2
TWO = "two"
FLASH = ("flash", "sdpa", "attn_fwd")  # torch's own kernels, cuDNN's, and AOTriton's for AMD
SYNC = "called a synchronizing"  # not torch's other warning: that it does not see all synchronizing operations
DETERMINISTIC = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "NCCL_ALGO": "Ring", "NCCL_PROTO": "Simple"}
Case = tuple[str, str, dict[str, Any], float]
CASES: tuple[Case, ...] = (
    *(
        ("strategies", f"{strategy}, fp32", {"train.strategy": strategy}, SAME)
        for strategy in ("ddp", "fsdp", "zero1", "zero2", "zero3")
    ),
    ("strategies", "ddp, bf16", {"train.precision": "bf16"}, HALF),
    ("strategies", "fsdp, bf16", {"train.strategy": "fsdp", "train.precision": "bf16"}, HALF),
    ("fp16", "ddp, fp16", {"train.precision": "fp16"}, HALF),
    ("losses", "chunked, fp32", {"train.loss": "chunked", "train.precision": "fp32"}, SAME),
)
"""Parts, what runs in them, how it differs from the CPU's run, and by how much the losses may."""


def checks(here: Here) -> Iterator[Row]:
    """`python -m dray.checks`, as in an image."""
    del here
    ended = subprocess.run([sys.executable, "-m", "dray.checks", "--json"], capture_output=True, text=True, check=False)
    found = json.loads(ended.stdout)
    failed = [f"{one['problem']}: {one['found']}" for one in found["results"] if one["level"] == "error"]
    seen = f"{found['ok']} ok, {found['skip']} skipped, {found['error']} failed"
    yield judged("checks", "python -m dray.checks", "none fails", "; ".join([seen, *failed]), good=not failed)


def runner(here: Here) -> Iterator[Row]:
    """A run as a node starts it: runner, preflight, rank supervisor, trainer."""
    command = [sys.executable, f"{HERE}/training.py", "{plan}"]
    plan = planned(here, "runner", {"command": command})
    names = json.loads(plan.read_text())["world"]["identity"]
    env = {names["node"]: "0", names["nodes"]: "1", names["name"]: "node1", names["cpus"]: str(os.cpu_count())}
    env |= {"OMP_NUM_THREADS": "1"} if here.on_cpu else {}
    ended = subprocess.run(  # noqa: S603  our own module
        [sys.executable, "-m", "dray.runner", str(plan)],
        env={**os.environ, **env}, cwd=plan.parent, capture_output=True, text=True, check=False,
    )  # fmt: skip
    report = plan.parent / "preflight" / "report.json"
    seen = f"exit code {ended.returncode}, {'a' if report.exists() else 'no'} report of the preflight"
    good = ended.returncode == 0 and report.exists()
    last = [] if good else (ended.stdout + ended.stderr).splitlines()[-6:]
    yield judged("preflight", "a run by dray.runner", "exit code 0", "; ".join([seen, *last]), good=good)


def _near(
    part: str, what: str, found: list[float], wanted: list[float], within: float, *, beside: str = "the CPU's"
) -> Row:
    apart = max(abs(one - other) for one, other in zip(found, wanted, strict=True))
    good = bool(found) and math.isfinite(apart) and apart <= within
    return judged(part, what, f"{beside} losses to {within:g}", f"{apart:.1e} apart, {found[-1]:.4f}", good=good)


def losses(here: Here) -> Iterator[Row]:
    """Three steps of each strategy beside the CPU's, and of Muon."""
    muon = {"train.optimizer": "muon"}
    wanted = train(here, "muon-cpu", {**muon, "variant": "cpu"}).losses
    for strategy in ("ddp", "fsdp"):
        case: Case = ("strategies", f"{strategy}, muon", {**muon, "train.strategy": strategy}, HALF)
        yield from tried("strategies", case[1], partial(_case, here, case, wanted))
    wanted = train(here, "losses-cpu", {"variant": "cpu"}).losses
    for case in CASES:
        part, what, *_ = case
        if what.startswith("zero") and find_spec("deepspeed") is None:
            yield left_out(part, what, "this Python lacks deepspeed")
        else:
            yield from tried(part, what, partial(_case, here, case, wanted))


def _case(here: Here, case: Case, wanted: list[float]) -> Iterator[Row]:
    part, what, changes, within = case
    found = train(here, f"losses-{what}".replace(" ", "-"), changes)
    yield _near(part, what, found.losses, wanted, within)
    if part == "fp16":
        scale, skipped = found.steps[-1].get("loss_scale", 0), found.steps[-1].get("skipped_steps")
        shown = f"scale {scale:g}, {skipped} steps left out"
        yield judged("fp16", "loss scale", "a scale above 1", shown, good=scale > 1)


def fp8(here: Here) -> Iterator[Row]:
    """Products of 8 bits by torchao."""
    if find_spec("torchao") is None:
        yield left_out("fp8", "torchao", "this Python lacks torchao")
        return
    model = {"model.type": "llama", "model.config": LLAMA}
    wanted = train(here, "fp8-cpu", {**model, "variant": "cpu"}).losses
    for precision in ("fp8", "fp8_tensorwise"):
        case = ("fp8", precision, {**model, "train.precision": precision, "train.compile": not here.on_cpu}, HALF)
        yield from tried(*case[:2], partial(_case, here, case, wanted))


def experts(here: Here) -> Iterator[Row]:
    """A model with experts, and the loss of its routers."""
    model = {"model.type": "mixtral", "model.config": MIXTRAL}
    wanted = train(here, "experts-cpu", {**model, "variant": "cpu"}).losses
    for strategy in ("ddp", "fsdp"):
        case = ("experts", f"mixtral, {strategy}", {**model, "train.strategy": strategy}, SAME)
        yield from tried(*case[:2], partial(_case, here, case, wanted))


def documents(here: Here) -> Iterator[Row]:
    """Masked documents, which a GPU hides by flex attention, and a CPU by a mask."""
    wanted = train(here, "documents-cpu", {**DOCUMENTS, "variant": "cpu"}).losses
    changes = {**DOCUMENTS, "train.precision": "bf16", "train.compile": not here.on_cpu}
    found = train(here, "documents", changes)
    chosen = next((line for line in found.log.splitlines() if "attention: " in line), "").partition("attention: ")[2]
    yield _near("documents", f"llama, {chosen.partition(':')[0]}", found.losses, wanted, HALF)


def deterministic(here: Here) -> Iterator[Row]:
    """Two runs, whose losses and gradients are to be the same numbers."""
    os.environ |= DETERMINISTIC
    changes = {"train.deterministic": True, "train.precision": "bf16", "train.steps": 6}
    first, second = (
        [(one["loss"], one["grad_norm"]) for one in train(here, f"deterministic-{number}", changes).steps]
        for number in (1, 2)
    )
    same = sum(one == other for one, other in zip(first, second, strict=True))
    shown = f"{same} of {len(first)} steps"
    yield judged("deterministic", "a run twice", "the same numbers", shown, good=same == len(first) > 0)


def attention(here: Here) -> Iterator[Row]:
    """The kernels' names, by the profiler: attention without a mask is flash attention."""
    models = {
        "gpt2": {"model.config": GPT2},
        "llama": {"model.type": "llama", "model.config": {**LLAMA, "hidden_size": 256}},
    }
    changed = {"data.sequence_length": 64, "train.precision": "bf16"}
    for name, model in models.items():
        for compiled in (False,) if here.on_cpu else (False, True):  # on a CPU it takes a minute of a C++ compiler
            what = f"{name}, {'compiled' if compiled else 'eager'}"
            changes = {**model, **changed, "train.compile": compiled}
            yield from tried("attention", what, partial(_flash, here, what, changes))


def _flash(here: Here, what: str, changes: dict[str, Any]) -> Iterator[Row]:
    kernels = look(here, f"attention-{what.replace(' ', '-')}", changes, _kernels, limit=180)
    found = flash(kernels)
    others = [one for one in kernels if "fmha" in one.lower()] or [f"none of {len(kernels)} kernels"]
    shown = ", ".join(one[:48] for one in (found or others)[:2])
    yield judged("attention", what, "a flash kernel", shown, good=bool(found))


def flash(kernels: list[str]) -> list[str]:
    """Those of flash attention; fmha, the memory-efficient one, is no faster than half of it."""
    return sorted({one for one in kernels if any(word in one.lower() for word in FLASH)})


def _kernels(loop: Any) -> list[str]:  # noqa: ANN401  dray's Loop
    """Their names, of one step after two."""
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415

    on_cpu = loop.strategy.device.type == "cpu"
    loop.strategy.network.train()
    for number in range(2):
        step(loop, number)
    with profile(activities=[ProfilerActivity.CPU if on_cpu else ProfilerActivity.CUDA]) as seen:
        step(loop, 2)
    return sorted({event.name for event in seen.events() or ()})


def syncs(here: Here) -> Iterator[Row]:
    """What of a step waits for the GPU: torch's own warnings, and copies of single numbers."""
    cases: dict[str, dict[str, Any]] = {"ddp": {}, "fsdp": {"train.strategy": "fsdp"}}
    if not here.on_cpu:
        cases |= {"ddp, loss in chunks": {"train.loss": "chunked"}, "ddp, masked documents": DOCUMENTS}
    for name, changes in cases.items():
        yield from tried("syncs", name, partial(_syncs, here, name, {"train.precision": "bf16", **changes}))


def _syncs(here: Here, name: str, changes: dict[str, Any]) -> Iterator[Row]:
    found = look(here, f"syncs-{name}".replace(" ", "-"), changes, _waits)
    shown = ", ".join(f"{count} x {where}" for where, count in found.items()) or "none"
    yield judged("syncs", f"3 steps of {name}", "none", shown, good=not found)


def waiting(warned: list[warnings.WarningMessage]) -> Counter[str]:
    """Where torch has warned that the host waits."""
    return Counter(f"{Path(one.filename).name}:{one.lineno}" for one in warned if SYNC in str(one.message))


def _waits(loop: Any) -> dict[str, int]:  # noqa: ANN401  dray's Loop
    """Where steps wait, and how often."""
    import torch  # noqa: PLC0415
    from torch.profiler import ProfilerActivity, profile  # noqa: PLC0415

    on_gpu = loop.strategy.device.type == "cuda"
    loop.strategy.network.train()
    read = [loop._read(number) for number in range(5)]
    for number in range(2):
        step(loop, number, read[number])
    with warnings.catch_warnings(record=True) as warned, profile(activities=[ProfilerActivity.CPU]) as seen:
        warnings.simplefilter("always")
        if on_gpu:
            torch.cuda.set_sync_debug_mode("warn")
        for number in range(2, 5):
            step(loop, number, read[number])
        if on_gpu:
            torch.cuda.set_sync_debug_mode("default")
    found = waiting(warned)
    found["item()"] = sum(event.name == "aten::_local_scalar_dense" for event in seen.events() or ()) if on_gpu else 0
    return {where: count for where, count in found.items() if count}


def resume(here: Here) -> Iterator[Row]:
    """A run that resumes takes the steps that the one before took."""
    changes = {"train.steps": 6, "checkpoint.every": [[0, 3]], "train.precision": "bf16"}
    first = train(here, "resume", changes)
    newest = max(first.folder.glob("checkpoints/step-*"), key=lambda path: int(path.name[5:]))
    shutil.rmtree(newest)
    (first.folder / "attempt-1" / "metrics.jsonl").unlink()
    second = train(here, "resume", changes)
    apart = max(abs(one - other) for one, other in zip(second.losses[-3:], first.losses[-3:], strict=True))
    resumed = "resumed at step 3" in second.log
    seen = f"{apart:.1e} apart{'' if resumed else ', and it did not resume'}"
    yield judged("resume", "steps 4 to 6 again", "the same losses to 1e-3", seen, good=resumed and apart <= 1e-3)


def analog(here: Here) -> Iterator[Row]:
    """With the library's own Triton kernels on a GPU."""
    if find_spec("aihwkit_lightning") is None:
        yield left_out("analog", "aihwkit-lightning", "this Python lacks aihwkit_lightning")
        return
    model = {"model.type": "llama", "model.config": LLAMA, "analog.enabled": True}
    wanted = train(here, "analog-cpu", {**model, "variant": "cpu"}).losses
    os.environ["AIHWKIT_USE_TRITON"] = "0" if here.on_cpu else "1"  # read as it is imported, in the next process
    found = train(here, "analog", model, limit=240).losses
    yield _near("analog", f"Triton {'off' if here.on_cpu else 'on'}", found, wanted, HALF)


def generate(here: Here) -> Iterator[Row]:
    """`dray model generate` and `dray model eval` of a saved model, where they run by themselves."""
    made = train(here, "generate", {"train.steps": 2})
    model, plan = made.folder / "checkpoints" / "final", made.folder / "attempt-1" / "plan.json"
    for job, verb in (("generate", "dray model generate"), ("evaluate", "dray model eval")):
        yield from tried("generate", verb, partial(_used, here, job, verb, str(model), str(plan)))


def _used(here: Here, job: str, verb: str, model: str, plan: str) -> Iterator[Row]:
    log = here.log(f"job-{job}")
    used = call(_job, job, model, plan, limit=here.limit(120), log=log)
    text = log.read_text(errors="replace").strip().splitlines()
    shown = f"on the {used}: {text[-1][:40] if text else 'nothing'}"
    good = bool(text) and (used == "CPU") == here.on_cpu
    yield judged("generate", verb, "text, by the GPU", shown, good=good)


def _job(kind: str, model: str, plan: str) -> str:
    """Where it ran."""
    import torch  # noqa: PLC0415

    from dray.contract.trainer import image_tasks  # noqa: PLC0415
    from dray.train.outputs import evaluate, generate  # noqa: PLC0415

    joined()
    if kind == "generate":
        generate.run(image_tasks.Generate(model, "causal", "one: ", 8, 0.0, 0, trust_remote_code=False))
    else:
        evaluate.run(image_tasks.Evaluate(model, json.loads(Path(plan).read_text())))
    return "GPU" if torch.cuda.is_available() and torch.cuda.max_memory_allocated() else "CPU"


def two(here: Here) -> Iterator[Row]:
    """Two ranks that share this one GPU, which NCCL refuses and gloo does not."""
    for strategy in ("ddp", "fsdp"):
        yield from tried(TWO, strategy, partial(_two, here, strategy))


def _two(here: Here, strategy: str) -> Iterator[Row]:
    alone = train(here, f"two-{strategy}-alone", {"train.strategy": strategy}).losses
    both = train_two(here, f"two-{strategy}", {"train.strategy": strategy, "batch.per_device": 2}).losses
    yield _near(TWO, f"{strategy}, two ranks", both, alone, SAME, beside="one rank's")


PARTS: dict[str, tuple[Callable[[Here], Iterator[Row]], float]] = {
    "checks": (checks, 200), "preflight": (runner, 150), "strategies": (losses, 340), "attention": (attention, 240),
    "documents": (documents, 200), "syncs": (syncs, 90), "resume": (resume, 90), "deterministic": (deterministic, 90),
    "fp8": (fp8, 200), "experts": (experts, 120), "analog": (analog, 200), "generate": (generate, 120), TWO: (two, 240),
}  # fmt: skip
"""Each with its limit in seconds."""
