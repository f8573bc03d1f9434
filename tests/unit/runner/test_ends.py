"""No process of a node outlives it, and a node that fails ends only once all others have ended theirs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from helpers import ROOT, until
from nodes import Start, ended, plan, start  # noqa: F401  fixtures

RANKS = [sys.executable, "-S", "-E", "{ranks}", "2", "1", "{node_rank}", "{master}", "{port}"]
# Each rank leaves a daemon behind, without its environment: out of its session, and no child of its own any more.
DAEMON = "(env -i setsid sleep 600 & echo $! >daemon-$RANK); touch up-$RANK"
ALL_UP = "until [ -e up-0 ] && [ -e up-1 ]; do sleep 0.05; done"


def ranks(plan: dict[str, Any], script: str) -> None:  # noqa: F811
    plan["launcher"] = RANKS
    plan["world"] |= {"ranks_per_node": 1, "size": 2}
    plan["command"] = ["sh", "-c", f"cd {plan['folder']}\n{DAEMON}\n{script}"]


def alive(folder: Path) -> list[str]:
    """The daemons that still run."""
    pids = [file.read_text().strip() for file in folder.glob("daemon-*")]
    return [pid for pid in pids if Path("/proc", pid, "exe").exists()]


@pytest.fixture(autouse=True)
def nothing_stays(tmp_path: Path):
    """Whatever a test finds."""
    yield
    for pid in alive(tmp_path):
        os.kill(int(pid), signal.SIGKILL)


def is_up(folder: Path) -> bool:
    return len(list(folder.glob("up-*"))) == 2


@pytest.mark.seconds
def test_a_node_that_fails_waits_for_the_others(plan: dict[str, Any], start: Start, tmp_path: Path) -> None:  # noqa: F811
    """srun ends all others with the first that fails, and takes the mount from below ranks that still end."""
    slow = "trap 'sleep 1; touch ended-$RANK; exit 5' TERM; while :; do sleep 0.05; done"
    ranks(plan, f"{ALL_UP}; [ $RANK = 0 ] || exit 3; {slow}")
    first, second = start(0, 2, "node1"), start(1, 2, "node2")
    assert ended(second)[0] == 3
    assert (tmp_path / "ended-0").exists()
    assert ended(first)[0] == 3
    assert len(list(tmp_path.glob("daemon-*"))) == 2
    assert alive(tmp_path) == []


def test_a_rank_that_ends_early_does_not_end_its_node(plan: dict[str, Any], start: Start, tmp_path: Path) -> None:  # noqa: F811
    """The others go on, and one of them may fail."""
    ranks(plan, f"{ALL_UP}; [ $RANK = 0 ] || exit 0; until [ -e go ]; do sleep 0.05; done; exit 4")
    first, second = start(0, 2, "node1"), start(1, 2, "node2")
    until(lambda: is_up(tmp_path) and not alive(tmp_path)[1:])  # what the second node's rank has left is gone
    assert second.poll() is None
    (tmp_path / "go").touch()
    assert [ended(node)[0] for node in (first, second)] == [4, 4]


@pytest.mark.seconds
@pytest.mark.parametrize("node", [0, 1])
def test_a_signal_to_one_node_during_the_preflight_ends_all(
    node: int,
    plan: dict[str, Any],  # noqa: F811
    start: Start,  # noqa: F811
    tmp_path: Path,
) -> None:
    """None waits for its deadline."""
    plan |= {"variant": "cpu", "site": "site s", "fabric": {"strategy": "none"}}
    plan["preflight"] = {"timeout_s": 600, "megabytes": 1, "free_gb": 0, "shared_memory_gb": 0, "memory_gb": 0}
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(
        "import sys, time, types\n"
        "network = types.ModuleType('dray.checks.network')\n"
        "network.suite = lambda *_: time.sleep(600)\n"
        "sys.modules['dray.checks.network'] = network\n"
    )
    path = os.pathsep.join([str(tmp_path / "site"), str(ROOT / "src")])
    nodes = [start(number, 2, f"node{number + 1}", PYTHONPATH=path) for number in range(2)]
    until(lambda: len(list(tmp_path.glob("preflight/rank-*.stack"))) == 4)
    nodes[node].send_signal(signal.SIGTERM)
    assert [ended(one)[0] for one in nodes] == [143, 143]
    assert not (tmp_path / "failures").exists()


@pytest.mark.seconds
def test_ranks_that_outlive_a_launcher_may_save_on_the_first_node_too(
    plan: dict[str, Any],  # noqa: F811
    start: Start,  # noqa: F811
    tmp_path: Path,
) -> None:
    """Where the launcher ends at once when the run is stopped."""
    saves = "trap 'sleep 1; touch saved; exit 0' TERM; echo $$ >daemon-0; touch up-0; while :; do sleep 0.05; done"
    (tmp_path / "rank").write_text(saves)
    plan["world"] |= {"nodes": plan["world"]["nodes"][:1], "ranks_per_node": 1, "size": 1}
    plan["launcher"] = ["sh", "-c", f"cd {tmp_path}; setsid sh rank & exec sleep 600"]
    node = start(0, 1, "node1")
    until((tmp_path / "up-0").exists)
    node.send_signal(signal.SIGTERM)
    ended(node)
    assert (tmp_path / "saved").exists()
    assert alive(tmp_path) == []


@pytest.mark.slow
def test_a_run_that_is_stopped_now_ends_within_the_grace(plan: dict[str, Any], start: Start, tmp_path: Path) -> None:  # noqa: F811
    ranks(plan, "trap '' TERM; while :; do sleep 0.05; done")
    nodes = [start(0, 2, "node1"), start(1, 2, "node2")]
    until(lambda: is_up(tmp_path))
    asked = time.monotonic()
    (tmp_path / "stop").write_text("dray stop\ndray stop --now\n")
    codes = [ended(node)[0] for node in nodes]
    assert (0 not in codes, time.monotonic() - asked < 20) == (True, True)
    assert alive(tmp_path) == []
    assert not (tmp_path / "failures").exists()


@pytest.mark.slow
def test_a_stopped_node_does_not_wait_for_one_that_is_lost(plan: dict[str, Any], start: Start, tmp_path: Path) -> None:  # noqa: F811
    """A scancel may kill one runner with its mount of the image; the other's ranks take no notice of SIGTERM."""
    ranks(plan, "trap 'touch told-$RANK' TERM; while :; do sleep 0.05; done")
    first, second = start(0, 2, "node1"), start(1, 2, "node2")
    until(lambda: is_up(tmp_path))
    second.send_signal(signal.SIGTERM)
    until(lambda: len(list(tmp_path.glob("told-*"))) == 2)
    lost = time.monotonic()
    first.kill()
    ended(second)
    assert time.monotonic() - lost < 20
    assert not (tmp_path / "failures").exists()


@pytest.mark.slow
def test_no_node_goes_on_without_the_first(plan: dict[str, Any], start: Start, tmp_path: Path) -> None:  # noqa: F811
    """It says that it has ended though others have not, where an exception ends it: its image is gone, say."""
    (tmp_path / "site").mkdir()
    broken = (
        "import sys\nif 'dray.runner' in sys.orig_argv:\n    from dray.runner import control\n"
        "    def breaks(self, lines):\n        raise SystemExit(9)\n"
        "    control.Control._obey = breaks\n"
    )
    (tmp_path / "site" / "sitecustomize.py").write_text(broken)
    ranks(plan, "trap '' TERM; while :; do sleep 0.05; done")
    path = os.pathsep.join([str(tmp_path / "site"), str(ROOT / "src")])
    first, second = start(0, 2, "node1", PYTHONPATH=path), start(1, 2, "node2")
    ended(first)
    until(lambda: second.poll() is not None)
    assert alive(tmp_path) == []


STALLS = """
import os, sys, time
if 'dray.runner' in sys.orig_argv:
    stat = os.stat
    def stalled(path, *more, **named):
        if str(path).endswith(("/stop", "rank-0.log")):
            time.sleep(600)
        return stat(path, *more, **named)
    os.stat = stalled
"""


@pytest.mark.seconds
def test_a_shared_disk_that_stalls_holds_up_no_signal(plan: dict[str, Any], start: Start, tmp_path: Path) -> None:  # noqa: F811
    """The first node looks there each second, whether the run is asked to end, and whether a log grows."""
    plan["recipe"]["hang_timeout_s"] = 60
    ranks(plan, "while :; do sleep 0.05; done")
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(STALLS)
    path = os.pathsep.join([str(tmp_path / "site"), str(ROOT / "src")])
    nodes = [start(0, 2, "node1", PYTHONPATH=path), start(1, 2, "node2")]
    until(lambda: is_up(tmp_path))
    time.sleep(3)  # in which it looks
    asked = time.monotonic()
    nodes[0].send_signal(signal.SIGTERM)
    codes = [ended(node)[0] for node in nodes]
    assert (0 not in codes, time.monotonic() - asked < 30) == (True, True)


START = """
set -euo pipefail
scratch={scratch}
{before}
source {root}/src/dray/render/bash/start.sh
node::start {engine}
"""


def script(tmp_path: Path, engine: str, before: str = "") -> subprocess.CompletedProcess[str]:
    """A node's script, without what comes before its engine."""
    text = START.format(scratch=tmp_path / "own", before=before, root=ROOT, engine=engine)
    return subprocess.run(["bash", "-c", text], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60)


LEAVES = """
for own in own own2; do
  TMPDIR="$PWD/$own/x" setsid sleep 600 >/dev/null 2>&1 &
  until [[ "$(</proc/$!/comm)" == sleep ]]; do :; done
  echo $! >daemon-$own
done
kill -KILL $$
"""


def test_the_node_s_script_ends_what_a_killed_runner_has_left(tmp_path: Path) -> None:
    """By the run's folder on this node, which is in the environment of each process; another run's is not this one."""
    (tmp_path / "leaves").write_text(LEAVES)
    assert script(tmp_path, "bash leaves").returncode == 137
    assert alive(tmp_path) == [(tmp_path / "daemon-own2").read_text().strip()]
    os.kill(int(alive(tmp_path)[0]), signal.SIGKILL)


@pytest.mark.parametrize(
    "before",
    [
        'set() { [[ $1 != -m ]] || kill -TERM $$; builtin set "$@"; }',
        """set -T; trap '[[ "$BASH_COMMAND" != "started=\\$!" ]] || kill -TERM $$' DEBUG""",  # it has no name yet
    ],
)
def test_a_signal_while_the_engine_starts_reaches_it(tmp_path: Path, before: str) -> None:
    """It would have ended the script, which takes the node's folder away, and the engine had gone on."""
    (tmp_path / "own").mkdir()
    started = time.monotonic()
    code = script(tmp_path, "sleep 30", before).returncode  # -15: the script was killed itself
    assert (code, time.monotonic() - started < 20) == (128 + signal.SIGTERM, True)
    assert not (tmp_path / "own").exists()


def test_the_engine_gets_a_signal_once(tmp_path: Path) -> None:
    """Also one that comes when the engine has just started, before those are looked at that came earlier."""
    before = """kill() { [[ "$1" != -TERM ]] || echo sent >>sent; builtin kill "$@"; }
        set -T; trap '[[ "$BASH_COMMAND" != "[[ -z \\"\\$early\\" ]]" ]] || builtin kill -TERM $$' DEBUG"""
    assert script(tmp_path, "sleep 30", before).returncode == 128 + signal.SIGTERM
    assert (tmp_path / "sent").read_text() == "sent\n"


def test_an_engine_that_starts_slowly_costs_no_core(tmp_path: Path) -> None:
    """Its program may be on a disk that stalls."""
    before = 'slow() { sleep 0.5; exec true; }; sleep() { echo round >>rounds; command sleep "$@"; }'
    assert script(tmp_path, "slow", before).returncode == 0
    assert len((tmp_path / "rounds").read_text().splitlines()) < 200


@pytest.mark.slow
def test_no_signal_is_lost_while_an_engine_starts(tmp_path: Path) -> None:
    """On a busy machine 1 of 50 came to the copy of bash that was to be the engine, whose handler took it."""
    before = 'set() { [[ $1 != -m ]] || kill -TERM $$; builtin set "$@"; }'
    with ThreadPoolExecutor(3) as several:
        ended = [*several.map(lambda _: script(tmp_path, "sleep 0.3", before).returncode, range(180))]
    assert ended == [128 + signal.SIGTERM] * 180
