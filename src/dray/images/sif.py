"""The SIF, built by Apptainer as an ordinary user. Also a program: the builder container runs it."""

from __future__ import annotations

import contextlib
import re
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from spython.utils import stream_command

from dray import process
from dray.errors import ConfigError, DrayError, UnfitError

IMAGE = "image.sif"


def apptainer() -> str | None:
    """The program's name on this machine; sites keep the old one for a long time."""
    return next((name for name in ("apptainer", "singularity") if process.which(name)), None)


@contextlib.contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """A folder to build IMAGE in. It takes the place of `out` at the end, so that a failure leaves the old one."""
    out.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(prefix=f".{out.name}-", dir=out.parent, ignore_cleanup_errors=True) as scratch:
        yield Path(scratch)
        (Path(scratch) / IMAGE).replace(out)


def build_argv(*, tool: str, inputs: Path, bootstrap: str, source: str, image: Path) -> list[str]:
    """Apptainer's command; the definition takes its base from the two arguments."""
    return [
        *(tool, "build", "--bind", f"{inputs}:/mnt"),
        *("--build-arg", f"BOOTSTRAP={bootstrap}", "--build-arg", f"BASE={source}"),
        *(str(image), str(inputs / "dray.def")),
    ]


def build(*, inputs: Path, base: str, scratch: Path, on_line: Callable[[str], None]) -> None:
    """Build scratch/IMAGE, each line of the output going to `on_line`."""
    tool = apptainer()
    if tool is None:
        raise UnfitError("Apptainer is not on this machine", wanted="apptainer or singularity on PATH")
    if set(",:") & set(str(inputs)):
        raise ConfigError(
            "Apptainer cannot bind a path with , or : in it", found=inputs, fix="move the checkout to another folder"
        )
    bootstrap, source = start_from(base, scratch)
    argv = build_argv(tool=tool, inputs=inputs, bootstrap=bootstrap, source=source, image=scratch / IMAGE)
    # The definition is kept in the image: a base that is named from here shows no path of this machine.
    on_line(shlex.join(argv))
    with contextlib.chdir(scratch):
        try:
            # Not spython's Client: it always calls `singularity`, and its stream stops when stderr's pipe is full.
            for line in stream_command(argv, sudo=False, output_type="both"):
                on_line(line.rstrip("\n"))
        except Exception as error:
            # spython lets subprocess's own error through, and importing that module is dray.process's alone.
            if not hasattr(error, "returncode"):
                raise
            raise DrayError(f"{tool} build failed with exit code {error.returncode}") from error


def local_base(base: str) -> Path | None:
    """The file or folder that a base is, or None where it is the reference of an image."""
    path = Path(base).expanduser().resolve()
    if path.exists():
        return path
    if base.startswith(("/", ".", "~")) or path.suffix in (".tar", ".sif"):
        raise ConfigError(
            "the base is not there",
            wanted="an image reference, a SIF, a folder, or the tar of a root filesystem",
            found=base,
            fix=f"make one: containers/base/make-base.sh bookworm {base}" if path.suffix == ".tar" else None,
        )
    return None


def start_from(base: str, scratch: Path) -> tuple[str, str]:
    """Apptainer's Bootstrap and From for a base."""
    path = local_base(base)
    if path is None:
        scheme, _, reference = base.rpartition("://")
        # Apptainer refuses a tag beside a digest, which alone says which image is meant.
        return scheme or "docker", re.sub(r":[^:/@]+(?=@)", "", reference)
    if path.is_dir() or path.suffix == ".sif":
        return "localimage", str(path)
    rootfs = scratch / "rootfs"
    rootfs.mkdir()
    # An ordinary user can make no devices, and a container has the host's anyway.
    process.run(["tar", "--extract", "--file", path, "--directory", rootfs, "--exclude=./dev/*"])
    return "localimage", rootfs.name


def main() -> None:
    """INPUTS BASE SCRATCH: the builder container's command."""
    inputs, base, scratch = sys.argv[1:]
    try:
        build(inputs=Path(inputs), base=base, scratch=Path(scratch), on_line=print)
    except DrayError as error:
        print(error)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
