"""`dray image inspect|verify|sign|sbom|diff`: what an image is, and whether it is the one that it should be."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dray.config import checkout
from dray.contract.findings import ConfigError
from dray.contract.values import printable
from dray.images import beside, store
from dray.images.sif import contents, record
from dray.images.sif import diff as differences
from dray.images.sif import format as sif_format
from dray.images.sif import inspect as summary
from dray.images.sif import sign as signatures
from dray.images.sif import verify as identity

_TOP = 15

Image = Annotated[str, typer.Argument(metavar="FILE|VARIANT", help="A SIF, or a variant that was built here.")]


def inspect(image: Image, as_json: Annotated[bool, typer.Option("--json", help="For programs.")] = False) -> None:
    """Show what an image is and what takes its space, without starting it.

    dray image inspect cpu --json
    """
    file = _file(image)
    if adopted := record.read(file) if store.described(file) else None:
        print(adopted.model_dump_json(indent=1) if as_json else _adopted(file, adopted))
        return
    report = printable(summary.report(sif_format.read(file)))
    if as_json:
        print(json.dumps(report, indent=1))
        return
    lines = {
        "image": f"{report['file']} ({report['size'] / 1e6:.0f} MB, {report['unpacked'] / 1e6:.0f} MB unpacked)",
        "digest": report["digest"],
        "signed": f"with {', '.join(report['signed'])} (dray image verify checks it)" if report["signed"] else "no",
        "variant": f"{report['variant']}, {report['architecture']}",
        **{name: report[name] for name in ("base", "python", "dray")},
        **report["versions"],
    }
    console, width = Console(highlight=False), max(map(len, lines))
    for name, value in lines.items():
        console.print(f"{name:<{width}}  {value}", markup=False, soft_wrap=True)
    console.print(_table(report["packages"]))


def verify(
    image: Image,
    recipe: Annotated[Path | None, typer.Option(help="A recipe, whose image_digest the image must have.")] = None,
    digest: Annotated[str | None, typer.Option(help="sha256:... that the image must have.")] = None,
    key: Annotated[
        list[str] | None, typer.Option(help="The fingerprint of a key that may have signed it; may be repeated.")
    ] = None,
    signature: Annotated[bool, typer.Option("--signature/--no-signature", help="Check who signed it.")] = True,
) -> None:
    """Refuse an image with another digest, or one that is not signed with a key of the keyring, or with these.

    dray image verify cuda --recipe recipes/mine.toml
    """
    if key and not signature:
        raise ConfigError("--key is for the signature", found="--no-signature", fix="leave out one of the two")
    sif = sif_format.read(_file(image))
    expected, source = identity.expected(sif.path, given=digest, recipe=recipe)
    found = identity.require(sif.path, expected, source)
    signers = signatures.check(sif, key or ()) if signature else []
    print(
        f"{sif.path}\n{found} ({source})\n"
        + (f"signed by {', '.join(signers)}" if signature else "signature unchecked")
    )


def sign(
    image: Image,
    key: Annotated[str, typer.Option(help="The key's fingerprint, or its end; needed where there are several.")] = "",
) -> None:
    """Sign an image with a key of Apptainer's keyring. The file's digest changes, and its record with it.

    dray image sign cuda
    """
    file = _file(image)
    if (file.parent / beside.DESCRIBED).is_file():
        raise ConfigError(
            "an adopted image is used as its owner left it",
            where=file.resolve(),
            fix="have its owner sign it (apptainer sign); then dray image adopt FILE --force",
        )
    sif = sif_format.read(file)
    digest, fingerprint = signatures.sign(sif, key)
    print(f"{sif.path}\n{digest}\nsigned with {fingerprint}")


def sbom(
    image: Image,
    spdx: Annotated[bool, typer.Option("--spdx", help="In SPDX 2.3, in place of CycloneDX 1.6.")] = False,
) -> None:
    """Print the bill of materials as JSON: every package, its licence and its hash.

    dray image sbom cpu
    """
    sif = sif_format.read(_file(image))
    name = f"opt/dray/sbom{'.spdx' if spdx else ''}.json"
    found = contents.file(sif, name)
    if found is None:
        problem = "dray did not build this image, or an older one did" if spdx else "dray did not build this image"
        raise ConfigError(problem, where=sif.path, wanted=f"/{name} in it")
    print(found.decode(), end="")


def diff(
    first: Annotated[Path, typer.Argument(metavar="A", help="A SIF.")],
    second: Annotated[Path, typer.Argument(metavar="B", help="Another.")],
) -> None:
    """Name what makes two images differ, and why; exit code 1 where anything does.

    dray image diff build/dray-cpu.sif other/dray-cpu.sif
    """
    found = differences.sifs(first, second)
    for line in found or [f"identical: {identity.digest(first)}"]:
        print(line)
    raise typer.Exit(1 if found else 0)


def _file(image: str) -> Path:
    return store.named(checkout.root(), image)


def _adopted(file: Path, known: record.Record) -> str:
    """As its record has it: what is in it is not dray's to describe."""
    lines = {"image": f"{file}, adopted from {known.base}", "digest": f"sha256:{known.sif.sha256}"}
    lines |= {"variant": known.variant, "dray": f"{known.dray}, beside it", **known.tools}
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())


def _table(packages: dict[str, int]) -> Table:
    table = Table("package", "MB unpacked")
    table.columns[1].justify = "right"
    for name, size in list(packages.items())[:_TOP]:
        table.add_row(name, f"{size / 1e6:.1f}")
    rest = list(packages.values())[_TOP:]
    if rest:
        table.add_row(f"{len(rest)} others", f"{sum(rest) / 1e6:.1f}", style="dim")
    return table
