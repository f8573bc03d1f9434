"""`dray finish` does not fail: whatever is in the folder of an attempt, the run gets a result with its first cause."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import pytest

from command import dray
from damage import RECORD
from dray.facts import Facts
from dray.runs.finish import finish
from dray.runs.prepare import read_recipe, write
from dray.runs.result import summary
from dray.runs.status import Stop
from dray.runs.store import RunPaths

pytestmark = pytest.mark.hostile("finish")

FACTS = Facts(scheduler="slurm", job=17, nodelist="n[1-2]", nodes=2, engine="apptainer", image="/i.sif")


def begun(root: Path, runs: Path, *words: str) -> RunPaths:
    return write(read_recipe(root / "recipes" / "smoke-cpu.toml", words), FACTS, runs=runs)[1]


@pytest.fixture
def paths(root: Path, tmp_path: Path) -> RunPaths:
    """Of an attempt of which rank 3 has failed first, and rank 0 then."""
    paths = begun(root, tmp_path)
    (paths.failures / "rank-3.json").write_text(json.dumps(RECORD))
    (paths.failures / "rank-0.json").write_text(json.dumps({**RECORD, "time": 20.0, "rank": 0, "code": 1}))
    paths.metrics.write_text('{"event": "step", "step": 7, "loss": 1.5}\n')
    return paths


def ended(paths: RunPaths, *words: str, code: int = 1, known: bytes = b"") -> subprocess.CompletedProcess[str]:
    return dray("finish", paths.folder, "--code", str(code), *words, stdin=known)


RECORDS: list[tuple[dict[str, object], int]] = [
    ({"code": 256}, 7), ({"code": 0}, 7), ({"code": -9}, 7), ({"code": True}, 1), ({"time": None}, 7),
    ({"rank": -1}, 7), ({"rank": "x"}, 7), ({"last_lines": "x"}, 7), ({"last_lines": [1]}, 7), ({"why": None}, 7),
    ({"node": 5}, 7), ({"why": "\ud800\x1b[2J\x00"}, 3),
]  # fmt: skip


@pytest.mark.seconds
@pytest.mark.parametrize(("fields", "code"), RECORDS, ids=[str(fields) for fields, _ in RECORDS])
def test_a_damaged_record_is_a_warning_that_names_its_rank(
    paths: RunPaths, fields: dict[str, object], code: int
) -> None:
    """And no code of it becomes a 0, which 256 would."""
    (paths.failures / "rank-0.json").unlink()
    (paths.failures / "rank-3.json").write_text(json.dumps({**RECORD, **fields}))
    done = ended(paths, code=7)
    result = json.loads(paths.result.read_text())
    assert (done.returncode, result["exit_code"]) == (code, code)
    assert "\x1b" not in done.stdout
    if code == 7:
        assert result["warnings"][0].startswith(f"{paths.failures}/rank-3.json cannot be read: ")


@pytest.mark.parametrize(
    ("left", "group"),
    [
        ({"largest": 2}, "2 of the 4 ranks"),
        (None, ""),
    ],
)
def test_ranks_that_have_worked_apart_are_told(root: Path, tmp_path: Path, left: object, group: str) -> None:
    paths = begun(root, tmp_path, "ranks_per_node=2")
    if left:
        paths.process_group.write_text(json.dumps(left))
    result = finish(paths, code=75)
    told = (
        f"the largest process group has {group}: the other ranks trained separately, maybe in the same files; call "
        "init_process_group() in each rank without rank= and world_size=: it reads RANK and WORLD_SIZE"
    )
    assert result.warnings == ([told] if left else [])
    assert result.exit_code == 75


def test_lines_of_metrics_that_are_none(root: Path, tmp_path: Path) -> None:
    paths = begun(root, tmp_path)
    lines = [
        b'{"event": "start", "first_step": 4, "steps": 20}', b"\0\0\0", b"{", b"[]", b'"x"', b"[" * 100_000,
        b'{"event": "step"}',
        b'{"event": "step", "step": 5, "loss": NaN}', b'{"event": "step", "step": 9, "loss": 2}',
        b'{"event": "eval", "perplexity": 1e999}',
        b'{"event": "end", "tokens_per_s": "x", "train_seconds": 1' + b"0" * 400 + b', "sample": {"a": 1}}',
    ]  # fmt: skip
    paths.metrics.write_bytes(b"\n".join(lines) + b'\n{"event": "st')
    result = finish(paths, code=1)
    assert (result.first_step, result.steps, result.loss_first, result.loss_last) == (4, 9, None, 2.0)
    assert (result.perplexity, result.tokens_per_s, result.train_seconds) == (None, None, None)
    assert result.warnings == [f"{paths.metrics}: 5 damaged lines left out"]
    assert f"warning: {paths.metrics}: 5 damaged lines left out\n" in summary(result, paths)


KNOWN = [
    b"", b"\xff\xfe\x00", b"at=x end=y\n", b"at=1e999 end=nan", b"at=-5", b"signal=USR1 at=" + b"9" * 5000,
    b"JobState= Reason==\n" * 1000, b"signal=",
]  # fmt: skip


@pytest.mark.seconds
@pytest.mark.parametrize("known", KNOWN, ids=[str(known[:20]) for known in KNOWN])
def test_what_slurm_tells_may_be_anything(paths: RunPaths, known: bytes) -> None:
    done = ended(paths, "--stopped", code=143, known=known)
    assert (done.returncode, json.loads(paths.result.read_text())["status"], done.stderr) == (143, "stopped", "")


@pytest.mark.seconds
def test_a_folder_that_is_not_this_user_s(paths: RunPaths) -> None:
    """A place that cannot be written: the text goes to the job's output."""
    paths.result.mkdir()
    done = ended(paths)
    assert done.returncode == 3
    head, _, text = done.stderr.partition("\n")
    assert head == f"dray: {paths.result} cannot be written: Is a directory. Its content is:"
    assert json.loads(text)["cause"]["why"] == "exit code 3"
    assert done.stdout.startswith("failed: rank 3 on n2: exit code 3\n")


@pytest.mark.seconds
def test_a_folder_that_is_gone(paths: RunPaths) -> None:
    """Somebody has deleted it while the run went on."""
    shutil.rmtree(paths.run)
    done = ended(paths, code=78)
    assert done.returncode == 78
    assert done.stdout.splitlines()[:4] == [
        f"failed: the launch: the folder of the attempt is gone: {paths.folder}",
        f"  log: {paths.logs}",
        "  cause: the run's folder is gone",
        "  fix: start a new run; set --runs or checkpoint.folder to a folder where neither the site nor another job "
        "deletes files",
    ]


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A disk of one page, to be filled."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", disk]
    mounted = subprocess.run(mount, capture_output=True, check=False)
    if mounted.returncode:
        pytest.skip("only root may mount a disk")
    yield disk
    subprocess.run(["umount", disk], check=True)


@pytest.mark.seconds
def test_a_disk_that_is_full(root: Path, full: Path) -> None:
    """With the run on it, and with the job's own output on it too."""
    paths = begun(root, full)
    (paths.failures / "rank-3.json").write_text(json.dumps(RECORD))
    with (full / "job.log").open("wb") as log, (full / "ballast").open("wb", buffering=0) as ballast:
        with suppress(OSError):
            while True:
                ballast.write(b"x" * 4096)
        done = ended(paths)
        assert done.returncode == 3
        head, _, text = done.stderr.partition("\n")
        assert head == f"dray: {paths.result} cannot be written: No space left on device. Its content is:"
        assert json.loads(text)["exit_code"] == 3
        assert [path.name for path in paths.folder.iterdir() if path.name.startswith("result")] == []
        argv = [sys.executable, "-m", "dray", "finish", paths.folder, "--code", "1"]
        assert subprocess.run(argv, stdout=log, stderr=log, timeout=60, check=False).returncode == 3
        (paths.failures / "rank-3.json").write_text("")  # as where there was no room for it
        (paths.failures / "rank-3.json").unlink()
        done = ended(paths)
        text = done.stderr.partition("\n")[2] or paths.result.read_text()
        cause = json.loads(text)["cause"]
        assert (done.returncode, cause["code"]) == (69, 69)
        assert cause["why"] == f"the disk is full, so logs and records are incomplete: {paths.folder}"


@pytest.mark.seconds
@pytest.mark.parametrize(
    "closed",
    [
        "<&- >&- 2>&-",
        ">/dev/full 2>/dev/full",
        *(pytest.param(one, marks=pytest.mark.slow) for one in ("<&-", ">&-", "2>&-", ">/dev/full")),
    ],
)
def test_streams_that_are_closed_or_full(paths: RunPaths, closed: str) -> None:
    line = f'exec "{sys.executable}" -m dray finish "$0" --code 143 --stopped {closed}'
    done = subprocess.run(["bash", "-c", line, paths.folder], capture_output=True, timeout=60, check=False)
    assert (done.returncode, json.loads(paths.result.read_text())["exit_code"]) == (143, 143)
    assert b"Traceback" not in done.stderr


@pytest.mark.seconds
def test_neither_the_file_nor_the_output_takes_it(paths: RunPaths) -> None:
    paths.result.mkdir()
    line = f'exec "{sys.executable}" -m dray finish "$0" --code 143 --stopped </dev/null >/dev/full 2>/dev/full'
    assert subprocess.run(["bash", "-c", line, paths.folder], timeout=60, check=False).returncode == 143


class TestDone:
    """Exit code 0 alone is no praise."""

    END = '{"event": "end", "tokens_per_s": 0.0, "train_seconds": 0.1, "sample": ""}\n'

    def left(self, paths: RunPaths, metrics: str, *, model: bool) -> None:
        paths.metrics.write_text(metrics)
        if model:
            paths.final_model.mkdir()
            (paths.final_model / "config.json").write_text("{}")

    @pytest.mark.parametrize(
        ("metrics", "model"),
        [
            ("", False),
            ('{"event": "step", "step": 20, "loss": 1.0}\n', True),
        ],
    )
    def test_a_training_without_its_last_line(self, root: Path, tmp_path: Path, metrics: str, *, model: bool) -> None:
        paths = begun(root, tmp_path)
        self.left(paths, metrics, model=model)
        paths.rank_log(0).write_text("its last line\n")
        result = finish(paths, code=0)
        assert (result.status, result.exit_code) == ("failed", 1)
        assert summary(result, paths) == (
            "failed: rank 0 on n1: it ended with exit code 0 but left no `end` in metrics.jsonl\n"
            f"  | its last line\n  log: {paths.rank_log(0)}\nrun folder: {paths.run}\nexit code: 1"
        )

    def test_a_run_that_is_to_keep_no_model(self, root: Path, tmp_path: Path) -> None:
        paths = begun(root, tmp_path, "checkpoint.final=false")
        self.left(paths, self.END, model=False)
        assert (finish(paths, code=0).status, finish(paths, code=0).cause) == ("done", None)

    def test_a_machine_that_shares_no_disk_with_rank_0(self, root: Path, tmp_path: Path) -> None:
        recipe = read_recipe(root / "recipes" / "smoke-cpu.toml")
        hosts = FACTS.model_copy(update={"scheduler": "hosts", "engine": "bare", "port": 20000})
        paths = write(recipe, hosts, runs=tmp_path, run="mine", secret="s" * 64)[1]
        assert finish(paths, code=0).status == "done"
        paths.rank_log(0).write_text("")
        assert finish(paths, code=0).status == "failed"

    def test_a_program_of_the_user_s_own(self, tmp_path: Path) -> None:
        paths = write(read_recipe(None, command=["true"]), FACTS, runs=tmp_path)[1]
        assert finish(paths, code=0).status == "done"

    def test_a_run_that_had_nothing_left_to_do(self, root: Path, tmp_path: Path) -> None:
        paths = begun(root, tmp_path)
        start = '{"event": "start", "first_step": 20, "steps": 20}\n{"event": "eval", "perplexity": 1.25}\n'
        self.left(paths, start + self.END, model=True)
        result = finish(paths, code=0)
        assert (result.status, result.first_step, result.steps) == ("done", 20, 20)
        assert summary(result, paths) == (f"done: 20 steps, perplexity 1.25, 4 ranks on n1 n2\nrun folder: {paths.run}")


class TestLost:
    """A node that died is the cause of what died with it."""

    LOST: ClassVar = {"node": "n1", "rank": None, "code": 75, "why": "node 0 (n1) is gone", "lost": True, "time": 12.0}

    @pytest.mark.parametrize(("survivor", "code"), [(11.9, 75), (12.5, 75), (8.0, 75), (5.5, 3)])
    def test_what_died_at_that_time_is_no_cause(self, root: Path, tmp_path: Path, survivor: float, code: int) -> None:
        """And what died long before is one."""
        paths = begun(root, tmp_path)
        (paths.failures / "rank-3.json").write_text(json.dumps({**RECORD, "time": survivor}))
        (paths.failures / "node-1-lost-0.json").write_text(json.dumps({**RECORD, **self.LOST}))
        assert finish(paths, code=1).exit_code == code
        (paths.failures / "rank-0.json").write_text(json.dumps({**RECORD, "time": 11.0, "node": "n1", "code": 137}))
        assert finish(paths, code=1).exit_code == (137 if code == 75 else code)


def test_a_result_holds_no_value_that_was_handed_in(root: Path, tmp_path: Path, monkeypatch) -> None:
    """An engine's own lines are in the node's log, which nothing filters; here its runner left no record."""
    monkeypatch.setenv("HF_TOKEN", "a token of my own")
    paths = begun(root, tmp_path, 'pass_env=["HF_TOKEN"]')
    paths.node_log(0).write_text("bad: a token of my own\nbad: hf_" + "a1" * 10 + "\n")
    result = finish(paths, code=3)
    assert result.cause
    assert result.cause.last_lines == ["bad: [HF_TOKEN]", "bad: [secret]"]
    assert "a token of my own" not in paths.result.read_text() + summary(result, paths)


class TestRestarts:
    """The runners have moved what failed before each of them."""

    @pytest.fixture
    def before(self, paths: RunPaths) -> Path:
        for number in (1, 2):
            (paths.failures / f"restart-{number}").mkdir()
        record = {**RECORD, "time": 1.0, "rank": 2, "code": 9, "why": "exit code 9"}
        (paths.failures / "restart-1" / "rank-2.json").write_text(json.dumps(record))
        (paths.failures / "restart-1" / "rank-1.json").write_text(json.dumps({**RECORD, "time": 2.0}))
        return paths.failures / "restart-1"

    def test_the_cause_is_what_ended_the_run_and_the_first_is_kept(self, paths: RunPaths, before: Path) -> None:
        result = finish(paths, code=1)
        assert (result.restarts, result.restart_cause and result.restart_cause.code) == (2, 9)
        assert (result.exit_code, result.cause and result.cause.rank) == (3, 3)
        assert summary(result, paths).splitlines()[-3:] == [
            "restarts: 2, first after rank 2 on n2: exit code 9",
            f"run folder: {paths.run}",
            "exit code: 3",
        ]

    def test_a_run_that_was_stopped_or_ended_well_after_it_keeps_them_too(self, paths: RunPaths, before: Path) -> None:
        result = finish(paths, code=143, stopped=Stop("scancel", "2026-11-22T21:00:00Z"))
        assert (result.status, result.cause, result.restarts) == ("stopped", None, 2)
        assert result.restart_cause
        assert result.restart_cause.rank == 2

    @pytest.mark.parametrize("content", [None, b"", b"[" * 100000, b'{"time": "now"}'])
    def test_a_record_that_is_gone_or_damaged_does_not_hide_the_number(
        self, paths: RunPaths, before: Path, content: bytes | None
    ) -> None:
        for path in before.iterdir():
            path.unlink()
        if content is not None:
            (before / "rank-2.json").write_bytes(content)
        result = finish(paths, code=1)
        assert (result.restarts, result.exit_code, result.restart_cause) == (2, 3, None)

    def test_what_is_no_folder_counts_nothing(self, paths: RunPaths) -> None:
        (paths.failures / "restart-1").touch()
        assert finish(paths, code=1).restarts == 0


def test_a_rank_that_died_of_another_s_end_is_no_cause_though_its_record_is_older(root: Path, tmp_path: Path) -> None:
    """As seen: gloo's connection ends with the other process, whose supervisor is the slower one to write."""
    paths = begun(root, tmp_path)
    gloo = "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [172.18.0.2]:17826."
    for name, time, code, why, lines in (
        ("rank-1", 10.0, 1, "exit code 1", [gloo]),
        ("rank-0", 10.03, 137, "killed by SIGKILL", ["step 27"]),
    ):
        record = {"time": time, "node": "n1", "rank": int(name[-1]), "code": code, "why": why, "log": "l"}
        (paths.failures / f"{name}.json").write_text(json.dumps({**record, "last_lines": lines}))
    cause = finish(paths, code=1).cause
    assert cause is not None
    assert (cause.rank, cause.why) == (0, "killed by SIGKILL")


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("told", "record", "ended"),
    [
        ("JobState=RUNNING Reason=None PreemptTime=2026-11-24T23:16:00", False, ("stopped", "preemption")),
        ("JobState=RUNNING Reason=None PreemptTime=None", False, ("failed", None)),
        ("", False, ("failed", None)),
        ("JobState=RUNNING Reason=None PreemptTime=2026-11-24T23:16:00", True, ("failed", None)),
    ],
)
def test_slurm_has_signalled_the_nodes_alone(
    root: Path, tmp_path: Path, told: str, record: bool, ended: tuple[str, str | None]
) -> None:
    """As in a preemption: the job's script hears nothing, and ranks that are told to end record nothing."""
    paths = begun(root, tmp_path)
    if record:
        found = {"time": 10.0, "node": "n1", "rank": 1, "code": 9, "why": "exit code 9", "log": "l", "last_lines": []}
        (paths.failures / "rank-1.json").write_text(json.dumps(found))
    text = f"JobId=17 {told} BatchFlag=1\n" if told else ""
    dray("finish", paths.folder, "--code", "135", stdin=text.encode())
    result = json.loads(paths.result.read_text())
    assert (result["status"], result["reason"]) == ended


@pytest.mark.parametrize(("saved", "code"), [(True, 75), (False, 138)])
def test_all_ranks_have_saved_though_srun_killed_a_node_that_was_ending(
    root: Path, tmp_path: Path, saved: bool, code: int
) -> None:
    """As seen: the first node ended with 75 some milliseconds before the second one's container."""
    paths = begun(root, tmp_path)
    for rank in range(4):
        record = {"time": 10.0, "node": "n1", "rank": rank, "code": 75, "why": "it was asked to save and end"}
        (paths.failures / f"rank-{rank}.json").write_text(json.dumps({**record, "log": "l", "last_lines": []}))
    paths.stop.write_text("USR1\n")
    if saved:
        paths.saved.touch()
    result = finish(paths, code=138, stopped=Stop("SIGUSR1", "2026-11-24T23:39:39Z"))
    assert (result.status, result.exit_code) == ("stopped", code)
