"""A plan and what is rendered from it, whole. DRAY_GOLDEN=write writes the golden files anew: read the diff then."""

from __future__ import annotations

import json
import os
import subprocess
import time
from pathlib import Path, PurePosixPath

import pytest

from dray import render
from dray.config.site import Site, SiteBind, SiteVariable
from dray.contract.findings import ConfigError
from dray.facts import Facts, parse, to_text
from dray.planning import environment
from dray.planning.plan import plan
from dray.planning.schema import Plan
from dray.runs.prepare import read_recipe
from helpers import GOLDEN, PYTHON, golden

HOSTILE = """a b,c:d'"$(touch pwned);`touch pwned`\\*?é"""

FACTS = {
    "scheduler": "slurm",
    "job": 17,
    "nodelist": "n[1-2]",
    "nodes": 2,
    "engine": "apptainer",
    "image": "/shared/my work/build/dray-cpu.sif",
    "uid": 1000,
    "gid": 1000,
}
SITE = Site(
    name="harbour",
    about="a made-up cluster",
    sbatch=("--partition=main",),
    binds=(SiteBind(path="/scratch", why="data lives there", write=True),),
    env=(
        SiteVariable(name="OMP_NUM_THREADS", value="3", why="hyperthreads are off"),
        SiteVariable(name="NCCL_SOCKET_IFNAME", value="hsn0,hsn1", why="the fast network"),
    ),
)
LOCAL = {"scheduler": "local", "job": 0, "nodelist": "node[1-2]", "engine": "docker", "image": "dray:cpu"}


def made(
    root: Path, *overrides: str, folder: str = "/shared/my work/runs/r1", site: Site = SITE, **facts: object
) -> Plan:
    recipe = read_recipe(root / "recipes" / "smoke-cpu.toml", overrides)
    seen = Facts.model_validate({**FACTS, **facts})
    return plan(recipe, site, seen, run_folder=PurePosixPath(folder), scratch="/tmp/dray-7-r", dray="0.0.0")


def test_plan_json(root: Path) -> None:
    plan = made(root)
    # A new key of the recipe changes no plan that does not set it.
    recipe = plan.recipe.model_dump(mode="json", exclude_defaults=True)
    golden(
        "plan.json", json.dumps({**plan.model_dump(mode="json"), "recipe": recipe}, indent=1, ensure_ascii=False) + "\n"
    )


def test_plan_text(root: Path) -> None:
    golden("plan.txt", render.text(made(root)))


def test_node_script_for_apptainer(root: Path) -> None:
    golden("node-apptainer.sh", render.node_script(made(root)))


def test_node_script_for_docker(root: Path) -> None:
    golden("node-docker.sh", render.node_script(made(root, **LOCAL)))


def test_node_script_for_bare(root: Path) -> None:
    bare = {**LOCAL, "engine": "bare", "image": "/home/me/.venv/bin/python", "address": "127.0.0.1"}
    golden("node-bare.sh", render.node_script(made(root, **bare)))


@pytest.mark.shellcheck
@pytest.mark.parametrize("engine", ["apptainer", "docker", "bare"])
def test_a_rendered_script_passes_shellcheck(root: Path, engine: str) -> None:
    script = GOLDEN / f"node-{engine}.sh"
    checked = subprocess.run(["shellcheck", script], capture_output=True, text=True, check=False)
    assert checked.stdout == ""


@pytest.mark.parametrize(
    ("engine", "prefix"), [("apptainer", "APPTAINERENV_"), ("singularity", "SINGULARITYENV_"), ("docker", "")]
)
def test_hostile_paths_and_values_arrive_as_they_are(root: Path, tmp_path: Path, engine: str, prefix: str) -> None:
    """The real script, run by the real bash; only the engine is a stand-in that writes down what reached it."""
    tool = tmp_path / "bin" / engine
    tool.parent.mkdir()
    tool.write_text('#!/bin/bash\nprintf "%s\\0" "$@" > "$SEEN/argv"\nenv -0 > "$SEEN/env"\n')
    tool.chmod(0o755)
    places = {name: tmp_path / f"{name} {HOSTILE}" for name in ("run", "data")}
    for place in (*places.values(), places["run"] / "attempt-1"):
        place.mkdir()
    identity = LOCAL if engine == "docker" else {}
    decided = made(
        root,
        f"data.train={places['data']}",
        folder=str(places["run"]),
        site=SITE.model_copy(update={"binds": ()}),
        **{**identity, "engine": engine, "image": f"{tmp_path}/{HOSTILE}.sif"},
    )
    if engine != "docker":
        (tmp_path / f"{HOSTILE}.sif").write_bytes(bytes(64))
    hostile = decided.env[0].model_copy(update={"name": "PYTHONHOSTILE", "value": HOSTILE + "\nsecond line"})
    decided = decided.model_copy(update={"env": (*decided.env, hostile)})
    script = tmp_path / "node.sh"
    script.write_text(render.node_script(decided), encoding="utf-8")
    names = decided.world.identity
    me = {names["node"]: "1", names["nodes"]: "2", names["name"]: "n 2"}
    subprocess.run(
        ["bash", script],
        env={"PATH": f"{tool.parent}:/usr/bin:/bin", "SEEN": str(tmp_path), **me},
        cwd=tmp_path,
        check=True,
    )
    argv = (tmp_path / "argv").read_text(encoding="utf-8").split("\0")[:-1]
    env = dict(line.split("=", 1) for line in (tmp_path / "env").read_text(encoding="utf-8").split("\0")[:-1])
    assert env[f"{prefix}PYTHONHOSTILE"] == HOSTILE + "\nsecond line"
    assert env[f"{prefix}{names['name']}"] == "n 2"
    assert argv[-5:] == [
        f"{tmp_path}/{HOSTILE}.sif",
        "python3",
        "-m",
        "dray.runner",
        f"{places['run']}/attempt-1/plan.json",
    ]
    run, data = (str(places[name]).replace('"', '""') for name in ("run", "data"))
    read_only = "readonly" if engine == "docker" else "ro"
    assert f'--mount=type=bind,"src={run}","dst={run}"' in argv
    assert f'--mount=type=bind,"src={data}","dst={data}",{read_only}' in argv
    assert not list(tmp_path.glob("**/pwned"))


def test_ranks_follow_the_gpus_that_the_scheduler_gave(root: Path) -> None:
    decided = made(root, "image=cuda", "batch.global_size=32", gpus_per_node=4)
    assert (decided.world.ranks_per_node, decided.world.size) == (4, 8)
    assert decided.reasons["ranks_per_node"] == "4: one for each GPU that the scheduler gave"


def test_nodes_follow_the_scheduler(root: Path) -> None:
    decided = made(root, "batch.global_size=32", nodelist="n[1-4]", nodes=4)
    assert decided.world.size == 8
    assert decided.reasons["nodes"] == "4: from the scheduler; the recipe has nodes = 2"


def test_the_master_is_the_first_of_the_list_as_the_scheduler_wrote_it(root: Path) -> None:
    decided = made(root, nodelist="n[07,02]", nodes=2)
    assert decided.world.master == "n07"
    assert [node.name for node in decided.world.nodes] == ["n07", "n02"]


def test_the_first_node_chooses_a_free_port_unless_the_recipe_or_the_hostfile_has_one(root: Path) -> None:
    assert made(root).world.port == 0
    assert made(root, port=23456).world.port == 23456
    assert made(root, "port=30000").world.port == 30000


def test_what_beats_what_is_kept(root: Path) -> None:
    threads = next(variable for variable in made(root).env if variable.name == "OMP_NUM_THREADS")
    assert (threads.value, threads.source, threads.beats) == ("1", "recipe", ("3 (site harbour)",))


def test_a_gpu_recipe_without_gpus_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="a cuda run needs GPUs, and the scheduler gave none"):
        made(root, "image=cuda")


@pytest.mark.parametrize(
    ("site", "fix"),
    [
        ({}, "image=cuda; or gpus=none ranks_per_node=N, to leave them idle"),
        ({"image": "rocm"}, "image=rocm; or gpus=none ranks_per_node=N, to leave them idle"),
    ],
)
def test_gpus_that_the_image_cannot_use_are_refused(root: Path, site: dict, fix: str) -> None:
    decided = made(root, site=Site(name="s", about="", **site), gpus_per_node=2)
    found = next(finding for finding in decided.findings if finding.code)
    assert (found.problem, found.fix) == ("the job has GPUs, and the cpu image cannot use them", fix)
    assert (found.found, found.code) == ("2 GPUs on each node", 78)
    meant = made(root, "gpus=none", "ranks_per_node=3", "batch.global_size=24", gpus_per_node=2)
    meant.refuse()
    assert meant.world.ranks_per_node == 3


def test_an_adopted_image_whose_torch_has_no_gpus_is_named(root: Path) -> None:
    theirs = {"adopted": "/b/dray-theirs", "adopted_from": "/s/theirs.sif", "image_variant": "cpu"}
    decided = made(root, "adopted=theirs", gpus_per_node=2, **theirs)
    found = next(finding for finding in decided.findings if finding.code)
    assert found.problem == "the job has GPUs, and the adopted image theirs cannot use them"
    assert found.fix == (
        "adopted=NAME of an image whose torch has these GPUs; or gpus=none ranks_per_node=N, to leave them idle"
    )


def test_what_is_compiled_needs_a_path_that_the_linker_takes(root: Path) -> None:
    """Inductor names torch's folder to it without quotes."""
    for engine, image, compile, fits in (
        ("bare", "/my env/bin/python", "true", False),
        ("bare", "/my env/bin/python", "false", True),
        ("bare", "/env/bin/python", "true", True),
        ("apptainer", "/my images/dray.sif", "true", True),
    ):
        decided = made(root, f"train.compile={compile}", engine=engine, image=image)
        found = [one.where for one in decided.findings if one.problem.startswith("train.compile needs torch in")]
        assert found == ([] if fits else [image])


def test_a_node_list_that_does_not_fit_the_count_is_refused(root: Path) -> None:
    with pytest.raises(ConfigError, match="the node list and the node count do not agree"):
        made(root, nodelist="n[1-3]")


@pytest.mark.parametrize(
    ("nodelist", "nodes", "found"),
    [
        ("n[1-2],n2", 3, "n2 (2 times) among 3 names"),
        ("n1,n1", 1, "n1 (2 times) among 2 names"),
        ("n[1-9],n[5-9]", 14, "n5 (2 times), n6 (2 times), n7 (2 times), ... among 14 names"),
        (",".join(["n1"] * 10_000), 10_000, "n1 (10000 times) among 10000 names"),
    ],
)
def test_a_node_that_is_listed_twice_is_refused(root: Path, nodelist: str, nodes: int, found: str) -> None:
    """Slurm's own list never does that; two runners would take one node."""
    with pytest.raises(ConfigError, match="the node list names a node more than once") as refused:
        made(root, nodelist=nodelist, nodes=nodes)
    assert refused.value.finding.found == found


def test_facts_survive_their_text() -> None:
    facts = Facts.model_validate(FACTS)
    assert parse(to_text(facts), where="test") == facts


def test_the_shell_of_a_job_is_read_and_never_written() -> None:
    shell = "shell.NCCL_DEBUG=INFO\nshell.HF_TOKEN=hush\nshell.MY_NCCL_X=1\nshell.PATH=/bin\n"
    facts = parse("scheduler=slurm\nnodelist=n1\nnodes=1\nengine=bare\nimage=p\n" + shell, where="test")
    assert facts.environment == ("HF_TOKEN", "NCCL_DEBUG")
    assert facts.shell["HF_TOKEN"] == "hush"
    assert "hush" not in f"{facts!r}{to_text(facts)}{facts.model_dump_json()}"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nonsense\n", "a line of the facts is not key=value"),
        ("scheduler=slurm\n", "nodelist: Field required"),
        ("scheduler=slurm\nnodelist=n1\nnodes=x\nengine=bare\nimage=p\n", "nodes: Input should be a valid integer"),
        ("colour=red\n", "colour: Extra inputs are not permitted"),
    ],
)
def test_facts_that_are_not(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(text, where="test")
    assert message in str(refused.value)


def test_a_place_that_a_node_lacks_is_named_and_recorded(root: Path, tmp_path: Path) -> None:
    place = tmp_path / f"gone {HOSTILE}"
    (tmp_path / "attempt-1" / "failures").mkdir(parents=True)
    (tmp_path / "image.sif").touch()
    decided = made(
        root,
        f"data.train={place}",
        folder=str(tmp_path),
        site=SITE.model_copy(update={"binds": ()}),
        image=f"{tmp_path}/image.sif",
    )
    ended = subprocess.run(
        ["bash", "-c", render.node_script(decided)],
        env={**PYTHON, "SLURMD_NODENAME": "n2", "SLURM_NODEID": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    wanted = "  wanted: recipe data.train: the training dataset\n"
    assert (ended.returncode, ended.stderr) == (69, f"dray: {place} does not exist\n{wanted}  where:  node n2\n")
    record = json.loads((tmp_path / "attempt-1" / "failures" / "node-1.json").read_text())
    assert time.time() - record.pop("time") < 60
    assert record == {
        "node": "n2",
        "rank": None,
        "code": 69,
        "why": f"{place} does not exist\n{wanted.rstrip()}",
        "log": None,
        "last_lines": [],
    }


def test_nothing_of_the_submitters_own_reaches_apptainer_unseen(root: Path, tmp_path: Path) -> None:
    tool = tmp_path / "apptainer"
    tool.write_text("#!/bin/bash\nenv\n")
    tool.chmod(0o755)
    site = SITE.model_copy(update={"binds": ()})
    (tmp_path / "attempt-1").mkdir()
    decided = made(root, folder=str(tmp_path), site=site, image=str(tool))
    strays = ("APPTAINERENV_STRAY", "SINGULARITYENV_STRAY", "APPTAINER_BIND", "SINGULARITY_BINDPATH")
    ended = subprocess.run(
        ["bash", "-c", render.node_script(decided)],
        env={"PATH": f"{tmp_path}:{os.environ['PATH']}", **dict.fromkeys(strays, "/x"), "APPTAINER_TMPDIR": "/t"},
        capture_output=True,
        text=True,
        check=True,
    )
    names = {line.split("=")[0] for line in ended.stdout.splitlines()}
    assert not names & set(strays)
    assert {"APPTAINERENV_PYTHONNOUSERSITE", "APPTAINER_TMPDIR"} <= names


def test_a_node_that_traces_does_not_show_what_is_passed(root: Path, tmp_path: Path) -> None:
    tool = tmp_path / "apptainer"
    tool.write_text("#!/bin/sh\nprintenv APPTAINERENV_HF_TOKEN\n")
    tool.chmod(0o755)
    (tmp_path / "attempt-1").mkdir()
    site = SITE.model_copy(update={"binds": ()})
    decided = made(root, 'pass_env=["HF_TOKEN"]', folder=str(tmp_path), site=site, image=str(tool))
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HF_TOKEN": "hush hush", "SHELLOPTS": "xtrace"}
    argv = ["bash", "-c", render.node_script(decided)]
    ended = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    assert ended.stdout == "hush hush\n"
    assert "hush" not in ended.stderr
    assert "+ node::start" in ended.stderr  # it traces on


def test_ranks_see_slurms_task(root: Path, tmp_path: Path) -> None:
    """As under plain srun, but for the number of the step: with that Open MPI 4 ends a program that lacks PMI."""
    tool = tmp_path / "apptainer"
    tool.write_text("#!/bin/sh\nenv | sed -n 's/^APPTAINERENV_SLURM/SLURM/p' | sort\n")
    tool.chmod(0o755)
    (tmp_path / "attempt-1").mkdir()
    site = SITE.model_copy(update={"binds": ()})
    decided = made(root, folder=str(tmp_path), site=site, image=str(tool))
    task = {
        **{"SLURM_JOB_ID": "17", "SLURM_JOB_NAME": 'a "b" $c', "SLURM_NODEID": "1", "SLURM_PROCID": "1"},
        **{"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "1", "SLURM_LOCALID": "0", "SLURMD_NODENAME": "n2"},
    }
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **task, "SLURM_STEP_ID": "0", "SLURM_CONF": "/etc/slurm.conf"}
    argv = ["bash", "-c", render.node_script(decided)]
    ended = subprocess.run(argv, env=env, capture_output=True, text=True, check=True)
    assert dict(line.split("=", 1) for line in ended.stdout.splitlines()) == task


def test_what_is_passed_is_the_jobs_own_and_nobody_elses(root: Path) -> None:
    decided = made(root, 'pass_env=["HF_TOKEN", "HF_HUB_OFFLINE"]', environment=["HF_TOKEN", "NCCL_DEBUG"])
    assert "HF_HUB_OFFLINE" not in {variable.name for variable in decided.env}
    assert decided.left_outside == ("NCCL_DEBUG",)
    assert " HF_TOKEN HF_HUB_OFFLINE; do\n" in render.node_script(decided)
    missing = '[[ -v "$variable" ]] || echo "dray: $variable (pass_env) is not set" >&2\n'
    assert f"for variable in HF_TOKEN HF_HUB_OFFLINE; do\n  {missing}done\n" in render.node_script(decided)
    assert "  passed        HF_TOKEN HF_HUB_OFFLINE\n  Slurm's task  SLURM_" in render.text(decided)
    assert "\n  left out      NCCL_DEBUG\n" in render.text(decided)


@pytest.mark.parametrize(("image", "name"), [("cuda12", "CUDA_VISIBLE_DEVICES"), ("rocm", "ROCR_VISIBLE_DEVICES")])
def test_a_job_sees_the_gpus_that_slurm_gave_it(root: Path, image: str, name: str) -> None:
    seen = ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"]
    decided = made(root, f"image={image}", gpus_per_node=2, environment=seen)
    assert (decided.pass_env, decided.left_outside) == ((name,), tuple(one for one in seen if one != name))
    assert f" {name}; do\n" in render.node_script(decided)
    assert made(root, f"image={image}", f"env.{name}=1", gpus_per_node=2).pass_env == ()


def test_what_a_recipe_reads_and_keeps_is_bound(root: Path) -> None:
    """A pattern's folder, and places that the node makes."""
    decided = made(
        root, "data.train=/d/train-*.parquet", "data.validation=hub:a/b", "data.cache_dir=/node/tokens",
        "model.name=/m/gpt2", "model.tokenizer=gpt2", "checkpoint.folder=/scratch/kept",
    )  # fmt: skip
    ours = [(bind.path, bind.write, bind.made) for bind in decided.binds if bind.source.startswith("recipe")]
    assert ours == [
        ("/d", False, False),
        ("/m/gpt2", False, False),
        ("/scratch/kept", True, True),
        ("/node/tokens", True, True),
    ]
    script = render.node_script(decided)
    assert "mkdir -p -m 700 -- /scratch/kept || true\n" in script
    assert "\nnode::need /scratch/kept 'recipe checkpoint.folder: " in script


def chosen(decided: Plan, *names: str) -> dict[str, str]:
    return {one.name: one.value for one in decided.env if one.name.startswith(names)}


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (("image=cuda",), {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}),
        (("image=rocm",), {}),
        (("image=cpu",), {}),
        (("image=cuda12", "env.PYTORCH_CUDA_ALLOC_CONF=backend:native"), {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}),
        (("image=cuda", "env.PYTORCH_ALLOC_CONF=backend:native"), {"PYTORCH_ALLOC_CONF": "backend:native"}),
        (("image=cuda", 'pass_env=["PYTORCH_ALLOC_CONF"]'), {}),
    ],
)
def test_the_allocator_joins_freed_memory_where_it_can(root: Path, words: tuple, value: dict[str, str]) -> None:
    decided = made(root, *words, gpus_per_node=2)
    assert chosen(decided, "PYTORCH_") == value


def test_the_allocator_of_a_users_own_program_is_its_own(root: Path) -> None:
    """It may share tensors by CUDA IPC."""
    recipe = read_recipe(root / "recipes" / "smoke-cpu.toml", ["image=cuda"])
    own = recipe.model_copy(update={"train": None})
    seen = Facts.model_validate({**FACTS, "gpus_per_node": 2})
    variables = environment.resolve(own, SITE, seen, SITE.fabric, run_folder="/r", scratch="/s")
    assert not [one for one in variables if one.name.startswith("PYTORCH_")]


GPU = {
    "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_SOCKET_IFNAME": "hsn0,hsn1",  # the site's own
}
INDUCTOR = {
    "TORCHINDUCTOR_COORDINATE_DESCENT_TUNING": "0",
    "TORCHINDUCTOR_DETERMINISTIC": "1",
    "TORCHINDUCTOR_MAX_AUTOTUNE": "0",
    "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM": "0",
    "TORCHINDUCTOR_MAX_AUTOTUNE_POINTWISE": "0",
}


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (("image=cpu",), {}),
        (("image=cuda", "train.compile=false"), GPU),
        (("image=rocm",), GPU | INDUCTOR),
        (
            ("image=cuda", "model.attn_implementation=flash_attention_2", "analog.enabled=true"),
            GPU | {"FLASH_ATTENTION_DETERMINISTIC": "1", "AIHWKIT_USE_TRITON": ""},
        ),
        (("image=cpu", "train.compile=true"), INDUCTOR),
    ],
)
def test_deterministic_training_has_all_that_it_needs(root: Path, words: tuple, found: dict[str, str]) -> None:
    gpus = 0 if "image=cpu" in words else 2
    decided = made(root, *words, "train.deterministic=true", gpus_per_node=gpus)
    names = ("CUBLAS", "NCCL", "TORCHINDUCTOR", "FLASH", "AIHWKIT")
    without = chosen(made(root, *words, gpus_per_node=gpus), *names)
    assert {**chosen(decided, *names), "NCCL_SOCKET_IFNAME": "hsn0,hsn1"} == {**without, **found}
    assert ", deterministic, " in decided.reasons["training"]
    decided.refuse()


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        ("env.NCCL_ALGO=NVLS", "NCCL_ALGO=NVLS"),
        ("env.NCCL_ALGO=Ring,Tree", "NCCL_ALGO=Ring,Tree"),
        ("env.NCCL_ALGO=", "NCCL_ALGO="),
        ("env.NCCL_PROTO=^LL128", "NCCL_PROTO=^LL128"),
        ("env.CUBLAS_WORKSPACE_CONFIG=:0:0", "CUBLAS_WORKSPACE_CONFIG=:0:0"),
        ("env.TORCHINDUCTOR_MAX_AUTOTUNE=1", "TORCHINDUCTOR_MAX_AUTOTUNE=1"),
        ("env.TORCHINDUCTOR_DETERMINISTIC=0", "TORCHINDUCTOR_DETERMINISTIC=0"),
        ("env.AIHWKIT_USE_TRITON=0", "AIHWKIT_USE_TRITON=0"),
        ("env.FLASH_ATTENTION_DETERMINISTIC=", "FLASH_ATTENTION_DETERMINISTIC="),
        ('pass_env=["NCCL_ALGO"]', "NCCL_ALGO in pass_env"),
    ],
)
def test_deterministic_training_is_refused_where_something_takes_it_away(root: Path, word: str, shown: str) -> None:
    words = ("image=cuda", "train.compile=true", "analog.enabled=true", "model.attn_implementation=flash_attention_2")
    decided = made(root, *words, "train.deterministic=true", word, gpus_per_node=2)
    found = [finding for finding in decided.findings if "deterministic" in finding.problem]
    assert [(one.found, one.where, one.code) for one in found] == [(shown, "recipe", 78)]
    assert (
        found[0].fix
        == f"leave {shown.split('=', maxsplit=1)[0].split(maxsplit=1)[0]} out, or train.deterministic=false"
    )
    made(root, *words, "train.deterministic=true", "env.NCCL_ALGO=tree", gpus_per_node=2).refuse()
    assert not [one for one in made(root, *words, word, gpus_per_node=2).findings if one.code]


def test_a_site_that_takes_determinism_away_is_named(root: Path) -> None:
    site = SITE.model_copy(update={"env": (SiteVariable(name="NCCL_ALGO", value="CollNet", why="it is fast"),)})
    decided = made(root, "image=cuda", "train.deterministic=true", site=site, gpus_per_node=2)
    with pytest.raises(ConfigError, match="NCCL_ALGO prevents deterministic runs"):
        decided.refuse()
    assert [one.where for one in decided.findings if one.code] == ["site harbour"]
