"""The bill of materials of an image: a small root and its inputs, the whole document, and CycloneDX's own schema."""

from __future__ import annotations

import importlib.util
import json
import sys
from email.message import Message
from hashlib import sha256
from pathlib import Path
from types import ModuleType

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

STATUS = """\
Package: libstdc++6
Status: install ok installed
Architecture: amd64
Version: 12.2.0-14+deb12u1
Description: a library
 Package: not a field

Package: gcc-12
Status: hold ok installed
Architecture: amd64
Version: 12.2.0-14+deb12u1

Package: tzdata
Status: install ok installed
Architecture: all
Version: 1:2026f-0+deb12u1

Package: gone
Status: deinstall ok config-files
Architecture: all
Version: 1
"""
GCC = """\
This is the compiler. It is under the terms of the GNU
General Public License; either version 3, or (at your option) any later version.
"""
TZDATA = """\
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/

Files: *
Copyright: none
License: public-domain

Files: debian/*
License: Expat or GPL-2+
 The text, which names GPL-3.

License: Apache-2.0
"""


@pytest.fixture
def sbom(root, monkeypatch) -> ModuleType:
    monkeypatch.setattr(sys, "dont_write_bytecode", True)  # the steps' folder is a build's input
    spec = importlib.util.spec_from_file_location("sbom", root / "containers" / "steps" / "sbom.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def image(tmp_path) -> Path:
    """The root of an image."""
    image = tmp_path / "image"
    write(image / "etc/os-release", 'NAME="Debian GNU/Linux"\nVERSION_CODENAME=bookworm\n')
    write(image / "var/lib/dpkg/status", STATUS)
    write(image / "usr/share/doc/gcc-12-base/copyright", GCC)
    (image / "usr/share/doc/gcc-12").symlink_to("gcc-12-base")
    write(image / "usr/share/doc/tzdata/copyright", TZDATA)
    for name, version, licence in (
        ("dray", "0.1.0", "License-Expression: Apache-2.0"),
        ("DeepSpeed", "0.19.8", "License: Apache Software License 2.0"),
        ("torch", "2.8.0+rocm6.4", "License-Expression: BSD-3-Clause AND Apache-2.0 WITH LLVM-exception"),
    ):
        folder = image / f"opt/dray/lib/python3.11/site-packages/{name}-{version}.dist-info"
        write(
            folder / "METADATA", f"Metadata-Version: 2.4\nName: {name}\nVersion: {version}\n{licence}\n\nLicense: no\n"
        )
    return image


@pytest.fixture
def inputs(tmp_path) -> Path:
    """What the image was built from; each file holds its own name."""
    inputs = tmp_path / "inputs"
    for path in (
        "debs/gcc-12_12.2.0-14+deb12u1_amd64.deb",
        "wheels/deepspeed-0.19.8.tar.gz",
        "wheels/torch-2.8.0+rocm6.4-cp311-cp311-manylinux_2_28_x86_64.whl",
        "wheels/torch-2.8.0+rocm6.4.tar.gz",
        "wheels/torch-2.8.0-cp311-cp311-manylinux_2_28_x86_64.whl",
        "dray/dray-0.1.0-py3-none-any.whl",
    ):
        write(inputs / path, path)
    write(inputs / "debs/tzdata_1%3a2026f-0+deb12u1_all.deb", "tzdata")
    write(inputs / "debs/base.sha256", f"libstdc++6 12.2.0-14+deb12u1 amd64 {'5' * 64}\ngone 1 all {'6' * 64}\n")
    return inputs


def component(name: str, version: str, purl: str, digest: str, *licenses: object) -> dict[str, object]:
    found: dict[str, object] = {"type": "library", "bom-ref": purl, "name": name, "version": version, "purl": purl}
    found["hashes"] = [{"alg": "SHA-256", "content": digest}]
    return found | ({"licenses": list(licenses)} if licenses else {})


def digest(content: str) -> str:
    return sha256(content.encode()).hexdigest()


def test_the_whole_document(sbom, image, inputs):
    found = sbom.sbom(image, inputs, variant="rocm", epoch=1760000000)
    apache = {"license": {"id": "Apache-2.0"}}
    assert found == {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "serialNumber": "urn:uuid:023a30d3-01a7-5d19-86a0-4d3366f3ecec",
        "metadata": {
            "timestamp": "2025-10-09T08:53:20+00:00",
            "component": {"type": "container", "bom-ref": "dray-rocm", "name": "dray-rocm", "version": "0.1.0"},
        },
        "components": [
            component(
                "gcc-12",
                "12.2.0-14+deb12u1",
                "pkg:deb/debian/gcc-12@12.2.0-14%2Bdeb12u1?arch=amd64&distro=bookworm",
                digest("debs/gcc-12_12.2.0-14+deb12u1_amd64.deb"),
                {"license": {"id": "GPL-3.0-or-later"}},
                {"license": {"name": "see /usr/share/doc/gcc-12/copyright"}},
            ),
            component(
                "libstdc++6",
                "12.2.0-14+deb12u1",
                "pkg:deb/debian/libstdc%2B%2B6@12.2.0-14%2Bdeb12u1?arch=amd64&distro=bookworm",
                "5" * 64,
            ),
            component(
                "tzdata",
                "1:2026f-0+deb12u1",
                "pkg:deb/debian/tzdata@1:2026f-0%2Bdeb12u1?arch=all&distro=bookworm",
                digest("tzdata"),
                {"license": {"name": "public-domain"}},
                {"license": {"name": "MIT OR GPL-2.0-or-later"}},
            ),
            component(
                "DeepSpeed", "0.19.8", "pkg:pypi/deepspeed@0.19.8", digest("wheels/deepspeed-0.19.8.tar.gz"), apache
            ),
            component("dray", "0.1.0", "pkg:pypi/dray@0.1.0", digest("dray/dray-0.1.0-py3-none-any.whl"), apache),
            component(
                "torch",
                "2.8.0+rocm6.4",
                "pkg:pypi/torch@2.8.0%2Brocm6.4",
                digest("wheels/torch-2.8.0+rocm6.4-cp311-cp311-manylinux_2_28_x86_64.whl"),
                {"expression": "BSD-3-Clause AND Apache-2.0 WITH LLVM-exception"},
            ),
        ],
    }


def test_what_was_compiled_from_a_release(sbom, image, inputs):
    url = "https://github.com/a/b/archive/refs/tags/v1.2.tar.gz"
    one = {"name": "b", "version": "1.2", "sha256": "7" * 64, "url": url, "license": "BSD-2-Clause OR GPL-2.0-only"}
    without = sbom.sbom(image, inputs, variant="cuda", epoch=0)
    write(inputs / "sources.json", json.dumps([one, {**one, "name": "c", "license": "Apache-2.0"}]))
    found = sbom.sbom(image, inputs, variant="cuda", epoch=0)
    purl = "pkg:generic/{}@1.2?download_url=https%3A%2F%2Fgithub.com%2Fa%2Fb%2Farchive%2Frefs%2Ftags%2Fv1.2.tar.gz"
    assert [part for part in found["components"] if part not in without["components"]] == [
        component("b", "1.2", purl.format("b"), "7" * 64, {"expression": "BSD-2-Clause OR GPL-2.0-only"}),
        component("c", "1.2", purl.format("c"), "7" * 64, {"license": {"id": "Apache-2.0"}}),
    ]
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(found)) is None


def test_the_schema_takes_it(sbom, image, inputs):
    found = json.dumps(sbom.sbom(image, inputs, variant="cpu", epoch=0))
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(found) is None


def test_the_schema_knows_every_id(sbom):
    parts = [{"type": "library", "name": one, "licenses": sbom.licenses([one])} for one in sorted(sbom.IDS)]
    assert [part["licenses"] for part in parts] == [[{"license": {"id": part["name"]}}] for part in parts]
    document = {"bomFormat": "CycloneDX", "specVersion": "1.6", "components": parts}
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(json.dumps(document)) is None


def test_the_number_is_the_contents(sbom, image, inputs):
    first = sbom.sbom(image, inputs, variant="cpu", epoch=0)
    paragraphs = STATUS.split("\n\n")
    write(image / "var/lib/dpkg/status", "\n\n".join(reversed(paragraphs)))
    assert sbom.sbom(image, inputs, variant="cpu", epoch=0) == first
    assert sbom.sbom(image, inputs, variant="cpu", epoch=1)["serialNumber"] != first["serialNumber"]


def test_files_that_nobody_kept(sbom, image, inputs):
    for path in inputs.rglob("*.*"):
        path.unlink()
    found = sbom.sbom(image, inputs, variant="cpu", epoch=0)
    assert [part["name"] for part in found["components"] if "hashes" in part] == []


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("GPL-2", ["GPL-2.0-only"]),
        ("LGPLv2.1+", ["LGPL-2.1-or-later"]),
        ("GFDL-NIV-1.3+", ["GFDL-1.3-no-invariants-or-later"]),
        ("Apache 2.0 License", ["Apache-2.0"]),
        ("Artistic", ["Artistic-1.0-Perl"]),
        ("GPL-1+ or Artistic, and Expat", ["GPL-1.0-or-later OR Artistic-1.0-Perl", "MIT"]),
        ("MPL-2.0 AND MIT", ["MPL-2.0", "MIT"]),
        ("ISC, and Zlib", ["ISC", "Zlib"]),
        ("LicenseRef-NVIDIA-Proprietary", ["LicenseRef-NVIDIA-Proprietary"]),
        # "GPL" is any version, "BSD" and "Apache" one of several; the rest is not SPDX's, or not this script's.
        *((name, []) for name in ("GPL", "GPL-7", "BSD", "Apache", "public-domain", "GPL-2+ or Kazlib", "")),
    ],
)
def test_names(sbom, name, expected):
    assert sbom.spdx(name) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("Format: 1\n\nFiles: *\nLicense:   Expat\n\nFiles: b\nLicense: BSD-3-clause\n", ["MIT", "BSD-3-Clause"]),
        ("Format: 1\n\nFiles: *\nLicense: Expat or Zlib\n\nFiles: b\nLicense: ISC\n", ["(MIT OR Zlib) AND ISC"]),
        ("Format: 1\n\nFiles: *\nLicense: Expat or Zlib\n", ["MIT OR Zlib"]),
        ("Format: 1\n\nFiles: *\nLicense: you may use this as you like, with or without me\n", ["see"]),
        ("Format: 1\nLicense: Expat\n", ["see"]),
        ("under the terms of the GNU Lesser General\n  Public License, version 2.1.\n", ["LGPL-2.1-only", "see"]),
        ("the text of the GNU General Public License, version 2, is in /usr/share/common-licenses/GPL-2\n", ["see"]),
        (
            "GNU General Public License for details; GNU Library General Public License, version 2+",
            ["LGPL-2.0-or-later", "see"],
        ),
        ("the GNU Free Documentation License, Version 1.2 or any later version", ["GFDL-1.2-or-later", "see"]),
        ("It is in /usr/share/common-licenses/Apache-2.0.", ["Apache-2.0", "see"]),
        ("PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2", ["Python-2.0", "see"]),
    ],
)
def test_copyright_files(sbom, tmp_path, text, expected):
    write(tmp_path / "usr/share/doc/a/copyright", text)
    found = [
        one.get("expression") or next(iter(one["license"].values())) for one in sbom.debian_licenses("a", tmp_path)
    ]
    assert found == ["see /usr/share/doc/a/copyright" if one == "see" else one for one in expected]


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ([("License-Expression", "PSF-2.0"), ("License", "MIT")], [{"license": {"id": "PSF-2.0"}}]),
        ([("License-Expression", "BlueOak-1.0.0")], [{"expression": "BlueOak-1.0.0"}]),
        (
            [("License", "Apache"), ("Classifier", "License :: OSI Approved :: MIT License")],
            [{"license": {"id": "MIT"}}],
        ),
        (
            [("License", "UNKNOWN"), ("Classifier", "License :: OSI Approved :: Mozilla Public License 2.0 (MPL 2.0)")],
            [{"license": {"id": "MPL-2.0"}}],
        ),
        (
            [("License", "Copyright\n me"), ("Classifier", "License :: OSI Approved :: BSD License")],
            [{"license": {"name": "BSD License"}}],
        ),
        ([("License", "LicenseRef-NVIDIA-Proprietary")], [{"expression": "LicenseRef-NVIDIA-Proprietary"}]),
        ([("License", "LICENSE"), ("License-File", "LICENSE")], [{"license": {"name": "see LICENSE"}}]),
        ([("Classifier", "Programming Language :: Python")], []),
    ],
)
def test_what_python_packages_say(sbom, headers, expected):
    about = Message()
    for header in headers:
        about.add_header(*header)
    assert sbom.python_licenses(about) == expected
