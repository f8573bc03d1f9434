"""Signatures of images: Apptainer makes and checks them, with the keys in its own keyring."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from dray import interrupts, process
from dray.clients import apptainer, builder
from dray.config import dray_home
from dray.contract.findings import ConfigError
from dray.images.sif import format as sif_format
from dray.images.sif import record, verify
from dray.images.sif.format import Sif
from dray.process import Done

# Apptainer 1.4 and SingularityCE 4: the variable that names the keyring, and where it is in the home folder otherwise.
_KEYS = {
    "apptainer": ("APPTAINER_KEYSDIR", ".apptainer/keys"),
    "singularity": ("SINGULARITY_SYPGPDIR", ".singularity/sypgp"),
}
# It hashes the whole image, which may have tens of gigabytes on a slow disk.
_HASHED_S = 1800.0


def check(sif: Sif, keys: Sequence[str] = ()) -> list[str]:
    """Who signed the image. Each signature must be valid, its key in the keyring; with `keys`, one must be by them."""
    asked = [_fingerprint(key) for key in keys]
    if not sif.signers():
        fix = f"{shlex.join(['dray', 'image', 'sign', str(sif.path)])}; or verify --no-signature"
        raise ConfigError("the image is not signed", where=sif.path, fix=fix)
    done = _apptainer(["verify", "--local", "--json", str(sif.path)], sif=sif.path)
    if done.code == 0:
        if asked and len({part.group for part in sif.parts if part.kind != "signature"}) > 1:
            # What starts could be in a group of another signer.
            raise ConfigError(
                "the image's parts are in several groups, and each group is signed by itself",
                where=sif.path,
                wanted="one group, as dray image build and apptainer build write it",
                fix="ask the person who built it for an image with one group",
            )
        signers = [key["Signer"] for key in json.loads(done.out)["SignerKeys"]]
        found = sorted({f"{signer['Name']} {signer['Fingerprint'].upper()}" for signer in signers})
        if asked and not any(one.endswith(key) for one in found for key in asked):
            raise ConfigError(
                "the image is signed with another key",
                where=sif.path,
                wanted="\n".join(asked),
                found="\n".join(found),
                fix="ask the person who built it for an image that is signed with this key",
            )
        return found
    if "unknown entity" in done.err:
        raise ConfigError(
            "the image is signed with a key that is not in the keyring",
            where=sif.path,
            wanted=f"a key of the keyring {keyring()}",
            found=", ".join(sif.signers()),
            fix=f"ask the key's owner for the public key; if you trust this person: {_command('key import FILE')}",
        )
    raise ConfigError(
        "the image's signature is not valid: the image was changed after it was signed",
        where=sif.path,
        found=_last(done),
        fix="copy or build it again",
    )


def _fingerprint(key: str) -> str:
    """The whole fingerprint: two keys may have the same last digits."""
    asked = key.upper().replace(" ", "").removeprefix("0X")
    if not re.fullmatch("[0-9A-F]{40}", asked):
        listed = _command("key list")
        raise ConfigError("not a key's fingerprint", wanted="40 hexadecimal digits", found=key, fix=listed)
    return asked


def sign(sif: Sif, keyidx: int | None = None) -> tuple[str, str]:
    """Sign with a key, by its number in Apptainer's list. Returns the new digest and the key's fingerprint."""
    if sif.signers():
        raise ConfigError("the image is signed already", where=sif.path, found=", ".join(sif.signers()))
    recorded = record.read(sif.path)
    if recorded:
        verify.require(sif.path, *verify.expected(sif.path))
    argv = ["sign"] if keyidx is None else ["sign", "--keyidx", str(keyidx)]
    # A copy beside the image: if signing is interrupted, the image that others start is intact.
    with interrupts.stoppable(), TemporaryDirectory(prefix=f".{sif.path.name}-", dir=sif.path.parent) as scratch:
        copy = Path(shutil.copy2(sif.path, scratch))
        if process.apptainer() and sys.stdin.isatty():  # it may ask for a passphrase, which dray must not see
            done = process.run([apptainer.name(), *argv, copy], env=_environment(), show=True, check=False)
        else:
            done = _apptainer([*argv, str(copy)], sif=copy, writes=True)
        signers = sif_format.read(copy).signers() if done.code == 0 else []
        if not signers:
            raise ConfigError(
                "the image could not be signed",
                where=sif.path,
                found=_last(done) or f"exit code {done.code}",
                fix=f"without a key, make one: {_command('key newpair')}\nwith several, name one: --keyidx NUMBER "
                f"({_command('key list --secret')})\n"
                "if it has a passphrase, sign at a terminal of a machine with Apptainer, which asks for it",
            )
        signed = record.File.of(copy)
        copy.replace(sif.path)
        if recorded:
            record.write(sif.path, recorded.model_copy(update={"sif": signed, "signed": signers[0]}))
    return f"sha256:{signed.sha256}", signers[0]


def keyring() -> Path:
    """The folder of Apptainer's keyring."""
    named = (os.environ.get(variable) for variable, _ in _KEYS.values())
    return Path(next(filter(None, named), None) or dray_home.home() / _KEYS[apptainer.name()][1])


def _apptainer(argv: list[str], *, sif: Path | None = None, writes: bool = False) -> Done:
    binds = {sif: writes} if sif else {}
    if keyring().is_dir():
        binds[keyring()] = True  # Apptainer corrects its mode if others may read it
    return builder.tool([apptainer.name(), *argv], binds=binds, env=_environment(), seconds=_HASHED_S)


def _environment() -> dict[str, str]:
    return {_KEYS[apptainer.name()][0]: str(keyring())}


def _command(command: str) -> str:
    """How a user runs Apptainer here."""
    if tool := process.apptainer():
        return f"{tool} {command}"
    keys = shlex.quote(str(keyring()))
    inside = f'-e APPTAINER_KEYSDIR=/keys -v "$PWD:/here" -w /here {builder.TAG} apptainer'
    return f'mkdir -p -m 700 {keys} && docker run --rm -it -u "$(id -u)" -v {keys}:/keys {inside} {command}'


def _last(done: Done) -> str:
    return "\n".join((done.err or done.out).strip().splitlines()[-3:])
