"""The bill of materials in SPDX 2.3: the whole document, and the rules of the specification."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from license_expression import get_spdx_licensing

DIGEST = "ab" * 32
SEE, MIT = {"license": {"name": "see /usr/share/x"}}, {"license": {"id": "MIT"}}


def part(name: str, version: str, purl: str, *licenses: object, digest: str = "") -> dict[str, Any]:
    hashes = [{"alg": "SHA-256", "content": digest}] if digest else []
    found = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    return found | ({"hashes": hashes} if hashes else {}) | ({"licenses": list(licenses)} if licenses else {})


BOM = {
    "bomFormat": "CycloneDX",
    "serialNumber": "urn:uuid:01234567-89ab-cdef-0123-456789abcdef",
    "metadata": {
        "timestamp": "2026-11-22T00:00:00+00:00",
        "component": {"type": "container", "bom-ref": "dray-cpu", "name": "dray-cpu", "version": "0.1.0"},
    },
    "components": [
        part("libstdc++6", "12", "pkg:deb/debian/libstdc++6@12?arch=amd64", SEE),
        part("libstdc--6", "12", "pkg:deb/debian/libstdc--6@12", MIT, {"license": {"id": "Zlib"}}),
        part("torch", "2.13.0", "pkg:pypi/torch@2.13.0", {"expression": "MIT OR LicenseRef-own"}, digest=DIGEST),
        part("torch", "2.13.0", "pkg:pypi/torch@2.13.0+cpu", SEE, MIT),
        part("none", "1", "pkg:pypi/none@1"),
        part("a-source", "1", "pkg:generic/a-source@1?download_url=https%3A%2F%2Fx", MIT, digest=DIGEST),
    ],
}  # fmt: skip


@pytest.fixture
def spdx(root: Path, monkeypatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("spdx", root / "containers" / "steps" / "spdx.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "spdx", module)
    spec.loader.exec_module(module)
    return module


# The names and values of the specification's JSON schema, of those that can be in such a document.
NAMES = {
    "document": "SPDXID creationInfo dataLicense documentNamespace hasExtractedLicensingInfos name packages "
    "relationships spdxVersion",
    "creationInfo": "comment created creators licenseListVersion",
    "packages": "SPDXID checksums comment copyrightText description downloadLocation externalRefs filesAnalyzed "
    "homepage licenseComments licenseConcluded licenseDeclared name originator primaryPackagePurpose "
    "supplier versionInfo",
    "checksums": "algorithm checksumValue",
    "externalRefs": "comment referenceCategory referenceLocator referenceType",
    "relationships": "comment relatedSpdxElement relationshipType spdxElementId",
    "hasExtractedLicensingInfos": "comment extractedText licenseId name seeAlsos",
}
VALUES = {
    "algorithm": "SHA1 SHA224 SHA256 SHA384 SHA512",
    "primaryPackagePurpose": "APPLICATION CONTAINER FRAMEWORK LIBRARY OPERATING-SYSTEM OTHER",
    "referenceCategory": "OTHER PACKAGE-MANAGER PERSISTENT-ID SECURITY",
    "relationshipType": "CONTAINS DEPENDS_ON DESCRIBES",
}


def fits_the_schema(part: object, name: str = "document") -> None:
    """Texts throughout, but for one; and nothing that the schema does not name."""
    if isinstance(part, list):
        assert part
        for one in part:
            fits_the_schema(one, name)
    elif isinstance(part, dict):
        assert part.keys() <= set(NAMES[name].split()), name
        for key, value in part.items():
            fits_the_schema(value, key)
    else:
        assert isinstance(part, bool if name == "filesAnalyzed" else str), name
        assert name not in VALUES or part in VALUES[name].split()


def follows_the_rules(document: dict[str, Any]) -> None:
    """What the specification of SPDX 2.3 demands of such a document."""
    fits_the_schema(document)
    assert (document["spdxVersion"], document["dataLicense"]) == ("SPDX-2.3", "CC0-1.0")
    assert document["SPDXID"] == "SPDXRef-DOCUMENT"
    assert re.fullmatch(r"https://[^#\s]+", document["documentNamespace"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", document["creationInfo"]["created"])
    assert all(re.match(r"(Tool|Person|Organization): \S", who) for who in document["creationInfo"]["creators"])
    ids = [document["SPDXID"], *(package["SPDXID"] for package in document["packages"])]
    assert len(set(ids)) == len(ids)
    assert all(re.fullmatch(r"SPDXRef-[A-Za-z0-9.-]+", one) for one in ids)
    explained = {one["licenseId"] for one in document.get("hasExtractedLicensingInfos", [])}
    assert all(one["extractedText"] for one in document.get("hasExtractedLicensingInfos", []))
    licensing = get_spdx_licensing()
    used = set()
    for package in document["packages"]:
        assert package["name"]
        assert package["downloadLocation"] == "NOASSERTION"
        assert package["filesAnalyzed"] is False  # with True, a verification code is required
        assert {"licenseConcluded", "licenseDeclared", "copyrightText"} <= package.keys()
        assert all(re.fullmatch("[0-9a-f]{64}", one["checksumValue"]) for one in package.get("checksums", []))
        assert all(one["referenceLocator"].startswith("pkg:") for one in package.get("externalRefs", []))
        declared = package["licenseDeclared"]
        if declared != "NOASSERTION":
            words = set(re.findall(r"LicenseRef-[A-Za-z0-9.-]+", declared))
            used |= words
            assert set(licensing.unknown_license_keys(declared)) <= words
    assert used == explained
    related = [one["relatedSpdxElement"] for one in document["relationships"]]
    assert sorted(related) == sorted(ids[1:])
    assert [one["relationshipType"] for one in document["relationships"]] == ["DESCRIBES"] + ["CONTAINS"] * (
        len(ids) - 2
    )
    assert {one["spdxElementId"] for one in document["relationships"]} <= set(ids)


def test_it_follows_the_rules(spdx: ModuleType) -> None:
    follows_the_rules(spdx.document(BOM))
    follows_the_rules(spdx.document({**BOM, "components": []}))


def test_a_package(spdx: ModuleType) -> None:
    document = spdx.document(BOM)
    image, first, second, third, fourth, last, compiled = document["packages"]
    assert third == {
        "SPDXID": third["SPDXID"],
        "name": "torch",
        "versionInfo": "2.13.0",
        "primaryPackagePurpose": "LIBRARY",
        "downloadLocation": "NOASSERTION",
        "filesAnalyzed": False,
        "licenseConcluded": "NOASSERTION",
        "licenseDeclared": "MIT OR LicenseRef-own",
        "copyrightText": "NOASSERTION",
        "checksums": [{"algorithm": "SHA256", "checksumValue": DIGEST}],
        "externalRefs": [
            {
                "referenceCategory": "PACKAGE-MANAGER",
                "referenceType": "purl",
                "referenceLocator": "pkg:pypi/torch@2.13.0",
            }
        ],
    }
    assert image["primaryPackagePurpose"] == "CONTAINER"
    assert second["licenseDeclared"] == "MIT AND Zlib"
    assert fourth["licenseDeclared"] == f"{first['licenseDeclared']} AND MIT"
    assert last["licenseDeclared"] == "NOASSERTION"
    assert (compiled["licenseDeclared"], compiled["checksums"]) == ("MIT", third["checksums"])
    texts = {one["licenseId"]: one["extractedText"] for one in document["hasExtractedLicensingInfos"]}
    assert texts[first["licenseDeclared"]] == "see /usr/share/x"


def test_the_same_again_for_the_same(spdx: ModuleType) -> None:
    assert json.dumps(spdx.document(BOM)) == json.dumps(spdx.document(json.loads(json.dumps(BOM))))
    other = {**BOM, "serialNumber": "urn:uuid:11234567-89ab-cdef-0123-456789abcdef"}
    assert spdx.document(other)["documentNamespace"] != spdx.document(BOM)["documentNamespace"]


def test_of_a_root(root: Path, tmp_path: Path) -> None:
    steps = root / "containers" / "steps"
    code = (
        "import json, sys\n"
        "from pathlib import Path\n"
        f"sys.path.insert(0, {str(steps)!r})\n"
        "import sbom\n"
        "from spdx import document\n"
        f"found = sbom.sbom(Path({str(tmp_path)!r}), Path({str(tmp_path)!r}), variant='cpu', epoch=1)\n"
        "print(json.dumps(document(found)))\n"
    )
    (tmp_path / "etc").mkdir()
    (tmp_path / "etc" / "os-release").write_text("VERSION_CODENAME=bookworm\n")
    (tmp_path / "var" / "lib" / "dpkg").mkdir(parents=True)
    status = "Package: gcc-12\nStatus: install ok installed\nArchitecture: amd64\nVersion: 1:12\n"
    (tmp_path / "var" / "lib" / "dpkg" / "status").write_text(status)
    site = tmp_path / "opt" / "dray" / "lib" / "python3.11" / "site-packages" / "dray-1.dist-info"
    site.mkdir(parents=True)
    (site / "METADATA").write_text("Metadata-Version: 2.1\nName: dray\nVersion: 1\nLicense-Expression: Apache-2.0\n")
    done = subprocess.run([sys.executable, "-B", "-c", code], capture_output=True, text=True, check=True)
    document = json.loads(done.stdout)
    follows_the_rules(document)
    assert [package["name"] for package in document["packages"]] == ["dray-cpu", "gcc-12", "dray"]
