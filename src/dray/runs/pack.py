"""Pack a capsule into one file without secrets, and open such a file."""

from __future__ import annotations

import gzip
import hashlib
import re
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic import BaseModel

from dray import __version__
from dray.contract import run_folder, secrets
from dray.contract.control_characters import printable
from dray.contract.findings import ConfigError
from dray.runs import bundle, capsule
from dray.runs.capsule_schema import File
from dray.runs.store import RunPaths, attempts, find, last_attempt, run_name

_MOST = 64 << 20  # bytes of one file; metrics are packed whole
_ALL, _FILES = 512 << 20, 20_000  # the largest archive that is opened
_HEADER = 1 << 16  # bytes of a member's headers
_LOGS = 24
_INSIDE = re.compile(r"[\w.-]+/(attempt-[1-9][0-9]{0,8}/(?:[\w.-]+/)?[\w.-]+)", re.ASCII)
_ABOUT = """\
The capsule of the run {run}: what is needed to repeat it. Made by dray {dray}.

dray capsule show FILE, dray diff FILE RUN and dray replay FILE --recipe NEW.toml read this file as it is.
Replaced:
  by [NAME]: values of pass_env and of secret variables such as HF_TOKEN, as they were set when the archive was made
  by [secret]: text that looks like a secret, and in the diff of code values of names such as PASSWORD or token
Not replaced: names of nodes, users and projects, paths, the command, the rest of the diff, other output of programs.
Left out: checkpoints, models, datasets, secrets, files that git does not track. Of logs only the ends are here.
Read the files before you send them.

{names}
"""


class Packed(BaseModel):
    """The file that was written."""

    file: str
    size: int
    names: list[str]
    left_out: list[str]


def make(run: Path, out: Path) -> Packed:
    """Write a file with all attempts, readable by this user alone; an existing file is never overwritten."""
    content, left_out = dict[str, str](), list[str]()
    for number in attempts(run):
        paths = RunPaths(run, number)
        if paths.capsule.exists():
            content |= _attempt(paths, left_out)
    if not content:
        capsule.read(last_attempt(run))  # raises the error that says what is missing
    named = [*content, *(f"({line}, left out)" for line in left_out)]
    content["README"] = printable(_ABOUT.format(run=run.name, dray=__version__, names="\n".join(named)))
    bundle.write_out(out, bundle.packed(f"dray-capsule-{bundle.plain(run.name)}", content))
    return Packed(file=str(out), size=out.stat().st_size, names=sorted(content), left_out=left_out)


def text(made: Packed) -> str:
    """List the packed files, and say what to do before sending them."""
    out = [f"{made.file}: {made.size:,} bytes, {len(made.names)} files:", *(f"  {name}" for name in made.names)]
    out += [f"left out: {line}" for line in made.left_out]
    return "\n".join([*out, "Read it before you send it: its README lists what was replaced and what was not."])


def _attempt(paths: RunPaths, left_out: list[str]) -> dict[str, str]:
    """The capsule's files without secrets, and the capsule with the checksums of these."""
    made, clean = capsule.read(paths), bundle.cleaner(paths, homes=False)
    folder, content, listed = paths.folder.name, dict[str, str](), list[File]()

    def take(name: str, *, end: bool) -> bytes | None:
        path = f"{folder}/{name}"
        if not _INSIDE.fullmatch(f"x/{path}"):
            left_out.append(printable(f"{path}: dray writes no file with this name"))
            return None
        try:
            text = clean(bundle.text_of(paths.folder / name, paths.run, most=_MOST, end=end))
        except OSError as error:
            left_out.append(printable(f"{path}: {error.strerror}"))
            return None
        content[path] = text = secrets.redacted_code(text) if name == run_folder.SOURCE_DIFF else text
        return text.encode("utf-8", "replace")

    for file in made.files:
        if (data := take(file.path, end=False)) is not None:
            listed.append(File(path=file.path, sha256=hashlib.sha256(data).hexdigest(), size=len(data)))
    for log in sorted(paths.logs.glob("*.log"))[:_LOGS]:
        take(log.relative_to(paths.folder).as_posix(), end=True)
    made = made.model_copy(update={"files": tuple(listed)})
    content[f"{folder}/{run_folder.CAPSULE}"] = clean(made.model_dump_json(indent=1) + "\n")
    return content


@contextmanager
def opened(named: str, runs: Path | None = None) -> Iterator[Path]:
    """The folder of a run or attempt, found as by `find`, or unpacked from a capsule's file."""
    found = find(named, runs)
    if not found.is_file():
        yield found
        return
    with tempfile.TemporaryDirectory(prefix="dray-capsule-") as folder:
        try:
            with _Bounded(found) as stream, tarfile.open(fileobj=stream) as archive:
                _unpack(archive, stream, Path(folder))
        except (OSError, EOFError, tarfile.TarError, zlib.error, ValueError) as error:
            raise _no_capsule(found, str(error)) from error
        run = Path(folder) / "run"
        if not attempts(run):
            raise _no_capsule(found, "no attempt in it")
        with suppress(ConfigError):
            run = run.rename(run.with_name(run_name(capsule.read(last_attempt(run)).run or "/")))
        yield run


def _no_capsule(file: Path, found: str) -> ConfigError:
    wanted, fix = "a file from dray capsule pack, or a run", "dray capsule pack RUN makes one"
    return ConfigError("this file is no capsule", where=file, wanted=wanted, found=printable(found)[:300], fix=fix)


class _Bounded(gzip.GzipFile):
    """An archive that refuses large headers, because tarfile reads a header into memory."""

    left = _HEADER
    """Bytes that may still be read."""

    def read(self, size: int | None = -1) -> bytes:
        """Read `size` bytes; ValueError if that is more than allowed."""
        if size is None or not 0 <= size <= self.left:
            raise ValueError(f"a header of more than {_HEADER >> 10} KiB")
        self.left -= size
        return super().read(size)


def _unpack(archive: tarfile.TarFile, stream: _Bounded, folder: Path) -> None:
    """Unpack plain files with plain names, and nothing else."""
    left = _ALL
    for number, member in enumerate(archive):
        left -= member.size
        if number > _FILES or left < 0 or member.size > _MOST:
            raise ValueError(f"more than {_ALL >> 20} MiB or {_FILES:,} files, or more than {_MOST >> 20} MiB in one")
        stream.left = _MOST
        inside = _INSIDE.fullmatch(member.name)
        file = archive.extractfile(member) if inside and member.isreg() else None
        if inside and file and ".." not in member.name:
            path = folder / "run" / inside[1]
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(file.read())
        stream.left = _HEADER
