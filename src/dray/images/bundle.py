"""A bundle: one folder with all that a build reads, for a machine without a network.

`python3 -m dray.images.bundle BUNDLE [SIGNERS]` checks one with Python's standard library alone: `make` runs it first.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from zipfile import ZipFile

from dray import process
from dray.contract.findings import ConfigError, DrayError
from dray.images.fetch import sha256

SUMS, SIGNATURE = "SHA256SUMS", "SHA256SUMS.sig"
README, BUILDER = "README.md", "builder.tar"
_SHOWN = 10
_METADATA = re.compile(r"dray-[\w.]+\.dist-info/(METADATA|WHEEL|RECORD|licenses/[\w.]+)")
_ENTRY_POINTS = re.compile(rb"(\[[\w.]+\]\n|\w+ = dray\.[\w.]+:\w+\n|\n)*")
_NAMESPACE = "dray-bundle"  # so that the signature of something else, such as a commit, is not valid for a bundle
_VERIFY = f"""
name=$(ssh-keygen -Y find-principals -f "$1" -s "$2.sig" | head -n 1)
[ "$name" ] && ssh-keygen -Y verify -f "$1" -s "$2.sig" -I "$name" -n {_NAMESPACE} <"$2"
"""


def link(source: str | Path, target: str | Path) -> None:
    """Hard-link a file; copy it only to another disk."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def sums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder, by its relative path; without the checksums' own file and its signature."""
    digests = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name not in (SUMS, SIGNATURE):
            digests[name] = sha256(path)
    return digests


def require(folder: Path, checkout: Path, signers: Path | None = None) -> None:
    """Refuse a bundle that is not complete, has files that no lock pins, or is not signed by one of `signers`."""
    if not (folder / SUMS).is_file():
        fix = "dray image bundle VARIANT makes one"
        raise ConfigError("not a bundle", where=folder, wanted=f"a folder with {SUMS}", fix=fix)
    paths = folder.rglob("*")
    odd = [path for path in paths if path.is_symlink() or not (path.is_file() or path.is_dir())]
    names = [path.relative_to(folder).as_posix() for path in odd]
    _refuse("the bundle has links or special files", folder, names, fix="make it again: it may have only plain files")
    if signers:
        _require_signed(folder, signers)
    lines = (folder / SUMS).read_text(encoding="utf-8", errors="replace").splitlines()
    listed = {line[66:]: line[:64] for line in lines}
    present = sums(folder)
    differing = [name for name in listed.keys() | present.keys() if listed.get(name) != present.get(name)]
    _refuse("the bundle differs from its checksums", folder, differing, fix="copy it again")

    pinning = (*checkout.glob("containers/*/*.lock"), *checkout.glob("containers/*/image.toml"))
    locked = {digest for path in pinning for digest in re.findall(r"\b[0-9a-f]{64}\b", path.read_text())}
    unlocked = [name for name in present if name.startswith(("wheels/", "sources/")) and present[name] not in locked]
    fix = "use it with the same version of dray: even a signed bundle may have only files that the locks name"
    _refuse("the bundle has wheels or sources that no lock of this checkout names", folder, unlocked, fix=fix)

    fix = "use it with a checkout of the same version of dray"
    _refuse("the bundle's dray is not this checkout's", folder, _changed(folder / "dray", checkout / "src"), fix=fix)


def _refuse(problem: str, folder: Path, names: Iterable[str], *, fix: str) -> None:
    names = sorted(names)
    if names:
        raise ConfigError(problem, where=folder, found="\n".join(names[:_SHOWN]), fix=fix)


def _changed(wheels: Path, source: Path) -> Iterator[str]:
    """What differs from this checkout in dray's own wheel, which no lock can name and which `make` installs."""
    ours = {path.relative_to(source).as_posix(): path for path in source.rglob("*") if path.is_file()}
    for wheel in wheels.glob("*"):
        with ZipFile(wheel) as archive:
            for name in archive.namelist():
                content = archive.read(name)
                if name in ours:
                    same = ours[name].read_bytes() == content
                elif name.endswith(".dist-info/entry_points.txt"):
                    same = bool(_ENTRY_POINTS.fullmatch(content))
                else:
                    same = bool(_METADATA.fullmatch(name))
                if not same:
                    yield f"{wheel.name}: {name}"


def sign(folder: Path, key: Path) -> None:
    """Sign the checksums with an SSH key; ssh-keygen may ask for its passphrase."""
    argv: list[str | Path] = ["ssh-keygen", "-q", "-Y", "sign", "-n", _NAMESPACE, "-f", key, folder / SUMS]
    if process.run(argv, show=True, check=False).code != 0:
        fix = 'ssh-keygen -t ed25519 -f KEY makes one, or eval "$(ssh-agent)"; ssh-add KEY'
        raise ConfigError("the bundle cannot be signed", where=key, wanted="an SSH private key", fix=fix)


def _require_signed(folder: Path, signers: Path) -> None:
    ended = process.run(["sh", "-c", _VERIFY, "-", signers, folder / SUMS], check=False)
    if ended.code != 0:
        raise ConfigError(
            "the bundle is not signed by one of the signers",
            where=folder,
            wanted=f"a signature by a key of {signers}, where each line is a name, a space and the key from its .pub",
            found=f"{ended.err}{ended.out}".strip(),
            fix="dray image bundle VARIANT --key ~/.ssh/id_ed25519 makes a signed one\n"
            "or ask the person who made it for the line of the key",
        )
    print(f"dray: the bundle's checksums: {ended.out.strip()}", file=sys.stderr)


if __name__ == "__main__":
    try:
        require(Path(sys.argv[1]), Path(__file__).resolve().parents[3], *map(Path, filter(None, sys.argv[2:])))
    except DrayError as error:
        print(f"dray: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
