"""launcher = "ray": what each node starts, what a recipe cannot say, and what a stranger cannot tell the nodes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path, PurePosixPath

import pytest

from dray.config.site import Site
from dray.contract.findings import ConfigError
from dray.facts import Facts
from dray.planning.plan import plan
from dray.ray import __main__ as ray
from dray.runs.write import read_recipe

pytestmark = pytest.mark.torch

TCPStore = pytest.importorskip("torch.distributed").TCPStore


def test_each_node_has_one_process_and_the_program_comes_last() -> None:
    recipe = read_recipe(None, ("launcher=ray", "image=cuda"), ("train.py", "--x", "a b"))
    facts = Facts(scheduler="slurm", nodelist="n[1-3]", nodes=3, gpus_per_node=4, engine="apptainer", image="/i.sif")
    run = {"run_folder": PurePosixPath("/runs/r"), "scratch": "/tmp/s"}
    made = plan(recipe, Site(name="s", about=""), facts, dray="0", **run)
    assert (made.world.ranks_per_node, made.world.size) == (1, 3)
    assert made.reasons["ranks_per_node"] == "1: launcher = ray: Ray starts its workers itself"
    assert made.launcher == ("python3", "-S", "-E", "{ranks}", "3", "1", "{node_rank}", "{master}", "{port}")
    assert made.command == (
        *("python3", "-m", "dray.ray", "/runs/r/attempt-1", "4"),
        *("python3", "train.py", "--x", "a b"),
    )


@pytest.mark.parametrize(("words", "key"), [(("ranks_per_node=2",), "ranks_per_node"), ((), r"\[train\]")])
def test_what_ray_has_no_use_for(root: Path, words: tuple[str, ...], key: str) -> None:
    command = ("train.py",) if words else ()
    file = None if words else root / "recipes" / "llama-sft.toml"
    with pytest.raises(ConfigError) as refused:
        read_recipe(file, ("launcher=ray", *words), command)
    assert "starts [command] on the first node, and does not support" in str(refused.value.details["found"])
    assert key.strip("\\[]") in str(refused.value.details["found"])


def test_an_image_without_ray(tmp_path: Path) -> None:
    argv = [sys.executable, "-m", "dray.ray", str(tmp_path), "0", "true"]
    ended = subprocess.run(argv, capture_output=True, text=True, check=False, env={**os.environ, "PYTHONPATH": ""})
    assert ended.returncode == 69
    assert ended.stderr == (
        "dray: launcher = ray, and the image lacks a new enough Ray\n"
        "  wanted: ray 2.52 or newer, whose ports ask for a token\n"
        "  found:  none\n"
        "  fix:    dray image layer VARIANT --pip ray, and layer=ray\n"
    )


def test_only_the_first_node_is_believed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(store.port))
    first, other, stranger = ray.Told(b"a" * 64), ray.Told(b"a" * 64), ray.Told(b"b" * 64)
    assert other.heard("head") is None

    def say(by: ray.Told, value: str) -> None:  # the store answers one client in order, and no other waits for that
        by.say("head", value)
        by._store.check(["head"])

    say(first, "10.0.0.1:4000 /tmp/x")
    assert other.heard("head") == "10.0.0.1:4000 /tmp/x"
    signed_for_another = json.dumps(["0", first._signed("end", "0")])
    for spoil in (
        lambda: store.set("head", signed_for_another),
        lambda: say(stranger, "6.6.6.6:1 /tmp/x"),
        lambda: store.set("head", "{"),
    ):
        spoil()
        store.check(["head"])
        with pytest.raises(SystemExit) as ended:
            other.heard("head")
        assert ended.value.code == 69
        assert "a value in torch's store is not from the first node" in capsys.readouterr().err


def test_a_folder_that_is_open_to_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    mine, open_ = tmp_path / "mine", tmp_path / "open"
    assert ray._made(str(mine)) == str(mine) == ray._made(str(mine))
    assert mine.stat().st_mode & 0o7777 == 0o700
    open_.mkdir(mode=0o755)
    (tmp_path / "link").symlink_to(mine)
    for place in (open_, tmp_path / "link"):
        with pytest.raises(SystemExit):
            ray._made(str(place))
        assert f"Ray's folder was made by another user\n  where:  {place}\n" in capsys.readouterr().err
