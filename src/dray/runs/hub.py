"""Names of the variables for reaching the hub, and its token; their values are passed by name only."""

from __future__ import annotations

import os
from pathlib import Path

from dray.contract import files
from dray.contract.findings import ConfigError

_NETWORK = ("HF_ENDPOINT", "http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")


def passed() -> tuple[str, ...]:
    """The variables that are set. HF_TOKEN is set from HF_TOKEN_PATH, if nobody else may read that file."""
    file = os.environ.get("HF_TOKEN_PATH")
    if file and not os.environ.get("HF_TOKEN"):
        os.environ["HF_TOKEN"] = _token(Path(file))
    return tuple(name for name in ("HF_TOKEN", *_NETWORK) if name in os.environ)


def _token(file: Path) -> str:
    token = files.text(file, "the file with the hub's token").strip("\0 \t\r\n")  # NULs: after a crash
    mode = file.stat().st_mode & 0o777
    if mode & 0o077 or not token:
        raise ConfigError(
            "others can read the hub's token" if token else "the file with the hub's token is empty",
            where=f"HF_TOKEN_PATH={file}",
            wanted="mode 600" if token else "a token",
            found=f"mode {mode:o}" if token else "nothing",
            fix=f"chmod 600 '{file}'" if token else "write the token into the file",
        )
    return token
