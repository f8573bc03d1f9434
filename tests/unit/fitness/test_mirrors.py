"""What is contacted in the place of registries, indexes and archives, by the user's own file."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from dray.config import mirrors
from dray.contract.findings import ConfigError
from dray.fitness import doctor

DIGEST = f"sha256:{'a' * 64}"
FILE = """[mirrors]
"docker.io" = "harbor.example:8443/hub"
"docker.io/library" = "harbor.example/official/"
"https://wheels.example/whl" = "https://artifactory.example/api/pypi/vendor"
"http://mirror.example/debian/" = "https://artifactory.example/debian"
"""


@pytest.fixture
def file(tmp_path, monkeypatch) -> Path:
    """Where a user has it."""
    monkeypatch.delenv("DRAY_MIRRORS", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "dray").mkdir()
    path = tmp_path / "dray" / "mirrors.toml"
    path.write_text(FILE)
    path.chmod(0o600)
    return path


@pytest.mark.parametrize(
    ("reference", "pulled"),
    [
        (f"debian:bookworm-slim@{DIGEST}", f"harbor.example/official/debian:bookworm-slim@{DIGEST}"),
        ("docker.io/library/debian", "harbor.example/official/debian"),
        ("rocm/pytorch:7", "harbor.example:8443/hub/rocm/pytorch:7"),
        ("docker.io/rocm/pytorch", "harbor.example:8443/hub/rocm/pytorch"),
        ("docker://index.docker.io/rocm/pytorch", "docker://harbor.example:8443/hub/rocm/pytorch"),
        ("oras://docker.io/team/image", "oras://harbor.example:8443/hub/team/image"),
        ("https://wheels.example/whl/x.sif", "https://artifactory.example/api/pypi/vendor/x.sif"),
        ("nvcr.io/nvidia/pytorch:26.01", "nvcr.io/nvidia/pytorch:26.01"),
        ("localhost/mine", "localhost/mine"),
        ("127.0.0.1:5000/mine", "127.0.0.1:5000/mine"),
    ],
)
def test_an_image(file, reference, pulled):
    assert mirrors.image(reference) == pulled


@pytest.mark.parametrize(
    ("address", "contacted"),
    [
        ("https://wheels.example/whl/cpu", "https://artifactory.example/api/pypi/vendor/cpu"),
        ("https://wheels.example/whl", "https://artifactory.example/api/pypi/vendor"),
        ("https://wheels.example/whl2", "https://wheels.example/whl2"),
        ("https://github.example/x.tar.gz", "https://github.example/x.tar.gz"),
    ],
)
def test_a_url(file, address, contacted):
    assert mirrors.url(address) == contacted


def test_apts_sources(file, tmp_path):
    sources = (
        "deb http://mirror.example/debian bookworm main\ndeb [arch=amd64] http://mirror.example/debian/ sid main\n"
        "URIs: http://mirror.example/debian http://mirror.example/debian/\nURIs: http://mirrorXexample/debian\n"
        "# http://mirror.example/debian-security\n"
    )
    script = tmp_path / "sed"
    script.write_text(mirrors.sed())
    argv = ["sed", "--regexp-extended", f"--file={script}"]
    done = subprocess.run(argv, input=sources, capture_output=True, text=True, check=True)
    assert done.stdout == (
        "deb https://artifactory.example/debian bookworm main\n"
        "deb [arch=amd64] https://artifactory.example/debian/ sid main\n"
        "URIs: https://artifactory.example/debian https://artifactory.example/debian/\n"
        "URIs: http://mirrorXexample/debian\n"
        "# http://mirror.example/debian-security\n"
    )


def test_no_file_is_no_mirror(file):
    file.unlink()
    assert (mirrors.table(), mirrors.sed()) == ({}, "")
    assert mirrors.image("debian") == "debian"


def test_a_file_of_another_name(file, tmp_path, monkeypatch):
    other = tmp_path / "other.toml"
    other.write_text('[mirrors]\n"docker.io" = "other.example"\n')
    other.chmod(0o600)
    monkeypatch.setenv("DRAY_MIRRORS", str(other))
    assert mirrors.table() == {"docker.io": "other.example"}
    other.unlink()
    with pytest.raises(ConfigError) as refused:
        mirrors.table()
    assert str(refused.value) == f"the file of mirrors does not exist\n  where:  DRAY_MIRRORS\n  found:  {other}"


def test_a_file_that_others_may_write(file):
    file.chmod(0o666)
    with pytest.raises(ConfigError) as refused:
        mirrors.table()
    assert refused.value.details == {
        "where": str(file),
        "found": "a file that others may write, mode 0666",
        "fix": f"chmod go-w {file}, as its owner: it decides what an image is made from",
    }


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ('"docker.io" = "https://harbor.example"', "of different kinds"),
        ('"https://wheels.example" = "harbor.example"', "of different kinds"),
        ('"docker.io" = "harbor.example/a b"', "1 error"),
        ('"https://wheels.example" = "https://me:hunter2@harbor.example"', "contains a login"),
        ('"docker.io" = "me:hunter2@harbor.example"', "contains a login"),
        ("docker = 3", "1 error"),
    ],
)
def test_what_cannot_be_a_mirror(file, line, found):
    file.write_text(f"[mirrors]\n{line}\n")
    with pytest.raises(ConfigError, match=found) as refused:
        mirrors.table()
    assert "hunter2" not in str(refused.value)


def test_doctor_shows_the_table(file):
    assert [finding.line() for finding in doctor.mirror_table()][:2] == [
        f"ok      mirror: http://mirror.example/debian -> https://artifactory.example/debian ({file})",
        f"ok      mirror: https://wheels.example/whl -> https://artifactory.example/api/pypi/vendor ({file})",
    ]
    file.chmod(0o622)
    (finding,) = doctor.mirror_table()
    assert finding.line() == (
        "error   other users may change the file of mirrors: a file that others may write, mode 0622\n"
        f"        where:  {file}\n"
        f"        fix:    chmod go-w {file}, as its owner: it decides what an image is made from"
    )
