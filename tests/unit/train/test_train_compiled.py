"""What one attempt compiled, the next one finds; and it is code, so nobody else's is run."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

from dray.train.checkpoint import manifest  # noqa: E402
from dray.train.runtime.compiled import Compiled, _key  # noqa: E402
from helpers import python  # noqa: E402
from trainings import Forks, Run, config  # noqa: E402

pytestmark = pytest.mark.torch

# A start of a rank: it compiles one small function, and says what Inductor did and how often the C++ compiler ran.
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
COMPILER = """#!/bin/sh
case "$*" in *" -E "*) ;; *" -o "*) echo "$@" >>"$CALLS" ;; esac
exec g++ "$@"
"""


def start(folder: Path, number: int) -> tuple[str, bool]:
    """What it says, and whether a compiler ran. The plan and the run folder stay, the node's own folder is another."""
    scratch, calls = folder / f"scratch-{number}", folder / f"calls-{number}"
    (folder / "c++").write_text(COMPILER)
    (folder / "c++").chmod(0o755)
    env = {
        **os.environ, "SCRATCH": str(scratch), "TORCHINDUCTOR_CACHE_DIR": f"{scratch}/inductor",
        "TRITON_CACHE_DIR": f"{scratch}/triton", "CXX": f"{folder}/c++", "CALLS": str(calls),
        "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1",
        "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS": "0",
    }  # fmt: skip
    plan = folder / "run/attempt-1/plan.json"
    argv = [python(), "-c", START, str(plan)]
    done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout, calls.exists()


@pytest.mark.slow
def test_a_second_start_compiles_nothing(tmp_path: Path) -> None:
    config(tmp_path)
    said, compiled = start(tmp_path, 1)
    (folder,) = (tmp_path / "run/compiled").iterdir()
    with tarfile.open(folder / "caches.tar") as archive:
        kept = len(archive.getmembers())
    assert (said, compiled) == (
        f'compiled code is kept for the next attempt: {kept} files in {folder}\n{{"miss": 2, "hit": 0}}\n',
        True,
    )
    assert [oct(stat.S_IMODE(path.stat().st_mode)) for path in (folder, *folder.iterdir())] == [
        "0o755",
        "0o644",
        "0o644",
    ]
    said, compiled = start(tmp_path, 2)
    assert (said, compiled) == (
        f'compiled code of an earlier attempt is used: {folder}\n{{"miss": 0, "hit": 2}}\n',
        False,
    )


@pytest.mark.slow
@pytest.mark.skipif(" " in sys.prefix, reason="torch.compile: torch is in a folder whose name has a space")
def test_a_requeued_run_compiles_nothing(tmp_path: Path) -> None:
    forks = Forks()
    words = ("train.compile=true", "checkpoint.every=2", "train.warmup_steps=0", "train.eval_every=2")
    runs = []
    for _ in range(2):  # the same run folder: the second is the next attempt
        run = Run(forks, tmp_path / "run", 2, *words, steps="steps=4")
        scratch = run.plan.scratch
        env = {one.name: one.value for one in run.plan.env if one.name.startswith(("TORCHINDUCTOR", "TRITON"))}
        runs.append(run.end(**env))
        shutil.rmtree(scratch)
        shutil.rmtree(tmp_path / "run/checkpoints")
    forks.close()
    assert "\ncompiled code is kept " in f"\n{runs[0].log(0).read_text()}"
    assert "compiled code of an earlier attempt is used: " in runs[1].log(0).read_text()
    assert "compiled code is kept" not in runs[1].said()
    assert runs[0].losses() == runs[1].losses()


class Caches:
    """A node's caches as if something had been compiled, and what is kept of them."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("LOCAL_RANK", "0")
        self.config = config(folder, "train.compile=true")
        self.inside = Path(self.config.scratch) / "inductor/ab"
        for name in ("inductor", "triton"):
            variable = {"inductor": "TORCHINDUCTOR_CACHE_DIR", "triton": "TRITON_CACHE_DIR"}[name]
            monkeypatch.setenv(variable, f"{self.config.scratch}/{name}")
        self.inside.mkdir(parents=True)
        (self.inside / "code.py").write_text("print()")
        self.compiled = Compiled(self.config, torch.device("cpu"))
        self.compiled.keep()
        shutil.rmtree(self.config.scratch)

    def loaded(self) -> bool:
        self.compiled.load()
        return (self.inside / "code.py").exists()


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    made = Caches(tmp_path, monkeypatch)
    yield made
    shutil.rmtree(made.config.scratch, ignore_errors=True)


def test_a_umask_that_lets_a_group_write_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.umask(0o002)
    try:
        caches = Caches(tmp_path, monkeypatch)
        assert caches.loaded()
    finally:
        os.umask(before)
    shutil.rmtree(caches.config.scratch)


def write_in_place(folder: Path) -> None:
    path = folder / "caches.tar"
    path.write_bytes(path.read_bytes().replace(b"print()", b"raise()"))


def another_version(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"version": 1', '"version": 9'))


def link(folder: Path) -> None:
    (folder / "caches.tar").rename(folder.parent / "else")
    (folder / "caches.tar").symlink_to(folder.parent / "else")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda folder: folder.chmod(0o777), " is a folder that others may write, mode 0777"),
        (lambda folder: folder.parent.chmod(0o775), " is a folder that others may write, mode 0775"),
        (lambda folder: folder.parent.parent.chmod(0o770), " is a folder that others may write, mode 0770"),
        (lambda folder: (folder / "caches.tar").chmod(0o664), " is a file that others may write, mode 0664"),
        (lambda folder: (folder / "manifest.json").chmod(0o666), " is a file that others may write, mode 0666"),
        (link, " is a link in place of a file"),
        (write_in_place, "caches.tar does not match manifest.json"),
        (another_version, "caches.tar does not match manifest.json"),
        (lambda folder: (folder / "manifest.json").write_text("{}"), "caches.tar does not match manifest.json"),
        (lambda folder: os.chown(folder / "caches.tar", 12345, -1), " is a file of user 12345, mode 0644"),
    ],
)
def test_code_that_another_may_have_written_is_not_used(
    caches: Caches, capsys: pytest.CaptureFixture, change: Callable[[Path], None], said: str
) -> None:
    if "12345" in said and os.geteuid():
        pytest.skip("root: only it gives files away")
    change(caches.compiled.folder)
    capsys.readouterr()
    assert not caches.loaded()
    found = capsys.readouterr().out
    assert found.startswith("compiled code of an earlier attempt is not used, and this attempt compiles again: ")
    assert found.endswith(f"{said}\n")


def test_an_archive_leads_nowhere_else(caches: Caches) -> None:
    """Whoever wrote it; names that leave the caches, links and devices are left out."""
    folder = caches.compiled.folder
    with tarfile.open(folder / "caches.tar", "w:") as archive:
        archive.add(folder / "manifest.json", "TORCHINDUCTOR_CACHE_DIR/ab/code.py")
        archive.add(folder / "manifest.json", "elsewhere/code.py")
        for name, kind in (("link", tarfile.SYMTYPE), ("pipe", tarfile.FIFOTYPE)):
            member = tarfile.TarInfo(f"TRITON_CACHE_DIR/{name}")
            member.type, member.linkname = kind, "/etc/passwd"
            archive.addfile(member)
    (folder / "manifest.json").unlink()
    manifest.write(folder, {"version": 1, "files": {"caches.tar": manifest.described(folder / "caches.tar")}})
    assert caches.loaded()
    assert [path.name for path in Path(caches.config.scratch).rglob("*") if not path.is_dir()] == ["code.py"]
    with tarfile.open(folder / "caches.tar", "w:") as archive:
        archive.add(folder / "manifest.json", "TORCHINDUCTOR_CACHE_DIR/../../../out")
    (folder / "manifest.json").unlink()
    manifest.write(folder, {"version": 1, "files": {"caches.tar": manifest.described(folder / "caches.tar")}})
    caches.compiled.load()
    assert not (Path(caches.config.scratch).parent / "out").exists()


def test_caches_of_the_users_own_stay_by_themselves(caches: Caches, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR"):
        monkeypatch.setenv(name, "/home/me/caches")
    assert not Compiled(caches.config, torch.device("cpu"))._on
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    monkeypatch.delenv("TRITON_CACHE_DIR")
    assert not Compiled(caches.config, torch.device("cpu"))._on


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
