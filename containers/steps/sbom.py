"""The bill of materials of an image, in CycloneDX 1.6.

`python3 sbom.py OUT.json` runs in the image, which seals it and has no network: so it uses the standard library alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import uuid
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from importlib.metadata import PackageMetadata, distributions
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote

Json = dict[str, Any]
Digests = Mapping[tuple[str, ...], str]

# CycloneDX refuses a document with an id that SPDX has not got, so what is not here stays a name.
PLAIN = """0BSD Apache-2.0 Artistic-1.0-Perl Artistic-2.0 Beerware BSD-2-Clause BSD-3-Clause BSD-4-Clause
BSD-4-Clause-UC BSL-1.0 CC-BY-3.0 CC0-1.0 CNRI-Python FSFAP FSFUL FSFULLR HPND ISC Latex2e MIT MIT-CMU MPL-1.1
MPL-2.0 MS-PL OpenSSL PSF-2.0 Python-2.0 Sleepycat Unlicense X11 Zlib"""
FAMILIES = """AGPL-3.0 GPL-1.0 GPL-2.0 GPL-3.0 LGPL-2.0 LGPL-2.1 LGPL-3.0
GFDL-1.2 GFDL-1.3 GFDL-1.2-no-invariants GFDL-1.3-no-invariants"""
IDS = {*PLAIN.split(), *(f"{family}-{end}" for family in FAMILIES.split() for end in ("only", "or-later"))}
# Debian's short names and Python's, where they can mean one licence only.
ALIASES = {name.lower(): name for name in IDS} | {
    "3-clause-bsd": "BSD-3-Clause",
    "apache-2": "Apache-2.0",
    "apache-software-2.0": "Apache-2.0",
    "artistic": "Artistic-1.0-Perl",  # base-files says so of Debian's
    "artistic-2": "Artistic-2.0",
    "bsd-2": "BSD-2-Clause",
    "bsd-3": "BSD-3-Clause",
    "expat": "MIT",
    "mpl-2": "MPL-2.0",
}
GNU = re.compile(r"([al]?gpl|gfdl)(-niv)?-?v?(\d)(\.\d)?(\+?)")
# How free text grants one of GNU's licences; without "or later" it may but mention it.
GRANT = re.compile(
    r"(terms of (?:the )?)?GNU (Lesser |Library )?(General Public|Free Documentation) License\b"
    r"(?:(?!GNU|details).){0,150}?"  # another one's version is not this one's
    r"\bversion (\d(?:\.\d)?)(?: of the License)?[;,]?(\+| \(?or,? (?:\(?at your option\)?,? )?(?:any )?later)?",
    re.IGNORECASE,
)
COMMON = re.compile(r"/usr/share/common-licenses/((?:Apache|Artistic|CC0|MPL)(?:-[\d.]*\d)?)")
PHRASES = {
    "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2": "Python-2.0",
    "GCC RUNTIME LIBRARY EXCEPTION": "GPL-3.0-or-later WITH GCC-exception-3.1",
}
LONGEST = 7  # words: more is the first line of a licence, not its name


def spdx(name: str) -> list[str]:
    """A licence's name as SPDX has it; several, where "and" joins them; none, where one is not known."""
    comma = "," if re.search(r"\sor\s", name, re.IGNORECASE) else ",?"  # "a or b, and c" is (a or b) and c
    groups = [_group(group) for group in re.split(rf"{comma}\s+and\s+", name, flags=re.IGNORECASE)]
    return [group for group in groups if group] if all(groups) else []


def _group(text: str) -> str | None:
    parts = re.split(r"\s+(and|or)\s+", text, flags=re.IGNORECASE)
    known = [part.upper() if number % 2 else _known(part) for number, part in enumerate(parts)]
    return " ".join(word for word in known if word) if all(known) else None


def _known(name: str) -> str | None:
    key = re.sub(r"\s+", "-", re.sub(r"\blicen[cs]e\b", "", name.lower()).strip())
    if key in ALIASES or key.startswith("licenseref-"):
        return ALIASES.get(key, name)
    gnu = GNU.fullmatch(key)
    if not gnu:
        return None
    family, free, major, minor, later = gnu.groups()
    version = f"{major}{minor or '.0'}{'-no-invariants' if free else ''}"
    return ALIASES.get(f"{family}-{version}-{'or-later' if later else 'only'}")


def licenses(names: Sequence[str]) -> list[Json]:
    """Ids and names; or one expression, which nothing can stand beside, where all is known and ids do not say it."""
    found = list(dict.fromkeys(one for name in names for one in spdx(name) or [name]))
    if all(map(spdx, names)) and not IDS.issuperset(found):
        return [{"expression": " AND ".join(f"({one})" if " OR " in one and found[1:] else one for one in found)}]
    return [{"license": {"id" if one in IDS else "name": one}} for one in found]


def debian_licenses(package: str, root: Path) -> list[Json]:
    """What a package's copyright file names; it is about the whole source that the package is made from."""
    path = f"usr/share/doc/{package}/copyright"
    if not (root / path).exists():
        return []
    text, see = (root / path).read_text(errors="replace"), f"see /{path}"
    if not re.match(r"\s*Format", text):
        return licenses([*_granted(re.sub(r"[\s*#]+", " ", text)), see])
    paragraphs = [part for part in re.split(r"\n\s*\n", text) if re.search("^Files:", part, re.MULTILINE)]
    named = [re.search(r"^License:[ \t]*(\S.*)", part, re.MULTILINE) for part in paragraphs]
    names = [" ".join(match[1].split()) for match in named if match]
    return licenses([name if len(name.split()) <= LONGEST or spdx(name) else see for name in names] or [see])


def _granted(text: str) -> Iterator[str]:
    yield from (name for phrase, name in PHRASES.items() if phrase in text)
    for terms, lesser, kind, version, later in GRANT.findall(text):
        family = "GFDL" if kind.lower().startswith("free") else "LGPL" if lesser else "GPL"
        known = spdx(f"{family}-{version}{'+' if later else ''}")
        yield from known if terms or later else []
    yield from COMMON.findall(text)


def python_licenses(about: PackageMetadata) -> list[Json]:
    """What a distribution says of itself, the clearest first."""
    expression = about.get_all("License-Expression", [])
    if expression:
        return licenses(expression) if IDS.issuperset(expression) else [{"expression": expression[0]}]
    named = [name for name in about.get_all("License", []) if "\n" not in name and name not in ("LICENSE", "UNKNOWN")]
    classified = [line.split(" :: ")[-1] for line in about.get_all("Classifier", []) if line.startswith("License ::")]
    short = [re.sub(r".*\((.*)\)", r"\1", name) for name in classified]
    clear = [names for names in (named, short) if all(map(spdx, names))]
    files = [f"see {path}" for path in about.get_all("License-File", [])]
    return licenses(next(filter(None, [*clear, named, classified, files]), []))


def debian(root: Path, digests: Digests) -> Iterator[Json]:
    suite = re.findall(r"^VERSION_CODENAME=(\w+)", (root / "etc/os-release").read_text(), re.MULTILINE)[0]
    for paragraph in (root / "var/lib/dpkg/status").read_text().split("\n\n"):
        field = dict(re.findall(r"^(Package|Status|Version|Architecture): (.*)$", paragraph, re.MULTILINE))
        if field.get("Status", "").endswith(" installed"):
            key = name, version, architecture = field["Package"], field["Version"], field["Architecture"]
            purl = f"pkg:deb/debian/{quote(name)}@{quote(version, safe=':')}?arch={architecture}&distro={suite}"
            yield _component(name, version, purl, debian_licenses(name, root), digests.get(key))


def python(site: Path, digests: Digests) -> Iterator[Json]:
    for found in distributions(path=[str(site)]):
        about = found.metadata  # parsed anew at each access
        key = _normal(about["Name"]), about["Version"]
        purl = f"pkg:pypi/{key[0]}@{quote(key[1])}"
        yield _component(about["Name"], key[1], purl, python_licenses(about), digests.get(key))


def sources(inputs: Path) -> Iterator[Json]:
    """What a step compiled from a release's tar; image.toml says what it is."""
    about = inputs / "sources.json"
    for one in json.loads(about.read_text()) if about.exists() else ():
        name, version, digest = one["name"], one["version"], one["sha256"]
        purl = f"pkg:generic/{name}@{version}?download_url={quote(one['url'], safe='')}"
        yield _component(name, version, purl, licenses([one["license"]]), digest)


def _component(name: str, version: str, purl: str, licenses: list[Json], digest: str | None) -> Json:
    hashes = [{"alg": "SHA-256", "content": digest}] if digest else []
    parts = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    return parts | {key: value for key, value in (("hashes", hashes), ("licenses", licenses)) if value}


def digests(inputs: Path) -> Digests:
    """SHA-256 of every file that the build installed, and of the base's own packages as their archive gives it."""
    base = inputs / "debs" / "base.sha256"
    lines = [line.split() for line in base.read_text().splitlines()] if base.exists() else []
    # Wheels last: pip takes one before a source distribution of the same version.
    files = [path for ending in ("debs/*.deb", "*/*.tar.gz", "*/*.whl") for path in inputs.glob(ending)]
    with ThreadPoolExecutor() as pool:
        hashed = list(zip(map(_key, files), pool.map(_sha256, files), strict=True))
    return {(name, version, architecture): digest for name, version, architecture, digest in lines} | dict(hashed)


def _key(path: Path) -> tuple[str, ...]:
    """(name, version, architecture) of Debian's, (name, version) of Python's."""
    name = unquote(path.name)
    if path.suffix == ".deb":
        return tuple(name.removesuffix(".deb").split("_"))
    parts = name.split("-")[:2] if path.suffix == ".whl" else name.removesuffix(".tar.gz").rsplit("-", 1)
    return _normal(parts[0]), parts[1]


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sbom(root: Path, inputs: Path, *, variant: str, epoch: int) -> Json:
    """Of the image in this root, built from these inputs; the same again for the same."""
    known = digests(inputs)
    site = next(root.glob("opt/dray/lib/python3*/site-packages"))
    found = [*debian(root, known), *python(site, known), *sources(inputs)]
    parts = sorted(found, key=lambda part: str(part["purl"]))
    version = next(part["version"] for part in parts if part["purl"].startswith("pkg:pypi/dray@"))
    image = {"type": "container", "bom-ref": f"dray-{variant}", "name": f"dray-{variant}", "version": version}
    bom = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {"timestamp": datetime.fromtimestamp(epoch, UTC).isoformat(), "component": image},
        "components": parts,
    }
    return bom | {"serialNumber": uuid.uuid5(uuid.NAMESPACE_OID, json.dumps(bom)).urn}


if __name__ == "__main__":
    bom = sbom(Path("/"), Path("/mnt"), variant=os.environ["DRAY_VARIANT"], epoch=int(os.environ["SOURCE_DATE_EPOCH"]))
    Path(sys.argv[1]).write_text(json.dumps(bom, indent=2) + "\n")
