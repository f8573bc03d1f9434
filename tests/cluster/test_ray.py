"""Ray on two nodes of the real cluster, from a layer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from dray.images.sif import record

PROGRAM = """
import os, ray, sys
ray.init()
@ray.remote(num_cpus=1)
def where():
    return os.environ["RAY_AUTH_MODE"], os.uname().nodename
spread = where.options(scheduling_strategy="SPREAD")
print("seen", sorted({ray.get(spread.remote()) for _ in range(8)}), len(ray.nodes()))
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.slow
@pytest.mark.cluster
def test_a_program_uses_both_nodes_and_its_exit_code_is_the_job_s(sbatch, cluster, root: Path, sif: Path) -> None:
    file = sif.with_name("dray-cpu-test-ray.sif")
    argv = [sys.executable, "-m", "dray", "image", "layer", "cpu", "--pip", "ray", "--name", "test-ray"]
    made = subprocess.run(argv, cwd=root, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    folder = cluster.shared / "home" / "my ray"
    folder.mkdir(exist_ok=True)
    (folder / "use.py").write_text(PROGRAM)
    words = ("preflight.when=never", "layer=test-ray", "launcher=ray", "--", "use.py")
    try:
        for code in (0, 3):
            ended = sbatch(f"{root}/slurm/multinode.sh", *words, str(code), workdir="/shared/home/my ray")
            assert ended.code == code, ended.output
            assert "seen [('token', 'n1'), ('token', 'n2')] 2\n" in ended.output
        for node in ("n1", "n2"):
            left = cluster.exec(["sh", "-c", "pgrep -c raylet; ls -d /tmp/ray-*"], node=node)
            assert left.out.split() == ["0"]
    finally:
        for path in (file, record.path_for(file), file.with_suffix(".lock")):
            path.unlink(missing_ok=True)
