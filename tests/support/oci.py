"""A small image of somebody else's: an OCI folder, and a registry on loopback that serves it."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

_INDEX = "application/vnd.oci.image.index.v1+json"
_MANIFEST = "application/vnd.oci.image.manifest.v1+json"
_CONFIG = "application/vnd.oci.image.config.v1+json"
_LAYER = "application/vnd.oci.image.layer.v1.tar+gzip"


def layout(folder: Path, layer: bytes) -> Path:
    """An OCI folder of one layer, a tar."""
    blobs = folder / "blobs" / "sha256"
    blobs.mkdir(parents=True)

    def blob(kind: str, content: bytes) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        (blobs / digest).write_bytes(content)
        return {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(content)}

    packed = blob(_LAYER, gzip.compress(layer, 1))
    diff = f"sha256:{hashlib.sha256(layer).hexdigest()}"
    config = {"architecture": "amd64", "os": "linux", "config": {"Env": ["PATH=/usr/bin:/bin", "WHOSE=theirs"]},
              "rootfs": {"type": "layers", "diff_ids": [diff]}}  # fmt: skip
    described = {"schemaVersion": 2, "mediaType": _MANIFEST, "layers": [packed]}
    manifest = blob(_MANIFEST, json.dumps({**described, "config": blob(_CONFIG, json.dumps(config).encode())}).encode())
    (folder / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
    (folder / "index.json").write_text(json.dumps({"schemaVersion": 2, "mediaType": _INDEX, "manifests": [manifest]}))
    return folder


@contextmanager
def registry(folder: Path) -> Iterator[str]:
    """`127.0.0.1:PORT`, where every name is this image."""
    (manifest,) = json.loads((folder / "index.json").read_text())["manifests"]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            _, _, digest = self.path.partition("sha256:")
            digest = digest or manifest["digest"].removeprefix("sha256:")
            path = folder / "blobs" / "sha256" / digest
            known = "/manifests/" in self.path or path.is_file()
            self.send_response(200 if known or self.path == "/v2/" else 404)
            content = path.read_bytes() if known else b"{}"
            self.send_header("Content-Type", _MANIFEST if "/manifests/" in self.path else "application/octet-stream")
            self.send_header("Docker-Content-Digest", f"sha256:{digest}")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command == "GET":
                self.wfile.write(content)

        do_HEAD = do_GET  # noqa: N815  http.server's name

        def log_message(self, *_: object) -> None:
            """In silence."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
