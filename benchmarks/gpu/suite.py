"""What a GPU says of dray, in ten minutes and without a network: one table of aims, figures and verdicts.

    python3 benchmarks/gpu [--cpu] [--only PART,...] [--minutes N] [--page FILE]

It wants torch 2.11 or newer and transformers; what else a part needs and this Python lacks, a line of the table says.
With --cpu everything runs that can, on tiny models. Exit code 1 where a verdict is not what it is to be.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from importlib import import_module
from pathlib import Path

import fast
import right
import training
from processes import NOT_DONE, Failed, Process, all_of, call
from rows import BELOW, FAILED, Row, left_out, table

PARTS = {**right.PARTS, **fast.PARTS}
BESIDE = 4  # parts at the same time, of those that measure no time
LAST = 15.0  # seconds for the end: who ends commands after ten minutes would also end the page
PAGES = training.HERE.parents[1] / "benchmarks" / "results"


def main() -> int:
    """0 where nothing failed and nothing is below its aim."""
    options = _options()
    began = time.monotonic()
    with nullcontext(options.keep) if options.keep else tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        _prepare(folder, cpu=options.cpu)
        variant, memory = ("cpu", 0.0) if options.cpu else _device(folder)
        here = training.Here(folder, variant, memory, began + 60 * options.minutes - LAST)
        rows = []
        for lists, at_once in ((right.PARTS, 2 if options.cpu else BESIDE), (fast.PARTS, 1)):
            chosen = [name for name in lists if not options.only or name in options.only]
            rows += _rows(here, chosen, at_once)
    shown = table(rows)
    print(f"\n{shown}\n\n{time.monotonic() - began:.0f} s", flush=True)
    bad = sum(row.verdict in (FAILED, BELOW) for row in rows)
    page = options.page or (None if options.cpu or options.only else PAGES / f"{datetime.now(UTC):%Y-%m-%d}-gpu.md")
    if page:
        Path(page).write_text(_page(shown, time.monotonic() - began), encoding="utf-8")
        print(f"written to {page}", flush=True)
    return 1 if bad else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks/gpu", description="What a GPU says of dray, in one table.")
    parser.add_argument("--cpu", action="store_true", help="tiny models on this CPU: only that all of it runs")
    parser.add_argument(
        "--only", type=lambda names: names.split(","), default=[], metavar="PART,...", help=", ".join(PARTS)
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="all of it ends by then (10)")
    parser.add_argument("--keep", type=_empty, metavar="FOLDER", help="a new folder, where runs and logs stay")
    parser.add_argument("--page", help="write this file; else benchmarks/results/DATE-gpu.md, with a GPU and all parts")
    options = parser.parse_args()
    if unknown := [name for name in options.only if name not in PARTS]:
        parser.error(f"there is no part {', '.join(unknown)}: {', '.join(PARTS)}")
    return options


def _empty(name: str) -> str:
    """Not one of before, whose checkpoints runs would go on from."""
    try:
        Path(name).mkdir(mode=0o700)
    except OSError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return os.path.abspath(name)  # noqa: PTH100  as text


def _prepare(folder: str, *, cpu: bool) -> None:
    """What all processes see, and, for those that are forked, what all of them import."""
    os.environ |= training.environment(folder)
    os.environ |= {"PYTHONPATH": os.pathsep.join(filter(None, [str(training.SRC), os.environ.get("PYTHONPATH")]))}
    os.environ |= {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    os.environ |= {"PYTORCH_NVML_BASED_CUDA_CHECK": "1", "GPU_CHECK_START": "fork"}  # else asking for a GPU is using it
    os.environ["CUDA_VISIBLE_DEVICES"] = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]  # one GPU
    if cpu:
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    Path(folder, "scratch").mkdir(mode=0o700)
    sys.path.insert(0, str(training.SRC))
    for module in ("transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama"):
        import_module(module)
    import_module("dray.train.__main__")


def _device(folder: str) -> tuple[str, float]:
    """The GPU's kind and memory. What cannot be asked by a fork is asked by a new process, and so are all others."""
    log = Path(folder, "logs", "device.log")
    try:
        return tuple(call(_asked, limit=120, log=log))
    except Failed as failed:
        os.environ["GPU_CHECK_START"] = "spawn"
        try:
            return tuple(call(_asked, limit=120, log=log))
        except Failed:
            sys.exit(f"no GPU can be used here: {failed}\n  fix: python3 benchmarks/gpu --cpu runs without one")


def _asked() -> tuple[str, float]:
    import torch  # noqa: PLC0415  not before the environment is set

    torch.ones(8, device="cuda").sum().item()
    return "rocm" if torch.version.hip else "cuda", float(torch.cuda.get_device_properties(0).total_memory)


def _part(name: str, here: training.Here) -> Iterator[Row]:
    """In a process of its own."""
    yield from PARTS[name][0](here)


def _rows(here: training.Here, names: list[str], at_once: int) -> list[Row]:
    """Of these parts, in their order: what each has said before it ended, and how it ended if not well."""
    found: dict[str, list[Row]] = {name: [left_out(name, "", "no time was left for it")] for name in names}

    def started(name: str) -> Process:
        log = here.log(f"part-{name}")
        process = Process(_part, (name, here), limit=here.limit(PARTS[name][1]), log=log, leads=True)
        names_of[id(process)] = name
        return process

    names_of: dict[int, str] = {}
    todo: list[Callable[[], Process]] = [partial(started, name) for name in names]
    for process in all_of(todo, at_once, here.deadline):
        if process is None:
            continue
        name, trouble = names_of[id(process)], process.end()
        found[name] = [Row(*row) for row in process.read()]
        if trouble.startswith(NOT_DONE) and time.monotonic() >= here.deadline:
            found[name].append(left_out(name, "the rest of it", "no time was left for it"))
        elif trouble:
            found[name].append(Row(name, "", "", trouble, FAILED))
        print(f"{name}: {', '.join(row.verdict for row in found[name])}", file=sys.stderr, flush=True)
    return [row for name in names for row in found[name]]


def _page(shown: str, seconds: float) -> str:
    return (
        f"# dray on a GPU, {datetime.now(UTC):%Y-%m-%d}\n\n`make gpu-check`, {seconds:.0f} s. "
        f"[GPUs](../../docs/gpu.md) says what each part looks at.\n\n{shown}\n"
    )
