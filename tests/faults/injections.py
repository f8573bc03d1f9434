"""What goes wrong: how it is done, what must be named, and how the run goes on."""

from __future__ import annotations

import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from running import EVERY, Running

from helpers import ROOT

TRAIN, RANK, RUNNER = "dray.train /[^ ]*/RUN/", "rank.py /[^ ]*/RUN/", "dray.runner /[^ ]*/RUN/"


@dataclass(frozen=True)
class Fault:
    """One way in which a run is hurt."""

    name: str
    inject: Callable[[Running], None]
    named: str
    """What a result must name as the cause; nothing where the run must not notice."""
    words: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    lost: int = 2 * EVERY
    """Steps that may be taken twice."""
    close: float = 0.0
    """How much a loss may differ in relation, where fewer ranks add it up; the weights are then not compared."""
    around: Callable[[Any], AbstractContextManager[None]] = nullcontext
    """What the cluster is like for this run, from before it starts."""


def kill_rank(run: Running) -> None:
    run.at_some_step()
    run.kill(run.rng.choice(("n1", "n2")), f"^python3 -m {TRAIN}")


def kill_launcher(run: Running) -> None:
    run.at_some_step()
    run.kill(run.rng.choice(("n1", "n2")), f"^python3 -m torch.distributed.run .*{RANK}")


def kill_supervisor(run: Running) -> None:
    run.at_some_step()
    run.kill(run.rng.choice(("n1", "n2")), f"^[^ ]*/python3 -S -E [^ ]*{RANK}")


def kill_runner(run: Running) -> None:
    run.at_some_step()
    run.kill("n2", f"^[^ ]*/python3 -m {RUNNER}")


def kill_first_runner(run: Running) -> None:
    run.at_some_step()
    run.kill("n1", f"^[^ ]*/python3 -m {RUNNER}")


def kill_mount(run: Running) -> None:
    """The image's file system goes away under one node's ranks."""
    run.at_some_step()
    run.injected = time.time()
    runner = f"^[^ ]*/python3 -m {RUNNER.replace('RUN', re.escape(run.name))}"
    parent = f"$(ps -o ppid= -p $(pgrep -o -f -- '{runner}') | tr -d ' ')"
    run.on("n2", f"pkill -KILL -P {parent} squashfuse")


def switch_off(run: Running) -> None:
    """A machine of the cluster ends with its daemon: the node is gone, and comes back."""
    run.at_some_step()
    machine = run.cluster.machine("n2")
    run.injected = time.time()
    machine.kill()
    goes_on = {
        "spares=1": "spare nodes take over: n3, without n2",
        "min_nodes=1": "fewer nodes: 1 of 2 continue (min_nodes = 1), without n2",
    }
    for word, line in goes_on.items():
        if word in run.words:  # it stays off, and the job goes on
            run.until(lambda line=line: line in run.output())
    machine.start()


def restart_controller(run: Running) -> None:
    run.at_some_step()
    run.injected = time.time()
    run.cluster.machine("controller").restart(timeout=5)
    run.until(lambda: run.cluster.exec(["scontrol", "ping"]).code == 0)


def pause_node(run: Running) -> None:
    """A node that stands still for a while, such as by a file system that does not answer."""
    run.at_some_step()
    machine = run.cluster.machine("n2")
    run.injected = time.time()
    machine.pause()
    time.sleep(10)
    machine.unpause()


def kill_while_saving(run: Running) -> None:
    """At some moment between the first byte of a checkpoint and its name."""
    run.at_some_step()
    begun = set(run.run.glob("checkpoints/*"))
    run.until(lambda: set(run.run.glob("checkpoints/*")) - begun)
    time.sleep(run.rng.random() * 0.03)
    run.kill(run.rng.choice(("n1", "n2")), f"^python3 -m {TRAIN}")


def time_is_near(run: Running) -> None:
    """As sbatch --signal does it before the time limit."""
    run.at_some_step()
    run.injected = time.time()
    assert run.cluster.exec(["scancel", "--batch", "--signal=USR1", run.jobs[-1]]).code == 0


def requeue(run: Running) -> None:
    run.at_some_step()
    run.injected = time.time()
    assert run.cluster.exec(["scontrol", "requeue", run.jobs[-1]]).code == 0


def preempt(run: Running) -> None:
    """A job of a partition with a higher priority takes a node."""
    run.at_some_step()
    run.injected = time.time()
    code, _, err = run.cluster.exec(
        [
            "sbatch",
            "--partition=urgent",
            "--exclusive",
            "--nodelist=n2",
            "--time=1",
            "--output=/dev/null",
            "--wrap=sleep 5",
        ]
    )
    assert code == 0, err


def stop_rank(run: Running) -> None:
    run.at_some_step()
    run.kill(run.rng.choice(("n1", "n2")), f"^python3 -m {TRAIN}", "STOP")


def newest(run: Running) -> Path:
    steps = [path for path in run.run.glob("checkpoints/step-*") if path.name[5:].isdigit()]
    return max(steps, key=lambda path: int(path.name[5:]))


def damage(change: Callable[[Path, Running], None]) -> Callable[[Running], None]:
    """Between two attempts, in the newest checkpoint."""

    def inject(run: Running) -> None:
        time_is_near(run)
        run.until((run.attempts()[-1] / "result.json").exists)
        change(newest(run), run)

    return inject


def flip(checkpoint: Path, run: Running) -> None:
    file = run.rng.choice(sorted(checkpoint.rglob("*.safetensors")))
    data = bytearray(file.read_bytes())
    data[run.rng.randrange(len(data) // 2, len(data))] ^= 0x40
    file.write_bytes(data)


def truncate(checkpoint: Path, run: Running) -> None:
    file = run.rng.choice(sorted(checkpoint.rglob("*.safetensors")))
    with file.open("r+b") as open_:
        open_.truncate(file.stat().st_size // 2)


def delete(checkpoint: Path, run: Running) -> None:
    run.rng.choice(sorted(checkpoint.rglob("*.safetensors"))).unlink()


def other_manifest(checkpoint: Path, run: Running) -> None:
    """Of an older checkpoint of the same run."""
    others = sorted(path for path in run.run.glob("checkpoints/step-*") if path != checkpoint)
    (manifest,) = [path for path in checkpoint.glob("*.json") if "manifest" in path.name]
    shutil.copyfile(others[0] / manifest.name, manifest)


def cut_network(run: Running) -> None:
    """A node's network is gone for a minute, and comes back."""
    run.at_some_step()
    run.injected = time.time()
    with_network(run, "n2", "ip link set eth0 down")
    run.until(lambda: "gone" in run.output() or len(list(run.run.glob("attempt-*/failures/*"))), 90)
    with_network(run, "n2", "ip link set eth0 up")


def with_network(run: Running, node: str, command: str) -> None:
    """A command of this machine in a node's network."""
    pid = run.cluster.machine(node).attrs["State"]["Pid"]
    subprocess.run(["nsenter", "--target", str(pid), "--net", *command.split()], check=True)


def slow_rank(run: Running) -> None:
    """Half of the time it stands still, for ten seconds."""
    run.at_some_step()
    pattern = f"^python3 -m {TRAIN.replace('RUN', re.escape(run.name))}"
    stutter = "for _ in {1..50}; do kill -STOP $pid || exit 0; sleep 0.1; kill -CONT $pid; sleep 0.1; done"
    run.on(run.rng.choice(("n1", "n2")), f"pid=$(pgrep -o -f -- '{pattern}'); {stutter}")


def slow_network(run: Running) -> None:
    """Five steps by a network of 20 MB/s."""
    run.at_some_step()
    with_network(run, "n2", "tc qdisc add dev eth0 root tbf rate 160mbit burst 256kbit latency 400ms")
    reached = run.step()
    run.until(lambda: run.step() >= reached + 5)
    with_network(run, "n2", "tc qdisc del dev eth0 root")


@contextmanager
def small_tmp(cluster: Any) -> Iterator[None]:
    """A node's /tmp holds 128 MB."""
    on(cluster, "n2", "mount -t tmpfs -o size=128m,mode=1777 tmpfs /tmp")
    try:
        yield
    finally:
        on(cluster, "n2", "umount --lazy /tmp")


def fill_tmp(run: Running) -> None:
    run.at_some_step()
    run.injected = time.time()
    run.on("n2", "! head -c 200M /dev/zero >/tmp/full")


IMAGE = "home/replaced.sif"


@contextmanager
def own_image(cluster: Any) -> Iterator[None]:
    shutil.copyfile(ROOT / "build/dray-cpu.sif", cluster.shared / IMAGE)
    try:
        yield
    finally:
        (cluster.shared / IMAGE).unlink()


def replace_image(run: Running) -> None:
    """Somebody builds it again while it is in use; then all ranks have to start again."""
    run.at_some_step()
    image = run.cluster.shared / IMAGE
    new = image.with_suffix(".new")
    shutil.copyfile(image, new)
    new.rename(image)
    run.kill(run.rng.choice(("n1", "n2")), f"^python3 -m {TRAIN}")


def cancel(run: Running) -> None:
    """By its user, who submits it again."""
    run.at_some_step()
    run.injected = time.time()
    assert run.cluster.exec(["scancel", run.jobs[-1]]).code == 0
    run.until(lambda: "JobState=CANCELLED" in run.show() and "run folder:" in run.output()[-500:])
    run.submit(run=f"/shared/runs/{run.name}")


def terminate(run: Running) -> None:
    """All processes of the nodes are told, that of the image's mount too, and the batch script is not."""
    run.at_some_step()
    run.injected = time.time()
    assert run.cluster.exec(["scancel", "--signal=TERM", run.jobs[-1]]).code == 0


def time_limit(run: Running) -> None:
    """Slurm looks at it every 30 seconds; its signal comes first, as the recipe's grace says."""
    run.at_some_step()
    run.injected = time.time()
    assert run.cluster.exec(["scontrol", "update", f"job={run.jobs[-1]}", "EndTime=now+75"]).code == 0


@contextmanager
def small_disk(cluster: Any) -> Iterator[None]:
    """A disk for checkpoints that both nodes share; a container sees what is mounted when it starts."""
    folder = cluster.shared / "small"
    folder.mkdir(exist_ok=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK},mode=1777", "tmpfs", folder], check=True)
    try:
        restart_nodes(cluster)
        yield
    finally:
        subprocess.run(["umount", "--lazy", folder], check=True)
        restart_nodes(cluster)


def fill_disk(run: Running) -> None:
    """Others write; after ten steps there is room again."""
    run.at_some_step()
    full = run.cluster.shared / "small" / "of others"
    with full.open("wb") as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 20))
            file.flush()
    reached = run.step()
    run.until(lambda: run.step() >= reached + 2 * EVERY)
    full.unlink()


def restart_nodes(cluster: Any) -> None:
    for node in ("n1", "n2"):
        cluster.machine(node).restart(timeout=1)
    deadline = time.monotonic() + 60
    while cluster.exec(["sinfo", "--noheader", "--format=%T"]).out.split() != ["idle"]:
        assert time.monotonic() < deadline, cluster.exec(["sinfo"]).out
        time.sleep(0.1)


def on(cluster: Any, node: str, command: str) -> None:
    code, out, err = cluster.exec(["bash", "-c", command], node=node, user="root")
    assert code == 0, (command, out, err)


DISK = "64m"
KILLED = r"killed by SIGKILL"
GONE = r"is gone|node failure"
STOPPED = r"stopped by (SIGUSR1|the time limit)"
HANGS = ("hang_timeout_s=10",)
FAULTS = (
    Fault("kill -9 of a rank", kill_rank, KILLED),
    Fault("kill -9 of the launcher", kill_launcher, r"launcher ended: killed by SIGKILL"),
    Fault("kill -9 of a rank's supervisor", kill_supervisor, r"killed by SIGKILL, or its supervisor was"),
    Fault("kill -9 of a node's runner", kill_runner, GONE),
    Fault("kill -9 of the first node's runner", kill_first_runner, GONE),
    Fault("kill -9 of squashfuse", kill_mount, "the image's mount went away"),
    Fault("a node is switched off", switch_off, GONE),
    Fault("a node is switched off, and fewer go on", switch_off, GONE, ("min_nodes=1",), ("--no-kill",), close=1e-4),
    Fault("the controller is restarted", restart_controller, "", lost=0),
    Fault("a node stands still for 10 s", pause_node, "", lost=0),
    Fault("kill -9 in the middle of a save", kill_while_saving, KILLED),
    Fault("the time limit is near", time_is_near, STOPPED, lost=0),
    Fault("scontrol requeue", requeue, "stopped by scontrol requeue"),
    Fault("preemption by a partition of higher priority", preempt, "stopped by preemption"),
    Fault("a checkpoint's file is flipped", damage(flip), STOPPED),
    Fault("a checkpoint's file is truncated", damage(truncate), STOPPED),
    Fault("a checkpoint's file is deleted", damage(delete), STOPPED),
    Fault("a manifest of another checkpoint", damage(other_manifest), STOPPED),
    Fault("a node's network is cut and healed", cut_network, GONE),
    Fault("a rank is stopped (SIGSTOP)", stop_rank, r"hang: rank \d on n\d is stopped", words=HANGS),
    Fault("a rank is slower by half for 10 s", slow_rank, "", lost=0),
    Fault("a node's network is slow", slow_network, "", lost=0),
    Fault("a node's /tmp is full", fill_tmp, "", lost=0, around=small_tmp),
    Fault("the image's file is replaced", replace_image, KILLED, (f"--image=/shared/{IMAGE}",), around=own_image),
    Fault("scancel", cancel, "stopped by scancel"),
    Fault("scancel --signal=TERM", terminate, "the image's mount went away"),
    Fault(
        "the disk of the checkpoints is full",
        fill_disk,
        "",
        ("checkpoint.folder=/shared/small/c",),
        lost=0,
        around=small_disk,
    ),
)


def kill_plain(run: Running) -> None:
    run.at_some_step(12)
    run.kill(run.rng.choice(("n1", "n2")), f"^python3 plain.py {run.seed}$")


def stop_plain(run: Running) -> None:
    run.at_some_step(12)
    run.kill(run.rng.choice(("n1", "n2")), f"^python3 plain.py {run.seed}$", "STOP")


def spin(run: Running) -> None:
    """A rank that is in an endless loop."""
    run.at_some_step(12)
    run.injected = time.time()
    file = f"{run.folder}/spin"
    run.on("n1", f"echo -n {run.rng.randrange(2)} >{file}.part && mv {file}.part {file}", user="dray")


LONG = (Fault("the time limit", time_limit, STOPPED, options=("--signal=B:USR1@70",), lost=0),)
"""In a run that is longer than Slurm takes to look."""
WITH_SPARE = (
    Fault("a node is switched off, with a spare node", switch_off, GONE, ("spares=1",), ("--nodes=3", "--no-kill")),
)
"""On three nodes."""
LIMIT = ("hang_timeout_s=30",)  # its own imports take many seconds, and nobody hears of them
OF_PLAIN = (
    Fault("the time limit is near", time_is_near, STOPPED, lost=0),
    Fault("kill -9 of a rank", kill_plain, KILLED, lost=10),
    Fault("scontrol requeue", requeue, "stopped by scontrol requeue", lost=10),
    Fault("a rank is stopped (SIGSTOP)", stop_plain, r"hang", words=LIMIT, lost=10),
    Fault("a rank in an endless loop", spin, r"hang", words=LIMIT, lost=10),
)
"""Of a user's own script."""
