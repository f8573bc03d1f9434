"""`make showcase`, on the two nodes that tests have: the run goes on with the node that is left."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import until

pytestmark = pytest.mark.cluster


@pytest.mark.slow
def test_a_users_script_comes_through(cluster, sif: Path, root: Path) -> None:
    shown = subprocess.run(
        [sys.executable, root / "benchmarks/showcase", "2", "200"], capture_output=True, text=True, check=False
    )
    until(lambda: cluster.exec(["sinfo", "--noheader", "--format=%T"]).out.split() == ["idle"])
    assert shown.returncode == 0, shown.stdout + shown.stderr
    wrong, _, lost = shown.stdout.partition("min_nodes=1")
    assert "GLOO_SOCKET_IFNAME=ib0" in wrong.partition("train.py 200")[2]
    assert "fewer nodes: 1 of 2 continue (min_nodes = 1), without n2" in lost
    assert re.search(r"^  step 200 loss ", lost, re.MULTILINE)
    assert (root / "build" / "showcase.html").stat().st_size > 0
