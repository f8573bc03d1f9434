"""An image that somebody else made: what it has, found by running it; dray beside it; a record of both."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import dray
from dray import __version__, interrupts, process
from dray.config import mirrors
from dray.config.image import ACCELERATORS, ADOPTED
from dray.containers import singularity
from dray.contract.findings import ConfigError, UnfitError
from dray.images import beside, store
from dray.images.sif import format as sif_format
from dray.images.sif import record, verify
from dray.images.sif.format import MACHINES
from dray.images.sources import inputs

# dray runs on it; its trainer is written for these, and others are said.
_PYTHON, _LIBC, _TRAINER = (3, 11), (2, 28), {"torch": (2, 8), "transformers": (5,)}
_START_S = 600.0  # a first start may unpack gigabytes, and import torch from a network disk
_PROBE = Path(dray.__file__).parent / "checks" / "adopted.py"


@dataclass(frozen=True, kw_only=True)
class Adopted:
    """What was made."""

    file: Path
    variant: str
    digest: str
    versions: dict[str, str]
    brought: tuple[str, ...]
    """Packages that the image lacks, with their versions."""
    lacks: tuple[str, ...]
    """What dray's own trainer wants and the image has not; programs of the user's own may not need it."""


def adopt(
    checkout: Path, source: str, *, name: str = "", force: bool = False, say: Callable[[str], None] = print
) -> Adopted:
    """Make it usable as build/dray-NAME.sif, with the folder build/dray-NAME beside it; or leave no image."""
    name = name or _named(source)
    _require_name(name)
    file, build = store.sif(checkout, name), checkout / "build"
    folder, described = file.with_suffix(""), record.path_for(file)
    present = [path for path in (file, folder, described) if path.exists()]
    if present and not force:
        raise ConfigError(
            "there is an image of this name",
            where=present[0],
            fix=f"give another one: --name {name}-2; or replace it: --force",
        )
    build.mkdir(exist_ok=True)
    # A refusal keeps what took hours to fetch.
    address = mirrors.image(source) if "://" in source else source
    kept = build / "fetched" / f"{hashlib.sha256(address.encode()).hexdigest()[:16]}.sif"
    if force:
        kept.unlink(missing_ok=True)
    with interrupts.stoppable(), TemporaryDirectory(dir=build, prefix=".adopt-") as scratch:
        new = _fetched(source, address, Path(scratch) / file.name, kept, say)
        sif = sif_format.read(new)
        if sif.architecture != MACHINES.get(platform.machine()):
            raise ConfigError(
                "the image is for another architecture",
                where=source,
                wanted=MACHINES.get(platform.machine(), platform.machine()),
                found=sif.architecture,
                fix="take the image of this machine's architecture, or adopt it on a machine of the image's own",
            )
        say("dray: start it, to see what it has")
        try:
            found = probe(new, source)
        except UnfitError:  # it may be damaged
            kept.unlink(missing_ok=True)
            raise
        variant = _variant(found["torch"])
        put = Path(scratch) / "beside"
        put.mkdir()
        say("dray: put dray beside it")
        brought = beside.fill(put, found, checkout=checkout, source=source)
        about = {"name": name, "variant": variant, "pythonpath": found["pythonpath"]}
        (put / "image.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        _require_start(new, put, source)
        versions = _versions(found)
        digest = verify.digest(new)
        made = record.Record(
            variant=variant,
            dray=__version__,
            base=source,
            inputs=beside.digest(put),
            epoch=sif.created,
            tools=versions,
            sif=record.File(sha256=digest.removeprefix("sha256:"), size=new.stat().st_size),
            signed=next(iter(sif.signers()), None),
        )
        old = Path(scratch) / "old"
        _move(present, old)
        try:
            put.rename(folder)
            record.write(file, made)
            new.rename(file)  # last: without it there is no image of this name
            kept.unlink(missing_ok=True)
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            described.unlink(missing_ok=True)
            _move([old / path.name for path in present], build)
            raise
    lacks = tuple(_lacking(found["packages"]))
    return Adopted(file=file, variant=variant, digest=digest, versions=versions, brought=brought, lacks=lacks)


def probe(image: Path, source: str) -> dict[str, Any]:
    """What its own Python says of it; refused where dray cannot run on that."""
    # --contain: nobody knows yet what it does; it gets a /tmp of its own.
    code = _PROBE.read_text(encoding="utf-8")
    done = singularity.execute(image, ["python3", "-c", code], options=["--contain"], seconds=_START_S)
    last = _last(done)
    if '"python3": executable file not found' in done.err or done.code == 127:
        raise ConfigError(
            "the image has no Python",
            where=source,
            wanted="python3 on the image's PATH",
            found=last,
            fix="an image with Python 3.11 or newer and torch; or one that sets PATH to its Python",
        )
    try:
        found: dict[str, Any] = json.loads(done.out.splitlines()[-1])
        found["python"], found["libc"], found["pythonpath"], found["packages"].keys(), found["torch"].keys()
    except (LookupError, ValueError, TypeError, AttributeError):
        raise UnfitError(
            "the image does not start", where=source, found=last or f"exit code {done.code}",
            fix="copy or pull it again: a damaged image looks like this; apptainer exec IMAGE true shows more",
        ) from None  # fmt: skip
    _require(beside.numbers(found["python"]) >= _PYTHON, "the image's Python is too old for dray", source,
             wanted="Python 3.11 or newer", found=found["python"])  # fmt: skip
    kind, _, version = str(found["libc"]).partition(" ")
    _require(kind == "glibc", "the image has no glibc, for which torch's wheels are made", source,
             wanted="glibc 2.28 or newer", found=found["libc"] or "another C library, such as musl")  # fmt: skip
    _require(beside.numbers(version) >= _LIBC, "the image's glibc is too old", source,
             wanted="glibc 2.28 or newer, as torch's wheels want it", found=found["libc"])  # fmt: skip
    _require("error" not in found["torch"], "the image has no torch that can be imported", source,
             wanted="torch, which starts the ranks", found=found["torch"].get("error"))  # fmt: skip
    return found


def _require(holds: bool, problem: str, where: str, *, wanted: str, found: object) -> None:
    if not holds:
        raise ConfigError(
            problem, where=where, wanted=wanted, found=found, fix="take a newer image, or dray image build"
        )


def _fetched(source: str, address: str, out: Path, kept: Path, say: Callable[[str], None]) -> Path:
    if re.match(r"[a-z-]+:", source) and not Path(source).exists():
        if kept.exists():
            say(f"dray: take what was fetched before ({kept}; remove it to fetch again)")
        else:
            say(f"dray: fetch {source}")
            kept.parent.mkdir(exist_ok=True)
            instead = "or bring it as a file: dray image adopt FILE.sif"
            singularity.pull(address, kept, what="the image", instead=instead, say=say)
        inputs.link(kept, out)
        return out
    path = Path(source).expanduser()
    if not path.exists():
        raise ConfigError(
            "the image does not exist", where=path.absolute(), found=source, fix="correct the path",
            wanted="a SIF, docker://NAME, oras://NAME or oci-archive:FILE",
        )  # fmt: skip
    sif = sif_format.read(path)
    say(f"dray: {sif.path}")
    inputs.link(sif.path, out)
    return out


def _named(source: str) -> str:
    """pytorch of docker://nvcr.io/nvidia/pytorch:26.01-py3, and of /images/pytorch.sif."""
    last = source.rstrip("/").rpartition("/")[2].partition("@")[0].partition(":")[0]
    return re.sub("[^a-z0-9_-]+", "-", last.removesuffix(".sif").lower()).strip("-_")[:63]


def _require_name(name: str) -> None:
    if not re.fullmatch(ADOPTED, name) or name in ACCELERATORS:
        raise ConfigError(
            "not a name for an adopted image",
            wanted=f"small letters, digits, _ and -, and none of {', '.join(ACCELERATORS)}",
            found=name or "no name",
            fix="--name mine",
        )


def _variant(torch: Mapping[str, str]) -> str:
    """The variant of ours that it takes the place of."""
    if torch["hip"]:
        return "rocm" if beside.numbers(torch["hip"]) >= (7,) else "rocm6"
    if torch["cuda"]:
        return "cuda" if beside.numbers(torch["cuda"]) >= (13,) else "cuda12"
    return "cpu"


def _versions(found: Mapping[str, Any]) -> dict[str, str]:
    """For people: the record's and what is printed."""
    torch, packages = found["torch"], found["packages"]
    named = {
        "python": f"{found['python']}, {found['executable']}",
        "libc": found["libc"],
        "torch": torch["version"],
        "CUDA": torch["cuda"],
        "ROCm": torch["hip"],
        "RCCL" if torch["hip"] else "NCCL": torch.get("nccl", ""),
        **{name: packages.get(name, "") for name in ("transformers", "accelerate", "deepspeed", "datasets", "triton")},
    }
    return {name: version for name, version in named.items() if version}


def _lacking(packages: Mapping[str, str]) -> Iterator[str]:
    for name, oldest in _TRAINER.items():
        wanted = ".".join(map(str, oldest))
        if name not in packages:
            yield f"{name} {wanted} or newer: it has none"
        elif beside.numbers(packages[name]) < oldest:
            yield f"{name} {wanted} or newer: it has {packages[name]}"
    for name in ("safetensors", "tokenizers", "numpy", "pyarrow"):
        if name not in packages:
            yield f"{name}: it has none"


def inside(image: Path, folder: Path, path: str, command: list[str], seconds: float = _START_S) -> process.Done:
    """Run a command in an adopted image, which sees the folder beside it."""
    quoted = str(folder).replace('"', '""')
    mount = f'--mount=type=bind,"src={quoted}","dst={quoted}",ro'
    argv = ["env", f"PYTHONPATH={path}", *command]
    return singularity.execute(image, argv, options=["--contain", mount], binds={folder: False}, seconds=seconds)


def _last(done: process.Done) -> str:
    """Without what the engine says of folders that the image has not."""
    lines = [line for line in done.err.splitlines() if line.strip() and not line.startswith(("WARNING:", "INFO:"))]
    return "\n".join(lines[-3:])


def _require_start(image: Path, folder: Path, source: str) -> None:
    """dray's planner and its runner start in it."""
    code = "import dray.cli, dray.cli.plan, dray.runner.__main__, dray.tcp_store.handler"
    path = ":".join(filter(None, [str(folder), json.loads((folder / "image.json").read_text())["pythonpath"]]))
    done = inside(image, folder, path, ["python3", "-B", "-c", code])
    if done.code:
        raise UnfitError(
            "dray does not start in the image", where=source, found=_last(done),
            fix="the last line says what is missing or does not fit; take another image",
        )  # fmt: skip


def _move(paths: list[Path], to: Path) -> None:
    """Out of the way, to be removed with the scratch folder; or back."""
    to.mkdir(exist_ok=True)
    for path in paths:
        path.rename(to / path.name)
