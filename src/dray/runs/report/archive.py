"""The archive of a run for a bug report (`dray why --bundle`), without secrets."""

from __future__ import annotations

import io
import json
import os
import pwd
import re
import tarfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from pydantic import BaseModel

from dray.contract import files, run_folder, secrets
from dray.contract.control_characters import printable
from dray.contract.findings import ConfigError
from dray.runs.store import Run, RunPaths

_TAIL = 1 << 16  # bytes of the end of a log
_LOGS = 24
_TEXTS = (".json", ".jsonl", ".txt", ".sh", ".options", ".diff")
_README = """\
A run of dray, for a bug report.
Unpack it with tar; then the folder is a RUN for dray diff RUN OTHER.

Replaced:
  by [NAME]: values of pass_env and of secret variables such as HF_TOKEN, as they were set when the archive was made
  by [secret]: the attempt's own secret, and text that looks like a secret
  by ~: home folders
  by [user]: user names in paths
Not replaced: names of nodes and projects, other paths, the command, other output of programs.
Left out: checkpoints, models, datasets, compiled code, secrets, files that git does not track; of logs all but the end.
Read the files before you send them.
"""

Clean = Callable[[str], str]


class Archive(BaseModel):
    """The archive that was written."""

    file: str
    size: int
    names: list[str]
    left_out: list[str]


def make(run: Path, out: Path, *, why: str) -> Archive:
    """Write a tar.gz of all attempts with the text of `dray why`, which only this user can read.

    An existing file is never overwritten.
    """
    require_new(out)
    content, left_out = dict[str, str](), list[str]()
    clean = cleaner(run)
    chosen = [path for attempt in Run(run).attempts for path in _chosen(attempt.paths)]
    for path in [*chosen, *sorted(run.glob("job-*.log"))]:
        name = path.relative_to(run).as_posix()
        try:
            content[name] = clean(_text(path, run))
        except OSError as error:
            left_out.append(printable(f"{name}: {error.strerror}"))
    if run.stat().st_uid == os.geteuid():  # else links in the run may have led it to your files
        content["why.txt"] = clean(why)
    content["README"] = _README
    try:
        files.write_new(out, _packed(f"dray-why-{run.name}", content), mode=0o600)
    except OSError as error:
        raise ConfigError(
            "the archive cannot be written", where=out, wanted="a folder in which you may write", found=error.strerror
        ) from error
    return Archive(file=str(out), size=out.stat().st_size, names=sorted(content), left_out=left_out)


def _chosen(paths: RunPaths) -> list[Path]:
    """What dray wrote into the attempt's folder as text, without secrets; of logs first those of what failed."""
    found = sorted(paths.folder.glob("*"))
    for folder in (paths.failures, paths.nodes, paths.preflight, paths.folder / run_folder.HANG):
        found += sorted(folder.rglob("*"))
    texts = [path for path in found if path.suffix in _TEXTS and path.name != run_folder.RENDEZVOUS]
    failed = [path.stem for path in paths.failures.glob("*.json")]
    logs = sorted(paths.logs.glob("*.log"), key=lambda log: log.stem not in failed)
    return [*texts, *logs[:_LOGS]]


def _text(path: Path, run: Path) -> str:
    """The text of a file, of logs and metrics the end; OSError if it is not in the run folder: a link of another user
    may lead to your files."""
    data, whole = files.end(path, _TAIL) if path.suffix in (".log", ".jsonl") else (files.read(path), True)
    if path.resolve() != run.resolve() / path.relative_to(run):
        raise OSError(0, "a link in its path")
    if path.stat().st_uid == os.geteuid() != run.stat().st_uid:
        raise OSError(0, "your file in another user's folder")
    text = data.replace(b"\0", b"").decode("utf-8", "replace")  # a crash may leave NULs
    if path.name == run_folder.SOURCE_DIFF:
        return secrets.redacted_code(text)
    # A cut line may hold half of a secret, which is not recognised.
    return text if whole else "(the lines before this one are left out)\n" + text.partition("\n")[2]


def cleaner(run: Path) -> Clean:
    """Replaces secrets in a text, by this user's environment and the run's own secrets, home folders and user names."""
    names, own = set[str](), list[str]()
    for attempt in Run(run).attempts:
        with suppress(TypeError):  # a damaged plan
            names |= {*attempt.plan.get("pass_env", ())}
        with suppress(OSError):
            own.append(files.read(attempt.paths.secret).decode("utf-8", "replace").strip())
    values = secrets.of_environment(names) | dict.fromkeys(filter(None, own), "secret")
    # JSON escapes quotes, backslashes and letters beyond ASCII.
    values |= {json.dumps(value)[1:-1]: name for value, name in values.items()}
    longest_first = dict(sorted(values.items(), key=lambda item: len(item[0]), reverse=True))
    replaced = _homes(run)

    def clean(text: str) -> str:
        text = secrets.redacted(text, longest_first)
        for pattern, name in replaced:
            text = pattern.sub(name, text)
        return str(printable(text))

    return clean


def _homes(run: Path) -> list[tuple[re.Pattern[str], str]]:
    """The home folders and names of this user and of the run's owner, and what replaces them."""
    homes, users = {os.environ.get("HOME", "")}, set[str]()
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


def _packed(folder: str, content: dict[str, str]) -> bytes:
    raw = io.BytesIO()
    with tarfile.open(fileobj=raw, mode="w:gz") as tar:
        for name, text in sorted(content.items()):
            data = text.encode("utf-8", "replace")
            entry = tarfile.TarInfo(f"{folder}/{name}")
            entry.size, entry.mode = len(data), 0o600
            tar.addfile(entry, io.BytesIO(data))
    return raw.getvalue()


def require_new(out: Path) -> None:
    """Refuse an existing FILE."""
    if os.path.lexists(out):
        raise ConfigError("the archive already exists", where=out, fix="name another FILE, or remove this one")


def text(made: Archive) -> str:
    """What was packed and what was not, and what to do before sending it."""
    lines = [f"left out: {line}" for line in made.left_out]
    lines.append(f"{made.file}: {made.size:,} bytes, {len(made.names)} files")
    return "\n".join([*lines, "Before you send it, read it; its README lists what was replaced."])
