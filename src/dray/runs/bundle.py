"""One archive for a bug report: why a run failed, without secrets, large files and the user's data."""

from __future__ import annotations

import gzip
import io
import json
import os
import platform
import pwd
import re
import stat
import sys
import tarfile
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel

from dray import __version__
from dray.contract import files, secrets
from dray.contract.control_characters import printable
from dray.contract.findings import ConfigError, DrayError, UnfitError
from dray.runs import why
from dray.runs.store import RunPaths, attempts
from dray.runs.write import read

_WHOLE, _TAIL = 4 << 20, 1 << 16  # bytes of a file that is taken whole, and of the end of a log
_LOGS, _RECORDS, _EARLIER = 24, 64, 4  # at most so many logs, records and earlier attempts
_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "triton", "numpy", "pydantic", "typer")
_SHORTEST = 8  # letters of a secret, as in contract/secrets.py
_ABOUT = """\
The files that show why the run {run} failed, for a bug report or the administrators. Made by dray {dray}.

Replaced:
  by [NAME]: values of pass_env and of secret variables such as HF_TOKEN, as they were set when the archive was made
  by [secret]: the attempt's own secret, and text that looks like a secret
  by ~: home folders
  by [user]: user names in paths
Not replaced: names of nodes and projects, other paths, the command, other output of programs.
Left out: checkpoints, models, datasets, compiled code, secrets. Of logs and metrics only the last {tail} KiB are here.
Read the files before you send them.

{names}
"""


class Bundle(BaseModel):
    """The archive that was written."""

    file: str
    size: int
    names: list[str]
    left_out: list[str]


def make(paths: RunPaths, report: why.Report, out: Path) -> Bundle:
    """Write the archive, readable by this user alone; an existing file is never overwritten."""
    left_out: list[str] = []
    clean = cleaner(paths)
    content = {"versions.json": clean(_versions())}
    if paths.run.stat().st_uid == os.geteuid():
        content["why.txt"] = clean(why.text(report))
    else:  # the report follows links, which in another user's folder may lead to this user's files
        left_out.append("why.txt: the run belongs to another user")
    for path in _chosen(paths):
        name = path.relative_to(paths.run).as_posix()
        if name in content:
            continue
        try:
            text = text_of(path, paths.run)
        except FileNotFoundError:
            continue
        except OSError as error:
            left_out.append(printable(f"{name}: {error.strerror}"))
            continue
        content[plain(name)] = clean(text)
    names = [*content, *(f"({line}, left out)" for line in left_out)]
    about = _ABOUT.format(run=paths.run.name, dray=__version__, tail=_TAIL >> 10, names="\n".join(sorted(names)))
    content["README"] = clean(about)
    write_out(out, packed(f"dray-why-{plain(paths.run.name)}", content))
    return Bundle(file=str(out), size=out.stat().st_size, names=sorted(content), left_out=left_out)


def text(made: Bundle) -> str:
    """List the archive's files, and say what to do before sending it."""
    out = [f"{made.file}: {made.size:,} bytes, {len(made.names)} files:", *(f"  {name}" for name in made.names)]
    out += [f"left out: {line}" for line in made.left_out]
    return "\n".join([*out, "Read it before you send it: its README lists what was replaced and what was not."])


def _chosen(paths: RunPaths) -> Iterator[Path]:
    """The files, most useful first, with a limit for each kind."""
    yield from (paths.plan, paths.result, paths.facts, paths.node_script, paths.srun_options, paths.preflight_report)
    failures = _listed(paths.failures, "*.json", _RECORDS)
    yield from failures
    yield from _listed(paths.failures, "restart-*/*.json", _RECORDS)
    failed = [_log_of(paths, path.stem) for path in failures]
    first, nodes = paths.rank_log(0), _listed(paths.logs, "node-*.log", _LOGS)
    logs = [*failed, first, *nodes, *_listed(paths.logs, "*.log", _LOGS)]
    yield from list(dict.fromkeys(logs))[:_LOGS]
    yield paths.metrics
    yield from _listed(paths.run, "job-*.log", 2)
    earlier = [RunPaths(paths.run, number) for number in attempts(paths.run) if number < paths.attempt]
    for before in earlier[-_EARLIER:]:
        yield before.result
        yield from _listed(before.failures, "*.json", _RECORDS)


def _log_of(paths: RunPaths, failure: str) -> Path:
    return paths.logs / f"{failure}.log"


def _listed(folder: Path, pattern: str, most: int) -> list[Path]:
    with suppress(OSError):
        return sorted(folder.glob(pattern))[:most]
    return []


def text_of(path: Path, run: Path, *, most: int = _WHOLE, end: bool = True) -> str:
    """The text of a file of the run folder; OSError if a link leads outside, as in another user's folder.

    With `end`, only the end of a log or of metrics.
    """
    with files.open_regular(path, link=False) as file:
        opened = Path(f"/proc/self/fd/{file.fileno()}").readlink()
        if opened != run.resolve() / path.relative_to(run):
            raise OSError(0, "a link in its path")
        found = os.fstat(file.fileno())
        if found.st_uid == os.geteuid() != run.stat().st_uid:
            raise OSError(0, "your file in another user's folder")
        if end and path.suffix in (".log", ".jsonl"):
            return _tail(file, found)
        content = file.read(most + 1)
    if len(content) > most:
        raise OSError(0, f"more than {most >> 20} MiB")
    return content.decode("utf-8", "replace")


def _tail(file: io.BufferedReader, found: os.stat_result) -> str:
    """The last whole lines: a cut line may hold half of a secret, which is not recognised."""
    begin = max(0, found.st_size - _TAIL)
    file.seek(max(0, begin - 1))
    content = file.read(_TAIL + (begin > 0))
    if begin:
        rest = content.partition(b"\n")[2]
        content = f"({found.st_size - len(rest):,} bytes before this line are left out)\n".encode() + rest
    return content.decode("utf-8", "replace")


class Cleaner:
    """Replaces secrets, home folders and user names in a text."""

    def __init__(self, values: dict[str, str], homes: dict[str, str]) -> None:
        self._values = dict(sorted(values.items(), key=lambda one: len(one[0]), reverse=True))
        names = sorted({name for name in homes.values() if len(name) > 1 and name != "root"}, key=len, reverse=True)
        self._homes = sorted((home for home in homes if len(home) > 1), key=len, reverse=True)
        user = "|".join(map(re.escape, names))
        self._user = re.compile(rf"(?<=/)(?:{user})(?=[/\s\"':;,.)\]]|$)|\b(?:{user})(?=@)") if names else None

    def __call__(self, text: str) -> str:
        text = secrets.redacted(text, self._values)
        for home in self._homes:
            text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
        text = self._user.sub("[user]", text) if self._user else text
        return str(printable(text))


def cleaner(paths: RunPaths, *, homes: bool = True) -> Cleaner:
    """The cleaner for a run, by this user's environment and the run's owner; without `homes`, paths are kept."""
    names = {name for name, value in os.environ.items() if secrets.is_variable(name, value)}
    known_homes = {os.environ.get("HOME", "").rstrip("/"): ""}
    with suppress(DrayError, OSError):
        plan = read(paths)
        names |= {*plan.recipe.pass_env, *plan.pass_env}
    with suppress(OSError, ValueError):
        found = files.read(paths.facts).decode("utf-8", "replace")
        known_homes |= {line[5:].rstrip("/"): "" for line in found.splitlines() if line.startswith("home=/")}
    for uid in (os.geteuid(), paths.run.stat().st_uid):
        with suppress(KeyError):
            known = pwd.getpwuid(uid)
            known_homes[known.pw_dir.rstrip("/")] = known.pw_name
    values = secrets.passed(names, os.environ)
    with suppress(OSError):
        own = files.read(paths.secret).decode("utf-8", "replace").strip()
        values |= {own: "secret"} if len(own) >= _SHORTEST else {}
    # JSON escapes quotes, backslashes and letters beyond ASCII.
    forms = {form: name for value, name in values.items() for form in (value, json.dumps(value)[1:-1])}
    return Cleaner(forms, known_homes if homes else {})


def _versions() -> str:
    found = {"dray": __version__, "python": sys.version, "platform": platform.platform()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return json.dumps(found, indent=1) + "\n"


def plain(name: str) -> str:
    """The name with only characters that every file system allows."""
    return re.sub(r"[^\w./-]|\.\.", "_", name, flags=re.ASCII)


def packed(folder: str, content: dict[str, str]) -> bytes:
    """A tar.gz, with the same bytes for the same content."""
    raw = io.BytesIO()
    with (
        gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.PAX_FORMAT) as archive,
    ):
        for name in sorted(content):
            data = content[name].encode("utf-8", "replace")
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mode = len(data), 0o600
            archive.addfile(entry, io.BytesIO(data))
    return raw.getvalue()


def require_new(out: Path) -> None:
    """Refuse an existing FILE."""
    if os.path.lexists(out):
        raise ConfigError("the archive already exists", where=out, fix="name another FILE, or remove this one")


def write_out(out: Path, data: bytes) -> None:
    require_new(out)
    try:
        file = os.open(out, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, stat.S_IRUSR | stat.S_IWUSR)
    except OSError as error:
        wanted = "a FILE in a folder where you may write"
        raise ConfigError("the archive cannot be written", where=out, wanted=wanted, found=error.strerror) from error
    try:
        with open(file, "wb") as stream:  # noqa: PTH123  a number
            stream.write(data)
    except OSError as error:
        out.unlink()
        raise UnfitError("the archive cannot be written", where=out, found=error.strerror) from error
