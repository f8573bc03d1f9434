"""A desk: dray here, and a real sshd on the loopback, on whose other side Apptainer and Slurm are stand-ins."""

from __future__ import annotations

import getpass
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from helpers import ROOT

# Everything before the image is the engine's; the program sees the host's own files, and no variable but env's.
APPTAINER = """#!/bin/bash
[[ "$1" != --version ]] || {{ echo apptainer version 1.4.0; exit; }}
while [[ "$1" != *.sif ]]; do
  [[ "$1" != --pwd=* ]] || {{ cd -- "${{1#*=}}" || exit; }}
  shift
done
shift
exec env -i PATH={python}:/usr/bin:/bin DRAY_HOME="$APPTAINERENV_DRAY_HOME" HOME=/nonexistent "$@"
"""
SSH = """#!/bin/bash
printf '%s\\n' "ssh $*" >>{folder}/asked
exec /usr/bin/ssh -F {folder}/config_ssh "$@"
"""
SLURM = """#!/bin/bash
printf '%s\\n' "$(basename "$0")${{*:+ }}$*" >>{folder}/calls
env >>{folder}/environments
case "$0" in
  */sbatch) [[ "$1" == --version ]] && echo slurm 24.11 || echo 4711 ;;
  */scontrol) echo 'ClusterName = there' ;;
esac
"""
CONFIG = """ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host
AuthorizedKeysFile {folder}/user.pub
StrictModes no
UsePAM no
PidFile none
SetEnv PATH={folder}/bin:/usr/bin:/bin HOME={folder}/home
"""


class Desk:
    """dray here, and the folder that is the other machine's."""

    def __init__(self, folder: Path, port: int, server: int) -> None:
        self.folder = folder
        self.there = folder / "it's $(touch pwned) mine"
        self.image = folder / "dray-cpu.sif"
        self.image.write_bytes(b"#!/usr/bin/env run-singularity\n" + b"SIF_MAGIC\0" * 9 + os.urandom(300_000))
        self.port, self.server = port, server

    def env(self, **given: str) -> dict[str, str]:
        return {
            "PATH": f"{self.folder}/here:{os.environ['PATH']}",
            "XDG_CONFIG_HOME": f"{self.folder}/config",
            "DRAY_IMAGE": str(self.image),
            "HOME": str(self.folder / "home"),
            **given,
        }

    def dray(
        self, *argv: str, code: int | None = 0, cwd: Path = ROOT, env: dict[str, str] | None = None
    ) -> tuple[str, str]:
        done = subprocess.run(
            [sys.executable, "-m", "dray", *argv],
            cwd=cwd,
            env=self.env(**env or {}),
            capture_output=True,
            text=True,
            timeout=240,
            check=False,
        )
        assert code in (None, done.returncode), done.stdout + done.stderr
        return done.stdout, done.stderr


@contextmanager
def at(folder: Path) -> Iterator[Desk]:
    """With `mine`, a remote that is this machine."""
    for name in ("bin", "here", "home"):
        (folder / name).mkdir()
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", folder / key], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (folder / "sshd").write_text(CONFIG.format(port=port, folder=folder))
    (folder / "known").write_text(f"[127.0.0.1]:{port} {(folder / 'host.pub').read_text()}")
    common = f"HostName 127.0.0.1\nPort {port}\nIdentityFile {folder}/user\nIdentitiesOnly yes\nBatchMode yes\n"
    common += f"User {getpass.getuser()}\n"
    known = f"{common}UserKnownHostsFile {folder}/known\n"
    (folder / "config_ssh").write_text(
        f"Host cluster\n{known}"
        f"Host shared\n{known}ControlMaster auto\nControlPersist yes\nControlPath {folder}/c\n"
        f"Host unknown\n{common}UserKnownHostsFile /dev/null\nStrictHostKeyChecking yes\n"
        f"Host closed\nHostName 127.0.0.1\nPort 1\nBatchMode yes\n"
    )
    tools = {"here/ssh": SSH.format(folder=folder)}
    tools["bin/apptainer"] = APPTAINER.format(python=Path(sys.executable).parent)
    tools |= {f"bin/{name}": SLURM.format(folder=folder) for name in ("sbatch", "squeue", "scancel", "scontrol")}
    # A profile that prints, as many do; it would also set PATH anew.
    tools["home/.bash_profile"] = f"echo Welcome; export PATH={folder}/bin:/usr/bin:/bin\n"
    for name, text in tools.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    log = (folder / "sshd.log").open("wb")
    server = subprocess.Popen(["/usr/sbin/sshd", "-D", "-e", "-f", folder / "sshd"], stderr=log)
    try:
        deadline = time.monotonic() + 10
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except OSError:
                assert time.monotonic() < deadline, (folder / "sshd.log").read_text()
                time.sleep(0.02)
        made = Desk(folder, port, server.pid)
        made.dray("remote", "add", "mine", f"cluster:{made.there}")
        yield made
    finally:
        server.terminate()
        server.wait()
        log.close()
