"""What goes wrong between a desk and a remote, and what goes along with a run; by a real sshd on the loopback."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from desk import Desk, at
from dray.cli import on
from dray.remote import parcel
from dray.remote.ssh import Brought
from helpers import ROOT, until

pytestmark = pytest.mark.skipif(not Path("/usr/sbin/sshd").exists(), reason="openssh-server is not installed")

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
    assert (started.returncode, err.splitlines()[-1]) == (0, "the run goes on")
    until(lambda: not processes(desk))


@pytest.mark.parametrize(
    ("verb", "code", "said"),
    [
        ("logs", 0, "the run goes on"),
        ("stop", 130, "if the run was asked already, it still saves and ends; dray status --on mine shows it"),
        ("runs", 130, "ended there too"),
    ],
)
def test_ctrl_c_says_what_is_so_there(verb: str, code: int, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    def interrupted(*_: object, **__: object) -> int:
        raise KeyboardInterrupt

    connection = SimpleNamespace(remote=SimpleNamespace(name="mine", path="/there"), run=interrupted)
    assert on.run(connection, [verb, "waits"], Brought()) == code
    assert capsys.readouterr().err == f"\n{said}\n"


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
    try:
        assert asked(desk, "shared") == [True] * 2, "a login of dray's own, and its end"
        assert not (desk.folder / "c").exists()
        assert subprocess.run([*user, "-O", "check", "shared"], capture_output=True, check=False).returncode != 0
        subprocess.run([*user, "-N", "-f", "shared"], check=True, stderr=subprocess.DEVNULL)
        try:
            assert asked(desk, "shared") == []
        finally:
            subprocess.run([*user, "-O", "exit", "shared"], check=True, capture_output=True)
    finally:
        desk.dray("remote", "remove", "shared")


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
    item = re.search(r"/(recipes/[0-9a-f]{64})/mine\.toml$", called, re.MULTILINE)
    assert item, called
    sent = desk.there / item[1]
    brought = sorted(str(path.relative_to(sent)) for path in sent.rglob("*") if path.is_file())
    assert brought == [".dray-sums", ".site/harbour.toml", "lib/own.py", "mine.toml", "train.py"]
    assert f"--run={desk.there}/runs/own --image={next((desk.there / 'images').glob('*.sif'))} " in called
    assert f"--site={sent}/.site/harbour.toml {sent}/mine.toml\n" in called


@pytest.mark.seconds
@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a small disk")
def test_no_room(desk: Desk, tmp_path: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k,mode=700", "tmpfs", tmp_path], check=True)
    try:
        desk.dray("remote", "add", "small", f"cluster:{tmp_path}/dray")
        _, err = desk.dray("submit", "--on", "small", "recipes/smoke-cpu.toml", code=69)
        lines = err.splitlines()
        assert "dray: the remote's disk has too little free space" in lines
        assert f"  wanted: {len(parcel.dray().data)} bytes" in lines
        assert not list(tmp_path.rglob(".arriving-*"))
    finally:
        desk.dray("remote", "remove", "small")
        subprocess.run(["umount", tmp_path], check=True)


@contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)
