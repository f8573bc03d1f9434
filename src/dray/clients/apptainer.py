"""Apptainer or SingularityCE by spython's client, on this machine or in the builder's container.

spython writes the commands. dray starts the programs: spython's own way has no deadline and joins both streams, and
the builder's container would be missing (docs/adr/0004).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import spython.utils

from dray import process
from dray.clients import builder, progress, pull_errors
from dray.contract.findings import ConfigError, UnfitError
from dray.process import Done

ANSWER_S = 60.0
"""A command that only reads an image answers in seconds; a cold network disk takes longer."""
_SOURCE = re.compile(r"(docker|oras|library|https)://.+|(?P<kind>oci|oci-archive|docker-archive):(?P<path>[^:]+)(:.*)?")


def name() -> str:
    """Apptainer's name on this machine, or in the builder's container."""
    return process.apptainer() or builder.APPTAINER


def here() -> str:
    """This machine's own Apptainer, for commands at the user's terminal."""
    program = process.apptainer()
    if not program:
        raise UnfitError("Apptainer is not on this machine", wanted="apptainer or singularity on PATH")
    return program


def _client(**how: Any) -> tuple[Any, list[Done]]:  # noqa: ANN401  as builder.tool
    """spython's client, whose programs dray starts, and a list for what they did."""
    spython.utils.check_install = lambda: True  # before each verb it starts `singularity --version`, and ignores it
    from spython.main import Client  # noqa: PLC0415  only now

    done: list[Done] = []
    Client._run_command = lambda argv, **_: done.append(builder.tool([name(), *argv[1:]], **how))
    return Client, done


def execute(
    image: Path,
    command: Sequence[str],
    *,
    options: Sequence[str] = (),
    binds: Mapping[Path, bool] | None = None,
    seconds: float = ANSWER_S,
) -> Done:
    """Run a command in the image, with any exit code. It sees only `binds` of this machine, which `options` mount."""
    client, done = _client(binds={image: False, **(binds or {})}, seconds=seconds)
    plain = ["--cleanenv", "--no-eval", "--no-mount=home,cwd", *options]
    client.execute(str(image), [*command], options=plain, singularity_options=["--quiet"], quiet=True)
    return done[0]


def pull(source: str, out: Path, *, what: str, instead: str, say: Callable[[str], None]) -> None:
    """Make a SIF from a registry, an OCI folder or an archive. A failure leaves nothing.

    Temporary files are written beside it: /tmp is small on many machines. The cache in the home would hold it again.
    """
    address = _SOURCE.fullmatch(source)
    if not address:
        raise ConfigError(
            "not the address of an image",
            wanted="docker://, oras://, library://, https://, oci:FOLDER, oci-archive:FILE or docker-archive:FILE",
            found=source,
        )
    path = address["path"]
    if path and not Path(path).exists():
        raise ConfigError("the source of the image does not exist", where=source, found=path)
    with TemporaryDirectory(prefix=".pull-", dir=out.parent) as made:
        scratch, part = Path(made), Path(made, out.name)
        binds = {scratch: True}
        env = {"APPTAINER_TMPDIR": made, "SINGULARITY_TMPDIR": made}
        env |= {"APPTAINER_DISABLE_CACHE": "1", "SINGULARITY_DISABLE_CACHE": "1"}
        if path:
            binds[Path(path)] = False
        client, done = _client(binds=binds, env=env, on_line=say, network=not path)
        with progress.watch(scratch, what, say=say):
            if path:
                client.build(source, str(part), sudo=False, quiet=True)
            else:
                client.pull(source, name=str(part), quiet=True)
        if done[0].code:
            raise pull_errors.refused(what, source, done[0].err or done[0].out, instead=instead)
        part.replace(out)
