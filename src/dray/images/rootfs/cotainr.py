"""A root filesystem whose Python comes by cotainr; standard library only, as all that the builder container runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Container, Iterator
from dataclasses import dataclass
from pathlib import Path

from dray import process
from dray.containers import apptainer
from dray.contract.findings import ConfigError, DrayError
from dray.images.rootfs import make

FOLDER = "cotainr"
ENVIRONMENT = f"{FOLDER}/environment.yml"
TOOL = f"{FOLDER}/tool"
WANTED = f"{FOLDER}/miniforge"
# What cotainr's programs may know of the caller's environment: the way to the network, and where programs are.
_KEPT = {"path", "lang", "ssl_cert_file", "http_proxy", "https_proxy", "no_proxy"}
_CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"


@dataclass(frozen=True, kw_only=True)
class Made:
    """What cotainr has made of a base."""

    sif: Path
    miniforge: str
    """Digest of the installer that it has fetched and run."""
    mounts: tuple[Path, ...]
    """Empty folders in it that were needed to build it, the innermost first."""


def build(*, inputs: Path, base: Path, scratch: Path, epoch: int) -> Made:
    """The base with Debian's packages, then cotainr's Conda and the environment in it."""
    work = scratch / FOLDER
    tmp = work / "tmp"
    tmp.mkdir(parents=True)
    definition = inputs / FOLDER / "base.def"
    rootfs = make.build(definition=definition, binds={inputs: "/mnt"}, base=base, scratch=work, epoch=epoch)
    # cotainr names files by their path on this machine also inside, where a writable image has no other mount points.
    point = tmp.relative_to("/")
    mounts = tuple(path for path in (point, *point.parents) if not (rootfs / path).exists())
    (rootfs / point).mkdir(parents=True, exist_ok=True)
    print("dray: cotainr", flush=True)
    out = work / "cotainr.sif"
    given = dict(environment(inputs, tmp))
    code = process.follow(argv(inputs, rootfs, out, given), on_line=_print, env=given)
    file, wanted = tmp / "miniforge", (inputs / WANTED).read_text()
    miniforge = file.read_text() if file.exists() else ""
    if wanted and miniforge not in {"", wanted}:
        raise ConfigError(
            "cotainr has fetched another Miniforge than you want, and it was not run",
            wanted=wanted,
            found=miniforge,
            fix="look what has changed in it, then give the new digest to --miniforge",
        )
    if code or not out.exists():
        raise DrayError(f"cotainr failed with exit code {code}")
    return Made(sif=out, miniforge=miniforge, mounts=mounts)


def argv(inputs: Path, rootfs: Path, out: Path, given: Container[str]) -> list[str]:
    """cotainr's whole command; of the caller's environment all goes but what is `given` anew, and the way out."""
    others = [f"--unset={name}" for name in sorted(os.environ) if name.lower() not in _KEPT and name not in given]
    command = ["env", f"--chdir={inputs / TOOL}", *others, sys.executable, "-m", "cotainr", "build", str(out)]
    command += [f"--base-image={rootfs}", f"--conda-env={inputs / ENVIRONMENT}"]
    return [*command, "--accept-licenses", "--no-color", "-v"]


def environment(inputs: Path, tmp: Path) -> Iterator[tuple[str, str]]:
    """What it and the containers that it starts find; they see the inputs and a /tmp of their own, and no home."""
    certificates = os.environ.get("SSL_CERT_FILE")
    binds = [f"{inputs}:/mnt:ro", f"{tmp}:{tmp}", f"{tmp}:/tmp"]
    binds += [f"{certificates}:{_CERTIFICATES}:ro"] if certificates else []
    make.require_bindable(inputs, tmp, *([Path(certificates)] if certificates else []))
    yield "PATH", f"{inputs / FOLDER / 'bin'}:{os.environ['PATH']}"
    yield "HOME", str(tmp)
    yield "TMPDIR", str(tmp)
    yield "PYTHONDONTWRITEBYTECODE", "1"
    # Its SIF is unpacked again at once.
    fast = "-comp zstd -Xcompression-level 1"
    settings = {"BIND": ",".join(binds), "CONTAIN": "1", "CWD": "/", "DISABLE_CACHE": "1", "MKSQUASHFS_ARGS": fast,
                "TMPDIR": str(tmp)}  # fmt: skip
    inside = {"SSL_CERT_FILE": _CERTIFICATES, "REQUESTS_CA_BUNDLE": _CERTIFICATES, "PIP_CONFIG_FILE": "/dev/null",
              "PIP_NO_CACHE_DIR": "1", "CONDA_REGISTER_ENVS": "false"}  # fmt: skip
    program = (apptainer.program() or "apptainer").upper()
    yield from ((f"{program}_{name}", value) for name, value in settings.items())
    yield from ((f"{program}ENV_{name}", value) for name, value in inside.items())


def _print(line: str) -> None:
    """Without the frames of its spinner, ten a second, each of which erases the one before."""
    text = line.removeprefix("\x1b[2K")
    if text and not "\u2800" <= text[0] <= "\u28ff":
        print(text, flush=True)
