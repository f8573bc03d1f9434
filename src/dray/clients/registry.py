"""Why a pull from a registry failed, and what helps."""

from __future__ import annotations

import re

from dray.config import mirrors
from dray.contract.findings import UnfitError

# What Apptainer, Docker and Podman say, in the words of Go's network library and of registries.
_CERTIFICATE = re.compile(r"x509|certificate", re.IGNORECASE)
_NETWORK = re.compile(
    r"no such host|dial tcp|i/o timeout|connection (refused|reset)|name resolution|unreachable|handshake timeout|"
    r"proxyconnect|deadline exceeded|unexpected EOF",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"unauthorized|access.*denied|authentication required|toomanyrequests|rate limit", re.IGNORECASE)
_UNKNOWN = re.compile(r"manifest unknown|name unknown|manifest.*not found|repository.*does not exist", re.IGNORECASE)
_FULL = re.compile(r"no space left|disk quota exceeded", re.IGNORECASE)
_SHOWN = 3


def refused(what: str, reference: str, text: str, *, instead: str) -> UnfitError:
    """The error of a pull, from the program's output; `instead` is a way without the registry."""
    lines = [line for line in text.splitlines() if line.strip()]
    failures = [line for line in lines if "FATAL" in line or "rror" in line]
    shown = "\n".join(failures[-_SHOWN:] or lines[-_SHOWN:])
    mirror = f"or name a mirror below [mirrors] in {mirrors.path()}"
    if _FULL.search(shown):
        return UnfitError(f"{what} cannot be pulled: the disk is full", wanted=reference, found=shown, fix="make room")
    if _CERTIFICATE.search(shown):
        reason = "the registry's certificate is not trusted"
        fix = "set SSL_CERT_FILE to a file with the site proxy's certificate; Docker needs it in /etc/docker/certs.d"
    elif _LOGIN.search(shown):
        reason = "the registry requires a login, or limits the number of pulls"
        fix = f"docker login, or apptainer registry login; {mirror}"
    elif _NETWORK.search(shown):
        reason = "the registry cannot be reached"
        fix = f"set http_proxy and https_proxy if the site has a proxy; {mirror}"
    elif _UNKNOWN.search(shown):
        reason = "the registry does not have this image"
        fix = "correct the name; or remove the mirror, which may lack it" if mirrors.table() else "correct the name"
    else:
        reason, fix = "", ""
    problem = f"{what} cannot be pulled{f': {reason}' if reason else ''}"
    return UnfitError(problem, wanted=reference, found=shown, fix="\n".join(filter(None, [fix, instead])))
