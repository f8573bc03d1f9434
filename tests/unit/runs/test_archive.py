"""The archive of a run for a bug report: what is in it, and what is never in it."""

from __future__ import annotations

import json
import os
import resource
import shutil
import tarfile
from pathlib import Path

import pytest

from capsules import begun, steps
from dray.contract.findings import ConfigError
from dray.runs import capsule
from dray.runs.finish import finish
from dray.runs.report import archive
from dray.runs.store import RunPaths, plan_of

TOKEN = 'a "token" of my own \u00e9'
WHY = "rank 3 failed in /home/me/code"


@pytest.fixture
def secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunPaths:
    """A run whose files hold what nobody else may read."""
    monkeypatch.setenv("MY_TOKEN", TOKEN)
    monkeypatch.setenv("HOME", "/home/me")
    paths = begun(tmp_path / "runs", 'pass_env=["MY_TOKEN"]')
    lines = [f"MY_TOKEN={TOKEN}", "hf_" + "a1" * 10, "/home/me/data /home/metoo"]
    failure = {"time": 10.0, "node": "n2", "rank": 3, "code": 3, "why": "exit code 3", "log": "l", "last_lines": lines}
    (paths.failures / "rank-3.json").write_text(json.dumps(failure))
    own = paths.secret.read_text().strip()
    paths.rank_log(3).write_text(f"{'x' * 99}\n" * 2000 + f"{TOKEN}\n{own}\n/home/me/x\n")
    paths.node_log(0).write_text("y" * 200_000 + TOKEN)  # one line, cut in its middle
    steps(paths, *[2.0] * 2000, odd=TOKEN)
    (paths.checkpoints / "step-1").mkdir()
    (paths.checkpoints / "step-1" / "model.safetensors").write_bytes(b"weights")
    (paths.folder / "rendezvous.json").write_text("{}")
    (paths.folder / "jupyter-1").mkdir()
    (paths.folder / "jupyter-1" / "jupyter_server_config.json").write_text('"token of Jupyter"')
    (paths.run / "job-17.log").write_text("the end\n")
    finish(paths, code=1)
    return paths


def opened(path: Path) -> dict[str, str]:
    with tarfile.open(path) as packed:
        return {
            entry.name.partition("/")[2]: packed.extractfile(entry).read().decode()  # type: ignore[union-attr]
            for entry in packed.getmembers()
        }


COMMON = [
    "attempt-1/capsule.json", "attempt-1/facts.txt", "attempt-1/failures/rank-3.json", "attempt-1/logs/node-0.log",
    "attempt-1/logs/rank-3.log", "attempt-1/metrics.jsonl", "attempt-1/node.sh", "attempt-1/plan.json",
    "attempt-1/result.json", "job-17.log",
]  # fmt: skip


def test_what_is_in_it(secret: RunPaths, tmp_path: Path) -> None:
    out = tmp_path / "a b.tar.gz"
    made = archive.make(secret.run, out, why=WHY)
    content = opened(out)
    assert (sorted(content), made.left_out) == (made.names, [])
    assert made.names == ["README", *COMMON, "why.txt"]
    everything = "\n".join(content.values())
    own = secret.secret.read_text().strip()
    for hidden in (TOKEN, json.dumps(TOKEN)[1:-1], own, "hf_a1a1", "safetensors\n", "/home/me/", "token of Jupyter"):
        assert hidden not in everything, hidden
    assert "~/data /home/metoo" in content["attempt-1/failures/rank-3.json"]
    assert content["attempt-1/logs/rank-3.log"].endswith("\n[MY_TOKEN]\n[secret]\n~/x\n")
    assert content["attempt-1/logs/node-0.log"] == "(the lines before this one are left out)\n"
    assert content["why.txt"] == "rank 3 failed in ~/code"
    assert json.loads(content["attempt-1/plan.json"])["recipe"]["pass_env"] == ["MY_TOKEN"]
    assert (out.stat().st_mode & 0o777, made.size) == (0o600, out.stat().st_size)


def test_what_tar_unpacks_is_a_run(secret: RunPaths, tmp_path: Path) -> None:
    archive.make(secret.run, tmp_path / "x.tar.gz", why=WHY)
    with tarfile.open(tmp_path / "x.tar.gz") as packed:
        packed.extractall(tmp_path)
    copy = RunPaths(tmp_path / "dray-why-mine")
    assert plan_of(copy).recipe == plan_of(secret).recipe
    assert capsule.read(copy) == capsule.read(secret)
    assert not copy.secret.exists()


def test_the_diff_of_code_keeps_no_password(secret: RunPaths, tmp_path: Path) -> None:
    secret.source_diff.write_text("+password = 'horse'\n")
    archive.make(secret.run, tmp_path / "x.tar.gz", why=WHY)
    assert opened(tmp_path / "x.tar.gz")["attempt-1/source.diff"] == "+password = '[secret]'\n"


def test_an_archive_replaces_no_file(secret: RunPaths, tmp_path: Path) -> None:
    out = tmp_path / "a.tar.gz"
    out.write_text("mine")
    with pytest.raises(ConfigError, match="the archive already exists"):
        archive.make(secret.run, out, why=WHY)
    assert out.read_text() == "mine"
    with pytest.raises(ConfigError, match="the archive cannot be written") as refused:
        archive.make(secret.run, tmp_path / "no" / "x.tar.gz", why=WHY)
    assert refused.value.finding.found == "No such file or directory"


def test_a_log_of_gigabytes(secret: RunPaths, tmp_path: Path) -> None:
    with secret.rank_log(3).open("wb") as log:
        log.truncate(8 << 30)  # a sparse file of NULs
    assert archive.make(secret.run, tmp_path / "a.tar.gz", why=WHY).size < 1 << 20


@pytest.mark.hostile("files")
def test_no_link_leads_out_of_the_run(secret: RunPaths, tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir()
    (private / "rank-0.log").write_text("private")
    secret.rank_log(0).symlink_to(private / "rank-0.log")
    shutil.rmtree(secret.failures)
    (private / "rank-1.json").write_text('"private"')
    secret.failures.symlink_to(private)
    secret.metrics.unlink(missing_ok=True)
    os.mkfifo(secret.metrics)
    made = archive.make(secret.run, tmp_path / "a.tar.gz", why=WHY)
    texts = [text for name, text in opened(tmp_path / "a.tar.gz").items() if name not in ("README", "why.txt")]
    assert "private" not in "".join(texts)
    assert made.left_out == [
        "attempt-1/metrics.jsonl: a FIFO, not a file", "attempt-1/failures/rank-1.json: a link in its path",
        "attempt-1/logs/rank-0.log: a link in its path",
    ]  # fmt: skip


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_run_of_another_user(secret: RunPaths, tmp_path: Path) -> None:
    """A file of this user in it was put there, as by a hard link; and what reading followed is not packed."""
    for path in (secret.run, *secret.run.rglob("*")):
        os.chown(path, 65534, 65534)
    os.chown(secret.rank_log(3), 0, 0)
    made = archive.make(secret.run, tmp_path / "a.tar.gz", why=WHY)
    assert made.left_out == ["attempt-1/logs/rank-3.log: your file in another user's folder"]
    assert "why.txt" not in made.names


def test_a_disk_that_is_full(secret: RunPaths, tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))
    try:
        with pytest.raises(ConfigError, match="the archive cannot be written"):
            archive.make(secret.run, tmp_path / "x.tar.gz", why=WHY)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert not (tmp_path / "x.tar.gz").exists()


def test_a_name_that_is_this_user_s(secret: RunPaths, monkeypatch: pytest.MonkeyPatch) -> None:
    user = type("User", (), {"pw_dir": "/home/ada", "pw_name": "ada"})
    monkeypatch.setattr(archive.pwd, "getpwuid", lambda _uid: user)
    clean = archive.cleaner(secret.run)
    assert clean("/home/ada/x /scratch/ada/y ada@n1 canada ada /home/adam /home/me/z") == (
        "~/x /scratch/[user]/y [user]@n1 canada ada /home/adam ~/z"
    )
