"""A stand-in for srun with CSCS's Container Engine: it takes the words of srun and the keys of an EDF that their
documentation has, and no others. What it was told goes to $SEEN, a line each; the command then runs on this machine."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from pathlib import Path

# srun's own, each with what it may be. docs.cscs.ch: `--environment` takes an absolute path.
WORDS = {
    "overlap": "", "disable-status": "", "export": "ALL", "nodes": "1", "ntasks": "1", "ntasks-per-node": "1",
    "kill-on-bad-exit": "1", "cpu-bind": "none", "output": r"logs/node-%n\.log", "open-mode": "append",
    "environment": r"/.+\.toml",
}  # fmt: skip
KEYS = {
    "base_environment": str, "image": str, "mounts": list, "workdir": str, "entrypoint": bool, "writable": bool,
    "env": dict, "annotations": dict,
}  # fmt: skip


def main(argv: list[str]) -> None:
    if argv == ["--help"]:
        print("Usage: srun [OPTIONS...] executable [args...]\n      --environment=FILE\n      --container-image=IMAGE")
        return
    words = {}
    while argv and argv[0].startswith("--"):
        name, _, value = argv.pop(0)[2:].partition("=")
        assert re.fullmatch(WORDS[name], value), (name, value)
        words[name] = value
    edf = described(Path(words["environment"]))
    with Path(os.environ["SEEN"]).open("a") as seen:
        seen.write(json.dumps({"command": argv[:4], "edf": edf}) + "\n")
    node = {"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURMD_NODENAME": "n1"}
    if "output" in words:
        log = os.open(words["output"].replace("%n", "0"), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(log, 1)
        os.dup2(log, 2)
    os.chdir(edf["workdir"])
    os.execvpe(argv[0], argv, {**os.environ, **edf.get("env", {}), **node})


def described(file: Path) -> dict:
    """The environment, whole and right, or an AssertionError."""
    edf = tomllib.loads(file.read_text(encoding="utf-8"))
    for name, value in edf.items():
        assert isinstance(value, KEYS[name]), (name, value)
    assert "$" not in json.dumps(edf), "it would be expanded"
    assert Path(edf["image"]).read_bytes().startswith(b"hsqs")
    targets = []
    for mount in edf["mounts"]:
        source, target, *flags = mount.split(":")
        assert Path(source).exists(), mount
        assert target.startswith("/"), mount
        assert flags in ([], ["ro"]), mount
        targets.append(target)
    assert any(Path(edf["workdir"]).is_relative_to(target) for target in targets), edf["workdir"]
    assert all(isinstance(value, str) for value in [*edf.get("env", {}).values(), *leaves(edf.get("annotations", {}))])
    return edf


def leaves(table: dict) -> list[object]:
    """The values of an annotation's dotted names."""
    return [one for value in table.values() for one in (leaves(value) if isinstance(value, dict) else [value])]


if __name__ == "__main__":
    main(sys.argv[1:])
