"""What one attempt compiled, the next one finds; and it is code, so nobody else's is run."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from dray.train.runtime.compiled import Compiled, _key  # noqa: E402
from helpers import python  # noqa: E402
from trainings import Forks, Run, config  # noqa: E402

pytestmark = pytest.mark.torch

# A start of a rank: it compiles one small function, and says what Inductor did.
START = """
import json, os, sys
from dataclasses import replace
import torch
import torch.distributed as dist
from dray.train.runtime.compiled import Compiled
from dray.train.config import read
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
torch.set_num_threads(1)
config = read(sys.argv[1])
config = replace(config, scratch=os.environ["SCRATCH"], train=replace(config.train, compile=True))
compiled = Compiled(config, torch.device("cpu"))
compiled.load()
function = torch.compile(lambda x: (x.sin() * 2).sum())
function(torch.ones(64, requires_grad=True)).backward()
assert compiled.nanoseconds > 0  # the forward pass and the backward one
compiled.keep()
from torch._dynamo.utils import counters
found = {name: counters["inductor"][f"fxgraph_cache_{name}"] for name in ("miss", "hit")}
print(json.dumps(found), flush=True)
os._exit(0)
"""


def start(folder: Path, number: int) -> list[str]:
    """What it says. The plan and the run folder stay, the node's own folder is another."""
    scratch = folder / f"scratch-{number}"
    env = {
        **os.environ, "SCRATCH": str(scratch), "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor",
        "TRITON_CACHE_DIR": f"{scratch}/triton", "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    }  # fmt: skip
    plan = folder / "run/attempt-1/plan.json"
    argv = [python(), "-c", START, str(plan)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.slow
def test_a_second_start_does_not_run_inductor(tmp_path: Path) -> None:
    config(tmp_path)
    kept, counts = start(tmp_path, 1)
    (folder,) = (tmp_path / "run/compiled").iterdir()
    size = (folder / "local-rank-0").stat().st_size
    assert kept == f"compiled code is kept for the next attempt: {size / 1e6:.1f} MB in {folder}/local-rank-0"
    assert counts == '{"miss": 2, "hit": 0}'
    modes = [oct(stat.S_IMODE(path.stat().st_mode)) for path in (folder.parent, folder, folder / "local-rank-0")]
    assert modes == ["0o755", "0o755", "0o644"]
    assert start(tmp_path, 2) == [
        f"compiled code of an earlier attempt is used: {folder}/local-rank-0",
        '{"miss": 0, "hit": 2}',
    ]


@pytest.mark.slow
@pytest.mark.skipif(" " in sys.prefix, reason="torch.compile: torch is in a folder whose name has a space")
def test_a_requeued_run_compiles_nothing(tmp_path: Path, forks: Forks) -> None:
    words = ("train.compile=true", "checkpoint.every=2", "train.warmup_steps=0", "train.eval_every=2")
    runs = []
    for _ in range(2):  # the same run folder: the second is the next attempt
        run = Run(forks, tmp_path / "run", 2, *words, steps="steps=4")
        scratch = run.plan.scratch
        env = {one.name: one.value for one in run.plan.env if one.name.startswith(("TORCHINDUCTOR", "TRITON"))}
        runs.append(run.end(**env))
        shutil.rmtree(scratch)
        shutil.rmtree(tmp_path / "run/checkpoints")
    assert "\ncompiled code is kept " in f"\n{runs[0].log(0).read_text()}"
    assert "compiled code of an earlier attempt is used: " in runs[1].log(0).read_text()
    assert "compiled code is kept" not in runs[1].said()
    assert runs[0].losses() == runs[1].losses()


@pytest.fixture
def compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Compiled:
    """With code that an earlier attempt has kept."""
    monkeypatch.setenv("LOCAL_RANK", "0")
    monkeypatch.setattr("torch.compiler.save_cache_artifacts", lambda: (b"code", None))
    monkeypatch.setattr("torch.compiler.load_cache_artifacts", lambda content: content == b"code" or None)
    before = os.umask(0o002)
    try:
        made = Compiled(config(tmp_path, "train.compile=true"), torch.device("cpu"))
        made.keep()
    finally:
        os.umask(before)
    return made


def test_a_umask_that_lets_a_group_write_changes_nothing(compiled: Compiled, capsys: pytest.CaptureFixture) -> None:
    capsys.readouterr()
    compiled.load()
    assert capsys.readouterr().out == f"compiled code of an earlier attempt is used: {compiled.path}\n"
    compiled.keep()  # it has not grown
    assert not capsys.readouterr().out


def test_a_file_that_torch_cannot_read_is_replaced(compiled: Compiled) -> None:
    compiled.path.write_bytes(b"DEAD")  # of the same size
    compiled._size = 0  # another attempt begins
    compiled.load()
    compiled.keep()
    assert compiled.path.read_bytes() == b"code"


def link(path: Path) -> None:
    path.rename(path.parent / "else")
    path.symlink_to(path.parent / "else")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda path: path.parent.chmod(0o777), " is a folder that others may write, mode 0777"),
        (lambda path: path.parent.parent.chmod(0o775), " is a folder that others may write, mode 0775"),
        (lambda path: path.chmod(0o664), " is a file that others may write, mode 0664"),
        (link, " is a link in place of a file"),
        (lambda path: path.write_bytes(b"x"), "torch cannot read "),
        (lambda path: os.chown(path, 12345, -1), " is a file of user 12345, mode 0644"),
    ],
)
def test_code_that_another_may_have_written_is_not_used(
    compiled: Compiled, capsys: pytest.CaptureFixture, change: Callable[[Path], None], said: str
) -> None:
    if "12345" in said and os.geteuid():
        pytest.skip("root: only it gives files away")
    change(compiled.path)
    capsys.readouterr()
    compiled.load()
    printed = capsys.readouterr().out
    assert printed.startswith("compiled code of an earlier attempt is not used, and this attempt compiles again: ")
    assert said in printed


def test_another_recipe_image_or_torch_is_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    cpu, one = torch.device("cpu"), config(tmp_path)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "H200")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    keys = [_key(one, cpu), _key(replace(one, image_sha256="a"), cpu), _key(replace(one, recipe={"train": 1}), cpu)]
    keys += [_key(replace(one, per_device=99), cpu), _key(one, torch.device("cuda", 0))]
    monkeypatch.setattr(torch, "__version__", "9.9")
    assert len({*keys, _key(one, cpu)}) == 6
    assert _key(one, cpu) == _key(replace(one, folder="/another/attempt"), cpu)
