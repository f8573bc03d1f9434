"""`dray image inspect|verify|sign|sbom`: what is in an image, and who signed it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from dray.config import dray_home
from dray.contract.control_characters import printable
from dray.contract.findings import ConfigError
from dray.images import adopted_folder, store
from dray.images.sif import contents, record
from dray.images.sif import format as sif_format
from dray.images.sif import inspect as summary
from dray.images.sif import sign as signatures
from dray.images.sif import verify as identity

_SBOM = "opt/dray/sbom.json"

Image = Annotated[str, typer.Argument(metavar="FILE|VARIANT", help="A SIF, or a variant that was built here.")]


def inspect(
    image: Image, as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False
) -> None:
    """Show an image's digest, base and versions, without starting it.

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
        "image": f"{report['file']} ({report['size'] / 1e6:.0f} MB)",
        "digest": report["digest"],
        "signed": f"with {', '.join(report['signed'])} (dray image verify checks it)" if report["signed"] else "no",
        "variant": f"{report['variant']}, {report['architecture']}",
        **{name: report[name] for name in ("base", "python", "dray")},
        **report["versions"],
    }
    print(_aligned(lines))


def verify(
    image: Image,
    digest: Annotated[str | None, typer.Option(help="Digest that the image must have, sha256:...")] = None,
    key: Annotated[
        list[str] | None,
        typer.Option(help="Fingerprint of an accepted key; may be repeated. Default: all keys of the keyring."),
    ] = None,
    signature: Annotated[bool, typer.Option("--signature/--no-signature", help="Check the signature.")] = True,
) -> None:
    """Check an image's digest, and that a key of Apptainer's keyring, or of --key, has signed it.

    dray image verify cuda --digest sha256:...
    """
    if key and not signature:
        raise ConfigError("--key and --no-signature exclude each other", fix="leave out one of the two")
    sif = sif_format.read(_file(image))
    expected, source = identity.expected(sif.path, digest)
    found = identity.require(sif.path, expected, source)
    signers = signatures.check(sif, key or ()) if signature else []
    print(
        f"{sif.path}\n{found} ({source})\n"
        + (f"signed by {', '.join(signers)}" if signature else "signature unchecked")
    )


def sign(
    image: Image,
    keyidx: Annotated[
        int | None, typer.Option(help="Number of the key in Apptainer's list. Needed if you have several keys.")
    ] = None,
) -> None:
    """Sign an image with a key of Apptainer's keyring. The file gets a new digest, which dray records.

    dray image sign cuda
    """
    file = _file(image)
    if (file.parent / adopted_folder.DESCRIBED).is_file():
        raise ConfigError(
            "an adopted image cannot be signed here: it stays as its owner made it",
            where=file.resolve(),
            fix="ask its owner to sign it (apptainer sign); then dray image adopt FILE --force",
        )
    sif = sif_format.read(file)
    digest, fingerprint = signatures.sign(sif, keyidx)
    print(f"{sif.path}\n{digest}\nsigned with {fingerprint}")


def sbom(image: Image) -> None:
    """Print the bill of materials as CycloneDX 1.6: every package, its licence and its hash.

    dray image sbom cpu
    """
    sif = sif_format.read(_file(image))
    document = contents.file(sif, _SBOM)
    if document is None:
        raise ConfigError("dray did not build this image", where=sif.path, wanted=f"/{_SBOM} in it")
    print(document.decode(), end="")


def _file(image: str) -> Path:
    return store.named(dray_home.root(), image)


def _adopted(file: Path, known: record.Record) -> str:
    """What the record of an adopted image says: dray does not read the image itself."""
    lines = {"image": f"{file}, adopted from {known.base}", "digest": f"sha256:{known.sif.sha256}"}
    lines |= {"variant": known.variant, "dray": f"{known.dray}, beside it", **known.tools}
    return _aligned(lines)


def _aligned(lines: dict[str, str]) -> str:
    width = max(map(len, lines))
    return "\n".join(f"{name:<{width}}  {value}" for name, value in lines.items())
