"""benchmarks/gpu: the suite for a machine with a GPU, on this CPU and with a Python that lacks what it may lack."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from contextlib import suppress
from importlib import metadata
from pathlib import Path, PurePosixPath

import pytest

from dray.config import sites
from dray.facts import Facts
from dray.planning import deterministic, memory
from dray.planning.plan import plan
from dray.runs import write
from helpers import ROOT, golden, python

SUITE = ROOT / "benchmarks" / "gpu"
HAS = ("torch", "transformers", "accelerate")  # and what they need; the stock Trainer needs the last
LACKS = ("pydantic", "typer")  # of a transformers that needs typer for its commands alone

LACKING = """
from importlib import metadata
from importlib.machinery import PathFinder
modules, packages, found, version = {modules}, {packages}, PathFinder.find_spec, metadata.version
PathFinder.find_spec = staticmethod(
    lambda name, *more: None if name.partition(".")[0] in modules else found(name, *more))
def of(name):
    if name.lower().replace("_", "-") in packages:
        raise metadata.PackageNotFoundError(name)
    return version(name)
metadata.version = of
"""
PLANTED = """
import json, os, signal, subprocess, sys, time
sys.path.insert(0, sys.argv[1])
import suite
from training import Here
os.environ["GPU_CHECK_START"] = "fork"
folder = sys.argv[2]
one = suite.Row("hangs", "one", "", "1", "ok")

def hangs(here):
    yield one
    child = subprocess.Popen(["sleep", "600"])
    open(folder + "/left", "w").write(str(child.pid))
    time.sleep(600)

def dies(here):
    os.kill(os.getpid(), signal.SIGSEGV)
    yield one

def raises(here):
    raise ValueError("of a library")
    yield one

def well(here):
    yield one._replace(part="well")

suite.PARTS = {"hangs": (hangs, 3.0), "dies": (dies, 60.0), "raises": (raises, 60.0), "well": (well, 60.0)}
here = Here(folder, "cuda", 0.0, time.monotonic() + 600)
rows = suite._rows(here, list(suite.PARTS), 2)
rows += suite._rows(here._replace(deadline=time.monotonic() + 2), ["hangs", "late"], 1)
print(json.dumps(rows))
"""


def lacking() -> str:
    """A sitecustomize.py that hides all that is installed here but what a bare Python has."""
    todo, has = [*HAS], set[str]()
    while todo:
        name = todo.pop().lower().replace("_", "-")
        with suppress(metadata.PackageNotFoundError):
            if name not in has and name not in LACKS:
                needs = [one for one in metadata.requires(name) or () if "extra ==" not in one]
                todo += [re.split(r"[^\w.-]", one)[0] for one in needs]
        has.add(name)
    has -= {*LACKS}
    mine = {"dray", "coverage"}  # the latter measures
    found = {module: {name.lower().replace("_", "-") for name in names} - mine
             for module, names in metadata.packages_distributions().items()}  # fmt: skip
    hidden = {module: names for module, names in found.items() if names and not names & has}
    assert {*LACKS} <= {*hidden}
    return LACKING.format(modules=set(hidden), packages=set().union(*hidden.values()))


def recipe(*overrides: str):
    return write.read_recipe(SUITE / "recipe.toml", overrides)


def test_its_plan_is_the_planner_s() -> None:
    facts = Facts(
        scheduler="local", nodelist="node1", nodes=1, address="127.0.0.1", gpus_per_node=1, engine="bare",
        image="/PLACE/PYTHON", uid=0, gid=0,
    )  # fmt: skip
    made = plan(
        recipe(), sites.choose(facts).site, facts, run_folder=PurePosixPath("/PLACE/RUN"), scratch="/PLACE/SCRATCH",
        dray="gpu-check",
    )  # fmt: skip
    golden(SUITE / "plan.json", made.model_dump_json(indent=1) + "\n")


def of_planner(name: str, rows: int) -> float:
    """GB for a batch of so many, without CUDA's own memory, which is not the allocator's."""
    changes = {**json.loads((SUITE / "shapes.json").read_text())[name]["changes"], "batch.per_device": rows}
    overrides = [f"batch.global_size={rows}"]
    for key, value in changes.items():
        pairs = {f"{key}.{name}": inner for name, inner in value.items()} if isinstance(value, dict) else {key: value}
        overrides += [f"{name}={str(inner).lower()}" for name, inner in pairs.items()]
    of_model = {"model_type": changes.get("model.type", "gpt2"), **changes["model.config"]}
    found = memory.estimate(recipe(*overrides), memory.shape(of_model), ranks=1, ranks_per_node=1)
    return (found.on_gpu - found.gpu["the rest"]) / 1e9


def test_its_estimates_are_the_planner_s() -> None:
    shapes = json.loads((SUITE / "shapes.json").read_text())
    for name, one in shapes.items():
        rows = one["changes"]["batch.per_device"]
        row = (of_planner(name, rows) - of_planner(name, 1)) / (rows - 1)
        own = of_planner(name, 1) - row
        one["estimate_gb"] = [round(own, 2), round(row, 4)]
    golden(SUITE / "shapes.json", json.dumps(shapes, indent=1) + "\n")


ASKED = """
import json, sys, time, warnings
sys.path.insert(0, sys.argv[1])
import fast, right, suite
from training import Here
gpus = {gpu: Here("", "cuda", memory, 0.0) for gpu, memory in {"H100": 84.9e9, "H200": 150.1e9}.items()}
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    warnings.warn_explicit("called a synchronizing CUDA operation (Triggered internally)", UserWarning, "/a/loop.py", 7)
    # As torch warns when it is told to warn.
    warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all "
                  "synchronizing operations")
print(json.dumps({
    "sizes": {gpu: {name: fast.sized(here, name) for name in fast.SHAPES} for gpu, here in gpus.items()},
    "waits": right.waiting(warned),
    "flash": right.flash(json.loads(sys.argv[2])),
    "deterministic": right.DETERMINISTIC,
    "ends": 600 - suite.LAST,
}))
"""
FLASH = [
    "aten::attn_fwd.kd",
    "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128_4x1x1_kernel0_0",
    "cudnn_generated_fort_native_sdpa_sm90_knob_7_64x128x128_4x1x1_kernel0_0",
    "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<64, 128, 128, 4> >(Flash_fwd_params)",
]


def test_what_it_knows_of_gpus_it_has_not_seen() -> None:
    others = ["fmha_cutlassF_bf16_aligned_64x64_rf_sm80(Params)", "ampere_bf16_s16816gemm_bf16_128x128"]
    ended = subprocess.run(
        [sys.executable, "-c", ASKED, str(SUITE), json.dumps([*others, *FLASH])], capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    # A smaller batch has a smaller estimate: before, it was still that of the batch which an H100 has no room for.
    assert found["sizes"]["H100"]["Llama 1B"][0] == found["sizes"]["H200"]["Llama 1B"][0] / 2
    for sizes in found["sizes"].values():
        for name, (rows, estimate) in sizes.items():
            assert estimate == pytest.approx(of_planner(name, rows), abs=0.1)
    assert found["waits"] == {"loop.py:7": 1}
    assert found["flash"] == FLASH
    wanted = deterministic.settings(recipe("train.deterministic=true", "image=cuda"))
    assert found["deterministic"] == {one.name: one.values[0] for one in wanted}
    assert found["ends"] <= 590


def cells(table: str) -> list[list[str]]:
    """What, its part and its verdict, of each line but the first two."""
    rows = [[cell.strip() for cell in line.split(" | ")] for line in table.splitlines() if line.startswith("| ")]
    return [[row[0].removeprefix("| "), row[1], row[4].removesuffix(" |").strip()] for row in rows[1:]]


def test_on_a_cpu_by_a_python_that_lacks_most_packages_all_of_it_runs(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")
    (tmp_path / "sitecustomize.py").write_text(lacking())
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path)}
    argv = [python(), str(SUITE), "--cpu", "--minutes", "90", "--page", str(tmp_path / "page.md")]
    ended = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    page = (tmp_path / "page.md").read_text()
    gpt, llama, ok, aimless, missing = "GPT-2 124M", "Llama 1B", "ok", "no aim", "left out"
    found = cells(page)
    assert found.pop(found.index(next(row for row in found if row[0] == "machine")))[1].startswith("a CPU; torch ")
    assert found == [
        ["checks", "python -m dray.checks", ok],
        ["preflight", "a run by dray.runner", ok],
        ["strategies", "ddp, fp32", ok],
        ["strategies", "fsdp, fp32", ok],
        *(["strategies", f"{zero}, fp32", missing] for zero in ("zero1", "zero2", "zero3")),
        ["strategies", "ddp, bf16", ok],
        ["strategies", "ddp, bf16, master weights", ok],
        ["fp16", "ddp, fp16", ok],
        ["fp16", "loss scale", ok],
        ["losses", "chunked, fp32", ok],
        *(["losses", f"triton, {precision}", missing] for precision in ("fp32", "bf16")),
        ["attention", "gpt2, eager", ok],
        ["attention", "llama, eager", ok],
        ["documents", "llama, sdpa with a mask for documents", ok],
        ["syncs", "3 steps of ddp", ok],
        ["syncs", "3 steps of fsdp", ok],
        ["resume", "steps 4 to 6 again", ok],
        ["deterministic", "a run twice", ok],
        ["analog", "aihwkit-lightning", missing],
        ["generate", "dray generate", ok],
        ["generate", "dray eval", ok],
        ["checkpoint", "a step is held up", aimless],
        ["checkpoint", "time to rename", aimless],
        ["memory", gpt, aimless],
        ["speed", f"{gpt}, eager, full", aimless],
        ["speed", f"{gpt}, eager, triton", missing],
        ["speed", f"{gpt}, the best of these beside the stock Trainer's", aimless],
        ["speed", f"{llama}, eager, full", aimless],
        ["speed", f"{llama}, eager, triton", missing],
    ]
    assert page.startswith("# dray on a GPU, ")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("gpu-check-")] == []


def test_a_part_that_dies_hangs_or_raises_is_a_line_and_the_others_go_on(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PLANTED, str(SUITE), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(ended.stdout)
    rows[3][3] = re.sub("; .*; ", "; ...; ", rows[3][3])
    assert rows == [
        ["hangs", "one", "", "1", "ok"],
        ["hangs", "", "", "not done after 3 s", "failed"],
        ["dies", "", "", "died by SIGSEGV", "failed"],
        ["raises", "", "", "exit code 1; ...; ValueError: of a library", "failed"],
        ["well", "one", "", "1", "ok"],
        ["hangs", "one", "", "1", "ok"],
        ["hangs", "the rest of it", "", "no time was left for it", "left out"],
        ["late", "", "", "no time was left for it", "left out"],
    ]
    state, deadline = Path("/proc", (tmp_path / "left").read_text(), "stat"), time.monotonic() + 60
    while state.exists() and state.read_text().split(") ")[1][0] != "Z":  # a container's init may not reap it
        assert time.monotonic() < deadline, "what a part has started ends with it"


def test_a_machine_without_a_gpu_is_told_what_to_type(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")
    argv = [python(), str(SUITE), "--only", "machine"]
    ended = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("no GPU can be used here: exit code 1; ")
    assert ended.stderr.endswith("\n  fix: python3 benchmarks/gpu --cpu runs without one\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--only", "memory,sped"), "there is no part sped: checks, "),
        (("--minutes", "x"), "'x'"),
        (("--keep", str(ROOT)), "File exists"),
        (("--keep", "/proc/none"), "No such file"),
    ],
)
def test_words_that_it_does_not_know(words: tuple[str, ...], said: str) -> None:
    ended = subprocess.run([sys.executable, str(SUITE), *words], capture_output=True, text=True, check=False)
    assert (ended.returncode, said in ended.stderr) == (2, True)
