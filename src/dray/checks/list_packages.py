"""Prints what somebody else's image has, as JSON. The image's own Python runs this text, even an old one."""

import json
import os
import platform
import sys


def main() -> None:
    """Print one line on standard output; what packages print during their import goes to stderr."""
    out = os.dup(1)
    os.dup2(2, 1)
    found = {
        "python": platform.python_version(),
        "executable": sys.executable,
        "machine": platform.machine(),
        "libc": " ".join(platform.libc_ver()),
        "pythonpath": os.environ.get("PYTHONPATH", ""),
        "packages": _packages(),
        "torch": _torch(),
    }
    os.write(out, json.dumps(found).encode() + b"\n")


def _packages() -> object:
    try:
        from importlib import metadata  # noqa: PLC0415  not before 3.8
    except ImportError:
        return {}
    # The first of a name is the one that is imported.
    return {
        str(package.metadata["Name"]).lower().replace("_", "-"): package.version
        for package in reversed(list(metadata.distributions()))
    }


def _torch() -> object:
    try:
        import torch  # noqa: PLC0415
    except BaseException as wrong:
        return {"error": str(wrong) or repr(wrong)}
    found = {"version": str(torch.__version__), "cuda": torch.version.cuda or "", "hip": torch.version.hip or ""}
    if found["cuda"] or found["hip"]:
        try:
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        except BaseException as wrong:
            found["nccl"] = "unknown: " + str(wrong)
    return found


if __name__ == "__main__":
    main()
