"""Runs on machines without a scheduler: each machine finds its own line in a hostfile. No SSH."""

from __future__ import annotations

import hashlib
import re
import shlex
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dray import engines
from dray.config.recipe import Recipe
from dray.contract import files
from dray.contract.findings import ConfigError, listed
from dray.facts import Engine, Facts
from dray.planning.world import port_of
from dray.runs import local

_SECRET_LENGTH = 32
_NEW_SECRET = "(umask 077; od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' > ~/.dray-secret)"  # noqa: S105  a line to type
_LINE = re.compile(r"([A-Za-z0-9_](?:[A-Za-z0-9._-]{0,251}[A-Za-z0-9_])?)(?:\s+slots=([1-9][0-9]{0,3}))?")
_FORM = "one line per machine: its name or IPv4 address, and slots=N for N ranks on it, such as `box1 slots=8`"


@dataclass(frozen=True)
class Hosts:
    """The machines in the file's order; the first is the master."""

    file: Path
    names: tuple[str, ...]
    slots: int | None

    def here(self, number: int | None = None) -> int:
        """The number of this machine in the file."""
        own = [line for line, name in enumerate(self.names) if _is_here(name)] if number is None else [number]
        if len(own) == 1 and 0 <= own[0] < len(self.names):
            return own[0]
        matches = ", ".join(self.names[line] for line in own) if number is None else f"--node {number}"
        raise ConfigError(
            "it is not clear which line of the hostfile is this machine",
            where=self.file,
            wanted="one line with this machine's name or with one of its addresses",
            found=matches or f"no line with {socket.gethostname()}",
            fix=f"name this machine's line: --node 0 for the first, up to {len(self.names) - 1}",
        )

    def run_id(self, recipe: Recipe) -> str:
        """The run's name, which every machine with the same recipe and hostfile computes alone."""
        text = f"{self.names} {self.slots} {recipe.model_dump_json()}"
        return f"{recipe.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def facts(self, recipe: Recipe, *, run: str, engine: Engine, image: str, gpus_per_node: int, site: str) -> Facts:
        """The facts for the plan, which must be the same on each machine."""
        gpus = gpus_per_node or self.slots or 0
        here = local.facts(recipe, engine=engine, image=image, nodes=len(self.names), gpus_per_node=gpus, site=site)
        shared = {
            "scheduler": "hosts",
            "nodelist": ",".join(self.names),
            "address": None,
            "hf_home": here.hf_home if engines.get(engine).isolates_env else None,  # else each machine has its own
            "port": port_of(run),
        }
        return here.model_copy(update=shared)

    def secret(self, file: Path | None) -> str:
        """The secret that the machines share, from a file that each has; empty for a single machine."""
        if file is None:
            if len(self.names) == 1:
                return ""
            raise ConfigError(
                "a run on several machines needs a secret: without it anyone on the network could join or stop the run",
                where=self.file,
                wanted="--secret FILE, with the same content on each machine",
                fix=f"{_NEW_SECRET}, then copy it to each machine and add --secret ~/.dray-secret",
            )
        secret = files.text(file, "the secret", fix=_NEW_SECRET).strip()
        mode = file.stat().st_mode & 0o777
        if mode & 0o077:
            fix = shlex.join(["chmod", "600", str(file)])
            raise ConfigError(
                "others can read the secret", where=file, wanted="mode 600", found=f"mode {mode:o}", fix=fix
            )
        if len(secret) < _SECRET_LENGTH or not secret.isascii():
            raise ConfigError(
                "the secret is too short, or not ASCII",
                where=file,
                wanted=f"at least {_SECRET_LENGTH} random letters and digits",
                found=f"{len(secret)} characters",
                fix=_NEW_SECRET,
            )
        return secret

    def commands(self, argv: Sequence[str], command: Sequence[str]) -> str:
        """The command to type on each machine."""
        width = max(map(len, self.names))
        folder = shlex.quote(str(Path.cwd()))
        after = ["--", *command] if command else []
        lines = ""
        for number, name in enumerate(self.names):
            line = shlex.join([*argv, "--node", str(number), *after])
            lines += f"{name:<{width}}  cd {folder} && {line}\n"
        return lines


def read(path: Path) -> Hosts:
    """The hostfile, in the form that DeepSpeed and MPI use too."""
    slots: dict[str, str | None] = {}
    for number, raw in enumerate(files.text(path, "the hostfile", wanted=_FORM).splitlines(), start=1):
        text = raw.partition("#")[0].strip()
        if not text:
            continue
        where, line = f"{path}:{number}", _LINE.fullmatch(text)
        if not line:
            raise ConfigError("a line of the hostfile is invalid", where=where, wanted=_FORM, found=ascii(text[:80]))
        if line[1] in slots:
            raise ConfigError("the hostfile names a machine twice", where=where, found=line[1])
        slots[line[1]] = line[2]
    if not slots:
        raise ConfigError("the hostfile names no machine", where=path, wanted=_FORM)
    counts = {*slots.values()}
    if len(counts) > 1:
        found = listed(sorted(count or "none" for count in counts))
        raise ConfigError(
            "machines of one run must have the same number of ranks", where=path, wanted="one slots=N", found=found
        )
    count = counts.pop()
    return Hosts(path, tuple(slots), int(count) if count else None)


def _is_here(name: str) -> bool:
    """Whether it is this machine's name, or an address at which this machine can listen."""
    if name.partition(".")[0] == socket.gethostname().partition(".")[0]:
        return True
    try:
        address = socket.getaddrinfo(name, None, type=socket.SOCK_DGRAM)[0]
        with socket.socket(address[0], socket.SOCK_DGRAM) as probe:
            probe.bind(address[4])
    except (OSError, UnicodeError):  # a label of more than 63 characters is no host name
        return False
    return True
