"""Stand-ins for what `cotainr build` fetches: Miniforge with Conda, and package indexes of this machine's wheels.

As a program, `miniforge.py FOLDER COMMAND`, it runs the command, and answers for each host that has a folder.
"""

from __future__ import annotations

import os
import re
import ssl
import subprocess
import sys
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

# Where cotainr looks for it, and a mirror that the user's pip is set to.
MINIFORGE = "github.com/conda-forge/miniforge/releases/latest/download/Miniforge3-Linux-x86_64.sh"
MIRROR = "mirror.test/simple"

# It makes an environment of the base's Python, and has pip install the list as Conda has it.
INSTALLER = r"""#!/bin/bash
set -eu
[[ "$*" == "-b -s -p /opt/cotainr/conda" ]]
mkdir -p "$4"/{condabin,envs,etc/profile.d}
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
#!/usr/bin/python3
import pathlib, subprocess, sys, yaml

PREFIX = pathlib.Path("/opt/cotainr/conda")
words = [word for word in sys.argv[1:] if word not in ("-q", "-v")]
if words == ["info", "--base"]:
    print(PREFIX)
elif words == ["update", "-y", "-n", "base", "-c", "conda-forge", "conda"] or words == ["clean", "-y", "-a"]:
    pass
elif words[:3] == ["env", "create", "-f"] and words[4:] == ["-n", "conda_container_env"]:
    file, env = pathlib.Path(words[3]), PREFIX / "envs" / words[5]
    *conda, pip = yaml.safe_load(file.read_text())["dependencies"]
    assert conda == ["python=3.11", "pip"], conda
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", env], check=True)
    requirements = file.with_name("condaenv.requirements.txt")
    requirements.write_text("\n".join(pip["pip"]))
    install = ["install", "-U", "-r", requirements, "--exists-action=b"]
    subprocess.run([sys.executable, "-m", "pip", "--python", env / "bin" / "python", *install], check=True)
    requirements.unlink()
else:
    sys.exit(f"the stand-in for Conda knows no {words}")
PYTHON
chmod +x "$4/condabin/conda"
"""


def lay_out(folder: Path, wheels: Path, seen: str, indexes: dict[str, str]) -> None:
    """What the program serves: Miniforge, and each wheel at the index of its package, else at the mirror.

    The program sees the folder of wheels as `seen`.
    """
    installer = folder / MINIFORGE
    installer.parent.mkdir(parents=True)
    installer.write_text(INSTALLER)
    for wheel in wheels.glob("*.whl"):
        name = re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower()
        page = folder / indexes.get(name, MIRROR) / name
        page.mkdir(parents=True, exist_ok=True)  # a cache may have two versions
        (page / wheel.name).symlink_to(Path(seen, wheel.name))
    names = ",".join(f"DNS:{host.name}" for host in folder.iterdir())
    argv = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2"]
    argv += ["-subj", "/CN=miniforge", "-addext", f"subjectAltName={names}"]
    files = ["-keyout", folder / "key.pem", "-out", folder / "certificate.pem"]
    subprocess.run([*argv, *files], check=True, capture_output=True)
    (folder / "key.pem").chmod(0o644)


class Proxy(SimpleHTTPRequestHandler):
    """A tunnel to a host ends in the folder of its name."""

    def do_CONNECT(self) -> None:
        self.send_response(200)
        self.end_headers()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(Path(self.directory, "certificate.pem"), Path(self.directory, "key.pem"))
        host = Path(self.directory, self.path.partition(":")[0])
        with context.wrap_socket(self.connection, server_side=True) as secure:
            SimpleHTTPRequestHandler(secure, self.client_address, self.server, directory=host)
        self.close_connection = True


def main(folder: Path, *command: str) -> int:
    """The command's exit code."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Proxy, directory=folder)) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        network = {"https_proxy": f"http://127.0.0.1:{server.server_port}", "PIP_INDEX_URL": f"https://{MIRROR}"}
        trust = {"SSL_CERT_FILE": str(folder / "certificate.pem")}
        code = subprocess.run(command, env={**os.environ, **network, **trust}, check=False).returncode
        server.shutdown()
    return code


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *sys.argv[2:]))
