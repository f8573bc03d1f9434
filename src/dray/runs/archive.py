"""One archive of a run without secrets: for a bug report (`dray why --bundle`) or to hand on (`dray replay --pack`)."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import pwd
import re
import shlex
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel

from dray import __version__
from dray.contract import files, run_folder, secrets
from dray.contract.control_characters import printable
from dray.contract.findings import ConfigError, DrayError
from dray.runs import capsule
from dray.runs.capsule import File
from dray.runs.store import Run, RunPaths, plan_of

_LARGEST, _TAIL = 64 << 20, 1 << 16  # bytes of a file that is taken whole, and of the end of a log
_LOGS = 24
_TEXTS = (".json", ".jsonl", ".txt", ".sh", ".options", ".diff")
_README = """\
The run {run}, by dray {dray}: {what}
Unpack it with tar; then the folder is a RUN for dray replay RUN --verify and dray diff RUN OTHER.

Replaced:
  by [NAME]: values of pass_env and of secret variables such as HF_TOKEN, as they were set when the archive was made
  by [secret]: the attempt's own secret, and text that looks like a secret
{replaced}Not replaced: names of nodes and projects, other paths, the command, other output of programs.
Left out: checkpoints, models, datasets, compiled code, secrets, files that git does not track; of logs all but the end.
Read the files before you send them.

{names}
"""
_HOMES = """\
  by ~: home folders
  by [user]: user names in paths
"""

Clean = Callable[[str], str]


class Archive(BaseModel):
    """The archive that was written."""

    file: str
    size: int
    names: list[str]
    left_out: list[str]


def make(run: Path, out: Path, *, why: str = "") -> Archive:
    """Write a tar.gz of all attempts, which only this user can read. An existing file is never overwritten.

    With the text of `dray why` it is for a bug report: without home folders, with only the end of metrics.
    """
    require_new(out)
    content, left_out = dict[str, str](), list[str]()
    clean = cleaner(run, homes=bool(why))
    attempts = [attempt.paths for attempt in Run(run).attempts]
    chosen = [path for paths in attempts for path in _chosen(paths)]
    for path in [*chosen, *sorted(run.glob("job-*.log"))]:
        end = path.suffix == ".log" or (bool(why) and path.suffix == ".jsonl")
        name = path.relative_to(run).as_posix()
        try:
            content[name] = clean(_text(path, run, end=end))
        except OSError as error:
            left_out.append(printable(f"{name}: {error.strerror}"))
    for paths in attempts:
        try:
            content[f"{paths.folder.name}/{paths.capsule.name}"] = clean(_capsule(paths, content))
        except DrayError as error:
            left_out.append(printable(f"{paths.folder.name}: {error.problem}"))
    if why and run.stat().st_uid == os.geteuid():  # else links in the run may have led it to your files
        content["why.txt"] = clean(why)
    what = "why it failed, for a bug report." if why else "what is needed to repeat it."
    names = sorted([*content, *(f"({line}, left out)" for line in left_out)])
    content["README"] = _README.format(
        run=run.name, dray=__version__, what=what, replaced=_HOMES if why else "", names="\n".join(names)
    )
    _write(out, f"dray-{'why' if why else 'capsule'}-{run.name}", content)
    return Archive(file=str(out), size=out.stat().st_size, names=sorted(content), left_out=left_out)


def _chosen(paths: RunPaths) -> list[Path]:
    """What dray wrote into the attempt's folder as text, without secrets; of logs first those of what failed."""
    found = [path for path in sorted(paths.folder.rglob("*")) if path.name not in capsule.NOT_RECORDED]
    found = [path for path in found if not path.relative_to(paths.folder).parts[0].startswith("jupyter-")]  # a token
    failed = [path.stem for path in paths.failures.glob("*.json")]
    logs = sorted(paths.logs.glob("*.log"), key=lambda log: log.stem not in failed)
    return [*(path for path in found if path.suffix in _TEXTS), *logs[:_LOGS]]


def _text(path: Path, run: Path, *, end: bool) -> str:
    """The text of a file; OSError if it is not in the run folder: a link of another user may lead to your files."""
    data, whole = files.end(path, _TAIL) if end else (files.read(path, limit=_LARGEST), True)
    if path.resolve() != run.resolve() / path.relative_to(run):
        raise OSError(0, "a link in its path")
    if path.stat().st_uid == os.geteuid() != run.stat().st_uid:
        raise OSError(0, "your file in another user's folder")
    text = data.replace(b"\0", b"").decode("utf-8", "replace")  # a crash may leave NULs
    if path.name == run_folder.SOURCE_DIFF:
        return secrets.redacted_code(text)
    # A cut line may hold half of a secret, which is not recognised.
    return text if whole else "(the lines before this one are left out)\n" + text.partition("\n")[2]


def _capsule(paths: RunPaths, content: dict[str, str]) -> str:
    """The capsule with the checksums of the files in the archive."""
    made = capsule.read(paths)
    recorded = []
    for file in made.files:
        if (text := content.get(f"{paths.folder.name}/{file.path}")) is not None:
            data = text.encode("utf-8", "replace")
            recorded.append(File(path=file.path, sha256=hashlib.sha256(data).hexdigest(), size=len(data)))
    return made.model_copy(update={"files": tuple(recorded)}).model_dump_json(indent=1) + "\n"


def cleaner(run: Path, *, homes: bool) -> Clean:
    """Replaces secrets in a text, by this user's environment and the run's own secrets; with `homes` home folders and
    user names too."""
    names = {name for name, value in os.environ.items() if secrets.is_variable(name, value)}
    own = []
    for attempt in Run(run).attempts:
        with suppress(DrayError):
            plan = plan_of(attempt.paths)
            names |= {*plan.recipe.pass_env, *plan.pass_env}
        with suppress(OSError):
            own.append(files.read(attempt.paths.secret).decode("utf-8", "replace").strip())
    values = secrets.passed(names, os.environ) | dict.fromkeys(filter(None, own), "secret")
    # JSON escapes quotes, backslashes and letters beyond ASCII.
    values |= {json.dumps(value)[1:-1]: name for value, name in values.items()}
    longest_first = dict(sorted(values.items(), key=lambda item: len(item[0]), reverse=True))
    replaced = _homes(run) if homes else []

    def clean(text: str) -> str:
        text = secrets.redacted(text, longest_first)
        for pattern, name in replaced:
            text = pattern.sub(name, text)
        return str(printable(text))

    return clean


def _homes(run: Path) -> list[tuple[re.Pattern[str], str]]:
    """The home folders and names of this user and of the run's owner, and what replaces them."""
    homes, users = {os.environ.get("HOME", "")}, set[str]()
    for attempt in Run(run).attempts:
        homes.add(attempt.facts.get("home", ""))
    for uid in (os.geteuid(), run.stat().st_uid):
        with suppress(KeyError):
            owner = pwd.getpwuid(uid)
            homes.add(owner.pw_dir)
            users.add(owner.pw_name)
    found = [
        (re.compile(rf"{re.escape(home.rstrip('/'))}(?![\w.-])"), "~")
        for home in sorted(homes, key=len, reverse=True)
        if len(home) > 1
    ]
    for name in users - {"root"}:
        user = re.escape(name)
        found.append((re.compile(rf"(?<=/){user}(?=[/\s\"':;,.)\]]|$)|\b{user}(?=@)"), "[user]"))
    return found


def _write(out: Path, folder: str, content: dict[str, str]) -> None:
    raw = io.BytesIO()
    with gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for name, text in sorted(content.items()):
            data = text.encode("utf-8", "replace")
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mode = len(data), 0o600
            tar.addfile(entry, io.BytesIO(data))
    files.write_atomic(out, raw.getvalue(), mode=0o600)


def require_new(out: Path) -> None:
    """Refuse an existing FILE, and a folder that does not exist."""
    if not out.parent.is_dir():
        fix = f"mkdir -p {shlex.quote(str(out.parent))}"
        raise ConfigError("the archive's folder does not exist", where=out, fix=fix)
    if os.path.lexists(out):
        raise ConfigError("the archive already exists", where=out, fix="name another FILE, or remove this one")


def text(made: Archive) -> str:
    """List the archive's files, and say what to do before sending it."""
    lines = [f"{made.file}: {made.size:,} bytes, {len(made.names)} files:", *(f"  {name}" for name in made.names)]
    lines += [f"left out: {line}" for line in made.left_out]
    return "\n".join([*lines, "Read it before you send it: its README lists what was replaced and what was not."])
