"""Make a root filesystem in a folder, and pack it in the requested formats."""

from __future__ import annotations

import argparse
import json
import os
import re
from pathlib import Path

from dray import process
from dray.contract import exit_codes, findings
from dray.contract.findings import DrayError
from dray.images.rootfs import INPUTS_LABEL, LAYER, SIF, TOOLS, docker_layer, make, squashfs


def main() -> None:
    """Read the command line, build, pack."""
    parser = argparse.ArgumentParser()
    parser.add_argument("definition", type=Path)
    parser.add_argument("base", type=Path)
    parser.add_argument("scratch", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--epoch", type=int, default=0)
    parser.add_argument("--sif", action="store_true")
    parser.add_argument("--docker", nargs=2)
    asked = parser.parse_args()
    inputs = asked.definition.parent
    os.umask(0o022)
    tools = _versions() if asked.sif else {}
    rootfs = make.build(
        definition=asked.definition, out=asked.out, base=asked.base, scratch=asked.scratch, epoch=asked.epoch
    )
    if asked.sif:
        _label(rootfs, inputs)
        (asked.scratch / TOOLS).write_text(json.dumps(tools))
        squashfs.pack(rootfs, asked.scratch / SIF, epoch=asked.epoch, definition=asked.definition)
    if asked.docker:
        tag, digest = asked.docker
        labels = _labels(inputs) | {INPUTS_LABEL: digest}
        docker_layer.pack(rootfs, asked.scratch / LAYER, epoch=asked.epoch, inputs=inputs, tag=tag, labels=labels)


def _labels(inputs: Path) -> dict[str, str]:
    return dict(line.split(" ", 1) for line in (inputs / "labels").read_text().splitlines())


def _label(rootfs: Path, inputs: Path) -> None:
    """Replace Apptainer's labels, which hold the time, the path and the Apptainer of the build."""
    (rootfs / ".singularity.d" / "labels.json").write_text(json.dumps(_labels(inputs), indent=1, sort_keys=True))


def _versions() -> dict[str, str]:
    """Versions of the tools: with others, the same inputs may give other bytes."""
    asked = {"apptainer": [process.apptainer() or "apptainer", "--version"], "mksquashfs": ["mksquashfs", "-version"]}
    answers = {name: process.run(argv, check=False).out for name, argv in asked.items()}
    return {name: match[0] for name, out in answers.items() if (match := re.search(r"\d+\.\d+\S*", out))}


if __name__ == "__main__":
    try:
        main()
    except DrayError as error:
        print(findings.encode(error.finding))
        raise SystemExit(error.exit_code) from None
    except OSError as error:
        print(f"{error.filename}: {error.strerror}")
        raise SystemExit(exit_codes.FAILED) from None
