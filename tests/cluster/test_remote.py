"""`--on` from this machine to the real Slurm, through sshd on the controller, with Apptainer and the image there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.cluster

PLACE = "/shared/home/my desk"
SSHD = """HostKey /run/desk/host
AuthorizedKeysFile /run/desk/user.pub
StrictModes no
UsePAM no
PidFile none
"""
COPIED = """mkdir -p /run/desk /run/sshd && cd /run/desk && printf %s "$2" >user.pub && printf %s "$3" >config
umask 077 && printf %s "$1" >host
"""
SSH = """Host sandbox
  User dray
  IdentityFile {folder}/user
  IdentitiesOnly yes
  UserKnownHostsFile {folder}/known
  StrictHostKeyChecking accept-new
  ProxyCommand docker exec -i {controller} /usr/sbin/sshd -i -f /run/desk/config
"""
Dray = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def dray(cluster, sif: Path, tmp_path: Path) -> Iterator[Dray]:
    """Runs it here; `ssh` has a configuration of its own, and its other end is the controller."""
    controller = cluster.machine("controller").name
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    (tmp_path / "ssh.conf").write_text(SSH.format(folder=tmp_path, controller=controller))
    (tmp_path / "sshd.conf").write_text(SSHD)
    texts = [(tmp_path / name).read_text() for name in ("host", "user.pub", "sshd.conf")]
    subprocess.run(["docker", "exec", controller, "bash", "-c", COPIED, "-", *texts], check=True)
    (tmp_path / "bin").mkdir()
    wrapper = tmp_path / "bin/ssh"
    wrapper.write_text(f'#!/bin/sh\nexec /usr/bin/ssh -F {tmp_path}/ssh.conf "$@"\n')
    wrapper.chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}/bin:{os.environ['PATH']}", "XDG_CONFIG_HOME": f"{tmp_path}/config"}
    env["DRAY_IMAGE"] = str(sif)

    def run(*words: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "dray", *words]
        ended = subprocess.run(argv, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)  # noqa: PLW1510
        assert ended.returncode == code, f"{words}: {ended.returncode}\n{ended.stdout}\n{ended.stderr}"
        return ended

    yield run
    subprocess.run(["docker", "exec", controller, "rm", "-rf", "/run/desk", PLACE], check=True)


@pytest.mark.slow
def test_a_run_from_submit_to_report(cluster, dray: Dray, root: Path, short, tmp_path: Path) -> None:
    dray("remote", "add", "sandbox", f"sandbox:{PLACE}")
    dray("remote", "check", "sandbox")
    queued = dray("submit", "--json", "--on", "sandbox", str(root / "recipes/smoke-cpu.toml"), "--nodes", "2", *short)
    run = Path(json.loads(queued.stdout)["run"]).name
    followed = dray("logs", "-f", "--on", "sandbox", run)
    assert "step 6/6" in followed.stdout
    shown = json.loads(dray("status", "--json", "--on", "sandbox", run).stdout)
    assert (shown["state"], shown["step"], shown["nodes"]) == ("done", 6, ["n1", "n2"])
    assert run in dray("runs", "--on", "sandbox").stdout
    assert "done" in dray("why", "--on", "sandbox", run).stdout
    assert "has already ended" in dray("stop", "--on", "sandbox", run).stdout
    dray("report", "--on", "sandbox", run, "--out", "page.html")
    assert run in (tmp_path / "page.html").read_text(encoding="utf-8")
    assert cluster.exec(["pgrep", "-u", "dray", "-fa", "dray|sshd"], user="root").out == ""
    assert cluster.exec(["find", "/tmp", "-name", "dray-relay-*"], user="root").out == ""
    assert dray("status", "--on", "sandbox", "no-such-run", code=78).stderr
