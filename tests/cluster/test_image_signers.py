"""Images that a recipe wants signed, by the real Apptainer: each node checks, and starts no other."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from dray.images.sif import format as sif_format

pytestmark = pytest.mark.cluster

PLACE = "/shared/home/my signed"  # as the nodes see it
NOBODY = "0" * 40
# A root filesystem as small as can be, in a SIF that is signed with the key of this number.
MADE = """
set -e
mkdir root; touch root/a; head --bytes 9000 /dev/urandom >root/b
mksquashfs root root.squashfs -quiet -no-progress
printf 'Bootstrap: docker\\nFrom: debian\\n' >def
for name in unsigned ann bob; do
  apptainer sif new $name.sif
  apptainer sif add --datatype 1 --groupid 1 $name.sif def
  apptainer sif add --datatype 4 --groupid 1 --parttype 2 --partfs 1 --partarch "$1" $name.sif root.squashfs
done
apptainer sign --keyidx 0 ann.sif
apptainer sign --keyidx 1 bob.sif
cp ann.sif both.sif
apptainer sif add --datatype 4 --groupid 2 --parttype 1 --partfs 1 --partarch "$1" both.sif root.squashfs
apptainer sign --keyidx 1 --group-id 2 both.sif
"""
# What node.sh contains, without a run.
CHECK = """
set -euo pipefail
number=N name=NAME N=1 NAME=n2
source "$1/mounts.sh"
source "$1/signed.sh"
mkdir -p failures
node::signed apptainer image "${@:2:1}.sif" '"not signed"' "${@:3}"
"""


@dataclass(frozen=True)
class Signed:
    """A folder with images, and a keyring with the keys of two: Ann's and Bob's."""

    folder: Path
    keys: tuple[str, str]
    env: dict[str, str]


@pytest.fixture(scope="module")
def signed(cluster) -> Iterator[Signed]:
    folder = cluster.shared / "home" / Path(PLACE).name
    shutil.rmtree(folder, ignore_errors=True)
    env = {"APPTAINER_KEYSDIR": f"{PLACE}/keys"}
    assert cluster.exec(["mkdir", "-p", "-m", "700", f"{PLACE}/keys"]).code == 0
    for name in ("Ann", "Bob"):
        words = ["--name", name, "--email", f"{name}@example.org", "--comment", "", "--password", "", "--push=false"]
        made = cluster.exec(["apptainer", "key", "newpair", "--bit-length", "2048", *words], env=env)
        assert made.code == 0, made.err
    listed = cluster.exec(["apptainer", "key", "list"], env=env).out
    ann, bob = re.findall(r"Fingerprint: +(\w{40})", listed)
    machine = sif_format.MACHINES[cluster.exec(["uname", "-m"]).out.strip()]
    number = sif_format.ARCHITECTURES[machine][:2].decode().lstrip("0")
    made = cluster.exec(["bash", "-c", MADE, "made", number], workdir=PLACE, env=env)
    assert made.code == 0, made.err
    yield Signed(folder, (ann, bob), env)
    shutil.rmtree(folder)


@pytest.fixture
def checked(cluster, root: Path, signed: Signed):
    """Whether the second node starts this image, and what it says."""

    def check(image: str, *keys: str, **env: str) -> Any:
        argv = ["bash", "-c", CHECK, "check", str(root / "src" / "dray" / "render" / "bash"), image, *keys]
        return cluster.exec(argv, node="n2", workdir=PLACE, env={**signed.env, **env})

    return check


@pytest.mark.parametrize(("image", "keys"), [("ann", "A"), ("ann", "BA"), ("bob", "B")])
def test_an_image_that_is_signed_starts(checked, signed: Signed, image: str, keys: str) -> None:
    ended = checked(image, *(signed.keys["AB".index(key)] for key in keys))
    assert (ended.code, ended.out, ended.err) == (0, "", "")


OTHER = "it is signed with another key"
FATAL = "FATAL: Failed to verify container: "


@pytest.mark.parametrize(
    ("image", "env", "found"),
    [
        ("bob", {}, OTHER),
        ("unsigned", {}, f"{FATAL}integrity: signature not found for object group 1"),
        ("both", {}, "its parts are not in one group, and each group has signatures of its own"),
        ("ann", {"APPTAINER_KEYSDIR": "/tmp/none"}, "openpgp: signature made by unknown entity"),
        ("changed", {}, f"{FATAL}integrity: data object integrity compromised: 2"),
        ("longer", {}, f"{FATAL}integrity: object 4: object not signed"),
        ("def", {}, "FATAL: "),
        ("missing", {}, "FATAL: "),
    ],
)
def test_any_other_does_not(cluster, checked, signed: Signed, image: str, env: dict[str, str], found: str) -> None:
    if image == "changed":
        text = bytearray((signed.folder / "ann.sif").read_bytes())
        (system,) = (part for part in sif_format.read(signed.folder / "ann.sif").parts if part.kind == "partition")
        text[system.offset + system.size // 2] ^= 1
        (signed.folder / "changed.sif").write_bytes(text)
    if image == "longer":  # with an overlay, which Apptainer would mount
        add = "apptainer sif add --datatype 4 --groupid 1 --parttype 4 --partfs 2 --partarch 2 longer.sif root.squashfs"
        assert cluster.exec(["sh", "-c", f"cp ann.sif longer.sif && {add}"], workdir=PLACE).code == 0
    if image == "def":
        shutil.copy(signed.folder / "def", signed.folder / "def.sif")
    ended = checked(image, signed.keys[0], NOBODY, **env)
    lines = [" ".join(line.split()) for line in ended.err.splitlines()]
    assert (ended.code, lines[:3]) == (
        69,
        [
            "dray: the image lacks the required signature",
            f"where: {image}.sif on node n2",
            f"wanted: a signature with one of {signed.keys[0]} {NOBODY}",
        ],
    )
    assert lines[3].startswith("found: ")
    assert found in lines[3]
    assert json.loads((signed.folder / "failures" / "node-1.json").read_text())["code"] == 69


def test_a_job_starts_a_signed_image_and_no_other(sbatch, cluster, sif: Path, signed: Signed) -> None:
    """The key is in both nodes' keyrings, and then in the first one's alone."""
    shutil.copy(sif, signed.folder / "whole.sif")
    image = f"{PLACE}/whole.sif"
    own = "/tmp/my keys"
    copied = ["bash", "-c", f"cp -r '{PLACE}/keys' '{own}' && apptainer sign --keyidx 0 '{image}'"]
    assert cluster.exec(["chmod", "777", image], user="root").code == 0
    assert cluster.exec(copied, node="n1", env=signed.env).code == 0
    words = (
        "slurm/multinode.sh",
        f'image_signers=["{signed.keys[0]}"]',
        "preflight.when=never",
        "ranks_per_node=1",
        "launcher=python",
    )
    try:
        for keys, code in ((signed.env["APPTAINER_KEYSDIR"], 0), (own, 69)):
            ended = sbatch(*words, "--", "true", env={"APPTAINER_KEYSDIR": keys, "DRAY_IMAGE": image})
            assert ended.code == code, ended.output
    finally:
        cluster.exec(["rm", "-r", own], node="n1")
    result = ended.result()
    assert (result["cause"]["node"], result["cause"]["why"].splitlines()[0]) == (
        "n2",
        "the image lacks the required signature",
    )
    log = (ended.attempt / "logs" / "node-1.log").read_text()
    assert "unknown entity" in log
