"""A machine that nobody has prepared: namespaces in which names are those of the test's servers, and a Docker."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

USER = "walker"
_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
# Everything in it is gone with its first process. /etc is this machine's own, and what is written there is not.
_INIT = """
set -euo pipefail
mount --make-rprivate /
mount -t tmpfs tmpfs "$OVER"
mkdir "$OVER"/{upper,work}
resolver=$(cat /etc/resolv.conf)
mount -t overlay overlay -o "lowerdir=/etc,upperdir=$OVER/upper,workdir=$OVER/work" /etc
rm -f /etc/resolv.conf /etc/pip.conf
rm -rf /etc/xdg/pip /etc/docker
echo "$resolver" >/etc/resolv.conf
printf '%s\\n' "$HOSTS" >>/etc/hosts
cat "$CA" >>/etc/ssl/certs/ca-certificates.crt
cp "$CA" /etc/ssl/certs/stock.pem
ln -s stock.pem "/etc/ssl/certs/$(openssl x509 -noout -hash -in "$CA").0"
touch /etc/subuid /etc/subgid
getent group docker >/dev/null || groupadd --system docker
useradd --no-create-home --home-dir "$USER_HOME" --groups docker --shell /bin/bash "$USER_NAME"
mkdir -p "$USER_HOME"
chown "$USER_NAME:" "$USER_HOME"
mount -t tmpfs tmpfs /run
mkdir -p /run/user /run/lock
install -d -m 700 -o "$USER_NAME" -g "$USER_NAME" "/run/user/$(id -u "$USER_NAME")"
dockerd --data-root "$DATA" --iptables=false >"$LOG" 2>&1 &
wait
"""


class Ended(NamedTuple):
    """A command that a user typed."""

    code: int
    out: str
    seconds: float


class Machine:
    """What the user does there."""

    def __init__(self, init: int, home: Path, logs: Path) -> None:
        self.enter = ["nsenter", f"--target={init}", "--mount", "--pid"]
        self.home, self.logs = home, logs
        # A network that looks into TLS has a CA of its own, which the pip inside a new environment does not know.
        self.environment = {
            "HOME": str(home), "USER": USER, "LOGNAME": USER, "LANG": "C.UTF-8", "PATH": "/usr/bin:/bin",
            "SSL_CERT_FILE": _BUNDLE, "PIP_CERT": _BUNDLE,
        }  # fmt: skip

    def run(
        self, command: str, *, folder: Path, log: str, umask: str = "022", env: Mapping[str, str] | None = None
    ) -> Ended:
        """As the user, in a login's environment and nothing more; what it prints is kept for people to read."""
        argv = self.argv(command, folder=folder, umask=umask, env=env)
        started = time.monotonic()
        with (self.logs / f"{log}.txt").open("w+") as out:
            out.write(f"$ {command}\n")
            out.flush()
            code = subprocess.run(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, check=False).returncode
            out.seek(0)
            text = out.read().removeprefix(f"$ {command}\n")
        return Ended(code, text, time.monotonic() - started)

    def argv(
        self, command: str, *, folder: Path, umask: str = "022", env: Mapping[str, str] | None = None
    ) -> list[str]:
        """The command with what brings it there."""
        environment = [f"{name}={value}" for name, value in {**self.environment, **(env or {})}.items()]
        typed = f"cd {shlex.quote(str(folder))} || exit\numask {umask}\n{command}"
        user = ["setpriv", f"--reuid={USER}", f"--regid={USER}", "--init-groups", "env", "-i", *environment]
        return [*self.enter, *user, "bash", "-c", typed]

    def root(self, command: str) -> subprocess.CompletedProcess:
        """As root."""
        return subprocess.run([*self.enter, "bash", "-euc", command], capture_output=True, text=True, check=False)


@contextmanager
def started(*, hosts: Mapping[str, Iterable[str]], ca: Path, scratch: Path, logs: Path) -> Iterator[Machine]:
    """The machine; `hosts` are names by address."""
    home = scratch / "home"
    over, data = (Path(tempfile.mkdtemp(prefix=name, dir=scratch)) for name in ("etc-", "docker-"))
    log = logs / "dockerd.txt"
    given = {
        "OVER": over, "CA": ca, "DATA": data, "LOG": log, "USER_NAME": USER, "USER_HOME": home,
        "HOSTS": "\n".join(f"{address} {name}" for address, names in hosts.items() for name in names),
    }  # fmt: skip
    argv = ["unshare", "--mount", "--pid", "--fork", "--kill-child", "--mount-proc", "bash", "-c", _INIT]
    env = {"PATH": os.environ["PATH"], **{name: str(value) for name, value in given.items()}}
    # SSL_CERT_FILE and its like would lead Docker's daemon past the bundle.
    running = subprocess.Popen(argv, env=env)
    try:
        deadline = time.monotonic() + 60
        machine = None
        # Before the user's folder is there, another Docker's socket may be: that of the machine around this one.
        ready = f'test -d "/run/user/$(id -u {USER})" && docker version'
        while machine is None or machine.root(ready).returncode:
            assert running.poll() is None, log.read_text() if log.exists() else "the machine did not start"
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.2)
            children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
            if children:
                machine = Machine(int(children[0]), home, logs)
        yield machine
    finally:
        running.send_signal(signal.SIGKILL)
        running.wait()
        shutil.rmtree(data, ignore_errors=True)
