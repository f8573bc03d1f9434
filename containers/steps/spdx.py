"""The bill of materials once more, in SPDX 2.3: what `sbom.py` found, for the scanners that read no CycloneDX."""

from __future__ import annotations

import hashlib
import re
from typing import Any

Json = dict[str, Any]

DOCUMENT = "SPDXRef-DOCUMENT"
UNKNOWN = "NOASSERTION"


def document(bom: Json) -> Json:
    """Of a CycloneDX document of `sbom.py`; the same again for the same."""
    about = bom["metadata"]
    image = _package(about["component"], "CONTAINER")
    packages = [_package(part, "LIBRARY") for part in bom["components"]]
    texts = {ref: text for part in bom["components"] for ref, text in _references(part.get("licenses", []))}
    extracted = [{"licenseId": ref, "extractedText": texts[ref], "name": texts[ref]} for ref in sorted(texts)]
    return {
        "spdxVersion": "SPDX-2.3",
        "dataLicense": "CC0-1.0",
        "SPDXID": DOCUMENT,
        "name": image["name"],
        "documentNamespace": f"https://spdx.org/spdxdocs/{image['name']}-{bom['serialNumber'].rpartition(':')[2]}",
        "creationInfo": {
            "created": about["timestamp"].replace("+00:00", "Z"),
            "creators": [f"Tool: dray-{image['versionInfo']}"],
        },
        "packages": [image, *packages],
        "relationships": [
            _relation(DOCUMENT, "DESCRIBES", image["SPDXID"]),
            *(_relation(image["SPDXID"], "CONTAINS", package["SPDXID"]) for package in packages),
        ],
        **({"hasExtractedLicensingInfos": extracted} if extracted else {}),
    }


def _relation(subject: str, kind: str, of: str) -> Json:
    return {"spdxElementId": subject, "relationshipType": kind, "relatedSpdxElement": of}


def _package(part: Json, purpose: str) -> Json:
    checksums = [{"algorithm": "SHA256", "checksumValue": one["content"]} for one in part.get("hashes", [])]
    category = {"referenceCategory": "PACKAGE-MANAGER", "referenceType": "purl"}
    purl = [{**category, "referenceLocator": part["purl"]}] if "purl" in part else []
    # Names may differ in what an id cannot have: libstdc++ and libstdc--.
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", part["name"])
    return {
        "SPDXID": f"SPDXRef-{readable}-{hashlib.sha256(part['bom-ref'].encode()).hexdigest()[:16]}",
        "name": part["name"],
        "versionInfo": part["version"],
        "primaryPackagePurpose": purpose,
        "downloadLocation": UNKNOWN,
        "filesAnalyzed": False,
        "licenseConcluded": UNKNOWN,
        "licenseDeclared": _declared(part.get("licenses", [])),
        "copyrightText": UNKNOWN,
        **({"checksums": checksums} if checksums else {}),
        **({"externalRefs": purl} if purl else {}),
    }


def _declared(licenses: list[Json]) -> str:
    """One expression of all: ids, and references to what has only a name."""
    found = [
        one.get("expression") or one["license"].get("id") or _reference(one["license"]["name"]) for one in licenses
    ]
    several = len(found) > 1
    return " AND ".join(f"({one})" if several and " OR " in one else one for one in found) or UNKNOWN


def _reference(name: str) -> str:
    readable = re.sub(r"[^A-Za-z0-9.]+", "-", name)[:40].strip("-")
    return f"LicenseRef-{readable}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _references(licenses: list[Json]) -> list[tuple[str, str]]:
    """What a document must explain: the names of licences that have no id, and references in expressions."""
    named = [one["license"]["name"] for one in licenses if "name" in one.get("license", {})]
    inside = [ref for one in licenses for ref in re.findall(r"LicenseRef-[A-Za-z0-9.-]+", one.get("expression", ""))]
    return [(_reference(name), name) for name in named] + [(ref, "as the package itself says") for ref in inside]
