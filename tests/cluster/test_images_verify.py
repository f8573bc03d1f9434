"""SIFs of our own writing: Apptainer reads, starts, signs and checks them; dray looks into them."""

from __future__ import annotations

import json
import os
from contextlib import closing
from pathlib import Path

import pytest

from dray import process
from dray.cli import image as verbs
from dray.clients import builder, docker
from dray.contract.findings import ConfigError, UnfitError
from dray.images.sif import contents, inspect, record, verify
from dray.images.sif import format as sif_format
from dray.images.sif.record import File, Record
from helpers import ROOT, builders, in_builder

pytestmark = pytest.mark.docker

EPOCH = 1_700_000_000
DEFINITION = b"Bootstrap: docker\nFrom: debian\n"
FACTS = {"variant": "cpu", "dray": "0.1.0", "python": "3.11.2", "base": "sha256:b", "packages": {"torch": "2.13.0+cpu"}}
SITE = "opt/dray/lib/python3.11/site-packages"
# Apptainer starts it although it has neither passwd nor scripts of Apptainer's own.
SHELL = (
    'cd /out && cp -L --parents $(ldd /usr/bin/dash | grep -o "/[^ ]*") /usr/bin/dash . && ln -s dash usr/bin/sh && '
)
SHELL += "ln -s usr/bin bin && mkdir proc sys dev tmp etc root home"


@pytest.fixture(scope="module")
def client():
    with closing(docker.client()) as client:
        try:
            builder.image(client, ROOT, on_line=lambda line: None)
        except UnfitError as error:
            if os.environ.get("DRAY_TEST_ALL") == "1":
                raise
            pytest.skip(f"{error.problem} (set DRAY_CLUSTER_BASE to the base that the builder was built with)")
        yield client


@pytest.fixture
def way(request, client, tmp_path, monkeypatch):
    """This machine's own tools where it has them, or the container's."""
    if getattr(request, "param", "container") == "here":
        if not process.which("unsquashfs"):
            pytest.skip("unsquashfs is not on this machine (Debian: apt-get install squashfs-tools)")
    else:
        monkeypatch.setenv("PATH", str(tmp_path / "nothing"))


both = pytest.mark.parametrize("way", ["here", pytest.param("container", marks=pytest.mark.slow)], indirect=True)


@pytest.fixture
def packed(way, tmp_path):
    """Make a SIF of a folder."""

    def pack(root: Path, *words: str, definition: bytes = DEFINITION, metadata: bytes = b"") -> Path:
        squashfs = tmp_path / f"{root.name}.squashfs"
        argv = ["mksquashfs", str(root), str(squashfs), "-noappend", "-quiet", "-no-progress", "-all-root"]
        argv += ["-all-time", str(EPOCH), "-mkfs-time", str(EPOCH), *words]
        done = builder.tool(argv, binds={tmp_path: True})
        assert done.code == 0, done.err
        sif_format.write(squashfs, root.with_suffix(".sif"), epoch=EPOCH, definition=definition, metadata=metadata)
        return root.with_suffix(".sif")

    return pack


@pytest.fixture
def small(tmp_path) -> Path:
    root = tmp_path / "small"
    for name, size in ((f"{SITE}/torch/lib.so", 5000), (f"{SITE}/six.py", 10), ("usr/lib/libc.so", 700)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(bytes(size))
    (root / "opt/dray/image.json").write_text(json.dumps(FACTS))
    return root


@pytest.fixture(scope="module")
def keyring(client, tmp_path_factory) -> Path:
    """A key made on the spot."""
    keys = tmp_path_factory.mktemp("keys")
    keys.chmod(0o700)
    words = ["--name", "Ann Tester", "--email", "ann@example.org", "--comment", "none", "--password", ""]
    client.containers.run(
        builder.TAG,
        ["apptainer", "key", "newpair", *words, "--bit-length", "2048", "--push=false"],
        user=f"{os.getuid()}:{os.getgid()}",
        volumes={str(keys): {"bind": "/keys", "mode": "rw"}},
        environment={"APPTAINER_KEYSDIR": "/keys"},
        remove=True,
        network_disabled=True,
    )
    return keys


@pytest.fixture
def keys(keyring, monkeypatch) -> Path:
    monkeypatch.setenv("APPTAINER_KEYSDIR", str(keyring))
    return keyring


def refusal(call, *args, **words) -> str:
    with pytest.raises(ConfigError) as raised:
        call(*args, **words)
    assert raised.value.exit_code == 78
    return str(raised.value)


def recorded(sif: Path) -> Record:
    """As a build leaves it."""
    known = Record(
        variant="cpu",
        dray="0.1.0",
        base="sha256:b",
        inputs="0" * 64,
        epoch=EPOCH,
        tools={},
        sif=File(sha256=verify.digest(sif).removeprefix("sha256:"), size=sif.stat().st_size),
    )
    record.write(sif, known)
    return known


def flipped(sif: Path, offset: int) -> None:
    with sif.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)
        file.seek(offset)
        file.write(bytes([old[0] ^ 1]))


def apptainer(folder: Path, script: str) -> tuple[int, str]:
    """As an ordinary user, on the files of this folder, which are in /work."""
    folder.chmod(0o755)  # pytest keeps its folders to their owner
    done = in_builder(builder.TAG, "bash", "-c", script, volumes=[f"{folder}:/work"])
    return done.returncode, done.stdout + (done.stderr if done.returncode else "")


def test_apptainer_reads_and_starts_it(client, packed, tmp_path):
    root = tmp_path / "shell"
    root.mkdir()
    client.containers.run(
        builder.TAG,
        ["sh", "-c", SHELL],
        user=f"{os.getuid()}:{os.getgid()}",
        volumes={str(root): {"bind": "/out", "mode": "rw"}},
        remove=True,
        network_disabled=True,
    )
    labels = json.dumps({"a": "b"})
    (root / ".singularity.d").mkdir()
    (root / ".singularity.d" / "labels.json").write_text(labels)
    sif = packed(root, metadata=sif_format.metadata(root, DEFINITION))
    read = sif_format.read(sif)
    ours = [f"{number} 1 NONE {part.offset}-{part.offset + part.size}" for number, part in enumerate(read.parts, 1)]
    code, message = apptainer(
        tmp_path,
        "set -e; cd /work;"
        "apptainer sif list shell.sif | grep '^[0-9]' | tr -d '|' | tr -s ' ' | cut -d ' ' -f 1-4;"
        "apptainer sif header shell.sif | grep -E '^(Version|Primary|Modified)' | tr -s ' ';"
        "apptainer inspect --deffile shell.sif; apptainer inspect shell.sif;"
        "apptainer --quiet exec --unsquash --contain shell.sif sh -c 'echo started'",
    )
    assert (code, message.splitlines()) == (
        0,
        [
            *ours,
            "Version: 01",
            f"Primary Architecture: {read.architecture}",
            "Modified At: 2023-11-14 22:13:20 +0000 UTC",
            "Bootstrap: docker",
            "From: debian",
            "a: b",
            "started",
        ],
    )


def test_apptainer_would_write_the_same(client, packed, small, tmp_path):
    """All of it but for the launch line, the id and the times."""
    sif = packed(small)
    (tmp_path / "def").write_bytes(DEFINITION)
    folder = tmp_path / "theirs"
    folder.mkdir()
    folder.chmod(0o777)
    code, message = apptainer(
        tmp_path,
        "set -e; cd /work/theirs; apptainer sif new a.sif; apptainer sif add --datatype 1 --groupid 1 a.sif ../def;"
        "apptainer sif add --datatype 4 --groupid 1 --parttype 2 --partfs 1 "
        f"--partarch {sif_format.ARCHITECTURES[sif_format.read(sif).architecture][:2].decode().lstrip('0')} "
        "a.sif ../small.squashfs; chmod 644 a.sif",
    )
    assert code == 0, message
    theirs, ours = bytearray((folder / "a.sif").read_bytes()), bytearray(sif.read_bytes())
    for whole in (theirs, ours):
        whole[:32] = bytes(32)
        whole[48:80] = bytes(32)  # id, created, modified
        for row in range(2):
            start = 4096 + 585 * row + 41
            whole[start : start + 16] = bytes(16)
    assert theirs == ours


@both
def test_inspect(packed, small, capsys):
    sif = packed(small)
    verbs.inspect(str(sif), as_json=True)
    assert json.loads(capsys.readouterr().out) == {
        "file": str(sif),
        "variant": "cpu",
        "digest": verify.digest(sif),
        "size": sif.stat().st_size,
        "architecture": sif_format.read(sif).architecture,
        "signed": [],
        "base": "sha256:b",
        "python": "3.11.2",
        "dray": "0.1.0",
        "versions": {"torch": "2.13.0+cpu"},
    }
    verbs.inspect(str(sif))
    assert capsys.readouterr().out.splitlines()[1:8] == [
        f"digest   {verify.digest(sif)}",
        "signed   no",
        f"variant  cpu, {sif_format.read(sif).architecture}",
        "base     sha256:b",
        "python   3.11.2",
        "dray     0.1.0",
        "torch    2.13.0+cpu",
    ]


@both
def test_inspect_what_others_built(packed, small):
    facts = small / "opt/dray/image.json"
    for spoil in (lambda: facts.write_text("[]"), facts.unlink):
        spoil()
        sif = packed(small)
        assert refusal(verbs.inspect, str(sif)) == (
            f"dray did not build this image\n  where:  {sif}\n  wanted: /opt/dray/image.json in it"
        )


@both
def test_a_damaged_squashfs(packed, small):
    sif = packed(small)
    with sif.open("r+b") as file:
        file.seek(sif_format.read(sif).system.offset + 40)
        file.write(bytes(100))
    head, _, found = refusal(verbs.inspect, str(sif)).partition("\n  found:  ")
    wanted = "squashfs-tools 4.4 or newer, with zstd, and a whole image"
    assert head == f"the image's files cannot be read\n  where:  {sif}\n  wanted: {wanted}"
    assert found.endswith("or build or copy the image again")


def test_sign_and_verify(packed, small, keys, capsys):
    sif = packed(small)
    known = recorded(sif)
    unsigned = verify.digest(sif)
    verbs.sign(str(sif))
    signed, fingerprint = verify.digest(sif), sif_format.read(sif).signers()[0]
    assert capsys.readouterr().out == f"{sif}\n{signed}\nsigned with {fingerprint}\n"
    assert signed != unsigned
    made = File(sha256=signed.removeprefix("sha256:"), size=sif.stat().st_size)
    assert record.read(sif) == known.model_copy(update={"sif": made, "signed": fingerprint})
    verbs.verify(str(sif))
    assert capsys.readouterr().out == (
        f"{sif}\n{signed} ({sif}.json)\nsigned by Ann Tester (none) <ann@example.org> {fingerprint}\n"
    )
    assert refusal(verbs.sign, str(sif)) == (f"the image is signed already\n  where:  {sif}\n  found:  {fingerprint}")


def test_without_a_record_signing_prints_the_digest(packed, small, keys, capsys):
    sif = packed(small)
    verbs.sign(str(sif), keyidx=0)
    assert capsys.readouterr().out.splitlines()[1] == verify.digest(sif)
    assert not record.path_for(sif).exists()


def test_no_byte_may_change(packed, small, keys):
    sif = packed(small)
    recorded(sif)
    verbs.sign(str(sif))
    signed = verify.digest(sif)
    parts = {part.kind: part for part in sif_format.read(sif).parts}
    # time in the header, unused descriptor, definition, squashfs, signature
    for offset in (
        64,
        20_000,
        parts["definition"].offset,
        parts["partition"].offset + 99,
        parts["signature"].offset + 99,
    ):
        flipped(sif, offset)
        for no_signature in (False, True):
            assert refusal(verbs.verify, str(sif), no_signature=no_signature) == (
                f"the image has another digest\n  where:  {sif}\n  wanted: {signed} ({sif}.json)\n"
                f"  found:  {verify.digest(sif)}\n"
                "  fix:    copy or build it again: the file is another image, or was changed or damaged"
            )
        flipped(sif, offset)
    verbs.verify(str(sif))


def test_a_signature_sees_changes_that_a_digest_was_made_for(packed, small, keys):
    sif = packed(small)
    verbs.sign(str(sif))
    parts = {part.kind: part for part in sif_format.read(sif).parts}
    for part, found in (("definition", 1), ("partition", 2)):
        flipped(sif, parts[part].offset + 10)
        message = refusal(verbs.verify, str(sif), digest=verify.digest(sif))
        assert message == (
            "the image's signature is not valid: the image was changed after it was signed\n"
            f"  where:  {sif}\n"
            "  found:  INFO:    Verifying image with PGP key material\n"
            f"          FATAL:   Failed to verify container: integrity: data object integrity compromised: {found}\n"
            "  fix:    copy or build it again"
        )
        flipped(sif, parts[part].offset + 10)


def test_an_unknown_key(packed, small, keys, tmp_path, monkeypatch):
    sif = packed(small)
    verbs.sign(str(sif))
    monkeypatch.setenv("APPTAINER_KEYSDIR", str(tmp_path / "no keys"))
    inside = '-e APPTAINER_KEYSDIR=/keys -v "$PWD:/here" -w /here dray:builder apptainer'
    quoted = f"'{tmp_path}/no keys'"
    docker = f'mkdir -p -m 700 {quoted} && docker run --rm -it -u "$(id -u)" -v {quoted}:/keys {inside}'
    assert refusal(verbs.verify, str(sif), digest=verify.digest(sif)) == (
        f"the image is signed with a key that is not in the keyring\n  where:  {sif}\n"
        f"  wanted: a key of the keyring {tmp_path}/no keys\n  found:  {sif_format.read(sif).signers()[0]}\n"
        f"  fix:    ask the key's owner for the public key; if you trust this person: {docker} key import FILE"
    )
    message = refusal(verbs.signatures.sign, sif_format.read(packed(small)))
    assert message.startswith(f"the image could not be signed\n  where:  {sif}\n")
    assert f"  fix:    without a key, make one: {docker} key newpair\n" in message


def test_a_key_that_is_not_there(packed, small, keys):
    sif = packed(small)
    whole = sif.read_bytes()
    assert refusal(verbs.sign, str(sif), keyidx=7).startswith("the image could not be signed\n")
    assert sif.read_bytes() == whole


def test_neither_the_tool_nor_an_engine(small, packed, tmp_path, monkeypatch):
    sif = packed(small)
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with pytest.raises(UnfitError) as raised:
        verbs.inspect(str(sif))
    assert str(raised.value) == (
        "this machine has no unsquashfs, and no Docker Engine to run it in\n"
        "  found:  no Docker Engine runs on this machine\n"
        "  fix:    install apptainer and squashfs-tools\n"
        "          or install Docker Engine and start it, or set DOCKER_HOST"
    )


def test_no_container_stays(client, packed, small, tmp_path):
    contents.file(sif_format.read(packed(small)), inspect.FACTS)
    assert builders(client, tmp_path) == []


def test_the_container_has_no_network_and_is_the_caller(way):
    assert builder.tool(["sh", "-c", "ls /sys/class/net; id -u; echo aside >&2; exit 3"], binds={}) == process.Done(
        argv=("sh", "-c", "ls /sys/class/net; id -u; echo aside >&2; exit 3"),
        code=3,
        out=f"lo\n{os.getuid()}\n",
        err="aside\n",
    )
