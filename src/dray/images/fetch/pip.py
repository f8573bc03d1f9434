"""Download pinned files with the host's pip and its configuration. No package's code runs."""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from dray import process
from dray.clients.progress import Say
from dray.config import mirrors
from dray.config.image_definition import Image
from dray.contract.findings import DrayError, UnfitError
from dray.images.fetch.platforms import command, download_argv, pip_options
from dray.images.locks.lock import Pin

_NOT_FOUND = "No matching distribution"
_LAST = 15
_STUB = Path(__file__).with_name("setuptools_stub")


def install_argv(*, requirements: Path, python: str, wheels: Path, folder: Path) -> list[str]:
    """The command that installs locked wheels for an image's Python into a folder, without running their code."""
    return [
        *(*command("install"), "--quiet", "--no-index", "--find-links", str(wheels), "--require-hashes"),
        *("--only-binary", ":all:", "--no-compile"),
        *(*pip_options(python), "--requirement", str(requirements), "--target", str(folder)),
    ]


def download(pins: Sequence[Pin], *, image: Image, folder: Path, index: str = "", say: Say) -> list[Path]:
    """Fetch all of these files into `folder`, or none. Each has the right hash.

    pip asks a vendor's `index` only for files that the user's own configuration of pip does not find.
    """
    with TemporaryDirectory(dir=folder, prefix=".new-") as made:
        scratch = Path(made)
        requirements, files = scratch / "requirements", scratch / "files"
        requirements.write_text("".join(f"{pin}\n" for pin in pins))
        files.mkdir()
        argv = download_argv(requirements=requirements, python=image.python, folder=files)
        if index:
            # If a firewall drops the connection, more tries would cost more than a minute.
            argv += ["--retries", "2"]
        path = os.pathsep.join(filter(None, (str(_STUB), os.environ.get("PYTHONPATH"))))
        # Gigabytes pass through pip's temporary folder, and /tmp is small on many machines. A constraint in the user's
        # configuration of pip could only refuse what the lock names by its hash.
        env = {"PYTHONPATH": path, "TMPDIR": made, "PIP_CONSTRAINT": os.devnull}
        lines: list[str] = []
        code = process.follow(argv, on_line=lines.append, env=env)
        if code and index and any(_NOT_FOUND in line for line in lines):
            lines.clear()
            contacted = mirrors.url(index)
            say(f"dray: look in {contacted}")
            code = process.follow([*argv, "--index-url", contacted], on_line=lines.append, env=env)
        if code:
            raise _failed(pins, image, index, _reason(lines))
        return [file.replace(folder / file.name) for file in sorted(files.iterdir())]


def _failed(pins: Sequence[Pin], image: Image, index: str, text: str) -> DrayError:
    """The error if pip did not fetch everything, with what to do."""
    if "DO NOT MATCH THE HASHES" in text:
        fix = "pip cache purge; if a mirror has another file under this name, lock again: dray image lock VARIANT"
        return DrayError("a fetched file does not match its locked hash", found=text.partition("\n")[2], fix=fix)
    if _NOT_FOUND not in text:
        return DrayError("pip cannot fetch the locked files", found=text)
    wanted = f"a wheel for Python {image.python} on {platform.machine()}"
    if index:
        cp = "cp" + image.python.replace(".", "")
        ending = f"{cp}-{cp}-*_{platform.machine()}.whl"
        wanted = "\n".join(f"{pin.name.replace('-', '_')}-{pin.version}-{ending}" for pin in pins)
    return UnfitError(
        "pip cannot find a locked file",
        where=mirrors.url(index) if index else None,
        wanted=wanted,
        found=text,
        fix=elsewhere(index, image.variant)
        if index
        else "pip config list shows where pip looks: a proxy or a mirror may be missing",
    )


def elsewhere(address: str, variant: str) -> str:
    """What to do if this machine cannot fetch a file from its publisher."""
    return (
        f'if only a mirror can be reached: "{address}" = "https://..." below [mirrors] in {mirrors.path()}\n'
        f"or put the files into a folder: make image-{variant} WHEELS=FOLDER\n"
        f"or, without a network, make a bundle on a machine with one: dray image bundle {variant}"
    )


def _reason(lines: Sequence[str]) -> str:
    """pip's last errors, and the cause if that is the network."""
    start = next((at for at, line in enumerate(lines) if line.lower().startswith("error:")), 0)
    errors = [line for line in lines[start:] if line.strip()][-_LAST:]
    errors += [line.partition("connection broken by ")[2] for line in lines if "connection broken by " in line][-1:]
    # Dozens of versions say no more than the last one, and an object's address nothing.
    return re.sub(r"(?<=from versions: )[^)]{40,}, |<[^>]*>:? ?", "", "\n".join(errors))
