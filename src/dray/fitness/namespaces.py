"""Whether an ordinary user's Apptainer may make user namespaces here. Standard library only."""

from __future__ import annotations

import re
import stat
import sys
from pathlib import Path

from dray import process
from dray.contract import exit_codes
from dray.contract.findings import DrayError, Finding

_USERNS = Path(__file__).with_name("userns.py")
_SECONDS = 5.0
# The kernel's switches, the value that forbids, and the command that allows. Some kernels lack the second switch.
_SWITCHES = (
    ("user/max_user_namespaces", "0", "sudo sysctl -w user.max_user_namespaces=15000"),
    ("kernel/unprivileged_userns_clone", "0", "sudo sysctl -w kernel.unprivileged_userns_clone=1"),
)
_APPARMOR = "kernel/apparmor_restrict_unprivileged_userns"
_KEPT = "\nand the same setting in a file of /etc/sysctl.d, to keep it after a reboot"


def tried() -> str:
    """Why this user cannot make a user namespace; empty if he can."""
    try:
        done = process.run([sys.executable, "-I", "-B", _USERNS], check=False, seconds=_SECONDS)
    except DrayError as error:
        return error.problem
    return "" if done.code == 0 else ((done.out or done.err).strip().splitlines() or [f"exit code {done.code}"])[-1]


def setuid(program: str) -> bool:
    """Whether this Apptainer is installed with setuid, and so needs no user namespace."""
    done = process.run([program, "buildcfg"], check=False, seconds=_SECONDS)
    found = re.search(r"^LIBEXECDIR=(.+)$", done.out, re.MULTILINE)
    if not found:
        return False
    starters = Path(found[1]).glob("*/bin/starter-suid")
    return any(path.stat().st_mode & stat.S_ISUID for path in starters)


def check(root: Path, *, trial: str, container: bool) -> Finding:
    """Check this machine, whose /proc and /etc are below `root`; `trial` is the answer of `tried`.

    The builder's `container` gets its rights from Docker. There the trial counts only for AppArmor, which confines
    neither this process nor the container.
    """
    for name, forbids, fix in _SWITCHES:
        if _value(root, name) == forbids:
            return _unfit(f"{name.replace('/', '.')} is {forbids}", fix + _KEPT)
    if not trial:
        return Finding("user namespaces", found="ordinary users may make them", kind="ok")
    if _value(root, _APPARMOR) == "1":
        profiles = [*(root / "etc/apparmor.d").glob("*apptainer*"), *(root / "etc/apparmor.d").glob("*singularity*")]
        if profiles:
            return Finding("user namespaces", found=f"AppArmor allows them: {profiles[0]}", kind="ok")
        return _unfit(
            f"AppArmor forbids them ({_APPARMOR.replace('/', '.')} is 1): {trial}",
            f"sudo sysctl -w {_APPARMOR.replace('/', '.')}=0{_KEPT}\n"
            "or install Apptainer 1.3.4 or newer from its project's .deb, which brings a profile for it",
        )
    if container:
        return Finding("user namespaces", found="the builder's container makes its own", kind="ok")
    return _unfit(trial, "ask the administrators for user namespaces, or for Apptainer with setuid; or use Docker")


def _unfit(found: str, fix: str) -> Finding:
    problem = "ordinary users cannot make user namespaces, and Apptainer builds in one"
    return Finding(problem, found=found, fix=fix, code=exit_codes.UNFIT)


def _value(root: Path, name: str) -> str:
    try:
        return (root / "proc/sys" / name).read_text(encoding="ascii").strip()
    except OSError:
        return ""
