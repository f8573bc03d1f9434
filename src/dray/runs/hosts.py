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
from dray.contract.findings import ConfigError
from dray.facts import Engine, Facts
from dray.hostlist import LIMIT
from dray.planning.world import port_of
from dray.runs import local

_SECRET_LENGTH = 32
_NEW_SECRET = "(umask 077; od -An -N32 -tx1 /dev/urandom | tr -d ' \\n' > ~/.dray-secret)"  # noqa: S105  a line to type
_NAME = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9._-]{0,251}[A-Za-z0-9_])?")  # or an IPv4 address
_SLOTS = re.compile(r"slots=([1-9][0-9]{0,3})")
_FORM = "one line per machine: its name or address, and slots=N for N ranks on it, such as `box1 slots=8`"


@dataclass(frozen=True)
class Hosts:
    """The machines in the file's order; the first is the master."""

    file: Path
    names: tuple[str, ...]
    slots: int | None

    def here(self, number: int | None = None) -> int:
        """The number of this machine in the file."""
        if number is not None:
            if not 0 <= number < len(self.names):
                raise ConfigError(
                    "the hostfile has no such node", where=self.file, wanted=f"0 to {len(self.names) - 1}", found=number
                )
            return number
        own = [number for number, name in enumerate(self.names) if _is_here(name)]
        if len(own) != 1:
            raise ConfigError(
                "several lines match this machine" if own else "no line matches this machine",
                where=self.file,
                wanted="one line with this machine's name or with one of its addresses",
                found=", ".join(self.names[one] for one in own) if own else f"{socket.gethostname()} is missing",
                fix="name this machine's line: --node 0 for the first, --node 1 for the second ...",
            )
        return own[0]

    def run_id(self, recipe: Recipe) -> str:
        """The run's name, which every machine with the same recipe and hostfile computes alone."""
        text = f"{self.names} {self.slots} {recipe.model_dump_json()}"
        return f"{recipe.name}-{hashlib.sha256(text.encode()).hexdigest()[:8]}"

    def facts(self, recipe: Recipe, *, run: str, engine: Engine, image: str, gpus_per_node: int, site: str) -> Facts:
        """The facts for the plan, which must be the same on each machine."""
        gpus, count = gpus_per_node or self.slots or 0, len(self.names)
        here = local.facts(recipe, engine=engine, image=image, nodes=count, gpus_per_node=gpus, site=site)
        among = {
            "scheduler": "hosts",
            "nodelist": ",".join(self.names),
            "address": None,
            "hf_home": here.hf_home if engines.get(engine).isolates_env else None,  # else each machine has its own
            "port": port_of(run),
        }
        return here.model_copy(update=among)

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
        mode = file.stat().st_mode
        if not secret.isascii():
            raise ConfigError(
                "the secret is not ASCII", where=file, wanted="random letters and digits", fix=_NEW_SECRET
            )
        if mode & 0o077:
            raise ConfigError(
                "others can read the secret",
                where=file,
                wanted="mode 600",
                found=f"mode {mode & 0o777:o}",
                fix=shlex.join(["chmod", "600", str(file)]),
            )
        if len(secret) < _SECRET_LENGTH:
            raise ConfigError(
                "the secret is too short",
                where=file,
                wanted=f"at least {_SECRET_LENGTH} random characters",
                found=f"{len(secret)}",
                fix=_NEW_SECRET,
            )
        return secret

    def commands(self, argv: Sequence[str], command: Sequence[str]) -> str:
        """The command to type on each machine."""
        width, folder = max(map(len, self.names)), shlex.quote(str(Path.cwd()))
        after = ["--", *command] if command else []
        lines = (shlex.join([*argv, "--node", str(number), *after]) for number in range(len(self.names)))
        return "".join(
            f"{name:<{width}}  cd {folder} && {line}\n" for name, line in zip(self.names, lines, strict=True)
        )


def read(path: Path) -> Hosts:
    """The hostfile, in the form that DeepSpeed and MPI use too."""
    text = files.text(path, "the hostfile", wanted=_FORM)
    names: dict[str, None] = {}  # in their order
    slots: set[int | None] = set()
    for number, raw in enumerate(text.splitlines(), start=1):
        fields = raw.partition("#")[0].split()
        if not fields:
            continue
        where = f"{path}:{number}"
        count = _SLOTS.fullmatch(fields[1]) if fields[1:] else None
        if fields[0].count(":") > 1:
            raise ConfigError(
                "the hostfile has an IPv6 address", where=where, wanted="a name or an IPv4 address",
                found=ascii(fields[0][:80]), fix="write the machine's name, as `hostname` prints it there",
            )  # fmt: skip
        if len(fields) > 2 or not _NAME.fullmatch(fields[0]) or (fields[1:] and not count):
            raise ConfigError(
                "a line of the hostfile is invalid", where=where, wanted=_FORM, found=ascii(raw.strip()[:80])
            )
        if fields[0] in names:
            raise ConfigError("the hostfile names a machine twice", where=where, found=fields[0])
        if len(names) == LIMIT:
            raise ConfigError("the hostfile names too many machines", where=where, wanted=f"at most {LIMIT:,}")
        names[fields[0]] = None
        slots.add(int(count[1]) if count else None)
    if not names:
        raise ConfigError("the hostfile names no machine", where=path, wanted=_FORM)
    if len(slots) > 1:
        found = ", ".join("none" if one is None else str(one) for one in sorted(slots, key=lambda one: one or 0))
        raise ConfigError(
            "machines of one run must have the same number of ranks", where=path, wanted="one slots=N", found=found
        )
    return Hosts(path, tuple(names), slots.pop())


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
