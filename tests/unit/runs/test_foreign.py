"""Run folders, checkouts and builds where there are other users."""

from __future__ import annotations

import errno
import inspect
import json
import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path, PurePosixPath

import pytest

from command import dray
from dray import render
from dray.cli import model
from dray.config import dray_home
from dray.config.site import Site
from dray.contract.findings import ConfigError
from dray.facts import Facts
from dray.planning.plan import plan
from dray.runner import __main__ as runner
from dray.runner import rendezvous
from dray.runs import local, prepare
from dray.runs.prepare import read_recipe, write
from dray.runs.store import RunPaths, make_run_folder, of_job
from dray.train import config
from dray.train.checkpoint import manifest
from helpers import ROOT
from jobs import Job

pytestmark = pytest.mark.hostile("runs and checkouts of others")

NOBODY = 65534
FACTS = Facts(scheduler="slurm", job=17, nodelist="n1", nodes=1, engine="apptainer", image="/i.sif")
LOCAL = Facts(scheduler="local", nodelist="node1", nodes=1, address="127.0.0.1", engine="bare", image=sys.executable)
SMOKE = ROOT / "recipes" / "smoke-cpu.toml"


def modes(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): stat.filemode(path.stat().st_mode) for path in (folder, *folder.rglob("*"))}


class TestFolders:
    """In processes with a umask of their own."""

    def run(self, tmp_path: Path, umask: int, *words: str) -> dict[str, str]:
        (tmp_path / "kept").mkdir(exist_ok=True)
        words = ("run", *words, "--run=mine", "launcher=python", "--", "touch", "made")
        ended = dray(*words, cwd=tmp_path / "kept", umask=umask, DRAY_RUNS=str(tmp_path / "runs"))
        assert ended.returncode == 0, ended.stdout + ended.stderr
        return modes(tmp_path / "runs" / "mine")

    @pytest.mark.torch
    @pytest.mark.parametrize("umask", [0, 0o077])
    def test_a_run_is_its_user_s_alone(self, tmp_path: Path, umask: int) -> None:
        assert self.run(tmp_path, umask)["."] == "drwx------"

    @pytest.mark.torch
    def test_the_group_reads_what_is_shared(self, tmp_path: Path) -> None:
        """All but the secret, also of a run that was not shared before."""
        make_run_folder(tmp_path / "runs" / "mine")
        found = self.run(tmp_path, 0o077, "runs.share=group")
        assert found.pop(".") == "drwxr-s---"
        assert found.pop("attempt-1/secret") == "-rw-------"
        assert {"attempt-1/result.json", "attempt-1/logs/rank-0.log"} <= found.keys()
        for name, mode in found.items():
            assert mode[4:7] in ("r--", "r-x", "r-s"), name

    def test_what_a_recipe_keeps_elsewhere(self, tmp_path: Path) -> None:
        for share, mode in (("none", "drwx------"), ("group", "drwxr-s---")):
            kept = tmp_path / share
            words = [f"checkpoint.folder={kept}", "checkpoint.every=10", f"runs.share={share}"]
            facts = FACTS.model_copy(update={"engine": "bare", "scheduler": "local"})
            made = plan(
                read_recipe(SMOKE, words), Site(name="s", about="a"), facts, run_folder=PurePosixPath("/r/x"),
                scratch="/s", dray="0",
            )  # fmt: skip
            line = next(line for line in render.node_script(made).splitlines() if line.startswith("mkdir"))
            subprocess.run(["bash", "-c", f"umask 0; {line}"], check=True)
            assert modes(kept)["."] == mode

    def test_the_reason_is_in_the_plan(self, tmp_path: Path) -> None:
        ended = dray("plan", "-v", SMOKE, "runs.share=group", cwd=tmp_path)
        assert "  access  this user, and its group may read all but the secret; runs.share = group\n" in ended.stdout

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder away")
    def test_another_user_s_run_folder_is_not_used(self, tmp_path: Path) -> None:
        theirs, mine = tmp_path / "20261122-200000-smoke-cpu-17", tmp_path / "mine"
        make_run_folder(theirs)
        os.chown(theirs, NOBODY, NOBODY)
        mine.symlink_to(tmp_path / "elsewhere")
        make_run_folder(tmp_path / "elsewhere")
        os.chown(mine, NOBODY, NOBODY, follow_symlinks=False)
        for name in (theirs.name, mine.name):
            with pytest.raises(ConfigError, match="the run folder belongs to another user") as refused:
                write(read_recipe(SMOKE), FACTS, runs=tmp_path, run=name)
            assert refused.value.details["wanted"] == f"a folder of user {os.geteuid()}"
            assert refused.value.details["found"] == f"a folder or a link of user {NOBODY}"
        assert not list(theirs.iterdir())
        assert of_job(tmp_path, "smoke-cpu", 17) == []

    @pytest.mark.parametrize("mode", [0o777, 0o755, 0o2777])
    def test_a_folder_that_was_there_is_as_any_other(self, tmp_path: Path, mode: int) -> None:
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine").chmod(mode)
        make_run_folder(tmp_path / "mine", new=False)
        assert modes(tmp_path / "mine")["."] == ("drwx--S---" if mode & stat.S_ISGID else "drwx------")

    @pytest.mark.seconds
    @pytest.mark.parametrize(("mode", "kept"), [(0o777, False), (0o2777, False), (0o1777, True), (0o2775, True)])
    def test_where_everybody_may_rename_a_run(self, tmp_path: Path, mode: int, *, kept: bool) -> None:
        """In Python, and so in a job before it starts anything of it."""
        job = Job(tmp_path)
        runs = tmp_path / "my runs"
        runs.mkdir()
        runs.chmod(mode)
        planned = job.plan("recipes/smoke-cpu.toml", DRAY_RUNS=str(runs))
        if kept:
            make_run_folder(runs / "mine")
            assert "attempt " in planned.stdout, planned.stderr
            return
        with pytest.raises(ConfigError, match="everybody may rename the folders of these runs") as refused:
            make_run_folder(runs / "mine")
        assert refused.value.details["fix"] == (
            f"chmod o-w '{runs}'; where it is not yours: mkdir -m 700 '{runs}'/$USER && export DRAY_RUNS='{runs}'/$USER"
        )
        assert (planned.returncode, planned.stdout) == (78, "")
        assert planned.stderr.startswith("dray: everybody may rename the folders of these runs")
        assert not list(runs.iterdir())

    def test_a_link_to_nothing_is_no_run(self, tmp_path: Path) -> None:
        (tmp_path / "20261122-200000-smoke-cpu-17").mkdir()
        (tmp_path / "20261122-200001-smoke-cpu-17").symlink_to("nowhere")
        assert of_job(tmp_path, "smoke-cpu", 17) == ["20261122-200000-smoke-cpu-17"]

    def test_a_disk_that_does_not_answer_may_hold_the_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = tmp_path / "20261122-200000-smoke-cpu-17"

        def stale(*_: object, **__: object) -> None:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        monkeypatch.setattr(Path, "glob", lambda *_: [run])
        monkeypatch.setattr(Path, "stat", stale)
        with pytest.raises(OSError, match=os.strerror(errno.ESTALE)):
            of_job(tmp_path, "smoke-cpu", 17)

    def test_my_own_cache_that_others_may_write(self, tmp_path: Path) -> None:
        cache = tmp_path / "my cache"
        cache.mkdir()
        cache.chmod(0o770)
        with pytest.raises(ConfigError, match="another user may write the cache folder") as refused:
            prepare._make_cache(cache)
        assert refused.value.finding.fix.startswith(f"chmod go-w '{cache}'; if it is not yours, ")
        (tmp_path / "link").symlink_to(cache)
        with pytest.raises(ConfigError, match="another user may write the cache folder"):
            prepare._make_cache(tmp_path / "link")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder away")
class TestARunInThePlaceOfMine:
    """A user who may write the folder of the runs, such as a project's group, can rename a run while it begins."""

    @pytest.fixture
    def attempt(self, tmp_path: Path) -> Path:
        made = write(read_recipe(SMOKE), FACTS, runs=tmp_path / "runs", run="mine")[1]
        made.node_script.write_text(f"#!/bin/sh\ntouch {shlex.quote(str(tmp_path / 'started'))}\n")
        return made.folder

    @pytest.mark.parametrize("part", ["", ".", "..", "node.sh"])
    def test_a_node_starts_no_script_of_another_user(self, tmp_path: Path, attempt: Path, part: str) -> None:
        if part:
            os.chown(attempt / part, NOBODY, NOBODY)
        script = 'source "$DRAY_HOME/slurm/job.sh"; exec bash -c "$job__task" "$1" ./node.sh'
        words = ["bash", "-c", script, "job", str(attempt)]
        ended = subprocess.run(
            words, env={**os.environ, "DRAY_HOME": str(ROOT)}, capture_output=True, text=True, check=False
        )
        assert (ended.returncode, (tmp_path / "started").exists()) == ((78, False) if part else (0, True))
        told = f"dray: {attempt} belongs to another user: {os.uname().nodename}\n"
        assert ended.stderr == (told if part else "")

    def test_a_node_starts_what_it_has_looked_at(self, tmp_path: Path, attempt: Path) -> None:
        """Another run is put in its place between the two."""
        theirs = tmp_path / "theirs"
        (theirs / attempt.name).mkdir(parents=True)
        (theirs / attempt.name / "node.sh").write_text(
            f"#!/bin/sh\ntouch {shlex.quote(str(tmp_path / 'theirs ran'))}\n"
        )
        (theirs / attempt.name / "node.sh").chmod(0o755)
        run, moved = shlex.quote(str(attempt.parent)), shlex.quote(str(tmp_path / "moved"))
        swap = f"mv {run} {moved} && mv {shlex.quote(str(theirs))} {run}"
        (tmp_path / "before").write_text(f"trap '[[ $BASH_COMMAND != exec* || -d {moved} ]] || {{ {swap}; }}' DEBUG\n")
        script = 'source "$DRAY_HOME/slurm/job.sh"; BASH_ENV="$2" exec bash -c "$job__task" "$1" ./node.sh'
        words = ["bash", "-c", script, "job", str(attempt), str(tmp_path / "before")]
        env = {**os.environ, "DRAY_HOME": str(ROOT)}
        ended = subprocess.run(words, env=env, capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert (tmp_path / "moved" / attempt.name).is_dir()
        assert [(tmp_path / name).exists() for name in ("started", "theirs ran")] == [True, False]

    @pytest.mark.parametrize("part", [".", ".."])
    def test_a_job_starts_no_node_in_it(self, tmp_path: Path, attempt: Path, part: str) -> None:
        os.chown(attempt / part, NOBODY, NOBODY)
        job = Job(tmp_path)
        job.tool("srun", f"#!/bin/sh\ntouch {shlex.quote(str(tmp_path / 'started'))}\n")
        script = 'set -euo pipefail; source "$DRAY_HOME/slurm/job.sh"; attempt="$1"; job::start'
        words = ["bash", "-c", script, "job", str(attempt)]
        ended = subprocess.run(words, env=job.env, capture_output=True, text=True, check=False)
        assert (ended.returncode, (tmp_path / "started").exists()) == (78, False)
        assert ended.stderr.startswith("dray: the run folder belongs to another user")

    @pytest.mark.parametrize("name", ["plan.json", "secret"])
    def test_nothing_in_the_image_reads_it(self, attempt: Path, name: str) -> None:
        os.chown(attempt / name, NOBODY, NOBODY)
        readers: dict[str, list[Callable[[], object]]] = {
            "plan.json": [
                lambda: runner.main(str(attempt / name)),
                lambda: config.read(str(attempt / name)),
            ],
            "secret": [lambda: rendezvous.secret_of(str(attempt))],
        }
        for read in readers[name]:
            with pytest.raises((ConfigError, OSError), match=f"a file of user {NOBODY}"):
                read()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder away")
class TestAnotherUsersRun:
    """Its recipe has code of that user's run by whoever evaluates it: by the environment, and beside the model."""

    CODE = "from transformers import PretrainedConfig\nopen({!r}, 'w')\nclass Evil(PretrainedConfig):\n    pass\n"

    @pytest.fixture
    def run(self, tmp_path: Path) -> Path:
        code = tmp_path / "code"
        code.mkdir()
        (code / "sitecustomize.py").write_text(f"open({str(tmp_path / 'by environment')!r}, 'w')\n")
        recipe = read_recipe(
            SMOKE, ["model.trust_remote_code=true", f"env.PYTHONPATH={code}", 'pass_env=["AWS_PROFILE"]']
        )
        made = write(recipe, LOCAL, runs=tmp_path / "runs", run="theirs")[1]
        made.final_model.mkdir()
        (made.final_model / "evil.py").write_text(self.CODE.format(str(tmp_path / "by model")))
        settings = {"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}, "architectures": ["X"]}
        (made.final_model / "config.json").write_text(json.dumps(settings))
        manifest.seal_model(made.final_model)
        for path in (made.run, *made.run.rglob("*")):
            os.chown(path, NOBODY, NOBODY)
        return made.run

    def verb(self, run: Path, *words: str) -> tuple[list[str], str]:
        """Which code has run, and what was printed."""
        env = {"XDG_CACHE_HOME": str(run.parents[1] / "cache"), "HF_HOME": str(run.parents[1])}
        ended = dray("model", *words[:1], run, *words[1:], cwd=run.parents[1], **env)
        assert ended.returncode != 0
        return sorted(path.name for path in run.parents[1].glob("by *")), ended.stderr

    @pytest.mark.torch
    def test_its_environment(self, run: Path) -> None:
        ran, printed = self.verb(run, "push", "a/b")
        assert ran == []
        assert printed.splitlines()[:3] == [
            "dray: warning: the run is another user's, so its env, pass_env, layer and trust_remote_code are ignored",
            f"  found:  {run} of user {NOBODY}, mode 0700",
            "  fix:    --trust-run uses them: code of that user then runs as you",
        ]
        assert self.verb(run, "push", "a/b", "--trust-run")[0] == ["by environment"]

    @pytest.mark.slow
    def test_its_model_s_code(self, run: Path) -> None:
        pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")
        assert self.verb(run, "generate", "x")[0] == []
        assert self.verb(run, "generate", "x", "--trust-run")[0] == ["by environment", "by model"]

    @pytest.mark.slow
    @pytest.mark.seconds
    def test_modules_beside_its_model(self, run: Path) -> None:
        """`python -m` would take them before its own."""
        planted = RunPaths(run).final_model / "json.py"
        planted.write_text(f"open({str(run.parents[1] / 'by folder')!r}, 'w')\n")
        for verb in (("push", "a/b"), ("generate", "x"), ("eval",)):
            assert self.verb(run, *verb)[0] == [], verb

    @pytest.mark.slow
    @pytest.mark.seconds
    @pytest.mark.parametrize("key", ["data.map", "data.mix.code.map", "evaluate.other.map"])
    def test_its_functions_on_rows(self, run: Path, key: str) -> None:
        code = run.parents[1] / "code"
        (code / "rows.py").write_text(
            f"open({str(run.parents[1] / 'by rows')!r}, 'w')\ndef same(row):\n    return row\n"
        )
        words = [f"{key}={code}/rows.py:same"]
        words += [f"{key.rpartition('.')[0]}.dataset=builtin"] if key.count(".") > 1 else []
        read = read_recipe(SMOKE, words)
        paths = RunPaths(run)
        made = json.loads(paths.plan.read_text())
        made["recipe"] = read.model_dump(mode="json")
        paths.plan.write_text(json.dumps(made))
        ran, printed = self.verb(run, "eval")
        assert ran == []
        assert printed.splitlines()[3:] == [
            "dray: you did not record this run here, and an evaluation runs code that it names",
            f"  where:  {run}",
            "  wanted: --trust-run, after you have read that code",
            f"  found:  {key}: rows.py:same",
            "  fix:    add --trust-run to the command",
        ]
        assert "you did not record this run here" not in self.verb(run, "eval", f"{key}=")[1]
        assert "you did not record this run here" not in self.verb(run, "eval", "--trust-run")[1]

    def test_every_verb_has_the_flag(self) -> None:
        for verb in (model.evaluate, model.generate, model.export, model.push):
            assert "trust_run" in inspect.signature(verb).parameters

    def test_its_model_has_no_links(self, run: Path) -> None:
        """A push would follow them, into this user's own files."""
        link = RunPaths(run).final_model / "more.json"
        link.symlink_to("/etc/shadow")
        with pytest.raises(ConfigError, match="links in another user's model") as wrong:
            local.ended_run(run)
        assert wrong.value.details["where"] == str(link)
        assert local.ended_run(run, trust=True)[1] == link.parent

    def test_what_counts_as_another_user_s(self, run: Path) -> None:
        given = {"env": {}, "pass_env": (), "trust_remote_code": False}

        def taken() -> dict[str, object]:
            recipe = local.trained_run(run)[0].recipe
            found = {"env": recipe.env, "pass_env": recipe.pass_env}
            return {**found, "trust_remote_code": recipe.model.trust_remote_code}

        paths = RunPaths(run)
        for path in (paths.run, paths.folder, paths.plan, paths.capsule):  # the last one that is theirs decides
            assert taken() == given
            os.chown(path, 0, 0)
        assert taken() == {
            "env": {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(run.parents[1] / "code")},
            "pass_env": ("AWS_PROFILE",),
            "trust_remote_code": True,
        }
        for path in (paths.run, paths.folder, paths.plan, paths.capsule):
            mode = path.stat().st_mode
            path.chmod(mode | stat.S_IWGRP)
            assert taken() == given
            path.chmod(mode)
        assert local.trained_run(run, trust=True)[0].recipe.pass_env == ("AWS_PROFILE",)


class TestCheckout:
    @pytest.fixture
    def found(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        """In one of its folders, with a package that is in no clone."""
        (tmp_path / "found" / "containers" / "steps").mkdir(parents=True)
        monkeypatch.delenv("DRAY_HOME", raising=False)
        monkeypatch.chdir(tmp_path / "found" / "containers" / "steps")
        monkeypatch.setattr(dray_home, "_CLONE", tmp_path / "none")
        return tmp_path / "found"

    def test_the_package_s_own_clone_comes_first(self, found: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dray_home, "_CLONE", ROOT)
        assert dray_home.root() == dray_home.root(build=True) == ROOT

    def test_one_of_this_user_s_is_found(self, found: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(dray_home, "_INSTALLED", tmp_path / "wheel")
        (tmp_path / "wheel" / "containers" / "steps").mkdir(parents=True)
        assert dray_home.root() == dray_home.root(build=True) == found

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root gives a folder away")
    @pytest.mark.parametrize("part", [".", "containers", "containers/steps"])
    @pytest.mark.parametrize("how", ["owned", "writable"])
    def test_one_of_another_user_s_is_not(
        self, found: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part: str, how: str
    ) -> None:
        if how == "owned":
            os.chown(found / part, NOBODY, NOBODY)
        else:
            (found / part).chmod(0o1777)
        with pytest.raises(ConfigError, match="no dray checkout found") as wrong:
            dray_home.root()
        assert wrong.value.details["found"] == f"{found}, which another user may change"
        monkeypatch.setattr(dray_home, "_INSTALLED", tmp_path / "wheel")
        (tmp_path / "wheel" / "containers" / "steps").mkdir(parents=True)
        assert dray_home.root() == tmp_path / "wheel"


def test_a_private_file_is_not_shared(tmp_path: Path) -> None:
    """A recipe of another user's may name it as accelerate's configuration."""
    private, mine = tmp_path / "a key", tmp_path / "mine.toml"
    private.write_text("gpu_ids: hush\n")
    mine.write_text(f'name = "x"\nlauncher = "accelerate"\naccelerate = "{private}"\n[command]\nargv = ["true"]\n')
    for mode, shared in ((0o600, False), (0o640, True)):
        private.chmod(mode)
        assert read_recipe(mine).accelerate == '{"gpu_ids": "hush"}'  # in a folder that is as private
        if shared:
            assert read_recipe(mine, ["runs.share=group"]).accelerate == '{"gpu_ids": "hush"}'
            continue
        with pytest.raises(ConfigError, match="your private file would be copied") as wrong:
            read_recipe(mine, ["runs.share=group"])
        assert "hush" not in str(wrong.value)
        assert wrong.value.details["fix"] == f"runs.share=none, or chmod g+r '{private}'"
