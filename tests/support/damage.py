"""What may be in the place of a file, and everything that reads one: `test_damage.py` tries each with each."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from dray import facts
from dray.config import mirrors
from dray.config.image_definition import Image
from dray.config.load_toml import load
from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.contract import files, run_folder
from dray.facts import Facts
from dray.images import store
from dray.images.layers import layer_lock
from dray.images.locks import lock as locks
from dray.images.sif import format as sif_format
from dray.images.sif import record
from dray.remote import remotes_file
from dray.runner import __main__ as runner
from dray.runs import capsule, clean, local, metrics, prepare, replay, result, study
from dray.runs.finish import finish
from dray.runs.prepare import read_recipe, write
from dray.runs.store import RunPaths
from dray.runs.store import plan_of as read
from dray.train.checkpoint import manifest
from helpers import ROOT

OLD = 1795570000.0
_LOCK = b"""# dray image lock cpu, 2026-11-27
# from requirements 0123456789abcdef
# lines 0123456789abcdef
# needs torch==2.13.0
trl==1.0.0 \\
    --hash=sha256:0123
"""
RECORD = {"time": 10.0, "node": "n2", "rank": 3, "code": 3, "why": "exit code 3", "log": "l", "last_lines": ["x"]}

Damage = Callable[[Path, bytes], object]
"""Put something in the place of a file, which is gone; the bytes are what it held."""


def _holding(content: bytes) -> Damage:
    return lambda path, _good: path.write_bytes(content)


def _linked(target: str) -> Damage:
    return lambda path, _good: path.symlink_to(target)


def _large(path: Path, good: bytes) -> None:
    path.write_bytes(good)
    os.truncate(path, 20 << 20)


def _socket(path: Path, _good: bytes) -> None:
    before = Path.cwd()
    os.chdir(path.parent)  # the name of a socket has at most 107 bytes
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(path.name)
    finally:
        os.chdir(before)


NO_FILES: dict[str, Damage] = {
    "a FIFO": lambda path, _good: os.mkfifo(path),
    "a socket": _socket,
    "a folder": lambda path, _good: path.mkdir(),
    "a loop": lambda path, _good: path.symlink_to(path.name),
    "a device": _linked("/dev/zero"),
    "a link to nowhere": _linked("nowhere"),
    "nothing": lambda _path, _good: None,
}
CONTENTS: dict[str, Damage] = {
    "empty": _holding(b""),
    "half": lambda path, good: path.write_bytes(good[: len(good) // 2]),
    "an empty table": _holding(b"{}"),
    "no table": _holding(b"[1, null]"),
    "NUL": _holding(b"\0" * 4096 + b"\n"),
    "UTF-16": lambda path, good: path.write_bytes(good.decode(errors="replace").encode("utf-16")),
    "Latin-1": lambda path, good: path.write_bytes(good[: len(good) // 2] + b"\xe9" + good[len(good) // 2 :]),
    "deep": _holding(b"[" * 100_000),
    "5,000 digits": _holding(b'{"time": ' + b"9" * 5000 + b', "step": ' + b"9" * 5000 + b', "event": "step"}\n'),
    "other kinds": _holding(b'{"time": "x", "event": ["step"], "version": [], "rank": {}, "code": "y", "step": {}}\n'),
    "large": _large,
}
DAMAGES = NO_FILES | CONTENTS


def _leaves(value: Any, change: Callable[[Any], Any]) -> Any:
    """Each leaf of a JSON value in another way."""
    if isinstance(value, dict):
        return {name: _leaves(inner, change) for name, inner in value.items()}
    if isinstance(value, list):
        return [_leaves(inner, change) for inner in value]
    return change(value)


def _values(change: Callable[[Any], Any]) -> Damage:
    def damage(path: Path, good: bytes) -> None:
        texts = good.splitlines() if path.suffix == ".jsonl" else [good]
        path.write_text("".join(json.dumps(_leaves(json.loads(text), change)) + "\n" for text in texts))

    return damage


def _numbers(by: object) -> Damage:
    return _values(lambda leaf: by if isinstance(leaf, int | float) and not isinstance(leaf, bool) else leaf)


def _texts(change: Callable[[str], str]) -> Damage:
    return _values(lambda leaf: change(leaf) if isinstance(leaf, str) else leaf)


VALUES: dict[str, Damage] = {
    "NaN": _numbers(float("nan")),
    "infinite": _numbers(float("inf")),
    "huge": _numbers(10**300),
    "2^63": _numbers(1 << 63),
    "4,000 digits": _numbers(10**4000),
    "negative": _numbers(-1),
    "zero": _numbers(0),
    "fractions": _numbers(0.5),
    "null": _values(lambda _leaf: None),
    "true": _values(lambda _leaf: True),
    "lists": _values(lambda leaf: [leaf]),
    "tables": _values(lambda leaf: {"x": leaf}),
    "escapes": _texts(lambda text: f"{text}\n\x1b[2J\x1b]0;x\x07\r\x00"),
    "surrogates": _texts(lambda text: f"{text}\ud800"),
    "long": _texts(lambda text: text * 3000),
    "paths": _texts(lambda _text: "/etc/passwd"),
    "version 99": _values(lambda leaf: 99 if leaf == 1 else leaf),
}
"""What is in each number, text or leaf of a JSON file."""


def damaged(path: Path, damage: Damage) -> None:
    """Put a damage in the place of a file or folder."""
    good, mode = b"", 0o644
    if path.is_dir():
        shutil.rmtree(path)
    elif path.exists():
        good, mode = path.read_bytes(), path.stat().st_mode
        path.unlink()
    damage(path, good)
    if path.is_file() and not path.is_symlink():
        path.chmod(mode)


def old(run: Path) -> None:
    """As if nothing had been written for long: what is new goes on, and is waited for."""
    for path in (run, *run.rglob("*")):
        os.utime(path, (OLD, OLD), follow_symlinks=False)


def make_run(runs: Path, name: str) -> RunPaths:
    """A run that has failed, with all files that a run leaves."""
    known = Facts(scheduler="slurm", job=17, nodelist="n[1-2]", nodes=2, engine="apptainer", image="/i.sif")
    recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", ("ranks_per_node=2", "train.trackers=[]"))
    paths = write(recipe, known, runs=runs, run=name)[1]
    start = {"event": "start", "time": OLD, "steps": 50, "first_step": 0, "world_size": 4, "hosts": ["n1", "n2"]}
    step = {"event": "step", "time": OLD + 9, "loss": 2.5, "lr": 0.1, "step_s": 0.1, "tokens": 1, "tokens_per_s": 9.0}
    events = [start, *(step | {"step": number} for number in range(1, 6)), {"event": "slow", "rank": 1, "node": "n1"}]
    paths.metrics.write_text("".join(f"{json.dumps(event)}\n" for event in events))
    (paths.failures / "rank-3.json").write_text(json.dumps(RECORD))
    paths.rank_log(0).write_text("step 1/50\n\x1b[2Jtalk\n")
    paths.process_group.write_text('{"largest": 2}')
    paths.startup.write_text('{"attempt": 1, "nodes": [{"stage": 1.0, "import": 2.0}, {"stage": 1.0}]}')
    (paths.folder / run_folder.RENDEZVOUS).write_text('{"time": 1.0}')
    paths.failing_nodes.write_text("n2\n")
    paths.nodes.mkdir()
    (paths.nodes / "node-0.json").write_text('{"node": 0, "name": "n1", "packages": {"torch": "2"}}')
    paths.preflight.mkdir()
    paths.preflight_report.write_text('{"ranks": [], "sweep": [], "seconds": {}}')
    argv = json.dumps({"job": 17, "cluster": "", "time": 1.0, "argv": ["sbatch", "/x/multinode.sh"]})
    (paths.run / run_folder.JOB).write_text(argv)
    finish(paths, code=1)
    return paths


def _under(**variables: str) -> Any:
    return patch.dict(os.environ, variables)


def _mirrors(path: Path) -> object:
    with _under(DRAY_MIRRORS=str(path)):
        return mirrors.table()


def _remotes(path: Path) -> object:
    with _under(XDG_CONFIG_HOME=str(path.parents[1])):
        return remotes_file.read() or None


def _tokens(path: Path) -> object:
    (entry,) = clean.tokens_in(path.parents[1])
    return None if entry.holds == "(incomplete)" else entry


def _sealed(found: dict[str, Any]) -> bytes:
    return json.dumps({**found, "sha256": manifest._checksum(found)}).encode()


def _manifest(path: Path) -> object:
    return None if "trouble" in manifest.read(path.parent) else "read"


def _checkpoint(path: Path) -> object:
    return None if "trouble" in manifest.read_checkpoint(path.parent) else "read"


def _recipe(key: str) -> Callable[[Path], object]:
    return lambda path: read_recipe(ROOT / "recipes" / "smoke-cpu.toml", [f"{key}={path}"])


def _accelerate(path: Path) -> object:
    return read_recipe(None, ("launcher=accelerate", f"accelerate={path}"), ("a.py",))


def _attempt(path: Path) -> RunPaths:
    return RunPaths(path.parents[1])


def _in_run(name: str) -> Callable[[Path], bytes]:
    return lambda folder: (folder / Path(name).name).read_bytes()


def _record() -> bytes:
    sha256 = "0" * 64
    text = {"variant": "cpu", "dray": "0.1.0", "base": "b", "inputs": sha256, "epoch": 1, "tools": {"mksquashfs": "4"}}
    return json.dumps(text | {"sif": {"sha256": sha256, "size": 9}, "signed": None}).encode()


def _sif(folder: Path) -> bytes:
    packed, made = folder / "a.squashfs", folder / "a.sif"
    packed.write_bytes(b"hsqs" + bytes(range(256)) * 48)
    sif_format.write(packed, made, epoch=1, definition=b"Bootstrap: docker\n", metadata=b"{}")
    return made.read_bytes()


class Reader(NamedTuple):
    """A file, and what reads it."""

    file: str
    content: bytes | Callable[[Path], bytes]
    """What is in it; a function makes it in the file's folder."""
    read: Callable[[Path], object]
    """None where it takes the file for absent."""
    refuses: bool | None = True
    """Whether what is no such file ends with 78, or the reader goes on without it; None where it depends."""
    values: bool = False
    """Also with other values in its JSON."""
    torch: bool = False


def _of_run(name: str, read: Callable[[Path], object], *, refuses: bool = True) -> Reader:
    """Of an attempt of a run, whose other files are there."""
    return Reader(f"RUN/{name}", _in_run(name), read, refuses=refuses, values=name.endswith(".json"))


READERS: dict[str, Reader] = {
    "recipe": Reader(
        "x.toml", (ROOT / "recipes" / "smoke-cpu.toml").read_bytes(), lambda path: load(Recipe, path)
    ),
    "site": Reader("x.toml", (ROOT / "slurm" / "sites" / "generic.toml").read_bytes(), lambda path: load(Site, path)),
    "image.toml": Reader(
        "image.toml", (ROOT / "containers" / "cpu" / "image.toml").read_bytes(), lambda path: load(Image, path)
    ),
    "mirrors": Reader("mirrors.toml", b'[mirrors]\n"docker.io" = "mirror.example"\n', _mirrors),
    "remotes": Reader("dray/remotes.toml", b'box = "me@box:/scratch/me"\n', _remotes),
    "hostfile": Reader("hosts", b"box1 slots=2\nbox2 slots=2\n", local.read_hostfile),
    "secret of a hostfile": Reader(
        "secret", b"0123456789abcdef" * 2, local.Hosts(Path("hosts"), ("a", "b"), None).secret
    ),
    "DeepSpeed file": Reader("ds.json", b'{"zero_optimization": {"stage": 2}}', _recipe("train.deepspeed")),
    "accelerate file": Reader("a.yaml", b"mixed_precision: bf16\n", _accelerate),
    "facts": Reader(
        "facts", b"scheduler=slurm\nnodelist=n[1-4]\nnodes=4\nengine=bare\nimage=x\n",
        lambda path: facts.parse(files.text(path, "the facts"), where=str(path)),
    ),
    "image": Reader("a.sif", _sif, sif_format.read),
    "image's record": Reader("a.sif.json", _record(), lambda path: record.read(path.with_suffix("")), values=True),
    "lock": Reader("requirements.lock", _LOCK, locks.about),
    "layer's lock": Reader("dray-cpu-mine.lock", _LOCK, layer_lock.needs),
    "adopted image": Reader(
        "image.json", b'{"source": "x.sif", "file": "x", "pythonpath": [], "variant": "", "name": "x"}',
        lambda path: store.described(path.with_name("x.sif")) or None, refuses=False,
    ),
    "study": Reader(
        "study.json", b'{"version": 1, "kind": "sweep", "recipe": "x", "members": [{"run": "a", "ranks": 1}]}',
        lambda path: study.load(path.parent), values=True,
    ),
    "plan": _of_run("attempt-1/plan.json", lambda path: read(_attempt(path))),
    "plan, on a node": Reader("plan.json", b"{}", lambda path: runner.main(str(path))),
    "capsule": _of_run("attempt-1/capsule.json", lambda path: capsule.read(_attempt(path))),
    "result": _of_run("attempt-1/result.json", lambda path: result.result_of(_attempt(path)), refuses=False),
    "earlier runs": _of_run(
        "attempt-1/result.json",
        lambda path: prepare.slowest_checkpoint(path.parents[2], [path.parents[1].name]),
        refuses=False,
    ),
    "job.json": _of_run("job.json", lambda path: replay.job_options(path.parent), refuses=False),
    "startup.json": _of_run(
        "attempt-1/startup.json", lambda path: metrics.read_startup(_attempt(path), ["n1", "n2"]), refuses=False
    ),
    "source.json": Reader(
        "source.json", b'{"folder": "/x", "commit": "0"}', lambda path: capsule.kept_source(path.parent), refuses=False
    ),
    "tokens in the cache": Reader(
        f"{'0' * 24}/manifest.json", b'{"dataset": "x"}', _tokens, refuses=False
    ),
    "manifest": Reader(
        "step-3/manifest.json", _sealed({"version": 3, "files": {}}), _manifest, refuses=False, values=True
    ),
    "checkpoint": Reader(
        "step-3/manifest.json", _sealed({"version": 3, "files": {}}), _checkpoint, refuses=None
    ),
}  # fmt: skip

VERBS = """
runs -n 0: all attempt plan.json result.json ../summary.json ../job.json
status RUN: all attempt plan.json result.json facts.txt ../job.json
status RUN --json: all
status GOING: plan.json metrics.jsonl process.json stop failures failures/rank-3.json logs rendezvous.json ../job.json
top RUN: all
top GOING: metrics.jsonl
logs RUN: all plan.json metrics.jsonl logs/rank-0.log
logs GOING: logs/rank-0.log
why RUN: all attempt plan.json result.json failures failures/rank-3.json
why RUN --json: all
why GOING: metrics.jsonl stop failures/rank-3.json
why RUN OUT.tar.gz --bundle: all secret logs
stop RUN --no-wait: all
stop GOING --no-wait: plan.json stop process.json ../job.json
report RUN --out OUT.html: all plan.json result.json metrics.jsonl preflight/report.json startup.json ../job.json
diff RUN OTHER: all capsule.json metrics.jsonl plan.json
diff OTHER RUN: all
replay RUN --recipe OUT.toml: all capsule.json plan.json facts.txt
report RUN --sync: plan.json ../checkpoints
clean: all attempt
model eval RUN: plan.json ../checkpoints
model generate RUN a: plan.json
model export RUN: plan.json ../checkpoints
enter RUN -- true: plan.json
enter GOING -- true: plan.json process.json
finish ATTEMPT --code 1: all plan.json facts.txt metrics.jsonl capsule.json failures \
failures/rank-3.json nodes nodes/node-0.json logs preflight ../checkpoints stop process_group.json startup.json \
failing_nodes.txt
"""
"""The verbs that read a run folder, and what each opens there; `GOING` is the run without a result."""
PLAIN = (
    "plan.json", "result.json", "metrics.jsonl", "capsule.json", "facts.txt", "process.json", "stop",
    "failures/rank-3.json", "logs/rank-0.log", "nodes/node-0.json", "preflight/report.json", "../job.json",
    "../summary.json",
)  # fmt: skip
JSON = tuple(name for name in PLAIN if ".json" in name and name != "process.json")
VALUES_OF = ("status", "why", "report", "finish")
"""The verbs that are tried with other values in each file alone, too."""
