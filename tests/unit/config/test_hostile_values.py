"""Values that reach bash, srun or a comment of a script, and what a planner in another user's image answers."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path, PurePosixPath
from typing import get_args

import pytest

from command import dray
from dray import engines
from dray.config.image_definition import Variant
from dray.config.site import Site
from dray.contract.control_characters import control_characters
from dray.contract.findings import ConfigError
from dray.facts import Facts, parse, to_text
from dray.planning.plan import plan
from dray.runs.prepare import read_recipe, write
from helpers import PYTHON, ROOT
from jobs import Job

FACTS = Facts(scheduler="slurm", job=17, nodelist="n1", nodes=1, engine="apptainer", image="/i.sif")
ENGINES = "apptainer singularity pyxis edf podman-hpc"
SMOKE = ROOT / "recipes" / "smoke-cpu.toml"
NAMES = ["../x", "/tmp/x", ".", "..", ".x", "-x", "a/b", "a b", "x" * 129, "x\ntouch PWNED", "x\n", "é", "$(touch x)"]


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


class TestControlCharacters:
    @pytest.mark.parametrize("character", ["\n", "\r", "\0", "\x1b", "\x7f", "\x85", "\u200f", "\u202e", "\u2069"])
    @pytest.mark.parametrize(
        ("given", "where"),
        [
            ({"run_folder": "/r/x{}"}, "run"),
            ({"facts": {"image": "/i{}.sif"}}, "image"),
            ({"facts": {"home": "/home/{}"}}, "facts.home"),
            ({"facts": {"cluster": "c{}"}}, "facts.cluster"),
            ({"facts": {"hf_home": "/hf{}"}}, "env[2].value"),
            ({"facts": {"variables": {"A": "/x{}"}}}, "facts.variables.A"),
            ({"site": {"sbatch": ["--comment={}"]}}, "sbatch[0]"),
            ({"site": {"stage": "/tmp{}"}, "facts": {"image_sha256": "0" * 64}}, "stage"),
            ({"site": {"env": [{"name": "A", "value": "a{}b", "why": "w"}]}}, "env[0].value"),
            ({"site": {"binds": [{"path": "/d{}", "why": "w"}]}}, "binds[1].path"),
            ({"site": {"fabric": {"strategy": "host", "plugin": "/p{}"}}}, "fabric.plugin"),
            ({"recipe": ["env.A=a{}b"]}, "env[0].value"),
            ({"recipe": ["checkpoint.folder=/kept/{}x"]}, "binds[1].path"),
            ({"recipe": ["data.train=/d{}.txt"]}, "binds[1].path"),
        ],
    )
    def test_a_plan_has_none(self, given: dict, where: str, character: str) -> None:
        def filled(value: object) -> object:
            if isinstance(value, str):
                return value.format(character)
            if isinstance(value, dict):
                return {key: filled(one) for key, one in value.items()}
            return tuple(filled(one) for one in value)

        recipe = read_recipe(SMOKE, filled(given.get("recipe", ())))
        try:
            site = Site.model_validate({"name": "s", "about": "a", **filled(given.get("site", {}))})
        except ValueError:  # some keys have a pattern, which no line break fits
            return
        seen = {"nodelist": "n[1-2]", "nodes": 2, **filled(given.get("facts", {}))}  # one node has no fabric
        made = plan(
            recipe, site, FACTS.model_copy(update=seen), scratch="/s", dray="0",
            run_folder=PurePosixPath(filled(given.get("run_folder", "/r/x"))),
        )  # fmt: skip
        with pytest.raises(ConfigError, match="a value has a control character") as wrong:
            made.refuse()
        assert wrong.value.details["where"] == where

    def test_what_no_script_has_may_have_lines(self) -> None:
        site = Site.model_validate(
            {"name": "s", "about": "a", "binds": ({"path": "/d", "why": "one\n  two"},),
             "env": ({"name": "A", "value": "v", "why": "one\ntwo"},)}
        )  # fmt: skip
        recipe = read_recipe(None, ["about=one\ntwo"], ["python", "-c", "import os\nprint(os.environ)"])
        made = plan(recipe, site, FACTS, run_folder=PurePosixPath("/r/x"), scratch="/s", dray="0")
        made.refuse()
        why = {bind.why for bind in made.binds if bind.source == "site s"}
        assert why | {made.env[0].why} == {"one two"}

    @pytest.mark.seconds
    @pytest.mark.parametrize("form", [(), ("-v",), ("--json",)])
    def test_a_terminal_gets_text_alone(self, tmp_path: Path, form: tuple[str, ...]) -> None:
        """Of somebody else's recipe, which may be shown as another one."""
        evil = "a\x1b[2J\x1b]0;x\x07b\x9b1m\u202ec\u2066d\u200fe\u061c\x7f"
        about = json.dumps(evil).replace("\x7f", "\\u007f")
        (tmp_path / "evil.toml").write_text(
            f'name = "x"\nabout = {about}\n[command]\nargv = ["true", {about}]\n', encoding="utf-8"
        )
        ended = dray("plan", *form, "evil.toml", cwd=tmp_path)
        assert ended.returncode == 0, ended.stderr
        assert [character for character in ended.stdout if not character.isprintable() and character != "\n"] == []
        if "--json" in form:
            assert json.loads(ended.stdout)["recipe"]["about"] == evil
        else:
            shown = r"a\u001b[2J\u001b]0;x\u0007b\u009b1m\u202ec\u2066d\u200fe\u061c\u007f"
            assert f"x: {shown}\n" in ended.stdout
            assert f"true '{shown}'" in ended.stdout
        ended = dray("plan", "evil.toml", f"name={evil}", cwd=tmp_path)
        assert ended.returncode == 78
        assert [character for character in ended.stderr if not character.isprintable() and character != "\n"] == []

    def test_a_plan_that_is_refused_has_no_script(self, tmp_path: Path) -> None:
        facts = FACTS.model_copy(update={"image": "/i\0.sif"})
        with pytest.raises(ConfigError, match="a value has a control character"):
            write(read_recipe(SMOKE), facts, runs=tmp_path / "runs")
        assert not list(tmp_path.iterdir())

    def test_they_are_found_wherever_they_are(self) -> None:
        values = {"a": [{"b": "x"}, {"b": "x\n", "c\n": None}], "d": 3}
        found = list(control_characters(values))
        assert [one.where for one in found] == ["a[1].b", "a[1] names"]
        assert found[0].found == r"'x\n'"

    def test_a_line_of_the_facts_ends_with_a_line_break_alone(self) -> None:
        """A value of the environment may hold any other character at which Python breaks lines."""
        text = to_text(FACTS) + "shell.X=a\u2028engine=bare\x85image=/evil\x0csite=evil\rcluster=evil\n"
        assert parse(text, where="here") == FACTS.model_copy(
            update={"shell": {"X": "a\u2028engine=bare\x85image=/evil\x0csite=evil\rcluster=evil"}}
        )

    @pytest.mark.seconds
    @pytest.mark.parametrize("words", [("--sbatch=--comment=a\nb",), ("batch.global_size=16\n",), ("--runs", "a\nb")])
    def test_sbatch_gets_none(self, tmp_path: Path, words: tuple[str, ...]) -> None:
        (tmp_path / "i.sif").write_bytes(b"hsqs")
        env = {"DRAY_IMAGE": str(tmp_path / "i.sif"), "PATH": str(tmp_path)}
        ended = dray("submit", SMOKE, *words, cwd=tmp_path, **env)
        assert (ended.returncode, "a value has a control character" in ended.stderr) == (78, True)
        assert [path.name for path in tmp_path.iterdir()] == ["i.sif"]

    @pytest.mark.parametrize(
        ("words", "env"),
        [
            (("--run=/r\n/x",), {}),
            (("--site=a\nb",), {}),
            (("--image=/i\r.sif",), {}),
            (("smoke\ncpu",), {}),
            (("recipes/smoke-cpu.toml", "a=b\nc"), {}),
            (("recipes/smoke-cpu.toml",), {"DRAY_RUNS": "/r\nx"}),
            (("recipes/smoke-cpu.toml",), {"HOME": "/h\nengine=bare"}),
            (("recipes/smoke-cpu.toml",), {"SLURM_CLUSTER_NAME": "c\nsite=evil"}),
            (("recipes/smoke-cpu.toml",), {"DRAY_SITES": "/s\x1b"}),
        ],
    )
    def test_a_job_takes_none(self, job: Job, words: tuple[str, ...], env: dict[str, str]) -> None:
        ended = job.plan(*words, **env)
        assert (ended.returncode, ended.stdout) == (78, "")
        assert ended.stderr.startswith("dray: a value has a control character, such as a line break\n  where:  ")
        assert not job.seen.exists()

    @pytest.mark.seconds
    def test_a_job_s_command_may_have_lines(self, job: Job) -> None:
        ended = job.plan("--", "python", "-c", "import os\nprint(os.environ)")
        assert ended.returncode == 0, ended.stderr


class TestTheJob:
    """What the planner answers, in an image that somebody may have handed on, is one of what this checkout knows."""

    @pytest.mark.seconds
    @pytest.mark.parametrize(
        "answer",
        [
            "engine=/tmp/evil", "engine=bash", "engine=apptainer;id", "image=../../tmp/evil", "image=X",
            "attempt=/tmp/evil/attempt-1", "attempt=RUNS/../attempt-1", "attempt=RUNS/a/../evil/attempt-1",
            "attempt=RUNS/x/evil", "attempt=RUNS/.x/attempt-1", "attempt=-x", "stage=/home/me/.bashrc",
            "grace_s=1 --wrap=x", "spares=-w", "layer=x", "image_digest=x", "PATH=/tmp/evil",
            "x[$(touch PWNED)]=1", "choices=gpus=$(id)", "choices=", "",
        ],
    )  # fmt: skip
    def test_an_answer(self, job: Job, answer: str) -> None:
        answer = answer.replace("RUNS", str(job.runs))
        job.tool("apptainer", f"#!/bin/bash\ncat >/dev/null\necho {shlex.quote(answer)}\n")
        ended = job.plan("recipes/smoke-cpu.toml")
        assert (ended.returncode, ended.stdout) == (78, "")
        assert ended.stderr.startswith("dray: the planner gives an unknown answer\n")
        assert not (job.home / "PWNED").exists()

    def test_bash_knows_the_same_as_python(self) -> None:
        text = (ROOT / "slurm" / "engines.sh").read_text()
        assert f"engine__variants=({' '.join(get_args(Variant))})\n" in text
        assert f"engine__names=({ENGINES})\n" in (ROOT / "slurm" / "engine_table.sh").read_text()
        names = [name for name in engines.names("slurm") if name != "bare"]
        assert sorted(ENGINES.split()) == sorted(names)
        sites = get_args(Site.model_fields["engine"].annotation)
        assert sorted(sites) == sorted({"", *names} - {"apptainer", "singularity"})
        texts = [file.read_text() for file in ROOT.glob("slurm/sites/*.toml")]
        variables = {name for text in texts for name in re.findall(r"[$][{]?([A-Z][A-Z0-9_]*)", text)}
        assert f"login__of_sites=({' '.join(sorted(variables))})\n" in (ROOT / "slurm" / "login.sh").read_text()

    def test_the_planner_gets_no_secret(self, tmp_path: Path) -> None:
        secrets = dict.fromkeys(("HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "SSHPASS", "MY_AUTH", "x_password"), "hush")
        env = {**PYTHON, "SLURM_JOB_ID": "1", "SLURM_JOB_NODELIST": "n", "SLURM_JOB_NUM_NODES": "1",
               "URL": "https://me:hush@there", "SCRATCH": "/s", "HF_HOME": "/h", **secrets}  # fmt: skip
        argv = [ROOT / "slurm" / "probe.sh", "apptainer", "/i", "generic", "SCRATCH", "HF_TOKEN", "URL", "GONE", "*"]
        ended = subprocess.run(argv, env=env | {"SHELLOPTS": "xtrace"}, capture_output=True, text=True, check=True)
        assert "+ probe::main" in ended.stderr  # bash shows its commands, and none of these values
        assert "hush" not in ended.stdout + ended.stderr
        lines = ended.stdout.splitlines()
        assert {"shell.HF_TOKEN=(set)", "shell.SSHPASS=(set)", "shell.SCRATCH=(set)", "shell.HF_HOME=/h"} <= set(lines)
        assert [line for line in lines if line.startswith("variable.")] == ["variable.SCRATCH=/s"]


class TestNames:
    @pytest.mark.parametrize("name", NAMES)
    def test_a_run_stays_in_its_folder(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(ConfigError, match="this is no valid name for a run"):
            write(read_recipe(SMOKE), FACTS, runs=tmp_path / "runs", run=name)
        assert not list(tmp_path.iterdir())

    @pytest.mark.seconds
    def test_on_the_command_line(self, tmp_path: Path) -> None:
        (tmp_path / "hosts").write_text("a\nb\n")
        for words in (("--run=x\ntouch PWNED",), ("--hostfile", "hosts", "--run=..")):
            ended = dray("run", *words, "--", "true", cwd=tmp_path)
            assert (ended.returncode, ended.stdout) == (78, "")
            assert ended.stderr.startswith("dray: this is no valid name for a run\n  where:  --run\n")
        assert [path.name for path in tmp_path.iterdir()] == ["hosts"]
