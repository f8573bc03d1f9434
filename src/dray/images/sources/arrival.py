"""Check that a bundle is complete, signed and from this checkout, before anything in it is installed or run.

`python3 -m dray.images.sources.arrival BUNDLE [SIGNERS]` needs only Python's standard library: `make` runs it first.
"""

from __future__ import annotations

import hashlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from dray import process
from dray.contract.findings import ConfigError, DrayError

_SHOWN = 10
_ABOUT = re.compile(r"dray-[\w.]+\.dist-info/(METADATA|WHEEL|RECORD|entry_points\.txt|licenses/[\w.]+)")
_ENTRY = re.compile(r"|\[[\w.]+\]|\w+ = dray\.[\w.]+:\w+")
SUMS, SIGNATURE = "SHA256SUMS", "SHA256SUMS.sig"
_NAMESPACE = "dray-bundle"  # so that the signature of something else, such as a commit, is not valid for a bundle


def sums(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder, by its relative path."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                found[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return found


def sign(folder: Path, key: Path) -> None:
    """Sign the checksums with an SSH key; ssh-keygen may ask for its passphrase."""
    argv: list[str | Path] = ["ssh-keygen", "-q", "-Y", "sign", "-n", _NAMESPACE, "-f", key, folder / SUMS]
    if process.run(argv, show=True, check=False).code != 0:
        fix = 'ssh-keygen -t ed25519 -f KEY makes one, or eval "$(ssh-agent)"; ssh-add KEY'
        raise ConfigError("the bundle cannot be signed", where=key, wanted="an SSH private key", fix=fix)


def require(folder: Path, locks: Path, signers: Path | None = None) -> None:
    """Refuse a bundle that is not complete, has files that no lock pins, or is not signed by one of `signers`."""
    if not (folder / SUMS).is_file():
        fix = "dray image bundle VARIANT makes one"
        raise ConfigError("not a bundle", where=folder, wanted=f"a folder with {SUMS}", fix=fix)
    odd = [path for path in folder.rglob("*") if path.is_symlink() or not (path.is_file() or path.is_dir())]
    if odd:
        raise ConfigError(
            "the bundle has links or special files",
            where=folder,
            found="\n".join(f"{path.relative_to(folder)}: {_kind(path)}" for path in sorted(odd)),
            fix="make it again: dray image bundle VARIANT writes only plain files",
        )
    if signers:
        _require_signed(folder, signers)
    lines = (folder / SUMS).read_text(encoding="utf-8", errors="replace").splitlines()
    wanted = {line[66:]: line[:64] for line in lines}
    present = {name: digest for name, digest in sums(folder).items() if name not in (SUMS, SIGNATURE)}
    if wrong := sorted(name for name in wanted.keys() | present.keys() if wanted.get(name) != present.get(name)):
        raise ConfigError(
            "the bundle differs from its checksums",
            where=folder,
            found="\n".join(
                f"{name}: {'missing' if name not in present else 'changed' if name in wanted else 'not in it'}"
                for name in wrong
            ),
            fix="copy it again",
        )
    pinning = (*locks.glob("*/*.lock"), *locks.glob("*/image.toml"))
    locked = {one for path in pinning for one in re.findall(r"\b[0-9a-f]{64}\b", path.read_text())}
    pinned = ("wheels/", "sources/")
    if strange := [name for name in present if name.startswith(pinned) and present[name] not in locked]:
        raise ConfigError(
            "the bundle has wheels or sources that no lock of this checkout names",
            where=folder,
            found="\n".join(strange),
            fix="use it with the same version of dray: even a signed bundle may have only files that the locks name",
        )

    _require_own(folder, locks.parent / "src")


def _kind(path: Path) -> str:
    if path.is_symlink():
        return f"a link to {path.readlink()}"
    return "a pipe" if path.is_fifo() else "a socket or a device"


def _require_own(folder: Path, source: Path) -> None:
    """Refuse a bundle whose own wheel of dray, which no lock can name, differs from this checkout's source."""
    found = [
        f"{wheel.name}: {entry}" for wheel in sorted((folder / "dray").glob("*")) for entry in _other(wheel, source)
    ]
    if found:
        raise ConfigError(
            "the bundle's dray is not this checkout's",
            where=folder / "dray",
            wanted=f"the files of {source}",
            found="\n".join(found[:_SHOWN]),
            fix="use it with a checkout of the same version of dray",
        )


def _other(wheel: Path, source: Path) -> Iterator[str]:
    try:
        with ZipFile(wheel) as archive:
            for name in archive.namelist():
                content = archive.read(name)
                entries = content.decode(errors="replace").splitlines() if name.endswith("/entry_points.txt") else []
                if _ABOUT.fullmatch(name) and all(_ENTRY.fullmatch(line) for line in entries):
                    continue
                file = source / name
                if not name.startswith("dray/") or ".." in name or not file.is_file() or file.read_bytes() != content:
                    yield name
    except BadZipFile:
        yield "not a wheel"


def _require_signed(folder: Path, signers: Path) -> None:
    wanted = f"a signature by a key of {signers}, where each line is a name, a space and the key from its .pub"
    ask = "ask the person who made it for the line of the key, or for the bundle as it was signed"
    if not signers.is_file():
        raise ConfigError("the file of signers does not exist", where=signers, wanted=wanted)
    if not (folder / SIGNATURE).is_file():
        fix = "dray image bundle VARIANT --key ~/.ssh/id_ed25519 makes a signed one"
        raise ConfigError("the bundle is not signed", where=folder, wanted=wanted, fix=fix)
    files: list[str | Path] = ["-f", signers, "-s", folder / SIGNATURE]
    named = process.run(["ssh-keygen", "-Y", "find-principals", *files], check=False)
    names = named.out.splitlines() if named.code == 0 else []
    if not names:
        raise ConfigError("the bundle is signed with another key", where=folder, wanted=wanted, fix=ask)
    verify: list[str | Path] = ["ssh-keygen", "-Y", "verify", *files, "-I", names[0], "-n", _NAMESPACE]
    # ssh-keygen reads what is signed from its input.
    held = process.run(["sh", "-c", 'file=$1; shift; exec "$@" <"$file"', "-", folder / SUMS, *verify], check=False)
    if held.code != 0:
        raise ConfigError(
            "the bundle's checksums were changed after they were signed",
            where=folder,
            wanted=wanted,
            found=(held.err or held.out).strip(),
            fix=ask,
        )
    print(f"dray: the bundle is signed by {names[0]}", file=sys.stderr)


if __name__ == "__main__":
    checkout = Path(__file__).resolve().parents[4]
    try:
        require(Path(sys.argv[1]), checkout / "containers", *map(Path, filter(None, sys.argv[2:])))
    except DrayError as error:
        print(f"dray: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
