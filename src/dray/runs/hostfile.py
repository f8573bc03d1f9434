"""Runs on machines without a scheduler: each machine finds its own line in a hostfile. No SSH."""

from __future__ import annotations

import re
import shlex
import socket
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
_LINE = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,252}( slots=[1-9][0-9]{0,3})?")
_FORM = "a line for each machine: its name or IPv4 address, and the same slots=N on all lines, or none: `box1 slots=8`"


@dataclass(frozen=True)
class Hosts:
    """The machines in the file's order; the first is the master."""

    file: Path
    names: tuple[str, ...]
    slots: int | None

    def here(self, number: int | None = None) -> int:
        """The number of this machine in the file."""
        own = socket.gethostname().partition(".")[0]
        lines = [line for line, name in enumerate(self.names) if name.partition(".")[0] == own]
        if number is not None:
            lines = [number]
        if len(lines) != 1 or not 0 <= lines[0] < len(self.names):
            raise ConfigError(
                "it is not clear which line of the hostfile is this machine",
                where=self.file,
                wanted=f"one line with the name {own}, or --node",
                fix=f"name this machine's line: --node 0 for the first, up to {len(self.names) - 1}",
            )
        return lines[0]

    def facts(self, recipe: Recipe, *, run: str, engine: Engine, gpus_per_node: int, site: str) -> Facts:
        """The facts for the plan, which must be the same on each machine."""
        here = local.facts(
            recipe,
            engine=engine,
            nodes=len(self.names),
            gpus_per_node=gpus_per_node or self.slots or 0,
            site=site,
        )
        return here.model_copy(
            update={
                "scheduler": "hosts",
                "nodelist": ",".join(self.names),
                "address": None,
                "hf_home": here.hf_home if engines.get(engine).isolates_env else None,  # else each machine has its own
                "port": port_of(run),
            }
        )

    def secret(self, file: Path | None) -> str:
        """The secret that the machines share, from a file that each has; empty for a single machine."""
        if file is None and len(self.names) == 1:
            return ""
        if file is None:
            raise ConfigError(
                "a run on several machines needs a secret: without it anyone on the network could join or stop the run",
                where=self.file,
                wanted="--secret FILE, with the same content on each machine",
                fix=f"{_NEW_SECRET}, then copy it to each machine and add --secret ~/.dray-secret",
            )
        secret, mode = files.text(file, "the secret", fix=_NEW_SECRET).strip(), file.stat().st_mode & 0o777
        if mode & 0o077 or len(secret) < _SECRET_LENGTH or not secret.isascii():
            raise ConfigError(
                "the secret is weak",
                where=file,
                wanted=f"a file of mode 600 with at least {_SECRET_LENGTH} random letters and digits",
                found=f"mode {mode:o}, {len(secret)} characters",
                fix=f"{shlex.join(['chmod', '600', str(file)])}; or make a new one: {_NEW_SECRET}",
            )
        return secret


def read(path: Path) -> Hosts:
    """The hostfile, in the form that DeepSpeed and MPI use too."""
    lines = [" ".join(line.partition("#")[0].split()) for line in files.text(path, "the hostfile").splitlines()]
    lines = [line for line in lines if line]
    names = [line.partition(" ")[0] for line in lines]
    slots = {line.partition(" slots=")[2] for line in lines}
    if not all(map(_LINE.fullmatch, lines)) or len({*names}) < len(names) or len(slots) != 1:
        raise ConfigError("the hostfile is not valid", where=path, wanted=_FORM, found=ascii(listed(lines))[:300])
    return Hosts(path, tuple(names), int(slots.pop() or 0) or None)
