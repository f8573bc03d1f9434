"""What goes wrong between a desk and a remote, and what goes along with a run; by a real sshd on the loopback."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from desk import Desk, at
from dray.cli import remote
from dray.contract.findings import DrayError
from dray.remote.transfer import Copied
from helpers import ROOT, until

pytestmark = pytest.mark.skipif(not Path("/usr/sbin/sshd").exists(), reason="openssh-server is not installed")

GOES_ON = "the verb has ended at the remote; the run continues"
SECRET = "hf_NotForAnybodyElse"
RECIPE = """
name = "mine"
image = "cpu"
ranks_per_node = 1

[command]
argv = ["python3", "train.py"]
"""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    with at(tmp_path_factory.mktemp("remote")) as made:
        made.dray("submit", "--on", "mine", "recipes/smoke-cpu.toml", "--run=waits")
        yield made


def processes(desk: Desk) -> list[str]:
    """Of verbs at the other end, by their whole command lines."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
        if ("-m dray logs" in line and "--on" not in line) or f"{desk.there}/dray/" in line:
            found.append(line)
    return found


@contextmanager
def following(desk: Desk) -> Iterator[subprocess.Popen[str]]:
    """`dray logs -f` of a run that waits in the queue there."""
    argv = [sys.executable, "-m", "dray", "logs", "-f", "--on", "mine", "waits"]
    started = subprocess.Popen(
        argv,
        cwd=ROOT,
        env=desk.env(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        until(lambda: any("-m dray logs" in line for line in processes(desk)))
        yield started
    finally:
        if started.poll() is None:
            os.killpg(started.pid, signal.SIGKILL)
        started.communicate()


@pytest.mark.seconds
def test_ctrl_c_ends_the_verb_there_too(desk: Desk) -> None:
    with following(desk) as started:
        os.killpg(started.pid, signal.SIGINT)  # as a terminal does it
        _, err = started.communicate(timeout=60)
    assert (started.returncode, err.splitlines()[-1]) == (0, GOES_ON)
    until(lambda: not processes(desk))


@pytest.mark.parametrize(("verb", "code"), [("logs", 0), ("stop", 130), ("runs", 130)])
def test_ctrl_c_says_what_is_so_there(verb: str, code: int, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    connection = SimpleNamespace(remote=SimpleNamespace(name="mine", path="/there"), run=interrupted)
    assert remote.run_at(connection, [verb, "waits"], Copied()) == code
    assert capsys.readouterr().err == f"\n{GOES_ON}\n"


class Cluster:
    """A connection to a cluster, on which a job is in these states, one after the other."""

    def __init__(self, name: str, *states: str) -> None:
        self.remote = SimpleNamespace(name=name)
        self.states, self.asked = [*states], list[list[str]]()

    def run(self, *argv: str, on_out: Callable[[bytes], None], on_err: Callable[[bytes], None]) -> int:
        assert argv[:5] == ("verb", "", "", "", "")
        self.asked.append([*argv[5:]])
        if argv[5] == "status":
            on_out(json.dumps({"state": self.states.pop(0)}).encode())
        return 0


def test_the_job_that_starts_first_is_kept(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(remote, "_POLL_S", 0)
    one, other = Cluster("lumi", "queued", "no result"), Cluster("leonardo", "queued", "running")
    assert remote._keep_first([one, other], ["mine", "--runs=/r"]) == 0  # type: ignore[list-item]
    status = ["status", "--json", "mine", "--runs=/r"]
    assert one.asked == [status, status, ["stop", "--no-wait", "mine", "--runs=/r"]]
    assert other.asked == [status, status]
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "the job at leonardo is first, and the others are stopped: dray status --on leonardo mine"


def test_a_job_that_was_cancelled_is_not_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_POLL_S", 0)
    one, other = Cluster("lumi", "stopped"), Cluster("leonardo", "queued", "lost")
    with pytest.raises(DrayError, match="no job has started"):
        remote._keep_first([one, other], ["mine"])  # type: ignore[list-item]
    assert len(one.asked) + len(other.asked) == 3


@pytest.mark.seconds
def test_a_connection_that_is_lost(desk: Desk) -> None:
    with following(desk) as started:
        session = subprocess.run(
            ["pgrep", "--parent", str(desk.server), "sshd"], capture_output=True, text=True, check=True
        ).stdout.split()
        for pid in session:
            os.kill(int(pid), signal.SIGKILL)
        _, err = started.communicate(timeout=60)
    assert started.returncode == 69
    assert "dray: the connection was lost; jobs on the remote continue" in err.splitlines()
    assert "  fix:    dray runs --on mine shows the runs there" in err.splitlines()
    until(lambda: not processes(desk))


@pytest.mark.seconds
def test_a_connection_of_the_user_s_is_shared_and_none_is_left(desk: Desk) -> None:
    """The configuration has every ssh leave its connection in the background."""
    user = ["/usr/bin/ssh", "-F", str(desk.folder / "config_ssh")]
    desk.dray("remote", "add", "shared", f"shared:{desk.there}")
    assert asked(desk, "shared") == [True] * 2, "a login of dray's own, and its end"
    assert not (desk.folder / "c").exists()
    assert subprocess.run([*user, "-O", "check", "shared"], capture_output=True, check=False).returncode != 0
    subprocess.run([*user, "-N", "-f", "shared"], check=True, stderr=subprocess.DEVNULL)
    try:
        assert asked(desk, "shared") == []
    finally:
        subprocess.run([*user, "-O", "exit", "shared"], check=True, capture_output=True)


def asked(desk: Desk, name: str) -> list[bool]:
    """Of a check, how often ssh was asked to begin or end a connection: whether it is one of dray's own."""
    (desk.folder / "asked").unlink(missing_ok=True)
    desk.dray("remote", "check", name)
    lines = (desk.folder / "asked").read_text().splitlines()
    return ["ControlPath=/tmp/dray-ssh-" in line for line in lines if " -M " in line or " -O exit " in line]


@pytest.mark.seconds
def test_no_secret_leaves_the_desk(desk: Desk) -> None:
    """Not by an argument, a variable or a file: each program here and there is looked at."""
    (desk.folder / "asked").unlink(missing_ok=True)
    given = {"HF_TOKEN": SECRET, "WANDB_API_KEY": SECRET, "LC_SECRET": SECRET}
    desk.dray(
        "submit", "--on", "mine", "recipes/smoke-cpu.toml", "--run=secret", "pass_env=['WANDB_API_KEY']", env=given
    )
    desk.dray("why", "--on", "mine", "secret", env=given, code=None)
    assert (desk.folder / "asked").read_text().count("ssh ") > 4
    seen = [desk.folder / "asked", desk.folder / "calls", desk.folder / "environments"]
    for file in [*seen, *(path for path in desk.there.rglob("*") if path.is_file() and path.suffix != ".sif")]:
        assert SECRET not in file.read_text(errors="replace"), file


@pytest.mark.seconds
def test_a_command_s_folder_and_a_site_s_file_go_along(desk: Desk, tmp_path: Path) -> None:
    folder = tmp_path / "my work"
    for name in ("train.py", "lib/own.py", ".git/config", "runs/old/plan.json", "build/big", ".env"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)
    (folder / "mine.toml").write_text(RECIPE)
    (tmp_path / "harbour.toml").write_text('name = "harbour"\nabout = "A site of mine"\n')
    with umask(0o077):
        site = f"--site={tmp_path}/harbour.toml"
        out, err = desk.dray("submit", "--on=mine", "--run=own", site, f"{folder}/mine.toml", cwd=folder)
    assert (out.splitlines()[0], "Terminated" in err) == ("job 4711 is in the queue", False), err
    called = (desk.folder / "calls").read_text()
    sent = desk.there / "code/own"
    assert sorted(str(path.relative_to(sent)) for path in sent.rglob("*") if path.is_file()) == [
        "lib/own.py", "mine.toml", "train.py",
    ]  # fmt: skip
    assert {path.stat().st_mode & 0o077 for path in [sent, *sent.rglob("*")]} == {0}
    assert f"--run={desk.there}/runs/own --image={next((desk.there / 'images').glob('*.sif'))} " in called
    assert f"--site={desk.there}/sites/own.toml {sent}/mine.toml\n" in called


@pytest.mark.seconds
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_no_room(desk: Desk, tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k,mode=700", "tmpfs", tmp_path], check=True)
    try:
        desk.dray("remote", "add", "small", f"cluster:{tmp_path}/dray")
        _, err = desk.dray("submit", "--on", "small", "recipes/smoke-cpu.toml", code=69)
        assert "dray: rsync cannot copy to the remote" in err.splitlines()
        assert "No space left on device" in err
    finally:
        subprocess.run(["umount", tmp_path], check=True)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)
