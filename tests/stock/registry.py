"""A container registry with the two bases, made to the package lists of the real slim images, from Debian's archive."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import re
import shutil
import ssl
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from stock.servers import Authority

HERE = Path(__file__).parent
STAMP = "20260824T000000Z"
_OCI = "application/vnd.oci.image"
# What the real image sets for apt, besides its sources.
_APT = """DPkg::Post-Invoke { "rm -f /var/cache/apt/archives/*.deb /var/cache/apt/*.bin || true"; };
Dir::Cache::pkgcache "";
Dir::Cache::srcpkgcache "";
Acquire::GzipIndexes "true";
Acquire::Languages "none";
APT::AutoRemove::SuggestsImportant "false";
"""


def base(suite: str, *, packed: Path, dated: str, mirrors: dict[str, str], key: bytes, folder: Path) -> Path:
    """The layer of the slim image, a tar.gz, of what `bootstrap` has packed.

    The image's own sources name the `mirrors`, and above each the archive, `dated`, in a comment.
    """
    root = folder / suite
    root.mkdir()
    subprocess.run(["tar", "--extract", "--file", packed, "--directory", root], check=True)
    found = re.findall(r"(?m)^Package: (.*)$", (root / "var/lib/dpkg/status").read_text())
    assert sorted(found) == sorted((HERE / f"{suite}.txt").read_text().split())
    stanzas = []
    for suites, name in _sources(suite):
        stanzas.append(
            f"Types: deb\n# {dated}/{name}/{STAMP}\nURIs: {mirrors[name]}\nSuites: {suites}\nComponents: main\n"
            "Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg\n"
        )
    (root / "etc/apt/sources.list.d/debian.sources").write_text("\n".join(stanzas))
    (root / "etc/apt/sources.list").unlink(missing_ok=True)
    (root / "etc/apt/apt.conf.d/docker-clean").write_text(_APT)
    with (root / "usr/share/keyrings/debian-archive-keyring.gpg").open("ab") as file:
        file.write(key)
    for name in ("hostname", "resolv.conf"):
        (root / "etc" / name).write_text("")
    layer = folder / f"{suite}.tar.gz"
    argv = ["tar", "--create", "--use-compress-program=gzip --fast", "--file", layer, "--directory", root]
    subprocess.run([*argv, "--exclude=./dev/*", "--sort=name", "."], check=True)
    shutil.rmtree(root)
    return layer


def bootstrap(suite: str, *, archive: str, keyring: Path, out: Path) -> Path:
    """The packages of the slim image in a tar, from the archive."""
    if out.exists():
        return out
    given = "".join(
        f"deb [check-valid-until=no] {archive}/{name}/{STAMP} {one} main\n"
        for suites, name in _sources(suite)
        for one in suites.split()
    )
    # mmdebstrap itself would take usrmerge for bookworm, and with it all of Perl.
    merged = ["--include=usr-is-merged", "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr"]
    argv = ["mmdebstrap", "--quiet", "--variant=minbase", *(merged if suite == "bookworm" else [])]
    argv += [f"--keyring={keyring}", "--dpkgopt=path-exclude=/usr/share/man/*", "--dpkgopt=force-unsafe-io"]
    argv += ["--dpkgopt=path-exclude=/usr/share/doc/*", "--dpkgopt=path-include=/usr/share/doc/*/copyright"]
    for of_another_lock in out.parent.glob(f"{suite}-*.tar"):
        of_another_lock.unlink()
    partial = out.with_suffix(".partial.tar")
    subprocess.run([*argv, suite, partial, "-"], input=given, text=True, check=True, stdout=subprocess.DEVNULL)
    return partial.replace(out)


def _sources(suite: str) -> list[tuple[str, str]]:
    return [(f"{suite} {suite}-updates", "debian"), (f"{suite}-security", "debian-security")]


@contextmanager
def serving(address: str, signed: Authority, folder: Path, log: Path) -> Iterator[str]:
    """Debian's docker-registry on port 443 of the address, and where it is."""
    folder.mkdir()
    settings = {
        "version": 0.1, "log": {"accesslog": {"disabled": False}, "formatter": "json"},
        "storage": {"filesystem": {"rootdirectory": str(folder)}},
        "http": {
            "addr": f"{address}:443", "secret": "none",
            "tls": {"certificate": str(signed.certificate), "key": str(signed.key)},
        },
    }  # fmt: skip
    config = folder / "config.yml"
    config.write_text(json.dumps(settings))
    with log.open("w") as out:
        running = subprocess.Popen(["docker-registry", "serve", config], stdout=out, stderr=out)
    try:
        where = f"https://{address}"
        deadline = time.monotonic() + 30
        while not _answers(where, signed.ca):
            assert running.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield where
    finally:
        running.terminate()
        running.wait()


def _answers(where: str, ca: Path) -> bool:
    try:
        return _ask("GET", f"{where}/v2/", ca=ca)[0] == 200
    except OSError:
        return False


def push(where: str, ca: Path, name: str, layer: Path) -> str:
    """The digest under which the layer can be pulled as an image: an index, as the real one's, of this architecture."""
    content = layer.read_bytes()
    machine = {"x86_64": "amd64", "aarch64": "arm64"}[os.uname().machine]
    diff = hashlib.sha256(gzip.decompress(content)).hexdigest()
    config = {
        "architecture": machine, "os": "linux", "rootfs": {"type": "layers", "diff_ids": [f"sha256:{diff}"]},
        "config": {"Cmd": ["bash"], "Env": ["PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"]},
        "history": [{"created": "2026-08-24T00:00:00Z", "created_by": "debuerreotype"}],
    }  # fmt: skip
    blobs = []
    for kind, data in (("config.v1+json", json.dumps(config).encode()), ("layer.v1.tar+gzip", content)):
        blobs.append(_described(kind, data))
        location = _ask("POST", f"{where}/v2/{name}/blobs/uploads/", ca=ca)[1]["Location"]
        _ask("PUT", f"{location}&digest={blobs[-1]['digest']}", data, ca=ca)
    manifest = {"schemaVersion": 2, "mediaType": f"{_OCI}.manifest.v1+json", "config": blobs[0], "layers": blobs[1:]}
    described = _manifest(where, ca, name, "manifest.v1+json", manifest)
    described["platform"] = {"architecture": machine, "os": "linux"}
    index = {"schemaVersion": 2, "mediaType": f"{_OCI}.index.v1+json", "manifests": [described]}
    return str(_manifest(where, ca, name, "index.v1+json", index)["digest"])


def _manifest(where: str, ca: Path, name: str, kind: str, content: dict[str, object]) -> dict[str, object]:
    data = json.dumps(content).encode()
    described = _described(kind, data)
    _ask("PUT", f"{where}/v2/{name}/manifests/{described['digest']}", data, ca=ca, kind=f"{_OCI}.{kind}")
    return described


def _described(kind: str, data: bytes) -> dict[str, object]:
    return {"mediaType": f"{_OCI}.{kind}", "digest": f"sha256:{hashlib.sha256(data).hexdigest()}", "size": len(data)}


def _ask(method: str, url: str, data: bytes = b"", *, ca: Path, kind: str = "application/octet-stream"):
    request = urllib.request.Request(url, data=data, method=method, headers={"Content-Type": kind})
    with urllib.request.urlopen(request, context=ssl.create_default_context(cafile=ca), timeout=60) as answer:
        return answer.status, answer.headers
