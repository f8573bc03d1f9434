"""Build a variant's image: once, or twice to show that the same bytes come out."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from dray import __version__
from dray.containers import builder, images
from dray.contract.findings import ConfigError, DrayError
from dray.images import store
from dray.images.log import build_log
from dray.images.rootfs import LAYER, PROGRAM, ROOTFS, SIF, TOOLS
from dray.images.sif import record
from dray.images.sif.verify import digest
from dray.images.sources import bundle, inputs
from dray.images.sources.inputs import INPUTS_LABEL, Source

Say = Callable[[str], None]


def build(
    checkout: Path,
    variant: str,
    *,
    formats: Sequence[str],
    base: str | None = None,
    out: Path | None = None,
    wheels: Path | None = None,
    bundled: Path | None = None,
    twice: bool = False,
    force: bool = False,
) -> list[str]:
    """Make the image, and put it where a run looks for it: a line a format. A failure leaves the images of before."""
    started = time.monotonic()
    sif = (out or store.sif(checkout, variant)).absolute()
    sif.parent.mkdir(parents=True, exist_ok=True)
    with build_log(checkout / "build" / "logs" / f"{variant}.log", out=sif.parent) as say, builder.engine():
        if bundled:
            source = bundle.opened(checkout, bundled, variant)
        else:
            source = inputs.gather(checkout, variant, base=base, own_wheels=wheels, say=say)
        made_from = source.digest
        there = [] if twice or force else _there(source, sif, formats, made_from)
        if there:
            say("dray: there already, of the same inputs (--force builds it again)")
            return there
        with _made(checkout, source, near=sif, formats=formats, say=say) as scratch:
            if twice:
                say("dray: once more, from nothing")
                with _made(checkout, source, near=sif, formats=formats, say=say) as again:
                    _need_same(store.failed(checkout, variant), scratch, again)
            shutil.rmtree(store.failed(checkout, variant), ignore_errors=True)
            for engine in images.engines(formats):
                say(f"dray: load the image into {engine}")
                images.load(engine, scratch / LAYER, store.docker_tag(variant))
            if "sif" in formats:
                _deliver(source, scratch, sif, made_from)
            seconds = time.monotonic() - started
            return [f"{image}  ({seconds:.0f} s)" for image in _there(source, sif, formats, made_from)]


def _there(source: Source, sif: Path, formats: Sequence[str], made_from: str) -> list[str]:
    """The images in all of these formats, if they are there and were made from the same."""
    found = []
    if "sif" in formats:
        known = _known(sif)
        if known is None or known.inputs != made_from or f"sha256:{known.sif.sha256}" != digest(sif):
            return []
        found.append(f"{sif}  {known.sif.size / 1e6:.0f} MB  sha256:{known.sif.sha256}")
    for engine in images.engines(formats):
        tag = store.docker_tag(source.image.variant)
        known_there = images.find(engine, tag)
        if not known_there or known_there.labels.get(INPUTS_LABEL) != made_from:
            return []
        found.append(f"{tag} in {engine}  {known_there.size / 1e6:.0f} MB  {known_there.id}")
    return found


@contextmanager
def _made(checkout: Path, source: Source, *, near: Path, formats: Sequence[str], say: Say) -> Iterator[Path]:
    """A folder with the image in each format, beside the place it goes to: the last move is then a rename."""
    with TemporaryDirectory(prefix=f".{near.name}-", dir=near.parent, ignore_cleanup_errors=True) as made:
        scratch = Path(made)
        argv: list[str | Path] = [
            *PROGRAM,
            source.inputs / "dray.def",
            source.base,
            scratch,
            "--bind",
            source.inputs,
            "/mnt",
        ]
        argv += ["--epoch", inputs.facts(source.inputs)["SOURCE_DATE_EPOCH"]]
        argv += ["--sif"] if "sif" in formats else []
        if images.engines(formats):
            tag = store.docker_tag(source.image.variant)
            argv += ["--docker", tag, "--label", INPUTS_LABEL, source.digest]
        try:
            builder.run(
                checkout,
                argv,
                binds={source.inputs: False, scratch: True, source.base: False},
                on_line=say,
                saved=source.inputs / inputs.BUILDER,
            )
        except builder.BuildError as error:
            _keep(store.failed(checkout, source.image.variant), source, scratch, error)
            raise
        yield scratch


def _keep(failed: Path, source: Source, scratch: Path, error: DrayError) -> None:
    """The sandbox of a build that failed stays, so that somebody can look around in it."""
    for sandbox in (*scratch.glob(f"build-temp-*/{ROOTFS}"), *scratch.glob(ROOTFS)):
        shutil.rmtree(failed, ignore_errors=True)
        failed.mkdir(parents=True)
        sandbox.replace(failed / ROOTFS)
        (failed / "inputs").symlink_to(source.inputs)
        if not error.finding.fix:
            error.amend(fix=f"dray image enter {failed.name} opens a shell where it failed")
        return


def _known(sif: Path) -> record.Record | None:
    """The record, where it and its image are there. A damaged one is no reason not to build."""
    try:
        return record.read(sif) if sif.is_file() else None
    except ConfigError:
        return None


def _need_same(failed: Path, first: Path, second: Path) -> None:
    """Refuse two builds that differ; both stay, to be looked at."""
    for name in (SIF, LAYER):
        if not (first / name).exists() or digest(first / name) == digest(second / name):
            continue
        failed.mkdir(parents=True, exist_ok=True)
        kept = [failed / f"{number}-{name}" for number in (1, 2)]
        for scratch, path in zip((first, second), kept, strict=True):
            (scratch / name).replace(path)
        raise DrayError(
            "two builds from the same inputs differ",
            found="\n".join(f"{digest(path)}  {path}" for path in kept),
            fix=f"dray image diff '{kept[0]}' '{kept[1]}' names the files" if name == SIF else None,
        )


def _deliver(source: Source, scratch: Path, sif: Path, made_from: str) -> None:
    os.chown(scratch / SIF, os.getuid(), os.getgid())
    facts = inputs.facts(source.inputs)
    known = record.Record(
        variant=source.image.variant,
        dray=__version__,
        base=facts["DRAY_BASE"],
        inputs=made_from,
        epoch=int(facts["SOURCE_DATE_EPOCH"]),
        tools=json.loads((scratch / TOOLS).read_text()),
        sif=record.File(sha256=digest(scratch / SIF).removeprefix("sha256:"), size=(scratch / SIF).stat().st_size),
    )
    # A moment without a record is better than one with another image's.
    record.path_for(sif).unlink(missing_ok=True)
    (scratch / SIF).replace(sif)
    record.write(sif, known)
