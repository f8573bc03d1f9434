"""Why a pull from a registry failed, and what helps."""

from __future__ import annotations

import re

from dray.config import mirrors
from dray.contract.findings import UnfitError

# What Apptainer, Docker and Podman say, in the words of Go's network library and of registries; the reason and the fix.
_REASONS = (
    (r"no space left|disk quota exceeded", ": the disk is full", "make room"),
    (
        r"x509|certificate",
        ": the registry's certificate is not trusted",
        "set SSL_CERT_FILE to a file with the site proxy's certificate; Docker needs it in /etc/docker/certs.d",
    ),
    (
        r"unauthorized|access.*denied|authentication required|toomanyrequests|rate limit",
        ": the registry requires a login, or limits the number of pulls",
        "docker login, or apptainer registry login; or name a mirror below [mirrors] in {file}",
    ),
    (
        r"no such host|dial tcp|i/o timeout|connection (refused|reset)|name resolution|unreachable|handshake timeout|"
        r"proxyconnect|deadline exceeded|unexpected EOF",
        ": the registry cannot be reached",
        "set http_proxy and https_proxy if the site has a proxy; or name a mirror below [mirrors] in {file}",
    ),
    (
        r"manifest unknown|name unknown|manifest.*not found|repository.*does not exist",
        ": the registry does not have this image",
        "correct the name; a mirror in {file} may lack the image",
    ),
    ("", "", ""),
)
_SHOWN = 3


def refused(what: str, reference: str, text: str, *, instead: str) -> UnfitError:
    """The error of a pull, from the program's output; `instead` is a way without the registry."""
    lines = re.findall(".*(?:FATAL|rror).*", text) or re.findall(r".*\S.*", text)
    shown = "\n".join(lines[-_SHOWN:])
    reason, fix = next(
        (reason, fix.format(file=mirrors.path()))
        for pattern, reason, fix in _REASONS
        if re.search(pattern, shown, re.IGNORECASE)
    )
    return UnfitError(
        f"{what} cannot be pulled{reason}", wanted=reference, found=shown, fix=f"{fix}\n{instead}".strip()
    )
