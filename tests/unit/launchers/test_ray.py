"""launcher = "ray": what each node starts, what a recipe cannot say, and what `ray symmetric-run` leaves to dray.

The command is a stand-in, which takes the words and returns the codes of Ray 2.54's own.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

import pytest

from dray.config.site import Site
from dray.contract import run_folder
from dray.contract.findings import ConfigError
from dray.facts import Facts
from dray.planning.plan import plan
from dray.ray import __main__ as ray
from dray.runs.prepare import read_recipe
from helpers import PYTHON, until
from nodes import loopback, planned

SECRET = "s" * 64
# Of symmetric-run, and of `ray start`, to which it hands on the rest: on a worker that refuses what is only for a head.
STAND_IN = """
import json, os, pathlib, shutil, socket, subprocess, sys
words = sys.argv[1:]
if words == ["--version"]:
    sys.exit(print("ray, version 2.54.1"))
assert words.pop(0) == "symmetric-run"
options, program = words[: words.index("--")], words[words.index("--") + 1 :]
names = {option.partition("=")[0] for option in options}
assert {"--address", "--min-nodes"} <= names <= {
    "--address", "--min-nodes", "--num-cpus", "--num-gpus", "--include-dashboard", "--no-monitor", "--temp-dir"
}, names
token = pathlib.Path(os.environ["RAY_AUTH_TOKEN_PATH"])
variables = {name: value for name, value in os.environ.items() if name.startswith("RAY_") or name == "OMP_NUM_THREADS"}
told = {"options": options, "variables": variables, "token": token.read_text(), "ray": shutil.which("ray"),
        "modes": [oct(path.stat().st_mode & 0o777) for path in (token, token.parent)]}
pathlib.Path(os.environ["SEEN"]).write_text(json.dumps(told))
if "UNHEARD" in os.environ:
    sys.exit("Error: Timed out waiting for head node to start.")
folder = options[-1].partition("=")[2] if "--temp-dir" in names else token.parent / "r"  # the head's, by its answer
logs = pathlib.Path(folder, "session_latest", "logs")
logs.mkdir(parents=True)
(logs / "gcs_server.err").write_text("busy")
if "--temp-dir" not in names:
    sys.exit(print("Failed to start Ray: Command 'ray start' returned non-zero exit status 1."))  # its code is 0
if "FAILS" in os.environ:
    sys.exit(int(os.environ["FAILS"]))
subprocess.run(program)
sys.exit(1)  # as where its own connection fails at the end
"""


@pytest.fixture
def node(tmp_path: Path):
    """Starts this node's part, as rank.py does."""
    (tmp_path / "attempt-1" / "logs").mkdir(parents=True)
    plan = planned(tmp_path / "attempt-1", rendezvous_timeout_s=120, nodes=loopback("n1"))
    (tmp_path / "attempt-1" / run_folder.PLAN).write_text(json.dumps(plan))
    secret = tmp_path / "attempt-1" / run_folder.SECRET
    secret.write_text(SECRET)
    secret.chmod(0o600)

    def start(*command: str, rank: int = 0, port: int = 40_000, ray: str = "2.54.1", **env: str):
        package = tmp_path / "site"
        (package / "ray" / "scripts").mkdir(parents=True, exist_ok=True)
        (package / "ray" / "__init__.py").touch()
        (package / "ray" / "scripts" / "scripts.py").write_text(STAND_IN)
        about = package / f"ray-{ray}.dist-info"
        about.mkdir(exist_ok=True)
        (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: ray\nVersion: {ray}\n")
        world = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        return subprocess.Popen(
            [sys.executable, "-m", "dray.ray", str(tmp_path / "attempt-1"), "4", *command],
            env={**PYTHON, "PYTHONPATH": str(package), "SEEN": f"{tmp_path}/seen", **world, **env},
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    return start


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
        "  wanted: ray 2.54 or newer, whose nodes join by `ray symmetric-run`\n"
        "  found:  none\n"
        "  fix:    dray image layer VARIANT --pip ray, and layer=ray\n"
    )


@pytest.mark.parametrize("version", ["2.53.0", "1.9.0", "2.9rc1"])
def test_an_older_ray(node, version: str) -> None:
    with node("true", ray=version) as started:
        _, err = started.communicate()
    assert started.returncode == 69
    assert f"  found:  {version}\n" in err


def test_the_first_node(node, tmp_path: Path) -> None:
    with node(
        "sh", "-c", 'echo "$0 $RAY_ADDRESS"; ray --version', "a b", OMP_NUM_THREADS="1", PATH="/usr/bin:/bin"
    ) as it:
        out, err = it.communicate()
    assert (it.returncode, err) == (0, "")
    assert out == "a b 127.0.0.1:25000\nray, version 2.54.1\n"
    seen = json.loads((tmp_path / "seen").read_text())
    place = Path(seen["variables"]["RAY_AUTH_TOKEN_PATH"]).parent
    assert seen["options"] == [
        "--address=127.0.0.1:25000", "--num-gpus=4", "--min-nodes=2", f"--num-cpus={len(os.sched_getaffinity(0))}",
        "--include-dashboard=false", "--no-monitor", f"--temp-dir={place}/r",
    ]  # fmt: skip
    assert seen["variables"] == {
        "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": f"{place}/token", "RAY_ADDRESS": "127.0.0.1:25000",
        "RAY_SYMMETRIC_RUN_CLUSTER_WAIT_TIMEOUT": "120", "RAY_USAGE_STATS_ENABLED": "0",
    }  # fmt: skip
    assert (seen["modes"], seen["ray"]) == (["0o600", "0o700"], f"{place}/ray")
    assert re.fullmatch("[0-9a-f]{52}", seen["token"])
    assert re.fullmatch("/tmp/ray-[0-9a-f]{12}", str(place))
    assert not place.exists()


def test_all_nodes_have_one_token_and_each_start_another(node, tmp_path: Path) -> None:
    tokens = []
    for rank, port in ((0, 40_000), (1, 40_000), (0, 40_001)):
        with node("true", rank=rank, port=port) as it:
            it.communicate()
        tokens.append(json.loads((tmp_path / "seen").read_text())["token"])
    assert tokens[0] == tokens[1] != tokens[2]


@pytest.mark.parametrize(("program", "code"), [("exit 3", 3), ("kill -9 $$", 137), ("exit 255", 255)])
def test_the_program_s_code(node, tmp_path: Path, program: str, code: int) -> None:
    with node("sh", "-c", program) as it:
        _, err = it.communicate()
    assert (it.returncode, err) == (code, "Killed\n" if code == 137 else "")
    assert (tmp_path / "attempt-1/logs/ray-0/gcs_server.err").read_text() == "busy"


@pytest.mark.parametrize("code", ["0", "1"])
def test_ray_does_not_start_on_the_first_node(node, tmp_path: Path, code: str) -> None:
    with node("true", FAILS=code) as it:
        _, err = it.communicate()
    logs = tmp_path / "attempt-1/logs/ray-0"
    assert it.returncode == 69
    assert err == f"dray: Ray ended before the program\n  where:  {logs}\n  found:  exit code {code}\n"
    assert (logs / "gcs_server.err").read_text() == "busy"


def test_a_worker_ends_with_the_first_node_and_not_before_it(node, tmp_path: Path) -> None:
    with node("true", rank=1, port=41_000) as it:
        _, err = it.communicate()
    assert (it.returncode, err) == (0, "")  # nobody listens: the first node has stopped Ray
    with socket.create_server(("127.0.0.1", 26_000)), node("true", rank=1, port=41_000) as it:
        _, err = it.communicate()
    logs = tmp_path / "attempt-1/logs/ray-1"
    assert it.returncode == 69
    assert err == f"dray: Ray ended before the program\n  where:  {logs}\n  found:  exit code 0\n"
    assert (logs / "gcs_server.err").read_text() == "busy"


def test_a_worker_that_never_hears_the_head(node, tmp_path: Path) -> None:
    """As behind a firewall: that nobody listens there tells nothing then. Ray itself says what it waited for."""
    with node("true", rank=1, port=41_000, UNHEARD="1") as it:
        _, err = it.communicate()
    assert it.returncode == 69
    assert err == (
        "Error: Timed out waiting for head node to start.\n"
        f"dray: Ray ended before the program\n  where:  {tmp_path}/attempt-1/logs/ray-1\n  found:  exit code 1\n"
    )


@pytest.mark.seconds
def test_a_head_that_answers_late_has_not_stopped() -> None:
    """Its queue is full, so the kernel drops the first try to connect, which Linux repeats after a second."""
    with socket.socket() as head, socket.socket() as waits, ThreadPoolExecutor() as pool:
        head.bind(("127.0.0.1", 0))
        head.listen(0)
        waits.connect(head.getsockname())
        asked = pool.submit(ray._listens, head.getsockname())
        time.sleep(0.2)
        head.accept()[0].close()
        assert asked.result()


def test_another_program_has_the_port_of_the_head(node, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 27_000)), node("true", port=42_000) as it:
        _, err = it.communicate()
    assert it.returncode == 75  # so max_restarts and max_requeues apply, and exclude no node
    assert err == (
        "dray: port 27000 is busy on n1\n"
        "  wanted: port 27000 free on the first node\n"
        "  found:  another program listens there\n"
        "  fix:    remove `port` from the recipe, and dray takes a free one; or start the run again later\n"
    )
    assert not (tmp_path / "seen").exists()


def test_the_program_hears_signals(node, tmp_path: Path) -> None:
    """SIGUSR1 would kill Ray, which does not handle it; and the program may take its time to end."""
    program = (
        f"trap 'echo saved' USR1; trap 'sleep 0.5; exit 9' TERM; : >{tmp_path}/ready; while :; do sleep 0.05; done"
    )
    with node("sh", "-c", program) as it:
        until((tmp_path / "ready").exists)
        it.send_signal(signal.SIGUSR1)
        assert it.stdout.readline() == "saved\n"
        it.send_signal(signal.SIGTERM)
        it.communicate()
    assert it.returncode == 9
