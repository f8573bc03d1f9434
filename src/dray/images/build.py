"""Build a variant's image: once, or twice to prove that the bytes are the same."""

from __future__ import annotations

import json
import shlex
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from dray import __version__, process
from dray.clients import builder, engine_store
from dray.clients.progress import Say
from dray.contract.findings import ConfigError, DrayError
from dray.images import bundle, inputs, store
from dray.images.build_output import build_log
from dray.images.fetch import compiled_wheels
from dray.images.inputs import BuildContext
from dray.images.rootfs import INPUTS_LABEL, LAYER, PROGRAM, ROOTFS, SIF, TOOLS
from dray.images.sif import record
from dray.images.sif.verify import digest


def build(
    checkout: Path,
    variant: str,
    *,
    formats: Sequence[str],
    base: str | None = None,
    out: Path | None = None,
    wheels: Path | None = None,
    bundled: Path | None = None,
    signers: Path | None = None,
    as_locked: bool = True,
    twice: bool = False,
    force: bool = False,
) -> list[str]:
    """Build the image where a run looks for it. Returns a line per format. A failure keeps the previous images."""
    started = time.monotonic()
    sif = (out or store.sif(checkout, variant)).absolute()
    sif.parent.mkdir(parents=True, exist_ok=True)
    with build_log(checkout / "build" / "logs" / f"{variant}.log", out=sif.parent) as say, builder.engine():
        if bundled:
            source = inputs.from_bundle(checkout, bundled, variant, signers=signers)
        else:
            source = inputs.gather(checkout, variant, base=base, own_wheels=wheels, as_locked=as_locked, say=say)
        found = {} if twice or force else _found(source, sif, formats)
        asked = [name for name in formats if name not in found]
        if not asked:
            say("dray: the image exists, built from the same inputs (--force builds it again)")
            return [found[name] for name in formats]
        make = partial(_made, checkout, source, near=sif, formats=asked, say=say)
        with make() as scratch:
            if twice:
                say("dray: build the image a second time")
                with make(from_nothing=True) as second:
                    _need_same(store.failed(checkout, variant), scratch, second)
            shutil.rmtree(store.failed(checkout, variant), ignore_errors=True)
            for engine in engine_store.engines(asked):
                say(f"dray: load the image into {engine}")
                engine_store.load(engine, scratch / LAYER, store.docker_tag(variant))
            if "sif" in asked:
                record.deliver(scratch / SIF, sif, _record_of(source, scratch))
        seconds = time.monotonic() - started
        found = _found(source, sif, formats)
        return [f"{found[name]}  ({seconds:.0f} s)" for name in formats]


def _found(source: BuildContext, sif: Path, formats: Sequence[str]) -> dict[str, str]:
    """The images that exist from the same inputs, a line for each format: the SIF, Docker's and Podman's."""
    found = {}
    recorded = None
    with suppress(ConfigError):  # a damaged record does not stop a build
        recorded = record.read(sif) if sif.is_file() else None
    if recorded and recorded.inputs == source.digest and f"sha256:{recorded.sif.sha256}" == digest(sif):
        found["sif"] = f"{sif}  {recorded.sif.size / 1e6:.0f} MB  sha256:{recorded.sif.sha256}"
    tag = store.docker_tag(source.image.variant)
    for engine in engine_store.engines(formats):
        info = engine_store.find(engine, tag)
        if info and info.labels.get(INPUTS_LABEL) == source.digest:
            found[engine] = f"{tag} in {engine}  {info.size / 1e6:.0f} MB  {info.id}"
    return found


@contextmanager
def _made(
    checkout: Path,
    source: BuildContext,
    *,
    near: Path,
    formats: Sequence[str],
    say: Say,
    from_nothing: bool = False,
) -> Iterator[Path]:
    """A folder with the image in each format, on the disk of its destination: the last move is then a rename."""
    with TemporaryDirectory(prefix=f".{near.name}-", dir=near.parent, ignore_cleanup_errors=True) as made:
        scratch = Path(made)
        kept = None if from_nothing else compiled_wheels.find(checkout, source.operators, say=say)
        wheel = kept or scratch / "operators"
        wheel.mkdir(exist_ok=True)
        binds = {source.inputs: False, scratch: True, source.base: False, wheel: kept is None}
        argv: list[str | Path] = [*PROGRAM, source.inputs / "dray.def", source.base, scratch, wheel]
        argv += ["--epoch", inputs.facts(source.inputs)["SOURCE_DATE_EPOCH"]]
        argv += ["--sif"] if "sif" in formats else []
        if engine_store.engines(formats):
            tag = store.docker_tag(source.image.variant)
            argv += ["--docker", tag, source.digest]
        try:
            saved = source.inputs / bundle.BUILDER
            builder.run(checkout, argv, binds=binds, on_line=say, saved=saved)
        except builder.BuildError as error:
            _keep_failed(store.failed(checkout, source.image.variant), source, scratch, error)
            raise
        compiled_wheels.keep(checkout, source.operators, wheel)
        yield scratch


def _keep_failed(failed: Path, source: BuildContext, scratch: Path, error: DrayError) -> None:
    """Keep the sandbox of a failed build, and name the command that opens a shell in it."""
    for sandbox in (*scratch.glob(f"build-temp-*/{ROOTFS}"), *scratch.glob(ROOTFS)):
        shutil.rmtree(failed, ignore_errors=True)
        failed.mkdir(parents=True)
        sandbox.replace(failed / ROOTFS)
        if not error.finding.fix:
            shell = ["apptainer", "shell", "--writable", "--fakeroot", "--no-home", f"--bind={source.inputs}:/mnt"]
            error.amend(fix=f"a shell where it failed: {shlex.join([*shell, str(failed / ROOTFS)])}")
        return


def _need_same(failed: Path, first: Path, second: Path) -> None:
    """Refuse two builds that differ, and keep both for a comparison."""
    for name in (SIF, LAYER):
        if not (first / name).exists() or digest(first / name) == digest(second / name):
            continue
        failed.mkdir(parents=True, exist_ok=True)
        kept = [failed / f"{number}-{name}" for number in (1, 2)]
        for scratch, path in zip((first, second), kept, strict=True):
            (scratch / name).replace(path)
        diff = process.run(
            ["diff", "--recursive", "--brief", "--no-dereference", first / ROOTFS, second / ROOTFS], check=False
        )
        raise DrayError(
            "two builds from the same inputs differ",
            where=diff.out.partition("\n")[0] or "modes, or the packing: all files are the same",
            found="\n".join(f"{digest(path)}  {path}" for path in kept),
        )


def _record_of(source: BuildContext, scratch: Path) -> record.Record:
    facts = inputs.facts(source.inputs)
    return record.Record(
        variant=source.image.variant,
        dray=__version__,
        base=facts["DRAY_BASE"],
        inputs=source.digest,
        epoch=int(facts["SOURCE_DATE_EPOCH"]),
        tools=json.loads((scratch / TOOLS).read_text()),
        sif=record.File.of(scratch / SIF),
    )
