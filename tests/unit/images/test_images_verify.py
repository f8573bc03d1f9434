"""Which digest an image must have, and its record."""

from __future__ import annotations

import hashlib
import platform
from pathlib import Path

import pytest

from dray.cli import image as verbs
from dray.contract.findings import ConfigError
from dray.images import store
from dray.images.sif import format as sif_format
from dray.images.sif import record, verify
from dray.images.sif.record import File, Record

pytestmark = pytest.mark.hostile("what is installed")

ZERO, ONE = "0" * 64, "1" * 64
KNOWN = Record(
    variant="cpu",
    dray="0.1.0",
    base="debian@sha256:0",
    inputs=ZERO,
    epoch=1,
    tools={"apptainer": "1.4.5"},
    sif=File(sha256=ONE, size=7),
)


@pytest.fixture
def sif(tmp_path) -> Path:
    (tmp_path / "squashfs").write_bytes(b"hsqs" + bytes(200))
    sif_format.write(tmp_path / "squashfs", tmp_path / "dray-cpu.sif", epoch=1, definition=b"a\nb\n")
    (tmp_path / "squashfs").unlink()
    return tmp_path / "dray-cpu.sif"


def refusal(call, *args, **words) -> str:
    with pytest.raises(ConfigError) as raised:
        call(*args, **words)
    assert raised.value.exit_code == 78
    return str(raised.value)


def test_a_record_lies_beside_its_image(sif):
    record.write(sif, KNOWN)
    assert (sif.parent / "dray-cpu.sif.json").read_text() == (
        '{\n "variant": "cpu",\n "dray": "0.1.0",\n "base": "debian@sha256:0",\n'
        f' "inputs": "{ZERO}",\n "epoch": 1,\n "tools": {{\n  "apptainer": "1.4.5"\n }},\n'
        f' "sif": {{\n  "sha256": "{ONE}",\n  "size": 7\n }},\n'
        ' "python": "",\n "needs": {},\n "packages": {},\n "signed": null\n}\n'
    )
    assert record.read(sif) == KNOWN
    assert sorted(path.name for path in sif.parent.iterdir()) == ["dray-cpu.sif", "dray-cpu.sif.json"]


def test_no_record(sif):
    assert record.read(sif) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("{", "Invalid JSON: EOF while parsing an object at line 1 column 1"),
        (KNOWN.model_dump_json().replace(ONE, "1"), "sif.sha256: String should match pattern '^[0-9a-f]{64}$'"),
        (
            KNOWN.model_dump_json().replace("variant", "kind"),
            "variant: Field required\nkind: Extra inputs are not permitted",
        ),
    ],
)
def test_a_damaged_record(sif, text, found):
    record.path_for(sif).write_text(text)
    assert refusal(record.read, sif) == (
        f"the image's record is damaged\n  where:  {sif}.json\n  found:  "
        + found.replace("\n", "\n          ")
        + "\n  fix:    build the image again; or remove the record, and give --digest"
    )


def test_who_says_which_digest(sif):
    record.write(sif, KNOWN)
    given = "sha256:" + "2" * 64
    assert verify.expected(sif, given) == (given, "--digest")
    assert verify.expected(sif) == (f"sha256:{ONE}", f"{sif}.json")


def test_nobody_says_which_digest(sif):
    assert refusal(verify.expected, sif) == (
        f"no digest to verify the image against\n  where:  {sif}\n"
        f"  wanted: --digest, or the record {sif}.json\n"
        "  fix:    copy the record with the image, or ask the person who built it for the digest"
    )


@pytest.mark.parametrize("given", [ONE, "sha256:1", f"sha256:{ONE}0", f"sha256:{ONE[:-1]}G"])
def test_no_digest_at_all(sif, given):
    assert refusal(verify.expected, sif, given=given) == (
        f"not a digest\n  wanted: sha256: and 64 hexadecimal digits\n  found:  {given}"
    )


def test_the_digest_decides(sif, capsys):
    whole = sif.read_bytes()
    digest = f"sha256:{hashlib.sha256(whole).hexdigest()}"
    verbs.verify(str(sif), digest=digest, no_signature=True)
    assert capsys.readouterr().out == f"{sif}\n{digest} (--digest)\nsignature unchecked\n"
    # header, descriptor table, space between parts, definition, squashfs
    for offset in (72, 20_000, 32_300, 32_176, 32_800):
        sif.write_bytes(whole[:offset] + bytes([whole[offset] ^ 1]) + whole[offset + 1 :])
        found = f"sha256:{hashlib.sha256(sif.read_bytes()).hexdigest()}"
        for no_signature in (False, True):
            assert refusal(verbs.verify, str(sif), digest=digest, no_signature=no_signature) == (
                f"the image has another digest\n  where:  {sif}\n  wanted: {digest} (--digest)\n"
                f"  found:  {found}\n"
                "  fix:    copy or build it again: the file is another image, or was changed or damaged"
            )


def test_the_record_of_another_image(sif):
    record.write(sif, KNOWN)
    assert f"wanted: sha256:{ONE} ({sif}.json)" in refusal(verbs.verify, str(sif), no_signature=True)
    assert f"wanted: sha256:{ONE} ({sif}.json)" in refusal(verbs.sign, str(sif))


def test_a_link_leads_to_the_image_and_its_record(sif, tmp_path, capsys):
    link = tmp_path / "latest.sif"
    link.symlink_to(sif.name)
    digest = verify.digest(sif)
    record.write(sif, KNOWN.model_copy(update={"sif": File(sha256=digest.removeprefix("sha256:"), size=1)}))
    verbs.verify(str(link), no_signature=True)
    assert capsys.readouterr().out == f"{sif}\n{digest} ({sif}.json)\nsignature unchecked\n"


def test_a_variant_is_the_image_built_here(tmp_path, monkeypatch):
    (tmp_path / "containers" / "steps").mkdir(parents=True)
    monkeypatch.setenv("DRAY_HOME", str(tmp_path))
    assert refusal(verbs.verify, "cuda12") == (
        f"the image does not exist\n  wanted: {tmp_path}/build/dray-cuda12.sif\n"
        "  fix:    make image-cuda12 builds build/dray-cuda12.sif; or name the file of another image"
    )


def test_unsigned(sif):
    image = sif.rename(sif.with_name("my image.sif"))
    assert refusal(verbs.verify, str(image), digest=verify.digest(image)) == (
        f"the image is not signed\n  where:  {image}\n  fix:    dray image sign '{image}'; or verify --no-signature"
    )


def test_machines_that_dray_knows():
    assert platform.machine() in sif_format.MACHINES


def test_what_is_submitted_is_the_recipe_s(sif, monkeypatch, tmp_path):
    monkeypatch.setenv("DRAY_IMAGE", str(sif))
    digest = verify.digest(sif)
    assert store.required(tmp_path, "cpu", digest) == sif
    with pytest.raises(ConfigError) as raised:
        store.required(tmp_path, "cpu", f"sha256:{ZERO}")
    assert raised.value.problem == "the image has another digest"
    assert raised.value.details["wanted"] == f"sha256:{ZERO} (the recipe's image_digest)"
