"""Files of users and of others, damaged at random: taken, or refused in a finding; never a traceback, never a hang.

`make hostile` tries 20,000 of them; here are as many as some seconds allow.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from dray import facts, render
from dray.config import deepspeed_file
from dray.config.image_definition import Image
from dray.config.load_toml import load
from dray.config.recipe import Recipe
from dray.config.site import Site
from dray.contract import files
from dray.contract.findings import DrayError
from dray.facts import Facts
from dray.images.sif import record
from dray.planning.plan import plan
from dray.runs import local, prepare, store
from dray.runs.store import RunPaths
from helpers import ROOT

EACH = int(os.environ.get("DRAY_FUZZ", "0")) or 12
LIMIT_S = 2.0  # of this process's own time: the machine may be busy with others
BASE = load(Recipe, ROOT / "recipes" / "smoke-cpu.toml")
SITE = load(Site, ROOT / "slurm" / "sites" / "generic.toml")
FACTS = Facts(scheduler="local", nodelist="node[1-2]", nodes=2, engine="bare", image="/python", address="127.0.0.1")
BAD = [
    b"\0", b"\xff", b"\xed\xa0\x80", b"\xef\xbb\xbf", b"\r", b"\n", b"\x1b[2J", b"[" * 300, b"]" * 3, b"{" * 70,
    b"a." * 300,
    b"9" * 5000, b"0x" + b"f" * 5000, b"1e999", b"-1", b"0", b"inf", b"nan", b"-nan", b"true", b'""', b'"', b"'''",
    b"\xc2\xb2", b"fe80::1", b"n[1-99999999]", b"n[", b"0-99999999999", b"../../..", b"$(touch x)", b"~", b"*", b"=",
    b",", b"#", b"\\ud800", b'"\\ud800"', b"null", b"[]", b"{}", b"[tiny]", b"1979-05-27T07:32:00Z",
    b"18446744073709551616",
    b"slots=0", b"\xe2\x80\xae", b"x" * 70_000, b"scale = 'tiny'\n", b"[command]\nargv = ['a']\n",
]  # fmt: skip


def _recipe(path: Path) -> None:
    read = prepare.read_recipe(path)
    made = plan(
        read, SITE, FACTS.model_copy(update={"nodelist": f"node[1-{read.nodes}]", "nodes": read.nodes}),
        run_folder=PurePosixPath("/r"), scratch="/run/x", dray="0",
    )  # fmt: skip
    render.node_script(made)
    made.model_dump_json()


def _facts(path: Path) -> None:
    read = facts.parse(files.text(path, "the facts"), where=str(path))
    read.hosts()
    facts.to_text(read)


def _site(path: Path) -> None:
    made = plan(BASE, load(Site, path), FACTS, run_folder=PurePosixPath("/r"), scratch="/run/x", dray="0")
    render.node_script(made)
    made.model_dump_json()


def _plan(path: Path) -> None:
    paths = RunPaths(path.parent / "run")
    paths.plan.parent.mkdir(parents=True, exist_ok=True)
    path.replace(paths.plan)
    render.text(store.plan_of(paths))


def _record(path: Path) -> None:
    record.read(path.replace(record.path_for(path)).with_suffix(""))


def _texts(folder: str, pattern: str) -> list[bytes]:
    return [path.read_bytes() for path in sorted((ROOT / folder).glob(pattern))]


def _a_plan() -> bytes:
    made = plan(BASE, SITE, FACTS, run_folder=PurePosixPath("/r"), scratch="/run/x", dray="0")
    return made.model_dump_json(indent=1).encode()


RECORD = b"""{"variant": "cpu", "dray": "0.1.0", "base": "b", "inputs": "%(sum)s", "epoch": 1,
 "tools": {"mksquashfs": "4.6"}, "sif": {"sha256": "%(sum)s", "size": 9}, "signed": null}""" % {b"sum": b"0" * 64}

KINDS: dict[str, tuple[Callable[[Path], object], list[bytes]]] = {
    "recipes": (_recipe, _texts("recipes", "*.toml")),
    "sites": (_site, _texts("slurm/sites", "*.toml")),
    "images": (lambda path: load(Image, path), _texts("containers", "*/image.toml")),
    "hostfiles": (local.read_hostfile, [b"box1 slots=8\nbox2 slots=8\n", b"# all\na\n10.0.0.2\n", b"n1\n" * 3]),
    "facts": (
        _facts,
        [facts.to_text(FACTS).encode(), b"scheduler=slurm\nnodelist=n[1-4]\nnodes=4\nengine=bare\nimage=x\n"],
    ),
    "plans": (_plan, [_a_plan()]),
    "manifests": (_record, [RECORD]),
    "DeepSpeed files": (
        lambda path: deepspeed_file.agreed(BASE, files.text(path, "the DeepSpeed file"), path),
        [*_texts("recipes", "**/*.json"), b'{"zero_optimization": {"stage": 2}, "fp16": {"enabled": false}}'],
    ),
}  # fmt: skip


@some.composite
def damaged(draw: some.DrawFn, kind: str) -> bytes:
    """A good file with some places cut, doubled, replaced or moved; sometimes no such file at all."""
    if draw(some.integers(0, 19)) == 0:
        return draw(some.binary(max_size=200) | some.text(max_size=100).map(lambda text: text.encode()))
    content = draw(some.sampled_from(KINDS[kind][1]))
    for _ in range(draw(some.integers(1, 4))):
        rows = content.split(b"\n")
        number = draw(some.integers(0, len(rows) - 1))
        begin = draw(some.integers(0, len(content)))
        end = min(len(content), begin + draw(some.integers(0, 40)))
        bad = draw(some.sampled_from(BAD))
        match draw(some.sampled_from(["value", "value", "value", "cut", "insert", "replace", "row", "double", "line"])):
            case "value":  # keep the key
                mark = b":" if b":" in rows[number] and b"=" not in rows[number] else b"="
                rows[number] = rows[number].partition(mark)[0] + mark + b" " + bad
                content = b"\n".join(rows)
            case "cut":
                content = content[:begin] + content[end:]
            case "insert":
                content = content[:begin] + bad + content[begin:]
            case "replace":
                content = content[:begin] + bad + content[end:]
            case "row":
                content = b"\n".join([*rows[:number], *rows[number + 1 :]])
            case "double":
                content = b"\n".join([*rows, rows[number]])
            case "line":
                content = b"\n".join([*rows[:number], bad, *rows[number:]])
    coding = draw(some.sampled_from(["", "", "", "", "", "", "", "utf-16", "cr", "latin-1"]))
    if coding == "cr":
        return content.replace(b"\n", b"\r")
    return content.decode(errors="replace").encode(coding, "replace") if coding else content


def _hangs(number: int, frame: object) -> None:
    raise AssertionError("a hang")


@pytest.mark.seconds
@pytest.mark.hostile("fuzz")
@pytest.mark.parametrize("kind", KINDS)
def test_a_damaged_file_is_taken_or_refused(kind: str, tmp_path: Path, record_property) -> None:
    read, path = KINDS[kind][0], tmp_path / "x.toml"
    record_property("cases", EACH)

    @settings(
        max_examples=EACH, deadline=None, database=None, derandomize="DRAY_FUZZ" not in os.environ,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(damaged(kind))
    def try_one(content: bytes) -> None:
        path.write_bytes(content)
        began = time.process_time()
        try:
            read(path)
        except DrayError as refused:
            str(refused).encode()  # it can be printed
        assert time.process_time() - began < LIMIT_S

    before = signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(60 + EACH)
    try:
        try_one()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
