"""The node's RDMA cards by the image's libibverbs: a small library of the test speaks as the real one does."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from dray.checks import node_checks
from dray.contract.findings import Finding

pytestmark = pytest.mark.skipif(not shutil.which("gcc"), reason="gcc makes the library")

FIX = "use an image whose drivers fit the node's kernel, or bind the node's own; see docs/sites.md"
WANTED = "a driver in the image for each RDMA card of the node"
# As rdma-core writes them.
ABI = (
    "libibverbs: Warning: Driver ionic does not support the kernel ABI of 4 (supports 1 to 1) for device "
    "/sys/class/infiniband/{}"
)
PRIVATE = (
    "libibverbs: Warning: couldn't load driver 'libmlx5-rdmav34.so': /lib/libibverbs.so.1: version "
    "`IBVERBS_PRIVATE_34' not found (required by /lib/libibverbs/libmlx5-rdmav34.so)"
)
UNLOADED = PRIVATE.removeprefix("libibverbs: Warning: ")
NO_DRIVER = "libibverbs: Warning: no userspace device-specific driver found for /sys/class/infiniband_verbs/uverbs0"

Verbs = Callable[[list[str], list[str]], str]


@pytest.fixture
def verbs(tmp_path: Path) -> Verbs:
    """libibverbs.so.1 that lists these devices, after these lines."""

    def make(devices: list[str], warnings: list[str]) -> str:
        names, lines = ("".join(f"{json.dumps(one)}, " for one in texts) for texts in (devices, warnings))
        path = tmp_path / "libibverbs.so.1"
        code = f"""
            #include <stdio.h>
            static const char *names[] = {{ {names}0 }}, *lines[] = {{ {lines}0 }};
            void **ibv_get_device_list(int *count) {{
                for (const char **line = lines; *line; line++) fprintf(stderr, "%s\\n", *line);
                *count = sizeof names / sizeof *names - 1;
                return (void **)names;
            }}
            const char *ibv_get_device_name(void *device) {{ return device; }}
        """
        subprocess.run(["gcc", "-shared", "-fPIC", "-xc", "-", "-o", path], input=code, text=True, check=True)
        return str(path)

    return make


def sysfs(tmp_path: Path, devices: list[str]) -> str:
    for number, device in enumerate(devices):
        folder = tmp_path / f"sys/class/infiniband_verbs/uverbs{number}"
        folder.mkdir(parents=True)
        (folder / "ibdev").write_text(f"{device}\n")
    return str(tmp_path / "sys")


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("there", "usable", "warnings", "found"),
    [
        ([], [], [NO_DRIVER], []),
        (["mlx5_0"], ["mlx5_0"], [], []),
        (["mlx5_0", "usnic_0"], ["mlx5_0"], [NO_DRIVER], []),  # a card that nobody wanted
        (
            ["ionic_0", "ionic_1"],
            [],
            [ABI.format("ionic_0"), ABI.format("ionic_1")],
            [
                (
                    "RDMA would be off: Driver ionic does not support the kernel ABI of 4 (supports 1 to 1)",
                    "not usable: ionic_0 ionic_1; usable: none",
                    69,
                )
            ],
        ),
        (
            ["bnxt_re0", "mlx5_0"],
            ["mlx5_0"],
            [ABI.format("bnxt_re0").replace("ionic", "bnxt_re").replace("1 to 1", "5 to 6")],
            [
                (
                    "RDMA would be off on some cards: "
                    "Driver bnxt_re does not support the kernel ABI of 4 (supports 5 to 6)",
                    "not usable: bnxt_re0; usable: mlx5_0",
                    0,
                )
            ],
        ),
        (["mlx5_0"], [], [PRIVATE], [(f"RDMA would be off: {UNLOADED}", "not usable: mlx5_0; usable: none", 69)]),
        (
            ["ionic_0"],
            [],
            [NO_DRIVER],
            [
                (
                    "RDMA would be off: the image has no driver for the node's RDMA cards",
                    "not usable: ionic_0; usable: none",
                    69,
                )
            ],
        ),
    ],
)
def test_what_the_image_cannot_drive(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    verbs: Verbs,
    there: list[str],
    usable: list[str],
    warnings: list[str],
    found: list[tuple[str, str, int]],
) -> None:
    (tmp_path / "uverbs0").touch()
    monkeypatch.setattr(node_checks, "_RDMA_FILES", tmp_path)
    library, sys = verbs(usable, warnings), sysfs(tmp_path, there)
    wanted = [Finding(problem, wanted=WANTED, found=devices, fix=FIX, code=code) for problem, devices, code in found]
    assert node_checks.rdma_cards(needed=True, sys=sys, library=library) == wanted
    assert node_checks.rdma_cards(needed=False, sys=sys, library=library) == [one._replace(code=0) for one in wanted]
    assert capfd.readouterr().err == ""


def test_a_container_without_the_device_s_file(tmp_path: Path, verbs: Verbs) -> None:
    sys = sysfs(tmp_path, ["none_0"])
    (Path(sys) / "class/infiniband_verbs/uverbs0").rename(Path(sys) / "class/infiniband_verbs/uverbs4000")
    (found,) = node_checks.rdma_cards(needed=True, sys=sys, library=verbs([], []))
    assert found.problem == "RDMA would be off: the container's /dev/infiniband lacks them"


def test_an_image_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "uverbs0").touch()
    monkeypatch.setattr(node_checks, "_RDMA_FILES", tmp_path)
    library = str(tmp_path / "none" / "libibverbs.so.1")
    (found,) = node_checks.rdma_cards(needed=True, sys=sysfs(tmp_path, ["mlx5_0"]), library=library)
    assert found.problem.startswith(
        f"RDMA would be off: couldn't load driver {library}: cannot open shared object file"
    )
    assert found.code == 69
