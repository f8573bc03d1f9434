"""The batch scripts' own bash, with stand-ins for Slurm and for Apptainer, which starts this Python as the image."""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from dray.images import store
from dray.runs import status
from helpers import ROOT, until
from jobs import SRUN, Job


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


def digest(variant: str) -> str:
    return f"sha256:{hashlib.sha256(variant.encode()).hexdigest()}"


SEEDS = 10
KEYS = ("{0} = {1}", "  {0}={1} # {0} = 'cpu'", "{0}\t=\t{1}", '"{0}" = {1}', " '{0}' = {1}")
VALUES = ('"{}"', "'{}'", '"""{}"""', "'''{}'''", '"\\u{:04x}{}"')
TINY = ("[tiny]\n{}", "[ tiny ]\n  {}", '["tiny"]\n{}', "tiny = {{ {} }}", "tiny.{}")


def spelled(chance: random.Random, key: str, value: str) -> str:
    style = chance.choice(VALUES)
    text = style.format(ord(value[0]), value[1:]) if style.startswith('"\\u') else style.format(value)
    return chance.choice(KEYS).format(key, text)


def recipe(seed: int) -> str:
    """A recipe in one of the many spellings of TOML."""
    chance = random.Random(seed)
    variant, tiny = chance.choice(("cpu", "cuda", "rocm")), chance.choice(("cpu", "cuda", "rocm"))
    scale, pinned = chance.choice(("tiny", "whole")), chance.choice(("cpu", "cuda", "rocm"))
    inner = spelled(chance, "image", tiny).strip().partition(" # ")[0]
    table = chance.choice(TINY).format(inner)
    head = [spelled(chance, "image", variant), 'name = "x"', spelled(chance, "scale", scale)]
    head += [spelled(chance, "image_digest", digest(pinned))] if chance.random() < 0.7 else []
    head += ["# image = 'cuda'", 'about = """\nimage = "rocm"\n"""']
    chance.shuffle(head)
    command = "[command]\nargv = ['true']"
    inline = [table] if not table.startswith("[") else []
    return "\n".join([*inline, *head, command, *([] if inline else [table])]) + "\n"


@pytest.mark.seconds
@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_job_decides_as_toml_says(job: Job, tmp_path: Path, seed: int) -> None:
    """The image and whether its digest is the one that is pinned, on bare sbatch."""
    text = recipe(seed)
    (tmp_path / "mine.toml").write_text(text)
    said = tomllib.loads(text)
    wanted = said["tiny"]["image"] if said["scale"] == "tiny" else said["image"]
    ended = job.plan(tmp_path / "mine.toml", SLURM_GPUS_ON_NODE="0" if wanted == "cpu" else "2")
    if said.get("image_digest", digest(wanted)) == digest(wanted):
        assert ended.returncode == 0, ended.stderr
        assert f"image {job.home}/build/dray-{wanted}.sif\n" in ended.stdout
    else:
        assert ended.returncode == 78, ended.stdout
        assert (
            f"dray: the image has another digest than the recipe\n  where:  {job.home}/build/dray-{wanted}.sif\n"
            in ended.stderr
        )
        assert not list(job.runs.iterdir())


@pytest.mark.seconds
def test_a_run_goes_on_by_its_name_or_its_folder(job: Job) -> None:
    """A name is in the folder of the runs, as for dray run."""
    attempts = [
        job.plan(f"--run={run}", "recipes/smoke-cpu.toml").stdout.rpartition("attempt ")[2].strip()
        for run in ("mine", str(job.runs / "mine"), "mine")
    ]
    assert attempts == [f"{job.runs}/mine/attempt-{number}" for number in (1, 2, 3)]


def test_all_spellings_are_tried() -> None:
    """By some seed; a spelling that TOML would not take is none."""
    texts = [recipe(seed) for seed in range(SEEDS)]
    assert {tomllib.loads(text)["scale"] for text in texts} == {"tiny", "whole"}
    for part in ('"image', "'image", "image\t", "tiny = {", "[ tiny ]", "\\u", '"""', "image_digest"):
        assert any(part in text for text in texts), part


class TestCorrections:
    """Bash guesses; the planner in the image knows."""

    @pytest.mark.seconds
    def test_the_right_guess_costs_one_start(self, job: Job) -> None:
        ended = job.plan("recipes/smoke-cpu.toml")
        assert ended.returncode == 0, ended.stderr
        assert job.seen.read_text() == "dray-cpu.sif dray plan\n"

    @pytest.mark.seconds
    def test_a_digest_is_computed_where_one_is_pinned(self, job: Job) -> None:
        ended = job.plan("recipes/smoke-cpu.toml", f"image_digest={digest('cpu')}")
        assert ended.returncode == 0, ended.stderr
        assert job.seen.read_text() == "dray-cpu.sif dray plan\n" * 2

    @pytest.mark.seconds
    def test_all_that_is_wrong_costs_one_more_start(self, job: Job, tmp_path: Path) -> None:
        (tmp_path / "mine.toml").write_text(
            f'name = "x"\nimage = "rocm"\nimage_digest = "{digest("rocm")}"\n[command]\nargv = ["true"]\n'
        )
        site = tmp_path / "site.toml"
        binds = "".join(f'[[binds]]\npath = "{path}"\nwhy = "x"\n' for path in (tmp_path / "scratch", "$SCRATCH"))
        (tmp_path / "scratch").mkdir()
        site.write_text(f'name = "site"\nabout = "x"\n{binds}')
        words = (f"--site={site}", tmp_path / "mine.toml")
        ended = job.plan(*words, SLURM_GPUS_ON_NODE="2", SCRATCH=str(tmp_path / "scratch"))
        assert ended.returncode == 0, ended.stderr
        assert job.seen.read_text() == "dray-cpu.sif dray plan\ndray-rocm.sif dray plan\n"

    @pytest.mark.slow
    def test_another_variant_on_the_command_line(self, job: Job) -> None:
        ended = job.plan("recipes/smoke-cpu.toml", "image=rocm", SLURM_GPUS_ON_NODE="2")
        assert f"image {job.home}/build/dray-rocm.sif\n" in ended.stdout, ended.stderr
        assert job.seen.read_text() == "dray-rocm.sif dray plan\n"

    @pytest.mark.seconds
    def test_an_image_that_the_user_names_is_not_exchanged(self, job: Job) -> None:
        named = job.home / "build" / "dray-rocm.sif"
        ended = job.plan("recipes/smoke-cpu.toml", DRAY_IMAGE=str(named))
        assert ended.returncode == 78
        assert ended.stderr.startswith(
            f"dray: the image has another variant than the recipe\n  where:  {named}\n  wanted: cpu\n  found:  rocm\n"
        )

    @pytest.mark.seconds
    @pytest.mark.parametrize("only", [False, True])
    def test_an_adopted_image(self, job: Job, only: bool) -> None:
        """Its dray is the checkout's; where the recipe alone names it, a first guess asks for it."""
        folder = job.home / "build" / "dray-mine"
        folder.mkdir()
        (folder / "image.sif").write_text("mine")
        described = {"name": "mine", "variant": "cpu", "pythonpath": "/theirs", "source": "docker://x",
                     "file": store.stat(folder / "image.sif")}  # fmt: skip
        (folder / "image.json").write_text(json.dumps(described, indent=1))
        for image in job.home.glob("build/dray-c*.sif") if only else []:
            image.unlink()
        (job.home / "build" / "dray-rocm.sif").unlink()
        ended = job.plan("recipes/smoke-cpu.toml", "adopted=mine")
        assert ended.returncode == 0, ended.stderr
        assert f"image {folder}/image.sif\n" in ended.stdout
        assert job.seen.read_text() == "image.sif dray plan\n"
        (plan,) = (json.loads(path.read_text()) for path in job.runs.glob("*/attempt-1/plan.json"))
        env = {one["name"]: one["value"] for one in plan["env"]}
        assert env["PYTHONPATH"] == f"{folder}:{job.home}/src:/theirs"
        assert str(folder) in [one["path"] for one in plan["binds"]]

    def test_the_first_image_that_is_there_is_guessed(self, job: Job) -> None:
        """Of dray's own, else the first adopted one."""
        build = job.home / "build"
        for name in ("mine", "theirs"):
            image = build / f"dray-{name}" / "image.sif"
            image.parent.mkdir()
            image.write_text(name)
            image.with_name("image.json").write_text(json.dumps({"name": name, "file": store.stat(image)}, indent=1))
        script = """source "$DRAY_HOME/slurm/job.sh"; engine=apptainer given_image="" recipe="" runs=/r; plan::guess"""
        for name in ("cpu", "cuda", "rocm"):
            (build / f"dray-{name}.sif").touch()
        for guessed in ("dray-cpu.sif", "dray-cuda.sif", "dray-rocm.sif", "dray-mine/image.sif"):
            env = {**os.environ, "DRAY_HOME": str(job.home)}
            ended = subprocess.run(["bash", "-euc", script], env=env, capture_output=True, text=True, check=False)
            assert (ended.stdout, ended.stderr) == (f"{build}/{guessed}\n", "")
            (build / guessed).unlink()

    @pytest.mark.seconds
    def test_an_image_that_is_not_built(self, job: Job) -> None:
        (job.home / "build" / "dray-cpu.sif").unlink()
        ended = job.plan("recipes/smoke-cpu.toml")
        assert ended.returncode == 78
        assert f"wanted: {job.home}/build/dray-cpu.sif (the recipe's image is cpu)\n" in ended.stderr
        shutil.rmtree(job.home / "build")
        assert job.plan("recipes/smoke-cpu.toml").returncode == 78

    @pytest.mark.seconds
    def test_a_bind_of_the_users_shell_is_named_and_not_used(self, job: Job) -> None:
        ended = job.plan("recipes/smoke-cpu.toml", APPTAINER_BIND="/data")
        assert ended.returncode == 0, ended.stderr
        told = "dray: warning: APPTAINER_BIND is not used: add paths to the container with [[binds]] in a site file\n"
        assert told in ended.stderr

    @pytest.mark.seconds
    @pytest.mark.parametrize("line", ['engine = "pyxis"', "  'engine'\t= '''pyxis'''"])
    def test_a_site_s_engine(self, job: Job, tmp_path: Path, line: str) -> None:
        """Whatever is on the nodes beside it."""
        job.tool("srun", '#!/bin/bash\nwhile [[ "$1" != python3 ]]; do shift; done\nexec "$PYTHON" "${@:2}"\n')
        site = tmp_path / "mine.toml"
        site.write_text(f'name = "mine"\nabout = "x"\n{line}\n')
        (job.home / "build" / "dray-cpu.sqsh").write_bytes(b"hsqs and more")
        ended = job.plan(f"--site={site}", "recipes/smoke-cpu.toml")
        assert f"engine pyxis\nimage {job.home}/build/dray-cpu.sqsh\n" in ended.stdout, ended.stderr

    @pytest.mark.parametrize("owner", [None, 0, 65534])
    def test_a_layer_s_owner_is_named(self, job: Job, tmp_path: Path, owner: int | None) -> None:
        layer, record = tmp_path / "x.sif", tmp_path / "x.sif.json"
        record.touch()
        if owner is not None:
            layer.touch()
            if os.geteuid() == 0:
                os.chown(layer, owner, owner)
        script = 'source "$DRAY_HOME/slurm/job.sh"; runs=/r; plan::answer layer "$1"; echo taken'
        argv = ["bash", "-euc", script, "job", layer]
        ended = subprocess.run(argv, env=job.env, capture_output=True, text=True, check=False)
        if layer.exists() and layer.stat().st_uid in (0, os.geteuid()):
            assert (ended.stdout, ended.stderr) == ("taken\n", "")
            return
        files = f"a file of user {layer.stat().st_uid}, " if layer.exists() else ""
        assert ended.returncode == 78
        assert f"  wanted: {layer}, a file of yours or of root's, and {record}\n" in ended.stderr
        assert f"  found:  {files}" in ended.stderr
        assert f"a file of user {os.geteuid()}" in ended.stderr
        assert ("cannot stat" in ended.stderr) == (not files)

    def test_the_engine_is_found_where_apptainer_is_not(self, job: Job) -> None:
        (job.bin / "apptainer").unlink()
        script = 'source "$DRAY_HOME/slurm/job.sh"; engine::found'
        for options, tool, expected in (
            ("--container-image", "x", "pyxis\n"), ("--container-image --environment", "x", "edf\n"), ("", "x", ""),
            ("", "podman-hpc", "podman-hpc\n"), ("--environment", "x", "edf\n"),
        ):  # fmt: skip
            job.tool("srun", f"#!/bin/bash\necho {options}\n")
            job.tool(tool, "")
            ended = subprocess.run(
                ["/bin/bash", "-c", script], env={**job.env, "PATH": str(job.bin)}, capture_output=True, text=True,
                check=False,
            )  # fmt: skip
            assert (ended.stdout, ended.returncode) == (expected, 0 if expected else 69)


class TestTheSame:
    """Bare sbatch refuses and warns as `dray plan` and `dray submit` do."""

    HUGE = ("image=cuda", "model.config.n_layer=48", "model.config.n_embd=8192", "model.config.n_head=64")

    @pytest.mark.slow
    def test_a_model_that_cannot_fit(self, job: Job, tmp_path: Path) -> None:
        site = tmp_path / "small.toml"
        site.write_text('name = "small"\nabout = "x"\nimage = "cuda"\ngpu_memory_gb = 16\n')
        gpus = {"SLURM_GPUS_ON_NODE": "4"}
        job_ended = job.plan(f"--site={site}", "recipes/smoke-cpu.toml", *self.HUGE, **gpus)
        assert job_ended.returncode == 78
        assert "dray: the model does not fit: 38,6" in job_ended.stderr
        argv = [sys.executable, "-m", "dray", "plan", "recipes/smoke-cpu.toml", *self.HUGE, "--site", site]
        planned = subprocess.run(
            [*argv, "--nodes", "1", "--gpus-per-node", "4"],
            cwd=ROOT, env={**job.env, "DRAY_HOME": str(ROOT)}, capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert (planned.returncode, "dray: the model does not fit: 38,6" in planned.stderr) == (78, True)
        allowed = job.plan(f"--site={site}", "--gpu-memory=0", "recipes/smoke-cpu.toml", *self.HUGE, **gpus)
        assert allowed.returncode == 0, allowed.stderr

    @pytest.mark.seconds
    def test_what_is_not_downloaded_and_a_variable_that_nothing_reads(self, job: Job, tmp_path: Path) -> None:
        (tmp_path / "hf").mkdir()
        ended = job.plan("recipes/gpt2-wikitext-ddp.toml", "scale=whole", "image=cpu", HF_HOME=str(tmp_path / "hf"),
                         NCCL_DEBGU="INFO", MY_TOKEN="hush")  # fmt: skip
        assert ended.returncode == 0, ended.stderr
        assert "dray: note: the job is offline, and files that it needs are not downloaded\n" in ended.stderr
        assert "dray: warning: NCCL_DEBGU=(set)\n" in ended.stderr
        (run,) = job.runs.glob("[!.]*")
        written = "".join(path.read_text() for path in (run / "attempt-1").iterdir() if path.is_file())
        assert "hush" not in written

    @pytest.mark.seconds
    def test_the_site_s_variables_come_from_the_job(self, job: Job, tmp_path: Path) -> None:
        (tmp_path / "scratch").mkdir()
        site = tmp_path / "mine.toml"
        site.write_text(
            'name = "mine"\nabout = "x"\nbinds = [{ path = """$SCRATCH/data""", why = "data" }, '
            '{ path = "$GONE/x", why = "x", required = false }]\n'
        )
        ended = job.plan(f"--site={site}", "recipes/smoke-cpu.toml", SCRATCH=str(tmp_path / "scratch"))
        assert ended.returncode == 0, ended.stderr
        attempt = Path(ended.stdout.split("attempt ")[1].strip())
        assert f"node::bind {tmp_path}/scratch/data ro\n" in (attempt / "node.sh").read_text()
        facts = (attempt / "facts.txt").read_text()
        assert [line for line in facts.splitlines() if line.startswith(("variable.", "shell."))] == [
            f"variable.SCRATCH={tmp_path}/scratch"
        ]
        assert job.seen.read_text() == "dray-cpu.sif dray plan\n" * 2  # it was asked for


class TestStopped:
    """scancel, the time limit and their like."""

    LINE = "JobId=17 JobState={} Reason={} Dependency=(null) PreemptTime={} EndTime=x"

    @pytest.mark.parametrize(
        ("job", "end", "reason"),
        [
            (("COMPLETING", "TimeLimit", "None"), "", "the time limit"),
            (("TIMEOUT", "None", "None"), "", "the time limit"),
            (("COMPLETING", "None", "None"), "1000", "the time limit"),
            (("COMPLETING", "None", "None"), "9000", "scancel"),
            (("CANCELLED", "None", "None"), "", "scancel"),
            (("COMPLETING", "None", "2026-11-22T21:00:00"), "9000", "preemption"),
            (("COMPLETING", "NodeDown", "None"), "9000", "a node failure"),
            (("RUNNING", "None", "None"), "9000", "SIGTERM"),
        ],
    )
    def test_what_slurm_tells(self, job: tuple[str, str, str], end: str, reason: str) -> None:
        text = f"at=1000 end={end}\n{self.LINE.format(*job)}\n"
        assert status.stop_of_job(text, now=0, grace=120) == status.Stop(reason, "1970-01-01T00:16:40Z")

    @pytest.mark.parametrize(("left", "reason"), [(180, "the time limit"), (241, "SIGUSR1")])
    def test_the_signal_before_the_time_limit(self, left: int, reason: str) -> None:
        text = f"signal=USR1 at=1000 end={1000 + left}\n{self.LINE.format('RUNNING', 'None', 'None')}\n"
        assert status.stop_of_job(text, now=0, grace=120).reason == reason

    @pytest.mark.parametrize(
        ("before", "now", "reason"), [("0", "1", "scontrol requeue"), ("1", "1", "scancel"), ("", "1", "scancel")]
    )
    def test_a_job_that_slurm_has_put_back_was_not_cancelled(self, before: str, now: str, reason: str) -> None:
        """As seen: its state is COMPLETING in both cases, and Slurm counts the restart at once."""
        line = f"{self.LINE.format('COMPLETING', 'None', 'None')} Restarts={now}"
        assert (
            status.stop_of_job(f"signal=TERM at=1000 end=9000 restarts={before}\n{line}\n", now=0, grace=120).reason
            == reason
        )

    def test_a_controller_that_does_not_answer(self) -> None:
        assert status.stop_of_job("at= end=\n", now=1000, grace=120).reason == "SIGTERM"

    @pytest.mark.seconds
    @pytest.mark.parametrize("kept", [True, False])
    def test_a_job_that_is_cancelled(self, job: Job, tmp_path: Path, *, kept: bool) -> None:
        """By the real job.sh: what Slurm said, when, how far it was, and what there is to resume from."""
        checkpoints = tmp_path / "kept"
        (checkpoints / "step-40").mkdir(parents=True)
        (checkpoints / "step-9").mkdir()
        (checkpoints / "step-50.part-x").mkdir()
        step = json.dumps({"event": "step", "step": 47, "loss": 1.0})
        job.tool("srun", f"#!/bin/bash\necho '{step}' >metrics.jsonl\necho $$ >task\nexec sleep 30\n")
        job.tool("scontrol", f"#!/bin/bash\necho '{self.LINE.format('COMPLETING', 'TimeLimit', 'None')}'\n")
        words = ["checkpoint.every=10", f"checkpoint.folder={checkpoints}"] if kept else []
        with self.started(job, "recipes/smoke-cpu.toml", *words) as (script, attempt):
            script.terminate()  # Slurm tells the nodes too
            os.kill(int((attempt / "task").read_text()), signal.SIGTERM)
            out, err = script.communicate(timeout=60)
        run = attempt.parent
        result = json.loads((attempt / "result.json").read_text())
        newest = f"{checkpoints}/step-40" if kept else None
        assert (result["status"], result["reason"], result["steps"]) == ("stopped", "the time limit", 47), err
        assert (script.returncode, result["exit_code"], result["checkpoint"]) == (143, 143, newest)
        lines = out.splitlines()[-4:]
        assert lines[0] == f"stopped by the time limit at {result['at']}, after step 47"
        again = f"dray submit --run={run}  # or sbatch slurm/multinode.sh with the same --run"
        folder = f"run folder: {run}"
        assert lines[1:] == (
            [f"  safe:   all up to step 40, in {newest}", f"  resume: {again}", folder]
            if kept
            else ["  safe:   nothing yet; checkpoint.every=N saves every N steps", f"  again:  {again}", folder]
        )

    PROGRAM = "trap 'exit 7' INT TERM; touch begun; while :; do sleep 0.1; done"

    @contextmanager
    def started(self, job: Job, *words: str) -> Iterator[tuple[subprocess.Popen[str], Path]]:
        """The real batch script, as Slurm starts it, once its nodes run; and the folder of its attempt."""
        argv = ["env", "--default-signal", "bash", job.home / "slurm" / "singlenode.sh", *words]
        script = subprocess.Popen(
            argv, env=job.env, cwd=job.home, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            start_new_session=True,
        )  # fmt: skip
        try:
            deadline = time.monotonic() + 60
            while not (seen := list(job.runs.glob("*/attempt-1/task"))):
                assert script.poll() is None, script.communicate()
                assert time.monotonic() < deadline
                time.sleep(0.05)
            yield script, seen[0].parent
        finally:
            if script.poll() is None:
                left = subprocess.run(
                    ["ps", "-o", "pid=", "-s", str(script.pid)], capture_output=True, text=True, check=False
                )
                for pid in map(int, left.stdout.split()):
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                script.communicate()

    @pytest.mark.seconds
    @pytest.mark.parametrize("name", ["HUP", "INT"])
    def test_a_signal_to_the_batch_script_alone(self, job: Job, name: str) -> None:
        """The nodes end, by the real node.sh, runner and rank, and it is said."""
        job.tool("srun", SRUN)
        job.tool("scontrol", f"#!/bin/bash\necho '{self.LINE.format('RUNNING', 'None', 'None')}'\n")
        with self.started(job, "launcher=python", "--", "bash", "-c", self.PROGRAM) as (script, attempt):
            deadline = time.monotonic() + 60
            while not (job.home / "begun").exists():
                assert script.poll() is None, script.communicate()
                assert time.monotonic() < deadline, (attempt / "logs" / "node-0.log").read_text()
                time.sleep(0.05)
            script.send_signal(signal.Signals[f"SIG{name}"])
            out, err = script.communicate(timeout=60)
        result = json.loads((attempt / "result.json").read_text())
        code = 128 + signal.Signals[f"SIG{name}"]
        assert (script.returncode, result["exit_code"]) == (code, code), err
        assert (result["status"], result["reason"], result["cause"]) == ("stopped", f"SIG{name}", None)
        stopped = f"stopped by SIG{name} at {result['at']}\n  safe:   what the command itself saved\n"
        again = f"dray submit --run={attempt.parent}  # or sbatch slurm/multinode.sh with the same --run"
        assert f"{stopped}  again:  {again}\n" in out

    @pytest.mark.seconds
    @pytest.mark.parametrize(("program", "code"), [("trap 'exit 75' USR1;", 75), ("", 0)])
    def test_the_time_limit_comes_near(self, job: Job, program: str, code: int) -> None:
        """As sbatch --signal=B:USR1@120 tells it: what knows the signal saves and ends, and all else goes on."""
        job.tool("srun", SRUN)
        job.tool("scontrol", f"#!/bin/bash\necho '{self.LINE.format('RUNNING', 'None', 'None')}'\n")
        loop = f"{program} touch begun; until [[ -e on ]]; do sleep 0.1; done"
        with self.started(job, "launcher=python", "--", "bash", "-c", loop) as (script, attempt):
            deadline = time.monotonic() + 60
            while not (job.home / "begun").exists():
                assert time.monotonic() < deadline, (attempt / "logs" / "node-0.log").read_text()
                time.sleep(0.05)
            script.send_signal(signal.SIGUSR1)
            while (attempt / "stop").read_text() != "USR1\n":
                assert time.monotonic() < deadline
                time.sleep(0.05)
            if not program:
                (job.home / "on").touch()
            _, err = script.communicate(timeout=60)
        result = json.loads((attempt / "result.json").read_text())
        status, reason = ("stopped", "SIGUSR1") if code else ("done", None)
        assert (script.returncode, result["exit_code"]) == (code, code), err
        assert (result["status"], result["reason"], result["cause"]) == (status, reason, None)

    @pytest.mark.slow
    @pytest.mark.seconds
    @pytest.mark.parametrize(("length", "left"), [(15, 5), (300, 100)])
    def test_a_short_job_is_told_when_a_third_of_its_time_is_left(self, job: Job, length: int, left: int) -> None:
        """Slurm sends the signal at once where the time limit is nearer than it says."""
        now = int(time.time())
        job.env |= {"SLURM_JOB_START_TIME": str(now), "SLURM_JOB_END_TIME": str(now + length)}
        job.tool("srun", SRUN)
        job.tool("scontrol", "#!/bin/bash\nexit 1\n")
        program = ["bash", "-c", "until [[ -e on ]]; do sleep 0.1; done"]
        with self.started(job, "launcher=python", "--", *program) as (script, attempt):
            script.send_signal(signal.SIGUSR1)
            told = (attempt / "stop").read_text
            if length < 60:
                until(lambda: told() == "USR1\n")
                assert time.time() >= now + length - left
            (job.home / "on").touch()
            _, err = script.communicate(timeout=60)
        assert (script.returncode, told()) == (0, "USR1\n" if length < 60 else ""), err
        assert "dray: SIGUSR1 came at the start of a short job: the run is asked to save and end in" in err

    @pytest.mark.seconds
    def test_a_run_that_ends_well_although_it_was_told_to_stop(self, job: Job) -> None:
        """TERM to the batch script alone."""
        job.tool("srun", SRUN)
        job.tool("scontrol", "#!/bin/bash\nexit 1\n")
        program = ["bash", "-c", "until [[ -e on ]]; do sleep 0.1; done"]
        with self.started(job, "launcher=python", "--", *program) as (script, attempt):
            script.terminate()
            (job.home / "on").touch()
            out, err = script.communicate(timeout=60)
        result = json.loads((attempt / "result.json").read_text())
        assert (script.returncode, result["status"], result["exit_code"]) == (0, "done", 0), err
        assert out.splitlines()[-2:] == ["done: exit code 0, 1 rank on n1", f"run folder: {attempt.parent}"]

    @pytest.mark.seconds
    def test_a_last_line_without_an_end(self, job: Job) -> None:
        job.tool("srun", SRUN)
        job.tool("scontrol", "#!/bin/bash\nexit 1\n")
        argv = job.argv("launcher=python", "--", "printf", "100%%", plan_only=False)
        ended = subprocess.run(argv, env=job.env, cwd=job.home, capture_output=True, text=True, check=False)
        assert ended.stdout.splitlines()[2:4] == ["100%", "done: exit code 0, 1 rank on n1"], ended.stderr


class TestTheEnd:
    """What the batch script does where `dray finish` cannot."""

    def ended(self, job: Job, *, srun: int) -> subprocess.CompletedProcess[str]:
        """A job whose image is gone when its nodes have ended."""
        job.tool("srun", f"#!/bin/bash\nprintf '#!/bin/bash\\nexit 255\\n' >{job.bin}/apptainer\nexit {srun}\n")
        words = ["launcher=python", "--", "true"]
        return subprocess.run(
            job.argv(*words, plan_only=False), env=job.env, cwd=job.home, capture_output=True, text=True, check=False
        )

    @pytest.mark.seconds
    def test_nodes_that_do_not_see_the_run_s_folder(self, job: Job) -> None:
        """All that srun tells of them is how their tasks ended; it has terminated those that see it."""
        blind = """#!/bin/bash
        words=("$@")
        [[ "${words[*]: -1}" == ./node.sh ]] || exit 1
        cd / && bash -c "${words[*]: -3:1}" "/elsewhere${words[*]: -2:1}" ./node.sh
        echo "srun: error: n[2-3]: tasks 1-2: Exited with exit code $?" >&2
        echo "srun: error: n1: task 0: Terminated" >&2
        exit 143
        """
        job.tool("srun", blind)
        words = job.argv("launcher=python", "--", "true", plan_only=False)
        ended = subprocess.run(words, env=job.env, cwd=job.home, capture_output=True, text=True, check=False)
        assert ended.returncode == 78, ended.stderr
        assert (
            f"failed: the launch on n[2-3]: n[2-3] do not see {job.runs}\n"
            "  fix:    set DRAY_RUNS to a folder that all nodes share\n"
        ) in ended.stdout

    @pytest.mark.seconds
    @pytest.mark.parametrize(("srun", "code"), [(0, 255), (9, 9)])
    def test_an_image_that_does_not_start_again(self, job: Job, srun: int, code: int) -> None:
        ended = self.ended(job, srun=srun)
        (attempt,) = job.runs.glob("*/attempt-1")
        assert (ended.returncode, ended.stderr) == (
            code,
            "dray: the image did not start again to write down how the run ended\n"
            f"  where:  {job.home}/build/dray-cpu.sif on node {os.uname().nodename}\n"
            f"  found:  exit code {srun} of the nodes\n"
            f"  fix:    see {attempt}/failures and {attempt}/logs, the first failure first\n",
        )


@pytest.mark.parametrize("script", ["multinode.sh", "singlenode.sh"])
@pytest.mark.parametrize("typed", ["../a checkout/slurm/{}", "{tmp}/a checkout/slurm/{} -- train.py", "slurm/{}"])
def test_sbatch_finds_the_checkout_from_its_spool(script: str, typed: str, tmp_path: Path) -> None:
    """Slurm's record has a relative path as it was typed."""
    checkout = tmp_path / "a checkout"
    for folder in (checkout / "slurm", tmp_path / "project", tmp_path / "bin"):
        folder.mkdir(parents=True)
    (checkout / "slurm/job.sh").write_text('job::main() { echo "$DRAY_HOME"; }\n')
    (tmp_path / "slurm_script").write_text((ROOT / "slurm" / script).read_text())
    command = typed.format(script, tmp=tmp_path)
    (tmp_path / "bin/scontrol").write_text(f"#!/bin/sh\necho '   Command={command}'\n")
    (tmp_path / "bin/scontrol").chmod(0o755)
    submitted = checkout if typed.startswith("slurm") else tmp_path / "project"
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(submitted)}
    argv = ["bash", str(tmp_path / "slurm_script")]
    ended = subprocess.run(argv, env=env, cwd="/", capture_output=True, text=True, check=False)
    assert (ended.stdout, ended.stderr, ended.returncode) == (f"{checkout}\n", "", 0)
    elsewhere = subprocess.run(argv, env=env | {"DRAY_HOME": "/none/dray"}, capture_output=True, text=True, check=False)
    assert (elsewhere.returncode, elsewhere.stderr.partition(" at ")[0]) == (78, "dray: there is no checkout of dray")


def test_no_bash_reads_toml() -> None:
    scripts = itertools.chain(ROOT.glob("slurm/*.sh"), ROOT.glob("src/dray/render/bash/*.sh"))
    for script in scripts:
        for line in script.read_text().splitlines():
            assert not (".toml" in line and ("sed" in line or "grep" in line or "awk" in line)), (script, line)
