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
from dray.planning import environment
from dray.planning.estimates import memory, model_shape
from dray.planning.plan import plan
from dray.runner import plan as runner_plan
from dray.runs import prepare
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
here = Here(folder, "cuda", time.monotonic() + 600)
rows = [*suite.rows_of(here, list(suite.PARTS), 2)]
rows += suite.rows_of(here._replace(deadline=time.monotonic() + 2), ["hangs", "late"], 1)
print(json.dumps(sorted(row[:5] for row in rows)))
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
    return prepare.read_recipe(SUITE / "recipe.toml", overrides)


def test_its_plan_is_the_planner_s() -> None:
    facts = Facts(
        scheduler="local", nodelist="node1", nodes=1, address="127.0.0.1", gpus_per_node=1, engine="bare",
        image="/PLACE/PYTHON", uid=0, gid=0,
    )  # fmt: skip
    made = plan(
        recipe(), sites.choose(facts).site, facts, run_folder=PurePosixPath("/PLACE/RUN"), scratch="/PLACE/SCRATCH",
        dray="gpu-check",
    )  # fmt: skip
    # Of a recipe the trainer and the runner read these alone.
    table, sections = made.recipe.model_dump(mode="json"), ("batch", "data", "model", "train", "checkpoint", "evaluate")
    table = {key: table[key] for key in ("name", *sections, "lora", "analog", "hang_timeout_s", "pass_env")}
    whole = {**made.model_dump(mode="json"), "recipe": table}
    assert runner_plan.of(whole).command == tuple(made.command)
    golden(SUITE / "plan.json", json.dumps(whole, indent=1, ensure_ascii=False) + "\n")


def of_planner(changes: dict, rows: int) -> float:
    """GB for a batch of so many, compiled and with the full loss, without CUDA's own memory."""
    overrides = [f"batch.global_size={rows}", "train.compile=true", "train.loss=full"]
    for key, value in {**changes, "batch.per_device": rows}.items():
        pairs = {f"{key}.{name}": inner for name, inner in value.items()} if isinstance(value, dict) else {key: value}
        overrides += [f"{name}={str(inner).lower()}" for name, inner in pairs.items()]
    of_model = {"model_type": changes.get("model.type", "gpt2"), **changes["model.config"]}
    found = memory.estimate(recipe(*overrides), model_shape.of(of_model), ranks=1, ranks_per_node=1)
    return (found.on_gpu - found.gpu["the rest"]) / 1e9


def test_its_estimates_are_the_planner_s() -> None:
    shapes = json.loads((SUITE / "shapes.json").read_text())
    for shape in shapes.values():
        shape["estimate_gb"] = round(of_planner(shape["changes"], shape["changes"]["batch.per_device"]), 2)
    golden(SUITE / "shapes.json", json.dumps(shapes, indent=1) + "\n")


ASKED = """
import json, sys, warnings
sys.path.insert(0, sys.argv[1])
import fast, right, suite
with warnings.catch_warnings(record=True) as warned:
    warnings.simplefilter("always")
    warnings.warn_explicit("called a synchronizing CUDA operation (Triggered internally)", UserWarning, "/a/loop.py", 7)
    # As torch warns when it is told to warn.
    warnings.warn("Synchronization debug mode is a prototype feature and does not yet detect all "
                  "synchronizing operations")
print(json.dumps({
    "order": list(suite.PARTS),
    "tokens": [(row.part, size["batch.per_device"], size["data.sequence_length"])
               for row in fast.SPEEDS for size in [{**fast.SHAPES[row.model]["changes"], **row.changes}]],
    "codes": [suite.exit_code([suite.Row("", "", "", "", verdict) for verdict in verdicts])
              for verdicts in json.loads(sys.argv[3])],
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


CODES = {
    ("ok", "no aim", "left out"): 0, ("ok", "no time"): 75, ("no time", "failed"): 1, ("ok", "below its aim"): 1,
    ("ok", "no time", "below its aim"): 1, (): 0,
}  # fmt: skip


@pytest.mark.seconds
def test_what_it_knows_of_gpus_it_has_not_seen() -> None:
    others = ["fmha_cutlassF_bf16_aligned_64x64_rf_sm80(Params)", "ampere_bf16_s16816gemm_bf16_128x128"]
    ended = subprocess.run(
        [sys.executable, "-c", ASKED, str(SUITE), json.dumps([*others, *FLASH]), json.dumps([*CODES])],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    assert found["order"] == [
        "machine", "gpt2", "handwritten", "stock", "llama",
        "checks", "preflight", "strategies", "attention", "documents", "syncs", "resume", "deterministic", "fp8",
        "experts", "analog", "generate", "two",
        "checkpoint", "memory", "llama-2048", "llama-8192", "fsdp", "eager",
    ]  # fmt: skip
    assert found["tokens"] == [
        ["gpt2", 64, 1024], ["llama", 4, 4096], ["llama-2048", 8, 2048], ["llama-8192", 2, 8192],
        ["fsdp", 64, 1024], ["eager", 32, 1024],
    ]  # fmt: skip
    assert found["codes"] == [*CODES.values()]
    assert found["waits"] == {"loop.py:7": 1}
    assert found["flash"] == FLASH
    wanted = environment.deterministic(recipe("train.deterministic=true", "image=cuda", "train.compile=false"))
    assert found["deterministic"] == {one.name: one.values[0] for one in wanted}
    assert found["ends"] <= 590


def cells(table: str) -> list[list[str]]:
    """What, its part and its verdict, of each line but the first two."""
    rows = [[cell.strip() for cell in line.split(" | ")] for line in table.splitlines() if line.startswith("| ")]
    return [[row[0].removeprefix("| "), row[1], row[4].removesuffix(" |").strip()] for row in rows[1:]]


@pytest.mark.slow
def test_on_a_cpu_by_a_python_that_lacks_most_packages_all_of_it_runs(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")
    (tmp_path / "sitecustomize.py").write_text(lacking())
    env = {**os.environ, "PYTHONPATH": str(tmp_path), "TMPDIR": str(tmp_path), "OUT": str(tmp_path / "results")}
    argv = [python(), str(SUITE), "--cpu", "--two", "--minutes", "90"]
    ended = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert {path.name for path in (tmp_path / "results").iterdir()} == {"page.md", "figures.jsonl"}
    page = (tmp_path / "results" / "page.md").read_text()
    lines = [json.loads(line) for line in (tmp_path / "results" / "figures.jsonl").read_text().splitlines()]
    gpt, llama, ok, aimless, missing = "GPT-2 124M", "Llama 1B", "ok", "no aim", "left out"
    first = next(line for line in lines if line["part"] == "gpt2")
    assert first["figures"]["steps"] == 4
    assert first["figures"]["tokens_per_s"] == pytest.approx(2 * 32 / first["figures"]["ms"][1] * 1e3)
    kernels = [line for line in lines if "kernel" in line["figures"]]
    assert [len(kernels), kernels == sorted(kernels, key=lambda line: -line["figures"]["ms"])] == [10, True]
    assert [line["part"] for line in lines if line["figures"].get("ratio")] == ["handwritten", "stock"]
    found = [row for row in cells(page) if not row[1].startswith("kernel ")]
    assert found[0][1].startswith("a CPU; torch ")
    right = range(7, len(found) - 8)
    assert found[1 : right.start] == [
        ["gpt2", f"{gpt}, compiled, full", aimless],
        ["handwritten", f"{gpt}, compiled", aimless],
        ["handwritten", f"{gpt}, dray's tokens/s beside it", aimless],
        ["stock", f"{gpt}, compiled", aimless],
        ["stock", f"{gpt}, dray's tokens/s beside it", aimless],
        ["llama", f"{llama}, compiled, full", aimless],
    ]
    # These run beside one another.
    assert sorted(found[at] for at in right) == sorted([
        ["checks", "python -m dray.checks", ok],
        ["preflight", "a run by dray.runner", ok],
        ["strategies", "ddp, fp32", ok],
        ["strategies", "fsdp, fp32", ok],
        *(["strategies", f"{zero}, fp32", missing] for zero in ("zero1", "zero2", "zero3")),
        ["strategies", "ddp, bf16", ok],
        ["strategies", "fsdp, bf16", ok],
        ["strategies", "ddp, muon", ok],
        ["strategies", "fsdp, muon", ok],
        ["fp16", "ddp, fp16", ok],
        ["fp16", "loss scale", ok],
        ["losses", "chunked, fp32", ok],
        ["attention", "gpt2, eager", ok],
        ["attention", "llama, eager", ok],
        ["documents", "llama, sdpa with a mask for documents", ok],
        ["syncs", "3 steps of ddp", ok],
        ["syncs", "3 steps of fsdp", ok],
        ["resume", "steps 4 to 6 again", ok],
        ["deterministic", "a run twice", ok],
        ["fp8", "torchao", missing],
        ["experts", "mixtral, ddp", ok],
        ["experts", "mixtral, fsdp", ok],
        ["analog", "aihwkit-lightning", missing],
        ["generate", "dray model generate", ok],
        ["generate", "dray model eval", ok],
        ["two", "ddp, two ranks", ok],
        ["two", "fsdp, two ranks", ok],
    ])  # fmt: skip
    assert found[right.stop :] == [
        ["checkpoint", "the first save, waited for", aimless],
        ["checkpoint", "a step is held up", aimless],
        ["checkpoint", "time to rename", aimless],
        ["memory", gpt, aimless],
        ["llama-2048", f"{llama}, compiled, full, 8 x 2,048", aimless],
        ["llama-8192", f"{llama}, compiled, full, 2 x 8,192", aimless],
        ["fsdp", f"{gpt}, compiled, full, fsdp", aimless],
        ["eager", f"{gpt}, eager, full, 32 rows", aimless],
    ]
    assert page.startswith("# dray on a GPU, ")
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith("gpu-check-")] == []


KILLED = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
import suite

def first(here):
    yield suite.Row("first", "one", "", "1", "ok", {"ms": 1})
    yield suite.Row("first", "two", "", "2", "ok")
    open(os.environ["CHILD"], "w").write(str(os.getpid()))
    time.sleep(600)

suite.STAGES = (({"first": None}, False),)
suite.PARTS = {"first": (first, 600.0)}
suite._prepare = lambda folder, cpu: os.environ.update(GPU_CHECK_START="fork")
sys.argv = ["gpu", "--cpu", "--results", sys.argv[2]]
suite.main()
"""


def has_ended(child: int) -> bool:
    """Gone, or a zombie that a container's init may not reap."""
    state = Path("/proc", str(child), "stat")
    return not state.exists() or state.read_text().split(") ")[1][0] == "Z"


@pytest.mark.seconds
def test_a_kill_keeps_the_rows_before_it_and_ends_the_parts(tmp_path: Path) -> None:
    argv = [sys.executable, "-c", KILLED, str(SUITE), str(tmp_path)]
    env = {**os.environ, "CHILD": str(tmp_path / "child")}
    with subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 60
        while not (tmp_path / "page.md").exists() or "| two" not in (tmp_path / "page.md").read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.kill()
    lines = [json.loads(line) for line in (tmp_path / "figures.jsonl").read_text().splitlines()]
    assert [[line["what"], line["seen"], line["figures"]] for line in lines] == [
        ["one", "1", {"ms": 1}],
        ["two", "2", {}],
    ]
    assert cells((tmp_path / "page.md").read_text()) == [["first", "one", "ok"], ["first", "two", "ok"]]
    while not has_ended(int((tmp_path / "child").read_text())):
        assert time.monotonic() < deadline, "a part would keep the GPU from the next command"


@pytest.mark.slow
@pytest.mark.parametrize("script", ["speed.sh", "correct.sh"])
def test_the_scripts_stop_at_once_without_a_gpu(script: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")
    env = {**os.environ, "PYTHON": python(), "TMPDIR": str(tmp_path), "OUT": str(tmp_path / "out")}
    done = subprocess.run([str(SUITE / script)], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert "no GPU can be used here: " in done.stderr
    assert list((tmp_path / "out").iterdir()) == [tmp_path / "out" / f"{script[:-3]}-logs.tar.gz"]


@pytest.mark.slow
@pytest.mark.seconds
def test_a_part_that_dies_hangs_or_raises_is_a_line_and_the_others_go_on(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PLANTED, str(SUITE), str(tmp_path)], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    rows = json.loads(ended.stdout)
    rows = [[*row[:3], re.sub("; .*; ", "; ...; ", row[3]), row[4]] for row in rows]
    assert rows == sorted([
        ["hangs", "one", "", "1", "ok"],
        ["hangs", "", "", "not done after 3 s", "failed"],
        ["dies", "", "", "died by SIGSEGV", "failed"],
        ["raises", "", "", "exit code 1; ...; ValueError: of a library", "failed"],
        ["well", "one", "", "1", "ok"],
        ["hangs", "one", "", "1", "ok"],
        ["hangs", "the rest of it", "", "no time was left for it", "no time"],
        ["late", "", "", "no time was left for it", "no time"],
    ])  # fmt: skip
    deadline = time.monotonic() + 60
    while not has_ended(int((tmp_path / "left").read_text())):
        assert time.monotonic() < deadline, "what a part has started ends with it"


@pytest.mark.slow
@pytest.mark.seconds
def test_a_machine_without_a_gpu_is_told_what_to_type(tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")
    argv = [python(), str(SUITE), "--only", "machine"]
    ended = subprocess.run(argv, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith("no GPU can be used here: exit code 1; ")
    assert ended.stderr.endswith("\n  fix: python3 benchmarks/gpu --cpu runs without one\n")


@pytest.mark.slow
@pytest.mark.seconds
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--only", "memory,sped"), "there is no part sped: machine, "),
        (("--minutes", "x"), "'x'"),
        (("--keep", str(ROOT)), "File exists"),
        (("--keep", "/proc/none"), "No such file"),
    ],
)
def test_words_that_it_does_not_know(words: tuple[str, ...], said: str) -> None:
    ended = subprocess.run([sys.executable, str(SUITE), *words], capture_output=True, text=True, check=False)
    assert (ended.returncode, said in ended.stderr) == (2, True)
