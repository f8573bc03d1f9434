"""Site files: ours are complete and explained, a user's overrides them, and the errors of a wrong one name the key."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path, PurePosixPath

import pytest

import command
from dray import render
from dray.config import sites
from dray.config.image_definition import PLUGIN
from dray.config.load_toml import load
from dray.config.site import Fabric, Site, SiteBind, SiteVariable
from dray.contract.findings import ConfigError
from dray.facts import Facts, parse, to_text
from dray.fitness import new_site
from dray.planning import missing_facts
from dray.planning.plan import plan
from dray.planning.schema import Plan
from dray.runs import submit as queue
from dray.runs.prepare import read_recipe
from helpers import ROOT, golden

OURS = sorted((ROOT / "slurm" / "sites").glob("*.toml"))
TWICE = '{ name = "A", value = "1", why = "w" }'
SEEN = {
    "scheduler": "slurm", "job": 7, "nodelist": "n[1-2]", "nodes": 2, "engine": "apptainer",
    "image": "/i.sif", "uid": 1000, "gid": 1000,
}  # fmt: skip


def dray(root: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return command.dray(*arguments, cwd=root, **{"DRAY_HOME": str(root), **env})


@pytest.mark.parametrize("path", OURS, ids=lambda path: path.stem)
def test_each_value_says_why_and_from_where(path: Path) -> None:
    site = load(Site, path)
    assert site.name == path.stem
    explained = site.model_fields_set - {"name", "about", "why"}
    assert explained == set(site.why), path
    for reason in site.why.values():
        assert reason.rstrip(".").endswith(")"), reason  # the source
    for one in (*site.binds, *site.env):
        assert one.why
        assert one.source
    assert not any("$HOME" in bind.path or bind.path.startswith("/home") for bind in site.binds)


@pytest.mark.seconds
def test_the_plan_for_lumi(root: Path) -> None:
    """What `dray plan -v --site lumi --nodes 4` shows: masks, binds and the fabric, each with its source."""
    words = ("recipes/smoke-cpu.toml", "image=rocm6", "batch.global_size=128", "--site", "lumi", "--nodes", "4")
    ended = dray(root, "plan", "-v", *words, "--runs", "/scratch/project_1/runs", SBATCH_ACCOUNT="project_1")
    assert (ended.returncode, ended.stderr) == (0, "")
    text = ended.stdout.replace(shlex.quote(f"{root}/build/dray-rocm6.sif"), "/dray/build/dray-rocm6.sif")
    text = text.replace(str(root), "/dray").rstrip("\n")
    run = next(line.split()[-1] for line in text.splitlines() if line.startswith("  id"))
    text = text.replace(run, "RUN") + "\n"
    golden("plan-lumi.txt", text)
    alone = dray(root, "plan", "-v", *words[:-1], "1", SBATCH_ACCOUNT="project_1").stdout
    required = [line for line in text.splitlines() if line.startswith("  check") and "cxi between nodes" in line]
    assert len(required) == 1
    assert "the preflight requires" not in alone, alone  # one node has nothing between nodes
    assert "one node has no network between nodes" in alone


@pytest.mark.seconds
def test_a_site_with_pyxis_is_planned_with_pyxis(root: Path, tmp_path: Path) -> None:
    """Which passes the whole environment; Apptainer does not."""
    (tmp_path / "mine.toml").write_text('name = "mine"\nabout = "a test"\nengine = "pyxis"\n')
    arguments = ("recipes/smoke-cpu.toml", "--site", str(tmp_path / "mine.toml"))
    shown = dray(root, "plan", *arguments, "--json")
    assert json.loads(shown.stdout)["engine"] == "pyxis", shown.stderr


def test_a_submission_asks_as_the_site_does(root: Path, tmp_path: Path) -> None:
    site = load(Site, root / "slurm/sites/leonardo.toml")
    recipe = read_recipe(root / "recipes" / "smoke-cpu.toml", ["image=cuda"])
    options = queue.options(recipe, site, 4, None)
    assert options[-1] == "--gres=gpu:4"
    assert "--partition=boost_usr_prod" in options
    assert queue.options(recipe, site.model_copy(update={"gpu_option": "gpus-per-node"}), 8, None)[-1] == (
        "--gpus-per-node=8"
    )


class TestWhichSite:
    @pytest.fixture
    def own(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("DRAY_SITES", str(tmp_path))
        return tmp_path

    def test_slurms_name_decides(self, own: Path) -> None:
        assert sites.detect("lumi", "nid005001") == (sites.find("lumi"), "Slurm calls this cluster lumi")
        assert sites.detect("", "iris-191") == (sites.find("iris"), "the host name iris-191 matches iris-*")
        assert sites.detect("elsewhere", "box") == (sites.find("generic"), "no site file names the cluster elsewhere")

    def test_a_users_own_file_beats_ours(self, own: Path) -> None:
        (own / "lumi.toml").write_text('name = "lumi"\nabout = "mine"\n')
        (own / "other.toml").write_text('name = "other"\nabout = "mine, too"\nclusters = ["lumi"]\n')
        assert sites.find("lumi").about == "mine"
        assert sites.detect("lumi", "").site.name == "other"

    def test_a_broken_file_of_the_users_own_is_never_left_out_in_silence(self, own: Path) -> None:
        (own / "broken.toml").write_text("name = ")
        with pytest.raises(ConfigError, match="not valid TOML"):
            sites.detect("lumi", "")

    def test_a_file_of_another_name(self, own: Path) -> None:
        (own / "mine.toml").write_text('name = "theirs"\nabout = "a"\n')
        with pytest.raises(ConfigError, match="the name in a site file differs from the file's"):
            sites.find("mine")

    def test_facts_decide_and_say_so(self, own: Path) -> None:
        seen = Facts.model_validate({**SEEN, "cluster": "lumi"})
        assert sites.choose(seen).site.name == "lumi"
        named = seen.model_copy(update={"site": "iris"})
        assert sites.choose(named) == (sites.find("iris"), "chosen by name")
        assert sites.choose(seen.model_copy(update={"scheduler": "local"})).site.name == "generic"


@pytest.mark.parametrize(
    ("content", "error"),
    [
        ("bindz = []", "unknown key: did you mean `binds`?"),
        ('cores = ["0-7", "4-11"]', "4-11: core 4 belongs to another rank"),
        ('cores = ["7-0"]', "7-0: a range ends before it begins"),
        ('cores = ["0-3", "60-70"]\ncpus_per_node = 64', "cores: core 70 is not on a node of 64 CPUs (cpus_per_node)"),
        ('cores = ["0-3"]\ngpus_per_node = 2', "cores: 1 masks for 2 GPUs (gpus_per_node)"),
        ('why = { cors = "x" }', "why.cors: there is no such key to explain"),
        ('[fabric]\nstrategy = "host"', 'strategy = "host" needs fabric.libraries or fabric.plugin'),
        ('[fabric]\nlibraries = ["/x"]', 'fabric.libraries needs strategy = "host"'),
        ('[[binds]]\npath = "data"\nwhy = "w"', 'binds.0.path = "data"'),
        (f"env = [{TWICE}, {TWICE}]", "env: A is set twice"),
        ("stage = 'tmp'", 'stage = "tmp"'),
        ("stage = ''", 'stage = ""'),
        ("stage = 'offs'", 'stage = "offs"'),
        ("stage = '/tmp'\nstage_by = 'sbcast'", "stage_by"),
        ("interfaces = ['a b']", 'interfaces.0 = "a b"'),
        (
            'engine = "edf"\nannotations = { "com.hooks" = "on", "com.hooks.cxi" = "true" }',
            "annotations.com.hooks cannot have a value and names below it",
        ),
        ("gpu_option = 'gpus'", 'gpu_option = "gpus"'),
        ('[fabric]\nplugin = "image"', 'fabric.plugin needs strategy = "host" or "image"'),
        ('[fabric]\nplugin = "/opt/lib.so"', 'fabric.plugin needs strategy = "host" or "image"'),
        ('[fabric]\nstrategy = "host"\nplugin = "images"', 'fabric.plugin = "images"'),
        ('[fabric]\nstrategy = "host"\nplugin = "lib.so"', 'fabric.plugin = "lib.so"'),
        ("[fabric]\nmin_bus_bandwidth_gb_s = -1", "fabric.min_bus_bandwidth_gb_s = -1"),
    ],
)  # fmt: skip
def test_an_invalid_site_file_is_refused(tmp_path: Path, content: str, error: str) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(f'name = "mine"\nabout = "a"\n{content}\n')
    with pytest.raises(ConfigError) as wrong:
        load(Site, path)
    assert error in str(wrong.value)


class TestBinds:
    SITE = Site(
        name="s",
        about="",
        binds=(
            SiteBind(path="$SCRATCH/data", why="data", write=True),
            SiteBind(path="/work/$USER", why="work", required=False),
        ),
    )

    def binds(self, root: Path, **facts: object) -> list[tuple[str, str, bool]]:
        seen = Facts.model_validate({**SEEN, **facts})
        recipe = read_recipe(root / "recipes" / "smoke-cpu.toml")
        made = plan(recipe, self.SITE, seen, run_folder=PurePosixPath("/r"), scratch="/tmp/dray-7-r", dray="0")
        return [(bind.path, bind.source, bind.required) for bind in made.binds[1:-1]]

    def test_the_jobs_variables_are_filled_in(self, root: Path) -> None:
        found = self.binds(root, variables={"SCRATCH": "/lustre/me", "USER": "me"}, home="/home/me")
        assert found == [
            ("/lustre/me/data", "site s $SCRATCH/data", True),
            ("/work/me", "site s /work/$USER", False),
        ]

    def test_what_is_not_set_is_left_out_or_refused(self, root: Path) -> None:
        assert self.binds(root, variables={"SCRATCH": "/l"}) == [("/l/data", "site s $SCRATCH/data", True)]
        with pytest.raises(ConfigError, match=r"the site binds \$SCRATCH/data, which is no path in this job"):
            self.binds(root)

    @pytest.mark.parametrize("scratch", ["/home", "/home/me", "/"])
    def test_never_the_home_by_accident(self, root: Path, scratch: str) -> None:
        site = self.SITE.model_copy(update={"binds": (SiteBind(path="$SCRATCH", why="data"),)})
        seen = Facts.model_validate({**SEEN, "variables": {"SCRATCH": scratch}, "home": "/home/me"})
        recipe = read_recipe(root / "recipes" / "smoke-cpu.toml")
        with pytest.raises(ConfigError, match="would bring your home into the container"):
            plan(recipe, site, seen, run_folder=PurePosixPath("/r"), scratch="/tmp/dray-7-r", dray="0")

    def test_on_a_login_node_they_stay_as_they_are(self, root: Path) -> None:
        assert [path for path, *_ in self.binds(root, login="uan01")] == ["$SCRATCH/data", "/work/$USER"]


def test_variables_for_one_node_or_for_several(root: Path) -> None:
    env = (
        SiteVariable(name="NCCL_NET", value="AWS Libfabric", why="w", nodes="several"),
        SiteVariable(name="NCCL_NET", value="Socket", why="w", nodes="one"),
    )
    site = Site(name="s", about="", env=env)
    recipe = read_recipe(root / "recipes" / "smoke-cpu.toml")
    for nodelist, nodes, value in (("n1", 1, "Socket"), ("n[1-2]", 2, "AWS Libfabric")):
        seen = Facts.model_validate({**SEEN, "nodelist": nodelist, "nodes": nodes})
        made = plan(recipe, site, seen, run_folder=PurePosixPath("/r"), scratch="/tmp/dray-7-r", dray="0")
        assert {variable.name: variable.value for variable in made.env}["NCCL_NET"] == value


def test_the_images_own_plugin_is_named_to_nccl(root: Path) -> None:
    fabric = Fabric(kind="slingshot", strategy="image", plugin="/opt/ofi/lib/librccl-net.so", transport=("cxi",))
    recipe = read_recipe(root / "recipes" / "smoke-cpu.toml")
    site = Site(name="s", about="", fabric=fabric)
    made = plan(
        recipe, site, Facts.model_validate(SEEN), run_folder=PurePosixPath("/r"), scratch="/tmp/dray-7-r", dray="0"
    )
    (variable,) = [variable for variable in made.env if variable.name == "NCCL_NET_PLUGIN"]
    assert (variable.value, variable.source) == ("/opt/ofi/lib/librccl-net.so", "site s")
    assert "librccl-net.so does not exist" not in render.node_script(made)


PLUGIN_OF_OURS = Fabric(strategy="host", libraries=("/usr/lib64/libcxi.so.1",), plugin="image", transport=("cxi",))


@pytest.mark.parametrize(
    ("words", "nodes", "engine", "fabric", "value"),
    [
        (("image=cuda",), 2, "apptainer", PLUGIN_OF_OURS, PLUGIN),
        (("image=cuda12",), 2, "apptainer", PLUGIN_OF_OURS, PLUGIN),
        (("image=rocm",), 2, "apptainer", PLUGIN_OF_OURS, PLUGIN),
        (("image=rocm6",), 2, "apptainer", PLUGIN_OF_OURS, PLUGIN),
        (("image=rocm", "env.NCCL_NET_PLUGIN=none"), 2, "apptainer", PLUGIN_OF_OURS, "none"),
        ((), 2, "apptainer", PLUGIN_OF_OURS.model_copy(update={"plugin": ""}), None),  # gloo has no plugins
        (("image=cuda",), 2, "docker", Fabric(transport=("cxi",)), None),  # nothing of the host gets in
        (("image=cuda",), 1, "apptainer", Fabric(transport=("cxi",)), None),
    ],
)
def test_a_run_gets_the_plugin_of_drays_own_images(
    root: Path, words: tuple[str, ...], nodes: int, engine: str, fabric: Fabric, value: str | None
) -> None:
    recipe = read_recipe(root / "recipes" / "smoke-cpu.toml", words)
    site = Site(name="s", about="", fabric=PLUGIN_OF_OURS)
    seen = Facts.model_validate(
        {**SEEN, "nodelist": f"n[1-{nodes}]", "nodes": nodes, "gpus_per_node": 2, "engine": engine}
    )
    made = plan(recipe, site, seen, run_folder=PurePosixPath("/r"), scratch="/tmp/dray-7-r", dray="0")
    assert (made.fabric, made.fabric.host_plugin) == (fabric, "")
    assert {variable.name: variable.value for variable in made.env}.get("NCCL_NET_PLUGIN") == value
    script = render.node_script(made)
    assert ("libcxi.so.1" in script) == bool(fabric.libraries)
    assert 'node::bind "$newest" ro' not in script  # it is in the image


def test_an_adopted_image_has_no_plugin_of_drays(root: Path) -> None:
    recipe = read_recipe(root / "recipes" / "smoke-cpu.toml", ("image=rocm", "adopted=mine"))
    site = Site(name="s", about="", fabric=PLUGIN_OF_OURS)
    several = {"nodelist": "n[1-2]", "nodes": 2, "gpus_per_node": 2, "engine": "apptainer", "image_variant": "rocm"}
    theirs = {"image": "/c/dray-mine.sif", "adopted": "/c/dray-mine", "adopted_path": "/c/dray-mine"}
    seen = Facts.model_validate({**SEEN, **several, **theirs})
    made = plan(recipe, site, seen, run_folder=PurePosixPath("/r"), scratch="/tmp/dray-7-r", dray="0")
    assert made.fabric == PLUGIN_OF_OURS.model_copy(update={"plugin": ""})
    assert "NCCL_NET_PLUGIN" not in {variable.name for variable in made.env}


def test_the_seven_sites_with_slingshot_take_it() -> None:
    sites = [load(Site, path) for path in OURS]
    slingshot = [site for site in sites if site.fabric.kind == "slingshot"]
    assert sorted(site.name for site in slingshot) == [
        *("alps", "dardel", "frontier", "isambard", "lumi", "perlmutter", "setonix")
    ]
    (alps,) = (site for site in slingshot if site.engine == "edf")
    assert alps.fabric.strategy == "none"  # hooks of its engine bring the libraries
    hosts = [site for site in slingshot if site is not alps]
    assert {(site.fabric.strategy, site.fabric.image_plugin) for site in hosts} == {("host", PLUGIN)}
    assert all(any("libfabric.so.1" in one for one in site.fabric.files) for site in hosts)
    # None of them has seen it, and the reason says so.
    assert all("never ran on" in " ".join(site.why["fabric"].split()) for site in slingshot)


class TestCommands:
    @pytest.mark.seconds
    def test_list_says_which_one_this_is(self, root: Path) -> None:
        ended = dray(root, "site", "list", SLURM_CLUSTER_NAME="lumi")
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout.splitlines()[-1] == "this machine: lumi (Slurm calls this cluster lumi)"
        assert len(ended.stdout.splitlines()) == len(OURS) + 2

    @pytest.mark.seconds
    def test_show_has_the_reasons(self, root: Path) -> None:
        ended = dray(root, "site", "show", "lumi")
        assert ended.returncode == 0, ended.stderr
        interfaces = 'interfaces = ["hsn0", "hsn1", "hsn2", "hsn3"]\n    Four Slingshot cards on a node'
        assert interfaces in ended.stdout

    @pytest.mark.seconds
    def test_check_of_all(self, root: Path) -> None:
        ended = dray(root, "site", "check")
        assert (ended.returncode, ended.stderr) == (0, "")
        assert ended.stdout.splitlines() == [f"{path.stem}: ok" for path in OURS]

    @pytest.mark.seconds
    def test_check_of_a_wrong_one(self, root: Path, tmp_path: Path) -> None:
        (tmp_path / "bad.toml").write_text('name = "bad"\n')
        ended = dray(root, "site", "check", DRAY_SITES=str(tmp_path))
        assert ended.returncode == 78
        assert f"dray: 1 of {len(OURS) + 1} site files are not valid\n  found:  site " in ended.stderr


class TestNew:
    SINFO = "#!/bin/bash\necho 'cpu|4|128|(null)'\necho 'gpu|12|64|gpu:a100:4(S:0-1)'\n"

    @pytest.mark.seconds
    def test_what_is_seen_becomes_a_site(self, root: Path, tmp_path: Path) -> None:
        for name, text in (("sinfo", self.SINFO), ("scontrol", "#!/bin/bash\necho 'ClusterName = Harbour'\n")):
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o755)
        own = tmp_path / "my sites"
        path = f"{tmp_path}:{os.environ['PATH']}"
        env = {"PATH": path, "DRAY_SITES": str(own), "SCRATCH": "/scratch/me", "WORK": "/home", "HOME": "/home/me"}
        ended = dray(root, "site", "new", **env)
        assert ended.returncode == 0, ended.stderr
        made = load(Site, own / "harbour.toml")
        assert (made.clusters, made.gpus_per_node, made.cpus_per_node) == (("Harbour",), 4, 64)
        assert made.sbatch == ("--partition=gpu",)
        assert [bind.path for bind in made.binds] == ["$SCRATCH"]
        again = dray(root, "site", "new", **env)
        assert (again.returncode, again.stderr.splitlines()[0]) == (78, "dray: cannot write the site file")

    @pytest.mark.seconds
    @pytest.mark.parametrize("name", ["LUMI", "my site", "../x"])
    def test_a_name_that_no_site_can_have_leaves_no_file(self, root: Path, tmp_path: Path, name: str) -> None:
        ended = dray(root, "site", "new", name, DRAY_SITES=str(tmp_path / "own"))
        assert (ended.returncode, ended.stdout) == (78, "")
        assert ended.stderr.startswith("dray: the site file")
        assert not list(tmp_path.iterdir())

    def test_the_fabric_is_seen_in_sys(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PATH", "")
        for name in ("hsn0", "hsn1", "eth0"):
            (tmp_path / "sys/class/net" / name / "device").mkdir(parents=True)
        probed = new_site.probe({}, tmp_path)
        assert (probed.fabric, probed.interfaces, probed.cluster) == ("slingshot", ("hsn0", "hsn1"), "")
        (tmp_path / "x.toml").write_text(new_site.render("x", probed))
        assert load(Site, tmp_path / "x.toml").fabric.transport == ("cxi",)


@pytest.mark.seconds
def test_doctor_is_one_page_and_json(root: Path) -> None:
    ended = dray(root, "doctor", "--json", "--site", "lumi")
    assert ended.returncode == 69
    items = json.loads(ended.stdout)
    by_name = {item["problem"]: item for item in items}
    assert by_name["site"]["found"] == "lumi: chosen by name"
    assert {"machine", "dray", "engine", "Slurm", "GPU", "fabric", "/dev/shm", "HF_HOME", "bind"} <= by_name.keys()
    missing = "/pfs does not exist (the other folders are links into it)"
    assert missing in [item["found"] for item in items if item["level"] == "error"]
    assert f"error   bind: {missing}\n" in dray(root, "doctor", "--site", "lumi").stdout


class TestAnotherClustersSite:
    """Else each node says that it lacks a folder, and is left out of the next job: all of them lack it."""

    SITE = Site(
        name="far",
        about="",
        binds=(SiteBind(path="/pfs", why="w"), SiteBind(path="/flash", why="w", required=False)),
    )

    def plan(self, **facts: object) -> Plan:
        seen = Facts.model_validate({**SEEN, **facts})
        recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml")
        return plan(recipe, self.SITE, seen, run_folder=PurePosixPath("/r"), scratch="/tmp/dray-7-r", dray="0")

    def test_the_planner_asks_for_its_folders(self) -> None:
        recipe, seen = read_recipe(ROOT / "recipes" / "smoke-cpu.toml"), Facts.model_validate(SEEN)
        assert missing_facts.ask(recipe, self.SITE, seen) == ["variables=/pfs"]
        known = seen.model_copy(update={"paths": {"/pfs": "there"}})
        assert missing_facts.ask(recipe, self.SITE, known) == []
        assert parse(to_text(known), where="w").paths == {"/pfs": "there"}

    def test_it_is_refused_where_the_first_node_lacks_one(self) -> None:
        self.plan(paths={"/pfs": "there"}).refuse()
        with pytest.raises(ConfigError, match="this cluster does not look like site far") as refused:
            self.plan(paths={"/pfs": "absent"}).refuse()
        assert "  wanted: /pfs, which site far has on every node\n" in str(refused.value)
        assert "export DRAY_SITE=NAME (dray site list), or generic" in str(refused.value)
