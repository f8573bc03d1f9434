"""Engines besides those of the plan's own tests: the image on a node's own disk, Podman, Pyxis."""

from __future__ import annotations

import itertools
import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import pytest

from dray import engines, render
from dray.config.site import Fabric, Site, SiteBind
from dray.contract.findings import ConfigError
from dray.engines.base import MOUNTS, Container, Engine
from dray.facts import Facts
from dray.planning.plan import plan
from dray.planning.schema import Plan
from dray.runs.prepare import read_recipe

IMAGE = bytes(range(256)) * 8
_NUMBERS = itertools.count()


def made(root: Path, folder: Path, *, site: Site, scratch: str = "/tmp/dray-7-r", **facts: object) -> Plan:
    said = {"scheduler": "slurm", "job": 1, "nodelist": "n[1-2]", "nodes": 2, "uid": 1000, "gid": 1000}
    seen = Facts.model_validate({**said, **facts})
    recipe = read_recipe(root / "recipes" / "smoke-cpu.toml")
    return plan(recipe, site, seen, run_folder=PurePosixPath(folder), scratch=scratch, dray="0")


def test_what_slurm_tells_the_script_alone_the_engine_hears_once(root: Path, tmp_path: Path) -> None:
    """As proctrack/cgroup does it, which signals no grandchild."""
    do = "count=0; trap 'count=$((count + 1))' USR1; trap 'echo heard $count; exit 9' TERM; echo ready; "
    (tmp_path / "run" / "attempt-1").mkdir(parents=True)
    (tmp_path / "i.sif").touch()
    tool = tmp_path / "apptainer"
    tool.write_text(f"#!/bin/bash\n{do}while :; do sleep 0.05; done\n")
    tool.chmod(0o755)
    script = render.node_script(
        made(
            root, tmp_path / "run", site=Site(name="s", about=""), engine="apptainer", image=str(tmp_path / "i.sif"),
            scratch=f"/tmp/dray-7-{os.getpid()}",  # a node ends all that has it in its environment
        )
    )  # fmt: skip
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    with subprocess.Popen(["bash", "-c", script], env=env, stdout=subprocess.PIPE, text=True) as node:
        assert node.stdout
        while node.stdout.readline() != "ready\n":
            assert node.poll() is None
        node.send_signal(signal.SIGUSR1)
        time.sleep(0.3)  # two signals at once may be heard in any order
        node.send_signal(signal.SIGTERM)
        assert node.wait(20) == 9
        assert node.stdout.read() == "heard 1\n"


def test_pyxis_is_told_by_options_of_srun(root: Path) -> None:
    binds = (SiteBind(path="/data", why="it is there"), SiteBind(path="/scratch", why="so is that", write=True))
    site = Site(name="s", about="", engine="pyxis", binds=binds)
    decided = made(root, Path("/my runs/r1"), site=site, engine="pyxis", image="/images/dray-cuda.sqsh")
    assert render.srun_options(decided).splitlines() == [
        "--container-image=/images/dray-cuda.sqsh",
        "--container-mounts=/my runs/r1:/my runs/r1,/data:/data:ro,/scratch:/scratch,"
        "/my runs/.cache-1000:/my runs/.cache-1000",
        "--container-workdir=/my runs/r1/attempt-1",
        "--no-container-mount-home",
        "--no-container-remap-root",
        "--container-writable",
    ]
    script = render.node_script(decided)
    assert script.index("cd '/my runs/r1/attempt-1'\n") < script.index(
        "\nnode::start python3 \\\n  -m \\\n  dray.runner \\\n"
    )
    assert "apptainer" not in script
    assert "\nexport PYTHONUNBUFFERED=1\n" in script
    odd = site.model_copy(update={"binds": (SiteBind(path="/a:b", why=""),)})
    with pytest.raises(ConfigError, match="pyxis cannot mount a path with , or : in it"):
        made(root, Path("/r"), site=odd, engine="pyxis", image="/i.sqsh").refuse()


def test_an_engine_is_one_class_and_a_line_in_the_registry(root: Path, monkeypatch) -> None:
    """Traits decide the rest: what node.sh looks for, how variables get in, who may use it."""

    class Sarus(Engine):
        name = "sarus"
        schedulers = frozenset({"slurm"})
        env_prefix = "SARUS_"
        read_only = "locked"

        def argv(self, container: Container, inner: Sequence[str]) -> list[str]:
            return ["sarus", f"--image={container.image}", MOUNTS, *inner]

    monkeypatch.setitem(engines._BY_NAME, "sarus", Sarus())
    script = render.node_script(made(root, Path("/r"), site=Site(name="s", about=""), engine="sarus", image="/i.img"))
    assert "node::need /i.img 'the image' " in script
    assert "read_only=locked\n" in script
    assert "\nexport SARUS_PYTHONUNBUFFERED=1\n" in script
    assert 'node::start sarus \\\n  --image=/i.img \\\n  "${mounts[@]}" \\\n  python3 \\\n' in script


def test_no_other_room_compares_names_of_engines(root: Path) -> None:
    compares = re.compile(rf"engine (==|!=|in|not in) .*({'|'.join(engines.names())})")
    rooms = (path for path in (root / "src/dray").rglob("*.py") if path.parent.name not in ("engines", "clients"))
    assert [str(path) for path in rooms if compares.search(path.read_text())] == []


def test_an_engine_that_is_none(root: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such engine") as refused:
        made(root, Path("/r"), site=Site(name="s", about=""), engine="rkt", image="/i")
    assert refused.value.details == {
        "wanted": "bare, docker, podman, apptainer, singularity and 3 more", "found": "rkt", "fix": "apptainer"
    }  # fmt: skip


def limits(engine: str, uid: int, accelerator: str = "cuda") -> list[str]:
    """What the engine says of limits: network cards register, and so lock, the memory that they read and write."""
    container = Container(
        run="r", image="i", accelerator=accelerator, folder="/r", user=f"{uid}:{uid}", variables=(),
        name_variable="N", one_machine=False, mounts=(),
    )  # fmt: skip
    return [word for word in engines.get(engine).argv(container, ["true"]) if word.startswith("--ulimit")]


def test_runs_without_gpus_keep_the_limits() -> None:
    assert limits("docker", 0, "cpu") == limits("podman", 1000, "cpu") == []
    assert limits("docker", 1000, "rocm") == ["--ulimit=memlock=-1"]


@pytest.mark.parametrize(("uid", "keep"), [(1000, True), (0, False)])
def test_podman_differs_from_docker_in_few_words(root: Path, uid: int, keep: bool) -> None:
    site = Site(name="s", about="")
    said = {"scheduler": "local", "image": "dray:cpu", "uid": uid}
    docker, podman = (
        render.node_script(made(root, Path("/r"), site=site, engine=engine, **said)).splitlines()
        for engine in ("docker", "podman")
    )
    for_gpus = ["--ulimit=memlock=-1", *(["--ulimit=host"] if keep else ["--ulimit=memlock=-1"])]
    assert [limits(engine, uid) for engine in ("docker", "podman")] == [[one] for one in for_gpus]
    new = [line for line in podman if line not in docker]
    assert new == [
        "DRAY_IMAGE_ID=$(podman image inspect '--format={{.Id}}' dray:cpu | tr --delete ' \\n') || true",
        "exec podman \\",
        *(["  --userns=keep-id \\"] if keep else []),
    ]


def test_machines_of_a_hostfile_share_the_host_s_network(root: Path) -> None:
    site = Site(name="s", about="")
    decided = made(root, Path("/r"), site=site, engine="docker", scheduler="hosts", image="dray:cpu", nodelist="a,b")
    lines = render.node_script(decided).splitlines()
    assert "  --network=host \\" in lines
    assert not [line for line in lines if "--hostname" in line or "--network-alias" in line]


class TestPlaces:
    """The real script and the real bash; Apptainer is a stand-in that tells what it was to see of the host."""

    @pytest.fixture
    def node(self, root: Path, tmp_path: Path):
        for name in ("run/attempt-1/failures", ".cache-1000", "bin", "real/data", "dev"):
            (tmp_path / name).mkdir(parents=True)
        (tmp_path / "i.sif").write_bytes(IMAGE)
        tool = tmp_path / "bin" / "apptainer"
        tool.write_text(
            "#!/bin/bash\n"
            'for word; do [[ "$word" != --mount=* ]] || printf "%s\\n" "${word#--mount=type=bind,}"; done\n'
            'printf "libs %s\\nplugin %s\\n" "${APPTAINER_CONTAINLIBS:-}" "${APPTAINERENV_NCCL_NET_PLUGIN:-}"\n'
        )
        tool.chmod(0o755)

        def run(*binds: SiteBind, fabric: Fabric | None = None) -> tuple[int, list[str], str]:
            site = Site(name="s", about="", binds=binds, fabric=fabric or Fabric())
            decided = made(root, tmp_path / "run", site=site, engine="apptainer", image=str(tmp_path / "i.sif"))
            ended = subprocess.run(
                ["bash", "-c", render.node_script(decided)],
                env={"PATH": f"{tool.parent}:/usr/bin:/bin", "SLURMD_NODENAME": "n1", "SLURM_NODEID": "0"},
                capture_output=True, text=True, check=False,
            )  # fmt: skip
            lines = [line for line in ended.stdout.splitlines() if line != self.line(tmp_path / ".cache-1000")]
            return ended.returncode, lines, ended.stderr

        return run

    @staticmethod
    def line(path: Path, mode: str = "") -> str:
        return f'"src={path}","dst={path}"{mode}'

    def test_a_links_target_is_seen_as_well(self, node, tmp_path: Path) -> None:
        (tmp_path / "scratch").symlink_to("real")
        code, out, _ = node(SiteBind(path=f"{tmp_path}/scratch/data", why="w", write=True))
        assert code == 0
        assert out[:-2] == [
            self.line(tmp_path / "real/data"), self.line(tmp_path / "run"), self.line(tmp_path / "scratch/data"),
        ]  # fmt: skip

    def test_a_folder_comes_before_what_lies_in_it_and_who_writes_decides(self, node, tmp_path: Path) -> None:
        """Else the site's folder, read-only, would hide the run's."""
        (tmp_path / "link").symlink_to("real/data")
        code, out, _ = node(
            SiteBind(path=str(tmp_path), why="w"),
            SiteBind(path=f"{tmp_path}/real/data", why="w", write=True),
            SiteBind(path=f"{tmp_path}/link", why="w"),
        )
        assert code == 0
        assert out[:-2] == [
            self.line(tmp_path, ",ro"), self.line(tmp_path / "link", ",ro"), self.line(tmp_path / "real/data"),
            self.line(tmp_path / "run"),
        ]  # fmt: skip

    @pytest.mark.parametrize("name", ["a b:c", "d,e", "it's", "f\\g", "é", "[z]*", "tab\tin it"])
    def test_any_name_arrives(self, node, tmp_path: Path, name: str) -> None:
        (tmp_path / name).mkdir()
        code, out, err = node(SiteBind(path=f"{tmp_path}/{name}", why="w"))
        assert code == 0, err
        assert self.line(tmp_path / name, ",ro") in out

    def test_what_is_not_required_is_left_out(self, node, tmp_path: Path) -> None:
        code, out, _ = node(SiteBind(path=f"{tmp_path}/flash", why="w", required=False))
        assert (code, out[:-2]) == (0, [self.line(tmp_path / "run")])

    def test_what_is_required_stops_the_node(self, node, tmp_path: Path) -> None:
        code, out, err = node(SiteBind(path=f"{tmp_path}/flash", why="fast data"))
        assert (code, out) == (69, [])
        assert err == f"dray: {tmp_path}/flash does not exist\n  wanted: site s: fast data\n  where:  node n1\n"
        record = json.loads((tmp_path / "run/attempt-1/failures/node-0.json").read_text())
        assert (record["node"], record["code"]) == ("n1", 69)

    def test_the_newest_library_that_matches_goes_in(self, node, tmp_path: Path) -> None:
        for version in ("1.9.0", "1.22.0", "1.15.2.0"):
            (tmp_path / "cray" / version).mkdir(parents=True)
            (tmp_path / "cray" / version / "libfabric.so.1").touch()
        (tmp_path / "libcxi.so.1").touch()
        (tmp_path / "librccl-net.so").touch()
        fabric = Fabric(
            strategy="host",
            libraries=(f"{tmp_path}/cray/*/libfabric.so.1", f"{tmp_path}/libcxi.so.1"),
            plugin=f"{tmp_path}/librccl-*.so",
        )
        code, out, err = node(fabric=fabric)
        assert code == 0, err
        assert out[-2:] == [
            f"libs {tmp_path}/cray/1.22.0/libfabric.so.1,{tmp_path}/libcxi.so.1",
            f"plugin {tmp_path}/librccl-net.so",
        ]
        assert self.line(tmp_path / "librccl-net.so", ",ro") in out

    def test_a_part_of_the_fabric_that_is_missing_stops_the_node(self, node, tmp_path: Path) -> None:
        code, out, err = node(fabric=Fabric(strategy="host", plugin=f"{tmp_path}/lib/librccl-net*.so"))
        assert (code, out) == (69, [])
        assert err.splitlines()[0] == f"dray: {tmp_path}/lib/librccl-net*.so does not exist"
        assert "ranks silently use TCP" in err


def test_docker_has_no_library_folder_to_put_the_hosts_into(root: Path) -> None:
    fabric = Fabric(strategy="host", libraries=("/usr/lib64/libcxi.so.1",), transport=("cxi",))
    site = Site(name="s", about="", fabric=fabric)
    decided = made(root, Path("/r"), site=site, engine="docker", image="dray:cpu")
    assert decided.fabric == Fabric(transport=("cxi",))


@pytest.mark.parametrize(
    ("config", "bound"),
    [
        ("mount dev = yes\n", []),  # a bind over it would have nodev: nobody could open the device
        ("# mount dev = minimal\nmount dev = yes\n", []),
        ("mount dev = no\n", []),
        ("\tmount dev=minimal\n", ["--bind=DEV/kfd", "--bind=DEV/dri"]),
        ("allow setuid = yes\nmount dev = minimal\n", ["--bind=DEV/kfd", "--bind=DEV/dri"]),
        (None, []),
    ],
)
@pytest.mark.parametrize("engine", ["apptainer", "singularity"])
def test_amd_gpus_are_seen_without_the_hosts_rocm(
    root: Path, tmp_path: Path, engine: str, config: str | None, bound: list[str]
) -> None:
    """The real script; the engine is a stand-in that has a configuration, and the devices are files."""
    (tmp_path / "dev/dri").mkdir(parents=True)
    for place in ("dev/kfd", "i.sif"):
        (tmp_path / place).touch()
    (tmp_path / "run/attempt-1").mkdir(parents=True)
    if config is not None:
        (tmp_path / "a conf").write_text(config)
    tool = tmp_path / engine
    found = f'echo "PREFIX=/usr"; echo "{engine.upper()}_CONF_FILE={tmp_path}/a conf"'
    tool.write_text(f'#!/bin/bash\nif [[ $1 == buildcfg ]]; then {found}; exit; fi\nprintf "%s\\n" "$@"\n')
    tool.chmod(0o755)
    facts = Facts(scheduler="slurm", nodelist="n1", nodes=1, gpus_per_node=1, engine=engine, image=f"{tmp_path}/i.sif")
    recipe = read_recipe(root / "recipes" / "smoke-cpu.toml", ["image=rocm"])
    decided = plan(recipe, Site(name="s", about=""), facts, run_folder=PurePosixPath(tmp_path / "run"),
                   scratch="/tmp/dray-7-r", dray="0")  # fmt: skip
    script = render.node_script(decided).replace("/dev/", f"{tmp_path}/dev/")
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURMD_NODENAME": "n1", "SLURM_NODEID": "0"}
    ended = subprocess.run(["bash", "-c", script], env=env, capture_output=True, text=True, check=False)
    words = ended.stdout.splitlines()
    assert ended.returncode == 0, ended.stderr
    wanted = [word.replace("DEV", f"{tmp_path}/dev") for word in bound]
    assert [word for word in words if word.startswith(("--rocm", "--bind"))] == wanted
    said = "/dev/kfd and /dev/dri, without --rocm, which would bind the host's ROCm libraries over the wheels'"
    assert f"\n  GPUs       {said}\n" in render.text(decided)
