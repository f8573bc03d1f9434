"""Values that pass_env hands in are in no log of a rank or a node, no record and no result."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dray import runner
from dray.runner import rank, redact
from helpers import PYTHON
from nodes import TORCHLESS

TOKEN = "a token of my own"


def supervised(folder: Path, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "logs").mkdir(exist_ok=True)
    given = {**PYTHON, "RANK": "1", "WORLD_SIZE": "2", "HF_TOKEN": TOKEN, "DRAY_PASSED": "HF_TOKEN"}
    argv = [sys.executable, "-S", "-E", str(rank.__file__), str(folder), "2", "node2", *command]
    return subprocess.run(argv, env={**given, **env}, timeout=60, check=False, capture_output=True, text=True)


def log(folder: Path) -> str:
    return (folder / "logs" / "rank-1.log").read_text()


def test_neither_log_nor_record_has_it(tmp_path: Path) -> None:
    ended = supervised(tmp_path, "sh", "-c", 'echo "with $HF_TOKEN."; echo "$HF_TOKEN" >&2; exit 3')
    assert ended.returncode == 3
    assert log(tmp_path) == "with [HF_TOKEN].\n[HF_TOKEN]\n"
    record = json.loads((tmp_path / "failures" / "rank-1.json").read_text())
    assert record["last_lines"] == ["with [HF_TOKEN].", "[HF_TOKEN]"]


def test_all_of_it_arrives(tmp_path: Path) -> None:
    assert supervised(tmp_path, "seq", "200000").returncode == 0
    assert log(tmp_path) == "".join(f"{number}\n" for number in range(1, 200001))


def test_a_line_without_an_end_arrives_too(tmp_path: Path) -> None:
    supervised(tmp_path, "printf", "it ends with %s", TOKEN[:-1])
    assert log(tmp_path) == f"it ends with {TOKEN[:-1]}"


def test_what_the_rank_leaves_behind_is_not_waited_for(tmp_path: Path) -> None:
    ended = supervised(tmp_path, "sh", "-c", "echo begun; sleep 600 & echo $! >pid", PWD=str(tmp_path))
    try:
        assert (ended.returncode, log(tmp_path)) == (0, "begun\n")
    finally:
        pid = Path("pid")
        os.kill(int(pid.read_text()), 9)
        pid.unlink()


@pytest.mark.parametrize("names", ["", "UNSET", "SHORT"])
def test_where_there_is_nothing_to_hide_a_rank_writes_to_its_log_itself(tmp_path: Path, names: str) -> None:
    supervised(tmp_path, "sh", "-c", "readlink /proc/self/fd/1", DRAY_PASSED=names, SHORT="1")
    assert log(tmp_path) == f"{tmp_path}/logs/rank-1.log\n"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 19, 1000])
def test_a_value_that_comes_in_pieces(tmp_path: Path, size: int, capfd) -> None:
    values = {TOKEN: "A", "a to": "B", "überlang": "C"}
    between = redact.Filter(values)
    text = f"x a {TOKEN}{TOKEN} {TOKEN[:6]}\n überlang über {TOKEN}".encode()
    for start in range(0, len(text), size):
        os.write(between.writer, text[start : start + size])
        between.pass_on()
    os.close(between.writer)
    between.finish()
    os.close(between.reader)
    assert capfd.readouterr().out == "x a [A][A] [B]ke\n [C] über [A]"


def test_the_rest_of_a_large_pipe_is_written(capfd) -> None:
    """Where pages have 64 KiB a pipe holds 1 MiB."""
    between = redact.Filter({"12345678": "A"})
    fcntl.fcntl(between.writer, fcntl.F_SETPIPE_SZ, 1 << 20)
    os.write(between.writer, b"x" * 200_000)
    between.finish()
    assert len(capfd.readouterr().out) == 200_000


def test_a_full_disk_ends_nothing(tmp_path: Path) -> None:
    code = (
        "import os\n"
        "from dray.runner import redact\n"
        "os.dup2(os.open('/dev/full', os.O_WRONLY), 1)\n"
        "between = redact.Filter({'12345678': 'A'})\n"
        "os.write(between.writer, b'text')\n"
        "os.close(between.writer)\n"
        "between.finish()\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_what_writes_for_ever_is_not_waited_for() -> None:
    """A process that the child has left behind."""
    code = (
        "import os, subprocess\n"
        "from dray.runner import redact\n"
        "between = redact.Filter({'12345678': 'A'})\n"
        "with subprocess.Popen(['yes'], stdout=between.writer) as left:\n"
        "    os.set_blocking(between.reader, True)\n"
        "    between.finish()\n"
        "    left.kill()\n"
    )
    subprocess.run([sys.executable, "-c", code], env=PYTHON, stdout=subprocess.DEVNULL, check=True, timeout=60)


@pytest.fixture
def node(plan: dict[str, Any], tmp_path: Path):
    """Run a launcher on the one node of a plan: the runner's exit code, the node's log and its record."""

    def run(*launcher: str) -> tuple[int, str, dict[str, Any]]:
        plan["recipe"]["pass_env"], plan["launcher"] = ["HF_TOKEN"], [*launcher]
        plan["world"] |= {"nodes": plan["world"]["nodes"][:1], "ranks_per_node": 1, "size": 1}
        (tmp_path / "plan.json").write_text(json.dumps(plan))
        env = {"DRAY_NODE": "0", "DRAY_NODES": "1", "DRAY_NODE_NAME": "node1", "HF_TOKEN": TOKEN, **PYTHON}
        env["PYTHONPATH"] = TORCHLESS
        argv = [sys.executable, "-m", "dray.runner", str(tmp_path / "plan.json")]
        with (tmp_path / "logs" / "node-0.log").open("ab") as file:
            ended = subprocess.run(argv, env=env, timeout=60, check=False, stdout=file, stderr=file)
        record = json.loads((tmp_path / "failures" / "node-0.json").read_text())
        return ended.returncode, (tmp_path / "logs" / "node-0.log").read_text(), record

    return run


def test_a_launcher_s_lines_have_it_neither(node) -> None:
    """torchrun prints the exception that a rank has left by torch's @record."""
    code, log, record = node("sh", "-c", 'echo "with $HF_TOKEN" >&2; printf "ValueError: %s" "$HF_TOKEN"; exit 3')
    lines = ["with [HF_TOKEN]", "ValueError: [HF_TOKEN]"]
    assert (code, log.splitlines()[1:]) == (3, lines)
    assert (record["why"], record["last_lines"][1:]) == ("the launcher ended: exit code 3", lines)


def test_a_node_s_record_has_it_neither(node, tmp_path: Path) -> None:
    """Whoever has written it into the log."""
    (tmp_path / "logs" / "node-0.log").write_text(f"it is {TOKEN}\n")
    code, _, record = node(f"/not there/{TOKEN}")
    assert code == 127
    assert "it is [HF_TOKEN]" in record["last_lines"]
    assert TOKEN not in json.dumps(record)


def test_it_loads_little() -> None:
    source = str(Path(runner.__file__).parents[2])
    code = f"import sys; sys.path.insert(0, {source!r}); import dray.runner.redact; print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-S", "-E", "-c", code], capture_output=True, text=True, check=True)
    assert not {"pathlib", "typing", "json", "pydantic"} & set(loaded.stdout.split())
