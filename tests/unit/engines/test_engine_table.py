"""slurm/engine_table.sh is what the engines' classes say. DRAY_GOLDEN=write writes it: read the diff then."""

from __future__ import annotations

import os
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest

from dray import engines
from dray.engines.base import DEVICES, MOUNTS, Container, Engine, Mount
from helpers import PYTHON, ROOT, golden

ENGINES = [name for name in engines.names("slurm") if name != "bare"]
TABLE = """\
#!/usr/bin/env bash
# What src/dray/engines says of the engines of a job; tests/unit/engines/test_engine_table.py writes this file.
# shellcheck disable=SC2034,SC2054,SC2154,SC2207

readonly -a engine__names=({names})
# The suffix of its usual image, the kinds of image that it starts, what its store puts before a name, and the
# characters that no path of a mount has.
{traits}
engine::argv() {{ # sets `argv`, which starts a program in the image
  case "$engine" in
{starts}  esac
}}
"""
# What only the job knows, by the word that stands for it here.
KNOWN = {
    "/FOLDER/edf.toml": '"$edf"', "/FOLDER": '"$where"', "/MOUNT:/MOUNT": '"$pairs"', "/IMAGE": '"$image"',
    "1000:1000": '"$UID:$(id --group)"', "--userns=keep-id": "$( ((UID == 0)) || echo --userns=keep-id)",
}  # fmt: skip
CONTAINER = Container(
    run="plan", image="/IMAGE", accelerator="cpu", folder="/FOLDER", user="1000:1000",
    variables=("DRAY_HOME", "DRAY_SITES"), name_variable="", one_machine=False, terminal=True,
    mounts=(Mount("/MOUNT", write=True),),
)  # fmt: skip


def argv(engine: Engine) -> str:
    """The command that starts the planner, up to the planner's own; a terminal and devices it has none."""
    srun = engine.srun_options(CONTAINER)
    words = ['"${engine__srun[@]}"', *map(shlex.quote, srun)] if srun else []
    for word in engine.argv(CONTAINER, []):
        if word == MOUNTS:
            words.append(word)
        elif word != DEVICES and "tty" not in word:
            words.append(shlex.quote(word))
    line = " ".join(words)
    for stands, known in KNOWN.items():
        line = line.replace(stands, known)
    return line


def table() -> str:
    traits: dict[str, list[str]] = {"suffix": [], "formats": [], "store": [], "never": []}
    starts = []
    for engine in map(engines.get, ENGINES):
        traits["suffix"].append("sif" if "sif" in engine.formats else "sqsh")
        traits["formats"].append(" ".join(engine.formats))
        traits["store"].append(engine.store_prefix)
        traits["never"].append(engine.unmountable)
        starts.append(f"    {engine.name}) argv=({argv(engine)}) ;;\n")
    lines = []
    for trait, values in traits.items():
        pairs = " ".join(f"[{name}]='{value}'" for name, value in zip(ENGINES, values, strict=True))
        lines.append(f"readonly -A engine__{trait}=({pairs})\n")
    return TABLE.format(names=" ".join(ENGINES), traits="".join(lines), starts="".join(starts))


def test_the_table() -> None:
    golden(ROOT / "slurm" / "engine_table.sh", table())


@pytest.mark.parametrize("engine", ENGINES)
def test_a_job_starts_the_planner_as_the_engine_says(engine: str) -> None:
    """In bash, with a path that has a blank and a quote."""
    script = (
        'source "$DRAY_HOME/slurm/job.sh"; engine=$1 image="/my i" where="/a \\"b\\"" edf="/e f" pairs="/a b:/a b"; '
        'mounts=("--mount=x y"); engine::argv; printf "%s\\n" "${argv[@]}"'
    )
    env = {**PYTHON, "DRAY_HOME": str(ROOT)}
    ended = subprocess.run(["bash", "-c", script, "x", engine], env=env, capture_output=True, text=True, check=True)
    words = ended.stdout.splitlines()
    assert words[0] == {"pyxis": "srun", "edf": "srun"}.get(engine, engine)
    values = {word.rpartition("=")[2] for word in words}
    assert values > ({"/e f"} if engine == "edf" else {'/a "b"', "/my i"})
    assert ("--mount=x y" in words) == (engine in ("apptainer", "singularity", "podman-hpc"))
    assert ("--container-mounts=/a b:/a b" in words) == (engine == "pyxis")
    assert ("--userns=keep-id" in words) == (engine == "podman-hpc" and os.getuid() != 0)  # Podman refuses it for root


def test_an_edf_has_each_folder_once_and_as_it_is(tmp_path: Path) -> None:
    script = (
        'source "$DRAY_HOME/slurm/job.sh"; engine=edf runs=$1 image="/my i" where="/a \\"b\\"" pairs="" edf=""; '
        'folders=("${@:2}"); engine::mounts; engine::edf; cat "$edf"'
    )
    folders = ["/x", "/my data", "/q\"'\\", "/x"]
    argv = ["bash", "-euc", script, "x", str(tmp_path), *folders]
    env = {**PYTHON, "DRAY_HOME": str(ROOT)}
    ended = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    assert tomllib.loads(ended.stdout) == {
        "image": "/my i",
        "workdir": '/a "b"',
        "entrypoint": False,
        "mounts": [f"{folder}:{folder}" for folder in folders[:3]],
    }
