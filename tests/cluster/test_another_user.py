"""Another user of the same nodes: nothing of theirs is run, read or trained on, and nothing of the run's is seen."""

from __future__ import annotations

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cluster

QUICK = "preflight.when=never"
SHORT = ("ranks_per_node=1", "train.steps=4", "train.warmup_steps=0", QUICK)
OTHER = "nobody"
# A rank that waits until the other user is done.
JOB = """
import json, os, time
from pathlib import Path
import torch.distributed as dist
dist.init_process_group("gloo")
if dist.get_rank() == 0:
    names = ("MASTER_ADDR", "MASTER_PORT", "TMPDIR", "TORCHINDUCTOR_CACHE_DIR", "TORCH_EXTENSIONS_DIR",
             "TRITON_CACHE_DIR", "TRITON_HOME")
    Path("seen.part").write_text(json.dumps({name: os.environ[name] for name in names}))
    Path("seen.part").rename("seen.json")
while not Path("go").exists():
    time.sleep(0.05)
seen = [None] * dist.get_world_size()
dist.all_gather_object(seen, dist.get_rank())
assert seen == list(range(dist.get_world_size())), seen
os._exit(0)  # torch's own end aborts one process in eight or so: "terminate called without an active exception"
"""


@pytest.fixture
def folder(cluster) -> Iterator[Path]:
    """A folder of the cluster's user."""
    made = cluster.shared / "home" / "my work"
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir()
    made.chmod(0o777)
    yield made
    shutil.rmtree(made)


@pytest.fixture
def other(cluster) -> Iterator[Callable[..., Any]]:
    """Run a command as the other user on a node; what they leave in /tmp is removed."""

    def execute(*argv: str, node: str = "n2") -> Any:
        return cluster.exec(argv, user=OTHER, node=node, workdir="/tmp", env={"HOME": "/tmp"})

    yield execute
    for node in ("n1", "n2"):
        cluster.exec(["find", "/tmp", "-mindepth", "1", "-user", OTHER, "-delete"], user="root", node=node)


def waited(path: Path, job: threading.Thread) -> None:
    deadline = time.monotonic() + 120
    while not path.exists():
        assert job.is_alive()
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.slow
def test_nobody_else_reaches_a_run(sbatch, cluster, sif: Path, root: Path, folder: Path, other) -> None:
    """Its ports are attacked from the other node, and its folders looked into, while it may restart."""
    pwned = cluster.shared / "home" / "pwned"
    (folder / "job.py").write_text(JOB)
    attack = (Path(__file__).parent / "scripts" / "attack.py").read_text()
    ended: list[Any] = []
    words = (f"{root}/slurm/multinode.sh", QUICK, "max_restarts=1", "ranks_per_node=1", "--", "job.py")
    job = threading.Thread(target=lambda: ended.append(sbatch(*words, workdir="/shared/home/my work")))
    job.start()
    try:
        waited(folder / "seen.json", job)
        seen = json.loads((folder / "seen.json").read_text())
        attacked = other("apptainer", "exec", str(sif), "python3", "-c", attack, "n1", "n2")
        own = other("ls", seen["TMPDIR"], node="n1")
    finally:
        (folder / "go").touch()
        job.join()
    assert attacked.code == 0, attacked.err
    assert seen["MASTER_PORT"] in attacked.out.splitlines()[0].split()  # it was there to be attacked
    paths = [path for name, path in seen.items() if not name.startswith("MASTER")]
    assert {path[: len(seen["TMPDIR"])] for path in paths} == {seen["TMPDIR"]}
    run = other("ls", f"/shared/{ended[0].folder.relative_to(cluster.shared)}")
    assert [(one.code, one.out) for one in (own, run)] == [(2, "")] * 2
    assert "Permission denied" in own.err
    assert ended[0].code == 0, ended[0].output
    assert not pwned.exists()


# The second node compiles, and the first has what is planted there too.
COMPILES = """
import os
from pathlib import Path
if os.environ["RANK"] == "1":
    import torch
    torch.compile(lambda x: x.sin() * 2)(torch.ones(64))
    assert list(Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.so"))
"""


@pytest.mark.slow
def test_what_is_planted_in_tmp_is_not_used(sbatch, cluster, root: Path, folder: Path, other) -> None:
    """Compiled code under the names that torch takes by default; and tokens, whose usual name in /tmp is taken."""
    uid = cluster.exec(["id", "-u"]).out.strip()
    name = cluster.exec(["id", "-un"]).out.strip()
    planted = (f"/tmp/torchinductor_{name}", "/tmp/torchelastic_x", f"/tmp/dray-{uid}-x", "/tmp/.triton")
    for node in ("n1", "n2"):
        for path in planted:
            assert other("sh", "-c", f"mkdir -m 777 {path} && touch {path}/evil.so", node=node).code == 0
    (folder / "job.py").write_text(COMPILES)
    words = (f"{root}/slurm/multinode.sh", QUICK, "ranks_per_node=1", "--", "job.py")
    ended = sbatch(*words, workdir="/shared/home/my work")
    assert ended.code == 0, ended.output
    for node in ("n1", "n2"):
        assert other("find", *planted, "-type", "f", node=node).out.split() == [f"{path}/evil.so" for path in planted]
    tokens = f"/tmp/dray-tokens-{uid}"
    cluster.exec(["rm", "-rf", tokens], user="root", node="n2")
    assert other("mkdir", "-m", "777", tokens).code == 0
    ended = sbatch("slurm/multinode.sh", "recipes/smoke-cpu.toml", *SHORT)
    assert ended.code == 78, ended.output
    log = (ended.attempt / "logs" / "rank-1.log").read_text()
    assert "the token cache is open to other users\n" in log
    assert "set data.cache_dir to a folder of yours\n" in log
    assert other("ls", "-A", tokens).out == ""


PLANT = """
import json, os, pickle
from pathlib import Path
class Code:
    def __reduce__(self):
        return os.system, ("touch /shared/home/pwned",)
os.umask(0)
step = Path("/tmp/theirs/step-2")
step.mkdir(parents=True)
(step / ".metadata").write_bytes(pickle.dumps(Code()))
(step / "manifest.json").write_text(json.dumps({"version": 1, "step": 2, "world_size": 1, "files": {".metadata": 0}}))
"""


def test_code_in_planted_checkpoints_is_not_run(sbatch, cluster, sif: Path, other) -> None:
    for node in ("n1", "n2"):
        planted = other("apptainer", "exec", str(sif), "python3", "-c", PLANT, node=node)
        assert planted.code == 0, planted.err
    words = ("launcher=python", "checkpoint.folder=/tmp/theirs", *SHORT)
    ended = sbatch("slurm/multinode.sh", "recipes/smoke-cpu.toml", *words)
    assert ended.code == 78, ended.output
    assert "of user 65534" in "\n".join(ended.result()["cause"]["last_lines"])
    assert not (cluster.shared / "home" / "pwned").exists()


# Puts a folder of this user's in the place of the first run that begins.
RENAME = """
import os, sys, time
runs, fake = sys.argv[1], "#!/bin/sh\\ntouch /shared/home/pwned\\n"
open(f"{runs}/ready", "w").close()
ended, done = time.monotonic() + 60, 0
while time.monotonic() < ended and not done:
    for run in os.scandir(runs):
        if run.is_dir() and not run.name.startswith("."):
            time.sleep(float(sys.argv[2]))
            made = f"{runs}/.theirs/attempt-1"
            os.makedirs(f"{made}/logs")
            os.mkdir(f"{made}/failures")
            with open(f"{made}/node.sh", "w") as script:
                script.write(fake)
            os.chmod(f"{made}/node.sh", 0o755)
            os.chmod(f"{runs}/.theirs", 0o777)
            os.rename(run.path, f"{runs}/.mine")
            os.rename(f"{runs}/.theirs", run.path)
            done = 1
print(done)
"""


@pytest.mark.parametrize(
    "delay", [pytest.param(0.04, marks=pytest.mark.slow), 0.2, pytest.param(0.6, marks=pytest.mark.slow)]
)
def test_a_run_that_is_renamed_while_it_begins(
    sbatch, cluster, sif: Path, root: Path, folder: Path, other, delay: float
) -> None:
    """In a project's folder, which a group may write."""
    pwned, runs = cluster.shared / "home" / "pwned", "/shared/home/my work/project"
    made = f"mkdir -m 2775 '{runs}' && chgrp 65534 '{runs}' && chmod g+s '{runs}'"
    assert cluster.exec(["sh", "-c", made], user="root").code == 0
    assert cluster.exec(["chown", "dray", runs], user="root").code == 0
    (folder / "job.py").write_text("print('trained')\n")
    words = ("apptainer", "exec", "--bind=/shared", str(sif), "python3", "-c", RENAME, runs, str(delay))
    renamed: list[Any] = []
    attack = threading.Thread(target=lambda: renamed.append(other(*words)))
    attack.start()
    waited(folder / "project" / "ready", attack)
    command = (f"{root}/slurm/multinode.sh", QUICK, "launcher=python", "ranks_per_node=1", "--", "job.py")
    ended = sbatch(*command, workdir="/shared/home/my work", env={"DRAY_RUNS": runs})
    attack.join()
    assert renamed[0].out == "1\n", renamed[0].err
    assert not pwned.exists()
    assert ended.code != 0


# A run whose recipe and model bring code of its owner's. The checkout around it is theirs too.
RUN = """
import json, os, sys
from pathlib import Path
os.environ["DRAY_HOME"] = sys.argv[1]
from dray.facts import Facts
from dray.runs.prepare import read_recipe, write
os.umask(0o022)
theirs = Path("/tmp/theirs")
code = theirs / "code"
code.mkdir(parents=True)
(code / "sitecustomize.py").write_text("open('/shared/home/pwned', 'w')")
settings = ["model.trust_remote_code=true", f"env.PYTHONPATH={code}"]
recipe = read_recipe(Path(sys.argv[1], "recipes/smoke-cpu.toml"), settings)
facts = Facts(scheduler="local", nodelist="n1", nodes=1, engine="bare", image=sys.executable)
final = write(recipe, facts, runs=theirs / "runs", run="theirs")[1].final_model
final.mkdir()
(final / "evil.py").write_text("open('/shared/home/pwned', 'w')")
settings = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}, "architectures": ["X"]}
(final / "config.json").write_text(json.dumps(settings))
for path in theirs.rglob("*"):
    path.chmod(0o755 if path.is_dir() else 0o644)
(theirs / "containers" / "steps").mkdir(parents=True)
(theirs / "recipes").symlink_to(theirs)
"""


@pytest.mark.parametrize(
    "verb",
    [
        ("generate", "x"),
        pytest.param(("eval",), marks=pytest.mark.slow),
        pytest.param(("export",), marks=pytest.mark.slow),
        pytest.param(("push", "a/b"), marks=pytest.mark.slow),
    ],
)
def test_code_in_a_run_of_theirs_is_not_run(cluster, sif: Path, root: Path, other, verb: tuple[str, ...]) -> None:
    checkout = f"--bind={root}:{root}:ro"
    planted = other("apptainer", "exec", checkout, str(sif), "python3", "-c", RUN, str(root))
    assert planted.code == 0, planted.err
    pwned = cluster.shared / "home" / "pwned"
    inside = [str(sif), "python3", "-m", "dray", "model", verb[0], "/tmp/theirs/runs/theirs", *verb[1:]]
    words = ["apptainer", "exec", checkout, f"--env=DRAY_HOME={root},HF_HUB_OFFLINE=1", *inside]
    ended = cluster.exec(words, node="n2", workdir="/tmp/theirs")
    assert ended.code != 0
    assert "the run is another user's, so its env, pass_env, layer and trust_remote_code are ignored" in ended.err
    assert not pwned.exists()
    if verb[0] == "generate":
        cluster.exec([*words, "--trust-run"], node="n2", workdir="/tmp/theirs")
        assert pwned.exists()  # what it would have been
        pwned.unlink()
        ended = cluster.exec(["apptainer", "exec", *inside], node="n2", workdir="/tmp/theirs")
        assert "found:  /tmp/theirs, which another user may change\n" in ended.err
