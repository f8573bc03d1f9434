"""A stand-in for Miniforge: it makes an environment of the base's Python and installs the pip section, as Conda does.

cotainr knows one address of its installer. Here a proxy answers for that address, with a certificate of its own.
"""

from __future__ import annotations

import hashlib
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from socketserver import StreamRequestHandler, ThreadingTCPServer
from threading import Thread

ASKED = "/conda-forge/miniforge/releases/latest/download/Miniforge3-Linux-x86_64.sh"

INSTALLER = r"""#!/bin/bash
set -eu
[[ "$*" == "-b -s -p /opt/cotainr/conda" ]]
mkdir -p "$4"/{condabin,conda-meta,envs,etc/profile.d}
cat >"$4/etc/profile.d/conda.sh" <<'SH'
export PATH="/opt/cotainr/conda/condabin:$PATH"
conda() {
    if [ "$1" = activate ]; then
        export CONDA_PREFIX="/opt/cotainr/conda/envs/$2"
        export PATH="$CONDA_PREFIX/bin:$PATH"
    else
        /opt/cotainr/conda/condabin/conda "$@"
    fi
}
SH
cat >"$4/condabin/conda" <<'PYTHON'
#!/usr/bin/python3.11
import json, os, pathlib, platform, subprocess, sys, tempfile, time

PREFIX = pathlib.Path("/opt/cotainr/conda")
words = [word for word in sys.argv[1:] if word not in ("-q", "-v")]
print("conda", *words, file=sys.stderr)
# Nothing of this machine but what the build lends: no home, no files in /tmp, no setting of pip's.
assert not os.path.exists(os.environ["HOME"]) or os.path.samefile(os.environ["HOME"], os.environ["TMPDIR"])
assert not [name for name in os.environ if name.startswith(("CONDA_E", "PYTHONPATH", "SECRET"))], os.environ
if words == ["info", "--base"]:
    print(PREFIX)
elif words == ["update", "-y", "-n", "base", "-c", "conda-forge", "conda"] or words == ["clean", "-y", "-a"]:
    pass
elif words[:3] == ["env", "create", "-f"] and words[4:] == ["-n", "conda_container_env"]:
    file, env = pathlib.Path(words[3]), PREFIX / "envs" / words[5]
    text = file.read_text()
    head, _, pip = text.partition("  - pip:\n")
    channels = "channels: [conda-forge, nodefaults]"
    assert head.splitlines()[1:] == [channels, "dependencies:", "  - python=3.11", "  - pip"], head
    subprocess.run([sys.executable, "-m", "venv", env], check=True)
    with tempfile.NamedTemporaryFile("w", dir=file.parent, suffix=".txt") as asked:
        asked.writelines(json.loads(line.removeprefix("      - ")) + "\n" for line in pip.splitlines())
        asked.flush()
        install = [env / "bin" / "python", "-m", "pip", "install", "-U", "-r", asked.name, "--exists-action=b"]
        subprocess.run(install, cwd=file.parent, check=True)
    meta = env / "conda-meta"
    meta.mkdir()
    (meta / "history").write_text(time.ctime())
    (meta / "python-3.11.json").write_text(json.dumps({
        "name": "python", "version": platform.python_version(), "build": "h0_cpython", "subdir": "linux-64",
        "channel": "https://conda.invalid/conda-forge/linux-64", "license": "Python-2.0", "sha256": "ab" * 32,
    }))
else:
    sys.exit(f"the stand-in for Conda knows no {words}")
PYTHON
chmod +x "$4/condabin/conda"
"""


def digest() -> str:
    """As dray records it."""
    return f"sha256:{hashlib.sha256(INSTALLER.encode()).hexdigest()}"


@contextmanager
def served(folder: Path, address: str) -> Iterator[dict[str, str]]:
    """What a build's environment needs, to get the stand-in in Miniforge's place."""
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    argv += ["-subj", "/CN=github.com", "-addext", "subjectAltName=DNS:github.com", "-keyout", key, "-out", certificate]
    subprocess.run(argv, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    class Handler(StreamRequestHandler):
        def handle(self) -> None:
            asked = self._request(self.rfile)
            self.wfile.write(
                b"HTTP/1.1 200 OK\r\n\r\n" if asked == "CONNECT github.com:443" else b"HTTP/1.1 403 no\r\n\r\n"
            )
            with suppress(OSError), context.wrap_socket(self.connection, server_side=True) as secure:
                stream = secure.makefile("rwb")
                found = self._request(stream) == f"GET {ASKED}"
                body = INSTALLER.encode() if found else b""
                stream.write(
                    f"HTTP/1.1 {200 if found else 404} .\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body
                )
                stream.flush()

        def _request(self, stream) -> str:
            first, *_ = iter(stream.readline, b"\r\n")  # to the end of its headers
            return first.decode().rpartition(" ")[0]

    class Server(ThreadingTCPServer):
        daemon_threads = True

    with Server((address, 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        proxy = f"http://{address}:{server.server_address[1]}"
        try:
            yield {"https_proxy": proxy, "SSL_CERT_FILE": str(certificate)}
        finally:
            server.shutdown()
