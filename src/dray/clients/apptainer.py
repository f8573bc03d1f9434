"""Apptainer or SingularityCE by spython's client, on this machine or in the builder's container.

spython writes the commands and reads the lists of instances. dray starts the programs: spython's own way has no
deadline and joins both streams, and its container would be missing (docs/adr/0004).
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import spython.utils

from dray import process
from dray.clients import builder, progress, registry
from dray.contract.findings import ConfigError, DrayError, UnfitError
from dray.process import Done

ANSWER_S = 60.0
"""A command that only reads an image answers in seconds; a cold network disk takes longer."""
FETCH_S = 4 * 3600.0
"""An image of a registry may have tens of gigabytes."""
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


def run(
    argv: Sequence[str],
    *,
    binds: Mapping[Path, bool] | None = None,
    env: Mapping[str, str] | None = None,
    seconds: float = ANSWER_S,
) -> Done:
    """Run a command that spython lacks, such as verify. `binds` has the paths in argv, and whether it writes them."""
    return builder.tool([name(), *argv], binds=binds or {}, env=env, seconds=seconds)


@cache
def _spython() -> tuple[Any, tuple[Any, ...]]:
    """spython's client, and its modules that start programs."""
    spython.utils.check_install = lambda: True  # before each verb it starts `singularity --version`, and ignores it
    from spython.main import Client, instances  # noqa: PLC0415  only now
    from spython.main.base import command  # noqa: PLC0415

    return Client, (command, instances)


def _call(verb: str, *arguments: object, options: Mapping[str, object], **how: Any) -> tuple[Done, Any]:  # noqa: ANN401  as spython
    """Call a verb of spython's client. Returns what its program did, and what the client made of it."""
    client, modules = _spython()
    done: list[Done] = []

    def run_command(argv: Sequence[str], **_: object) -> dict[str, Any]:
        done.append(builder.tool([name(), *argv[1:]], **how))
        return {"message": [done[-1].out], "return_code": done[-1].code}

    for module in modules:
        module.run_cmd = module.run_command = run_command
    answer = getattr(client, verb)(*arguments, quiet=True, **options)
    return done[-1], answer


def execute(
    image: Path,
    command: Sequence[str],
    *,
    options: Sequence[str] = (),
    binds: Mapping[Path, bool] | None = None,
    seconds: float = ANSWER_S,
) -> Done:
    """Run a command in the image, with any exit code. It sees only `binds` of this machine, which `options` mount."""
    for path in binds or {}:
        if not path.exists():
            raise ConfigError("a path that the image must see does not exist", found=path)
    plain = ["--cleanenv", "--no-eval", "--no-mount=home,cwd", *options]
    done, _ = _call(
        "execute",
        str(image),
        [*command],
        options={"options": plain, "singularity_options": ["--quiet"]},
        binds={image: False, **(binds or {})},
        seconds=seconds,
    )
    return done


def instances() -> list[dict[str, Any]]:
    """This user's instances on this machine, as Apptainer lists them."""
    try:
        done, listed = _call("instances", options={"return_json": True}, binds={}, seconds=ANSWER_S)
    except (LookupError, TypeError, ValueError, AttributeError) as wrong:
        raise DrayError(f"{name()} lists its instances in a form that dray cannot read", found=repr(wrong)) from wrong
    if done.code:  # spython takes it for an empty list
        raise DrayError(f"{name()} cannot list its instances", found=done.err.strip())
    return list(listed)


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
    binds = {}
    if address["path"]:
        path = Path(os.path.abspath(address["path"]))  # noqa: PTH100  without following links
        if not path.exists():
            raise ConfigError("the source of the image does not exist", where=source, found=path)
        source = source.replace(address["path"], str(path), 1)
        binds[path] = False
    with TemporaryDirectory(prefix=".pull-", dir=out.parent) as scratch:
        part = Path(scratch) / out.name
        env = {"APPTAINER_TMPDIR": scratch, "SINGULARITY_TMPDIR": scratch}
        env |= {"APPTAINER_DISABLE_CACHE": "1", "SINGULARITY_DISABLE_CACHE": "1"}
        how = {"binds": {Path(scratch): True, **binds}, "env": env, "seconds": FETCH_S, "on_line": say}
        with progress.watch(Path(scratch), what, say=say):
            if binds:
                done, _ = _call("build", source, str(part), options={"sudo": False}, **how)
            else:
                done, _ = _call("pull", source, options={"name": str(part)}, network=True, **how)
        if done.code:
            raise registry.refused(what, source, done.err or done.out, instead=instead)
        part.replace(out)
