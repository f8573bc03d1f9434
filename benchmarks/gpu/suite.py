"""What a GPU says of dray, in ten minutes and without a network: one table of aims, figures and verdicts.

    python3 benchmarks/gpu [--cpu] [--only PART,...] [--two] [--minutes N] [--results FOLDER] [--keep FOLDER]

It wants torch 2.11 or newer and transformers; what else a part needs and this Python lacks, a line of the table says.
The parts come in the order of their worth, and each row is written as it comes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from importlib import import_module
from pathlib import Path

import fast
import right
import training
from processes import NOT_DONE, Failed, Process, call
from rows import BELOW, FAILED, NO_TIME, Results, Row, no_time

BESIDE = 4  # parts at the same time, of those that measure no time
LAST = 15.0  # seconds for the end: who ends commands after ten minutes would also end the page
POLL = 0.5  # seconds between two looks for new rows
STAGES = ((fast.FIRST, False), (right.PARTS, True), (fast.THEN, False))
"""Parts in the order of their worth, and whether they run beside one another."""
PARTS = {name: part for parts, _ in STAGES for name, part in parts.items()}
RESULTS = training.HERE.parents[1] / "benchmarks" / "results"
EXIT_CODES = """
exit codes:
  0   all parts ran, and all figures reach their aims
  1   something failed or is below its aim, or there is no GPU
  75  nothing failed, but there was no time for all of it
"""
NO_TIME_CODE = 75


def main() -> int:
    """One of EXIT_CODES."""
    options = _options()
    began = time.monotonic()
    with nullcontext(options.keep) if options.keep else tempfile.TemporaryDirectory(prefix="gpu-check-") as folder:
        _prepare(folder, cpu=options.cpu)
        variant = "cpu" if options.cpu else _device(folder)
        here = training.Here(folder, variant, began + 60 * options.minutes - LAST)
        results = Results(options.results)
        for parts, beside in STAGES:
            at_once = (2 if options.cpu else BESIDE) if beside else 1
            for row in rows_of(here, [name for name in parts if name in options.only], at_once):
                results.add(row)
    print(f"{time.monotonic() - began:.0f} s, written to {results.page}", flush=True)
    return exit_code(results.rows)


def exit_code(rows: list[Row]) -> int:
    """One of EXIT_CODES."""
    verdicts = {row.verdict for row in rows}
    if verdicts & {FAILED, BELOW}:
        return 1
    return NO_TIME_CODE if NO_TIME in verdicts else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="benchmarks/gpu", description="What a GPU says of dray, in one table.", epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )  # fmt: skip
    parser.add_argument("--cpu", action="store_true", help="tiny models on this CPU: only that all of it runs")
    parser.add_argument(
        "--only", type=lambda names: names.split(","), default=[], metavar="PART,...", help=", ".join(PARTS)
    )
    parser.add_argument("--two", action="store_true", help="also the part `two`: two ranks on one GPU, over gloo")
    parser.add_argument("--minutes", type=float, default=10.0, help="all of it ends by then (10)")
    parser.add_argument(
        "--results", type=Path, metavar="FOLDER", default=Path(os.environ.get("OUT") or RESULTS),
        help="where page.md and figures.jsonl go; else $OUT, else benchmarks/results",
    )  # fmt: skip
    parser.add_argument("--keep", type=_empty, metavar="FOLDER", help="a new folder, where runs and logs stay")
    options = parser.parse_args()
    if unknown := [name for name in options.only if name not in PARTS]:
        parser.error(f"there is no part {', '.join(unknown)}: {', '.join(PARTS)}")
    options.only = options.only or [name for name in PARTS if name != right.TWO]
    options.only += [right.TWO] * options.two
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
    inductor = os.environ.get("TORCHINDUCTOR_CACHE_DIR")  # a second call compiles nothing again
    os.environ |= training.environment(folder)
    if inductor:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = inductor
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


def _device(folder: str) -> str:
    """The GPU's kind. What cannot be asked by a fork is asked by a new process, and so are all others."""
    log = Path(folder, "logs", "device.log")
    try:
        return str(call(_asked, limit=60, log=log))
    except Failed as failed:
        os.environ["GPU_CHECK_START"] = "spawn"
        try:
            return str(call(_asked, limit=60, log=log))
        except Failed:
            sys.exit(f"no GPU can be used here: {failed}\n  fix: python3 benchmarks/gpu --cpu runs without one")


def _asked() -> str:
    import torch  # noqa: PLC0415  not before the environment is set

    torch.ones(8, device="cuda").sum().item()
    return "rocm" if torch.version.hip else "cuda"


def _part(name: str, here: training.Here) -> Iterator[Row]:
    """In a process of its own."""
    yield from PARTS[name][0](here)


def rows_of(here: training.Here, names: list[str], at_once: int) -> Iterator[Row]:
    """Each row of these parts as it comes, and how a part ended if not well."""
    waiting, running = [*names], dict[str, Process]()
    read: dict[str, int] = dict.fromkeys(names, 0)
    while waiting or running:
        late = time.monotonic() >= here.deadline
        if late:
            for name in waiting:
                yield no_time(name, "")
            waiting.clear()
        while waiting and len(running) < at_once:
            name = waiting.pop(0)
            running[name] = Process(
                _part, (name, here), limit=here.limit(PARTS[name][1]), log=here.log(f"part-{name}"), leads=True
            )
        Process.wait_for([*running.values()], POLL)
        for name, process in [*running.items()]:
            over = late or process.done or process.left <= 0
            trouble = process.end() if over else ""
            rows = [Row(*row) for row in process.read()]
            yield from rows[read[name] :]
            read[name] = len(rows)
            if over:
                del running[name]
            if trouble.startswith(NOT_DONE) and time.monotonic() >= here.deadline:
                yield no_time(name, "the rest of it")
            elif trouble:
                yield Row(name, "", "", trouble, FAILED)
