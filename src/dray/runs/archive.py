"""One archive of a run without secrets: for a bug report (`dray why --bundle`) or to hand on (`dray replay --pack`)."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import os
import platform
import pwd
import re
import tarfile
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from pydantic import BaseModel

from dray import __version__
from dray.contract import files, run_folder, secrets
from dray.contract.control_characters import printable
from dray.contract.findings import ConfigError, DrayError
from dray.runs import capsule
from dray.runs.capsule import File
from dray.runs.paths import RunPaths, attempts, last_attempt
from dray.runs.write import read

_WHOLE, _TAIL = 64 << 20, 1 << 16  # bytes of a file that is taken whole, and of the end of a log
_LOGS = 24
_PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "datasets", "triton", "numpy", "pydantic", "typer")
_SHORTEST = 8  # letters of a secret, as in contract/secrets.py
_REPLACED = """
Replaced:
  by [NAME]: values of pass_env and of secret variables such as HF_TOKEN, as they were set when the archive was made
  by [secret]: the attempt's own secret, and text that looks like a secret
"""
_BUG = f"""\
The files that show why the run failed, for a bug report or the administrators.
{_REPLACED}\
  by ~: home folders
  by [user]: user names in paths
Not replaced: names of nodes and projects, other paths, the command, other output of programs.
Left out: checkpoints, models, datasets, compiled code, secrets. Of logs and metrics only the ends are here.
"""
_CAPSULE = f"""\
The capsule of the run: what is needed to repeat it. Unpack it with tar; then the folder is a RUN for
`dray replay RUN --verify`, `dray replay RUN --recipe NEW.toml` and `dray diff RUN OTHER`.
{_REPLACED}\
Not replaced: names of nodes, users and projects, paths, the command, the diff of code, other output of programs.
Left out: checkpoints, models, datasets, secrets, files that git does not track. Of logs only the ends are here.
"""


class Archive(BaseModel):
    """The archive that was written."""

    file: str
    size: int
    names: list[str]
    left_out: list[str]


class Cleaner:
    """Replaces secrets, home folders and user names in a text."""

    def __init__(self, values: dict[str, str], homes: dict[str, str]) -> None:
        self._values = dict(sorted(values.items(), key=lambda item: len(item[0]), reverse=True))
        names = [re.escape(name) for name in homes.values() if len(name) > 1 and name != "root"]
        user = "|".join(names)
        self._user = re.compile(rf"(?<=/)(?:{user})(?=[/\s\"':;,.)\]]|$)|\b(?:{user})(?=@)") if names else None
        self._homes = sorted((home for home in homes if len(home) > 1), key=len, reverse=True)

    def __call__(self, text: str) -> str:
        text = secrets.redacted(text, self._values)
        for home in self._homes:
            text = re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text)
        if self._user:
            text = self._user.sub("[user]", text)
        return str(printable(text))


def cleaner(paths: RunPaths, *, homes: bool) -> Cleaner:
    """The cleaner for a run, by this user's environment and the run's owner; without `homes`, paths are kept."""
    names = {name for name, value in os.environ.items() if secrets.is_variable(name, value)}
    with suppress(DrayError, OSError):
        plan = read(paths)
        names |= {*plan.recipe.pass_env, *plan.pass_env}
    values = secrets.passed(names, os.environ)
    with suppress(OSError):
        own = files.read(paths.secret).decode("utf-8", "replace").strip()
        values |= {own: "secret"} if len(own) >= _SHORTEST else {}
    # JSON escapes quotes, backslashes and letters beyond ASCII.
    values |= {json.dumps(value)[1:-1]: name for value, name in values.items()}
    return Cleaner(values, _homes(paths) if homes else {})


def _homes(paths: RunPaths) -> dict[str, str]:
    """The home folders of this user and the run's owner, here and on the nodes, each with the user's name."""
    homes = {os.environ.get("HOME", "").rstrip("/"): ""}
    with suppress(OSError):
        facts = files.read(paths.facts).decode("utf-8", "replace")
        homes |= dict.fromkeys(re.findall(r"^home=(/.*?)/?$", facts, re.MULTILINE), "")
    for uid in (os.geteuid(), paths.run.stat().st_uid):
        with suppress(KeyError):
            user = pwd.getpwuid(uid)
            homes[user.pw_dir.rstrip("/")] = user.pw_name
    return homes


class _Writer:
    """Collects the texts of an archive."""

    def __init__(self, run: Path) -> None:
        self.run, self.content, self.left_out = run, dict[str, str](), list[str]()

    def take(self, path: Path, clean: Cleaner, *, end: bool) -> str:
        """Add a file if there is one; return what the archive has of it. With `end`, only the end of a long file."""
        name = os.path.relpath(path, self.run)
        try:
            text = clean(_text(path, self.run, name, end=end))
        except FileNotFoundError:
            return ""
        except OSError as error:
            self.left_out.append(printable(f"{name}: {error.strerror}"))
            return ""
        if path.name == run_folder.SOURCE_DIFF:
            text = secrets.redacted_code(text)
        self.content[_plain(name)] = text
        return text

    def write(self, out: Path, folder: str, about: str) -> Archive:
        """Write a tar.gz that only this user can read."""
        require_new(out)
        names = sorted([*self.content, *(f"({line}, left out)" for line in self.left_out)])
        listed = "\n".join(names)
        self.content["README"] = f"{about}Read the files before you send them. Made by dray {__version__}.\n\n{listed}\n"
        raw = io.BytesIO()
        with gzip.GzipFile(fileobj=raw, mode="wb", mtime=0) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
            for name, text in sorted(self.content.items()):
                data = text.encode("utf-8", "replace")
                entry = tarfile.TarInfo(f"{folder}-{_plain(self.run.name)}/{name}")
                entry.size, entry.mode = len(data), 0o600
                tar.addfile(entry, io.BytesIO(data))
        try:
            files.write_atomic(out, raw.getvalue(), mode=0o600)
        except OSError as error:
            wanted = "a FILE in a folder where you may write"
            raise ConfigError("the archive cannot be written", where=out, wanted=wanted, found=error.strerror) from error
        return Archive(
            file=str(out), size=out.stat().st_size, names=sorted(self.content), left_out=self.left_out
        )


def _text(path: Path, run: Path, name: str, *, end: bool) -> str:
    """The text of a file; OSError if it is not in the run folder: a link of another user may lead to your files."""
    data, whole = files.end(path, _TAIL) if end else (files.read(path, limit=_WHOLE), True)
    if path.resolve() != run.resolve() / name:
        raise OSError(0, "a link in its path")
    if path.stat().st_uid == os.geteuid() != run.stat().st_uid:
        raise OSError(0, "your file in another user's folder")
    text = data.decode("utf-8", "replace")
    # A cut line may hold half of a secret, which is not recognised.
    return text if whole else "(the lines before this one are left out)\n" + text.partition("\n")[2]


def _plain(name: str) -> str:
    """The name with only characters that every file system allows."""
    return re.sub(r"[^\w./-]|\.\.", "_", name, flags=re.ASCII)


def for_bug_report(paths: RunPaths, why: str, out: Path) -> Archive:
    """Write the files that show why an attempt failed; `why` is the text of dray why."""
    clean, writer = cleaner(paths, homes=True), _Writer(paths.run)
    if paths.run.stat().st_uid == os.geteuid():
        writer.content["why.txt"] = clean(why)
    else:
        writer.left_out.append("why.txt: the run belongs to another user, and links in it may lead to your files")
    found = {"dray": __version__, "platform": platform.platform(), "python": platform.python_version()}
    for name in _PACKAGES:
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    writer.content["versions.json"] = json.dumps(found, indent=1) + "\n"
    failures = sorted(paths.failures.rglob("*.json"))
    whole = [paths.plan, paths.result, paths.facts, paths.node_script, paths.srun_options, paths.preflight_report]
    for attempt in attempts(paths.run):
        before = RunPaths(paths.run, attempt)
        if attempt < paths.attempt:
            whole += [before.result, *sorted(before.failures.glob("*.json"))]
    for path in [*whole, *failures]:
        writer.take(path, clean, end=False)
    failed = [paths.logs / f"{path.stem}.log" for path in failures]
    logs = dict.fromkeys([*failed, paths.rank_log(0), *sorted(paths.logs.glob("*.log"))])
    for path in [paths.metrics, *sorted(paths.run.glob("job-*.log")), *[*logs][:_LOGS]]:
        writer.take(path, clean, end=True)
    return writer.write(out, "dray-why", _BUG)


def of_run(folder: Path, out: Path) -> Archive:
    """Write the capsules of a run with their files, to hand on."""
    run = last_attempt(folder).run
    writer = _Writer(run)
    for attempt in attempts(run):
        paths = RunPaths(run, attempt)
        made, clean = capsule.read(paths), cleaner(paths, homes=False)
        listed = []
        for file in made.files:
            data = writer.take(paths.folder / file.path, clean, end=False).encode("utf-8", "replace")
            listed.append(File(path=file.path, sha256=hashlib.sha256(data).hexdigest(), size=len(data)))
        for log in sorted(paths.logs.glob("*.log"))[:_LOGS]:
            writer.take(log, clean, end=True)
        # The checksums are those of the files in the archive.
        made = made.model_copy(update={"files": tuple(listed)})
        name = paths.capsule.relative_to(run).as_posix()
        writer.content[name] = clean(made.model_dump_json(indent=1) + "\n")
    return writer.write(out, "dray-capsule", _CAPSULE)


def text(made: Archive) -> str:
    """List the archive's files, and say what to do before sending it."""
    lines = [f"{made.file}: {made.size:,} bytes, {len(made.names)} files:", *(f"  {name}" for name in made.names)]
    lines += [f"left out: {line}" for line in made.left_out]
    return "\n".join([*lines, "Read it before you send it: its README lists what was replaced and what was not."])


def require_new(out: Path) -> None:
    """Refuse an existing FILE."""
    if os.path.lexists(out):
        raise ConfigError("the archive already exists", where=out, fix="name another FILE, or remove this one")
