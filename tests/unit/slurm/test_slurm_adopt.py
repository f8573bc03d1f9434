"""slurm/adopt.sh: an image that somebody else made, adopted by the job itself; this Python stands in for its own."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import signal
import subprocess
import zipfile
from pathlib import Path

import pytest

from dray import process
from dray.images import adopted_folder, store
from helpers import until
from jobs import Job

TORCH = {
    "__init__.py": "class version: cuda = hip = None\n__version__ = '2.9.0'\n",
    "distributed/__init__.py": "PrefixStore = TCPStore = Store = object\n",
    "distributed/elastic/rendezvous/api.py": "def __getattr__(name): return object\n",
}
LAYER = "build/dray-cpu-extra.sif"


@pytest.fixture
def job(tmp_path: Path) -> Job:
    job = Job(tmp_path)
    for image in job.home.glob("build/dray-*.sif"):
        image.unlink()
    # Importing the real one takes seconds.
    torch = tmp_path / "site" / "torch"
    for name, content in TORCH.items():
        (torch / name).parent.mkdir(parents=True, exist_ok=True)
        (torch / name).write_text(content)
    job.env["PYTHONPATH"] = str(tmp_path / "site")
    return job


@pytest.fixture
def theirs(tmp_path: Path) -> Path:
    """A SIF of somebody's, and no other image is here."""
    folder = tmp_path / "their images"
    folder.mkdir()
    file = folder / "Torch 2.9, ours.sif"
    file.write_bytes(b"#!/usr/bin/env run-singularity\n\0SIF_MAGIC\0")
    file.chmod(0o644)
    return file


def login(job: Job, folder: Path, *words: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    """slurm/dray at a login node, in this folder."""
    argv = ["bash", job.home / "slurm" / "dray", *words]
    return subprocess.run(
        argv, env={**job.env, **env}, cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )


def image_of(ended: subprocess.CompletedProcess[str]) -> Path:
    assert ended.returncode == 0, ended.stderr
    return Path(ended.stdout.split("image ")[1].partition("\n")[0])


@pytest.mark.seconds
def test_a_sif_is_adopted_on_the_way_and_once(job: Job, theirs: Path) -> None:
    before = theirs.stat()
    ended = job.plan(f"adopted={theirs}", "--", "python3", "-c", "1", APPTAINERENV_PYTHONPATH="/not/the/image's")
    image = image_of(ended)
    folder = job.home / "build" / "dray-torch-2-9-ours"
    assert image == folder / "image.sif"
    assert ((folder / "source").readlink(), image.readlink()) == (theirs, Path("source"))
    assert theirs.stat().st_nlink == before.st_nlink == 1
    described = json.loads((folder / "image.json").read_text())
    assert (described["source"], described["variant"]) == (str(theirs), "cpu")
    assert described["pythonpath"] == job.env["PYTHONPATH"]
    assert described["file"] == store.stat(theirs)
    assert sorted(path.name for path in job.home.glob("build/*") if path.suffix != ".d") == [folder.name]
    (plan,) = (json.loads(path.read_text()) for path in job.runs.glob("*/attempt-1/plan.json"))
    assert plan["image_file"] == store.stat(theirs)
    env = {one["name"]: one["value"] for one in plan["env"]}
    assert env["PYTHONPATH"] == f"{folder}:{job.home}/src:{job.env['PYTHONPATH']}"
    assert {str(folder), f"{job.home}/src"} <= {one["path"] for one in plan["binds"]}
    assert re.search(r"read in \d+ s: sha256:", ended.stderr)
    again = job.plan(f"adopted={theirs}", "--", "python3", "-c", "1")
    assert image_of(again) == image
    assert "adopt" not in again.stderr
    assert image_of(job.plan("adopted=torch-2-9-ours", "--", "python3", "-c", "1")) == image


@pytest.mark.seconds
@pytest.mark.parametrize("where", ["the command line", "the recipe"])
def test_a_path_is_the_submitter_s(job: Job, theirs: Path, where: str) -> None:
    if where == "the recipe":
        (theirs.parent / "mine.toml").write_text(f'adopted = "{theirs}"\nname = "x"\n[command]\nargv = ["true"]\n')
        words = [str(theirs.parent / "mine.toml")]
    else:
        words = [f"adopted={theirs.name}", "--", "python3", "-c", "1"]
    assert image_of(job.plan(*words, SLURM_SUBMIT_DIR=str(theirs.parent))).parent.name == "dray-torch-2-9-ours"


@pytest.mark.seconds
def test_a_file_that_was_changed_is_refused(job: Job, theirs: Path) -> None:
    image = image_of(job.plan(f"adopted={theirs}", "--", "python3", "-c", "1"))
    was = store.stat(theirs)
    theirs.write_bytes(theirs.read_bytes() + b"more")
    for word in (str(theirs), "torch-2-9-ours"):
        refused = job.plan(f"adopted={word}", "--", "python3", "-c", "1")
        assert refused.returncode == 78
        lines = refused.stderr.splitlines()
        assert lines[0] == "dray: the image was changed since it was adopted"
        assert lines[1].startswith(f"  where:  {theirs} on node ")
        assert lines[2:4] == [f"  wanted: {was}", f"  found:  {store.stat(theirs)}"]
        assert lines[4].startswith("  fix:    ")
    fix = lines[4].removeprefix("  fix:    ")
    done = subprocess.run(["bash", "-c", fix], env=job.env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert image_of(job.plan(f"adopted={theirs}", "--", "python3", "-c", "1")) == image


@pytest.mark.seconds
@pytest.mark.parametrize(("mode", "copy"), [(0o664, 0o644), (0o660, 0o600)])
def test_a_file_that_others_may_write_is_copied(job: Job, theirs: Path, mode: int, copy: int) -> None:
    theirs.chmod(mode)
    ended = job.plan(f"adopted={theirs}", "--", "python3", "-c", "1")
    image = image_of(ended)
    assert f"it is copied, since others may write it: its mode is {mode:o}" in ended.stderr
    assert image.stat().st_mode & 0o777 == copy
    assert image.is_file()
    assert not image.is_symlink()
    assert image.read_bytes() == theirs.read_bytes()


@pytest.mark.seconds
def test_a_checkout_that_cannot_be_written(job: Job, theirs: Path) -> None:
    """The folder is beside the runs then."""
    build = job.home / "build"
    for path in sorted(build.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()
    build.rmdir()
    build.write_text("a file, since root may write into any folder")
    image = image_of(job.plan(f"adopted={theirs}", "--", "python3", "-c", "1"))
    assert image == job.runs / ".adopted" / "dray-torch-2-9-ours" / "image.sif"


@pytest.mark.seconds
def test_the_folder_of_runs_is_not_needed(job: Job, theirs: Path) -> None:
    """Where the checkout can be written; Apptainer mounts no folder that is missing."""
    for runs in (theirs.parent / "none", theirs / "none"):
        ended = login(job, theirs.parent, "image", "adopt", theirs, "--force", DRAY_RUNS=str(runs))
        assert ended.returncode == 0, ended.stderr
        assert not runs.exists()


@pytest.mark.seconds
def test_what_an_image_sees_while_it_is_adopted(job: Job, theirs: Path) -> None:
    """It may be anybody's, and all users of the machine see the command line."""
    job.runs.mkdir()
    apptainer = job.bin / "apptainer"
    script = apptainer.read_text().partition("\n")[2]
    job.tool("apptainer", f'#!/bin/bash\nprintf "%s\\n" "$@" >>"$SEEN.argv"\nenv -0 >"$SEEN.env"\n{script}')
    index = "https://me:hush@index.invalid/simple"
    ended = login(job, theirs.parent, "image", "adopt", theirs, PIP_INDEX_URL=index, PIP_CONFIG_FILE=os.devnull)
    assert ended.returncode == 0, ended.stderr
    argv = Path(f"{job.seen}.argv").read_text()
    assert "hush" not in argv
    mounts = [line for line in argv.splitlines() if line.startswith("--mount=")]
    seen = ((job.home, ",ro"), (theirs, ",ro"), (job.home / "build", ""))
    assert mounts == [f'--mount=type=bind,"src={path}","dst={path}"{mode}' for path, mode in seen]
    environment = Path(f"{job.seen}.env").read_text().split("\0")
    assert {f"APPTAINERENV_PIP_INDEX_URL={index}", f"SINGULARITYENV_PIP_CONFIG_FILE={os.devnull}"} <= {*environment}


@pytest.mark.seconds
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_an_adoption_that_is_stopped_leaves_nothing(
    job: Job, theirs: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """As scancel does it, and Ctrl-C, while the image's torch is imported."""
    begun = tmp_path / "begun"
    slow = f"import os, pathlib, time\npathlib.Path({str(begun)!r}).write_text(str(os.getppid()))\ntime.sleep(300)\n"
    (tmp_path / "site" / "torch" / "__init__.py").write_text(slow)
    argv = ["bash", job.home / "slurm" / "dray", "image", "adopt", theirs]
    with subprocess.Popen(argv, env=job.env, cwd=tmp_path, text=True, stderr=subprocess.PIPE) as dray:
        until(lambda: begun.exists() and begun.read_text(), dray.poll)
        os.kill(int(begun.read_text()), number)
        _, err = dray.communicate(timeout=60)
    assert dray.returncode == 128 + number
    assert err.endswith(f"dray: the adoption was stopped by {number.name}\n")
    assert [path.name for path in (job.home / "build").iterdir() if path.suffix != ".d"] == []


@pytest.mark.seconds
def test_a_defect_shows_its_traceback(job: Job, theirs: Path) -> None:
    """What it wrote into /tmp would go with the container."""
    (job.home / "pyproject.toml").unlink()
    (job.home / "pyproject.toml").write_text("[")
    ended = login(job, theirs.parent, "image", "adopt", theirs)
    assert ended.returncode == 70
    assert "Traceback (most recent call last):" in ended.stderr
    assert "dray: this is a defect of dray\n" in ended.stderr
    assert ended.stderr.endswith("with the traceback above\n")


@pytest.mark.seconds
def test_an_option_that_adopt_does_not_have(job: Job, theirs: Path) -> None:
    ended = login(job, theirs.parent, "image", "adopt", theirs, "--nmae", "x")
    assert (ended.returncode, ended.stdout) == (78, "")
    assert ended.stderr.endswith("unrecognized arguments: --nmae x\n")


def test_wheels_are_kept_beside_the_runs(tmp_path: Path, monkeypatch) -> None:
    """Where the checkout cannot be written, for the next image with this Python."""
    (tmp_path / "containers").mkdir()
    (tmp_path / "containers" / "venv.lock").write_text(f"a==2 --hash=sha256:{'0' * 64}\n")
    places: list[Path] = []
    monkeypatch.setattr(adopted_folder, "_wheels", lambda _pins, _python, found, _source: places.extend(found) or [])
    folder = tmp_path / "runs" / ".adopted" / ".adopt-x" / "new"
    adopted_folder._packages(folder, {}, ["a>=1"], tmp_path, source="/x.sif", python="3.12")
    assert places[0] == tmp_path / "runs" / ".adopted" / "wheels" / "beside-3.12"


@pytest.mark.slow
@pytest.mark.seconds
def test_jobs_that_adopt_the_same_at_once(job: Job, theirs: Path) -> None:
    words = job.argv(f"adopted={theirs}", "--", "python3", "-c", "1")
    jobs = [
        subprocess.Popen(words, env=job.env, cwd=job.home, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        for _ in range(3)
    ]
    ended = [one.communicate(timeout=120) for one in jobs]
    assert [one.returncode for one in jobs] == [0, 0, 0], ended
    assert [path.name for path in (job.home / "build").iterdir() if path.suffix != ".d"] == ["dray-torch-2-9-ours"]


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("words", "problem", "fix"),
    [
        (("adopted=thers",), "there is no adopted image thers", "slurm/dray image adopt FILE.sif --name thers"),
        (("adopted=/none.sif",), "the image does not exist, or cannot be read", "correct the path: "),
        (("adopted=none/x.sif",), "the image does not exist, or cannot be read", "correct the path: "),
        (("adopted=/etc/hostname",), "the image is no SIF", "of an archive or a folder of OCI make one first: "),
    ],
)
def test_what_cannot_be_adopted(job: Job, theirs: Path, words: tuple[str, ...], problem: str, fix: str) -> None:
    image_of(job.plan(f"adopted={theirs}", "--", "python3", "-c", "1"))
    refused = job.plan(*words, "--", "python3", "-c", "1")
    assert refused.returncode == 78
    assert refused.stderr.startswith(f"dray: {problem}\n"), refused.stderr
    assert f"  fix:    {fix}" in refused.stderr
    if words == ("adopted=thers",):
        assert "or one of: torch-2-9-ours\n" in refused.stderr
    elif words[0].startswith("adopted=none"):
        assert f"  where:  {job.home}/none/x.sif on node " in refused.stderr
        assert "  found:  no file\n" in refused.stderr


@pytest.mark.parametrize("words", [("image=cuda",), ("image=cpuu",), ("image=cpu",), ()])
def test_a_layer_is_never_taken_for_an_image(job: Job, words: tuple[str, ...]) -> None:
    (job.home / LAYER).write_text("a layer")
    refused = job.plan(*words, "--", "python3", "-c", "1")
    assert refused.returncode == 78
    variant = "cuda" if words == ("image=cuda",) else "cpu"
    assert refused.stderr.startswith("dray: the image does not exist\n"), refused.stderr
    assert (
        f"wanted: {job.home}/build/dray-{variant}.sif (the recipe's image is {variant})\n  found:  no file\n"
        in refused.stderr
    )


@pytest.mark.seconds
def test_a_login_node_without_python(job: Job, theirs: Path) -> None:
    """slurm/dray adopts, submits and shows, in the image; sbatch runs outside of it."""
    job.tool("sbatch", '#!/bin/bash\nprintf "%s\\n" "$@" >"$SEEN.sbatch"\necho 4711\n')

    def dray(*words: str) -> subprocess.CompletedProcess[str]:
        return login(job, theirs.parent, *words)

    image = job.home / "build" / "dray-mine" / "image.sif"
    adopted = dray("image", "adopt", theirs.name, "--name", "mine")
    assert (adopted.returncode, adopted.stdout) == (0, f"{image}\n"), adopted.stderr
    again = dray("image", "adopt", theirs.name)
    assert (again.returncode, again.stdout) == (0, f"{image}\n"), again.stderr
    refused = dray("image", "adopt", theirs.name, "--name", "mine")
    assert refused.returncode == 78
    assert refused.stderr.startswith("dray: there is an image of this name\n")
    submitted = dray("submit", f"adopted={theirs.name}", "--", "python3", "-c", "1")
    assert submitted.returncode == 0, submitted.stderr
    assert submitted.stdout.startswith("job 4711 is in the queue\n")
    words = Path(f"{job.seen}.sbatch").read_text().splitlines()
    assert f"--image={image}" in words
    assert f"adopted={theirs}" in words
    assert words[-4:] == ["--", "python3", "-c", "1"]
    assert "python3-" in dray("runs").stdout


def test_before_the_first_job_has_read_the_image(job: Job) -> None:
    argv = ["bash", job.home / "slurm" / "dray", "status"]
    ended = subprocess.run(
        argv, env=job.env, cwd=job.home, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 78
    assert ended.stderr.startswith("dray: the image does not exist\n")
    assert ended.stderr.endswith("or slurm/dray image adopt FILE; a job with adopted=FILE does it too\n")


def test_without_a_verb_it_shows_how_it_is_used(job: Job) -> None:
    ended = subprocess.run(
        ["bash", job.home / "slurm" / "dray"], env=job.env, capture_output=True, text=True, check=False
    )
    assert (ended.returncode, ended.stdout) == (78, "")
    assert ended.stderr.startswith("slurm/dray image adopt FILE [--name NAME] [--force]\nslurm/dray submit|")


@pytest.mark.parametrize("words", [("--out", "my reports/a.html"), ("--out=my reports/a.html",)])
def test_the_folder_of_a_new_file_is_mounted(words: tuple[str, ...], tmp_path: Path) -> None:
    job, folder = Job(tmp_path), tmp_path / "my reports"
    job.tool("apptainer", '#!/bin/bash\nprintf "%s\\n" "$@"\n')
    folder.mkdir()
    argv = ["bash", job.home / "slurm" / "dray", "report", "mine", *words]
    ended = subprocess.run(
        argv, env=job.env, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
    )
    assert f'--mount=type=bind,"src={folder}","dst={folder}"' in ended.stdout.splitlines(), ended


@pytest.mark.parametrize(
    "words", [("--site", "site.toml", "mine.toml"), ("mine.toml", "--", "train.py", "image=rocm", "adopted=./x.sif")]
)
def test_which_words_name_the_image(words: tuple[str, ...], tmp_path: Path) -> None:
    """The recipe's: no site file is one, and what follows -- is the command's own."""
    job, folder = Job(tmp_path), tmp_path / "my dray" / "build" / "dray-theirs"
    job.tool("apptainer", '#!/bin/bash\nprintf "%s\\n" "$@"\n')
    folder.mkdir()
    image = folder / "image.sif"
    image.touch()
    described = {"name": "theirs", "source": "docker://x", "file": store.stat(image), "pythonpath": ""}
    (folder / "image.json").write_text(json.dumps(described, indent=1))
    (tmp_path / "mine.toml").write_text('adopted = "theirs"\n')
    (tmp_path / "site.toml").write_text('name = "site"\n')
    ended = login(job, tmp_path, "submit", *words)
    lines = ended.stdout.splitlines()
    assert f"DRAY_IMAGE={image}" in lines, ended
    assert lines[-len(words) :] == list(words)


def test_a_verb_that_brings_no_file(tmp_path: Path) -> None:
    job, folder = Job(tmp_path), tmp_path / "remote"
    job.tool("apptainer", "#!/bin/bash\n")
    folder.mkdir()
    argv = ["bash", job.home / "slurm" / "login.sh", folder, job.home / "build" / "dray-cpu.sif", folder, "1", "report"]
    ended = subprocess.run(argv, env=job.env, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"dray: the command has written no file\n  where:  {folder}/.made-")
    assert ended.stderr.endswith("\n  found:  no file; the lines above say more\n")


def test_ctrl_c_ends_the_verb_in_the_image(tmp_path: Path) -> None:
    """It has a process group of its own there, where no terminal's signal comes."""
    job, begun, told = Job(tmp_path), tmp_path / "begun", tmp_path / "told"
    verb = tmp_path / "verb"
    verb.write_text(
        f'#!/bin/bash\ntrap \'touch "{told}"; exit 130\' INT\ntouch "{begun}"\nwhile :; do sleep 0.1; done\n'
    )
    verb.chmod(0o755)
    argv = ["bash", job.home / "slurm" / "dray", "logs", "-f", "mine"]
    env = {**job.env, "PYTHON": str(verb)}
    with subprocess.Popen(argv, env=env, cwd=tmp_path, stdin=subprocess.DEVNULL, start_new_session=True) as dray:
        until(begun.exists)
        os.killpg(dray.pid, signal.SIGINT)
        until(told.exists)


def test_what_the_image_lacks_comes_from_the_checkout_without_a_network(tmp_path: Path, monkeypatch) -> None:
    """And what that needs, as its wheel says."""
    monkeypatch.setattr(adopted_folder.process, "run", lambda *_, **__: pytest.fail("pip is not needed"))
    wheels = tmp_path / "build" / "wheels"
    wheels.mkdir(parents=True)
    lock = ""
    files = (("a", "cp312-cp312-linux", "b>=2"), ("b", "py2.py3-none-any", "has>=1"), ("a", "cp311-x", ""))
    for name, tag, needs in files:
        wheel = wheels / f"{name}-2-{tag}.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            archive.writestr(f"{name}.py", tag)
            text = f"Metadata-Version: 2.1\nName: {name}\nVersion: 2\n" + f"Requires-Dist: {needs}\n" * bool(needs)
            archive.writestr(f"{name}-2.dist-info/METADATA", text)
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        if f"{name}==" in lock:
            lock = lock.replace(f"{name}==2 ", f"{name}==2 --hash=sha256:{digest} ")
        else:
            lock += f"{name}==2 --hash=sha256:{digest}\n"
    (tmp_path / "containers").mkdir()
    (tmp_path / "containers" / "venv.lock").write_text(lock)
    project = (
        '[project]\ndependencies = ["a>=1", "docker>=7"]\n[project.entry-points."torchrun.handlers"]\ndray = "d:c"\n'
    )
    (tmp_path / "pyproject.toml").write_text(project)
    folder = tmp_path / "build" / "new"
    folder.mkdir()
    found = {"python": "3.12.1", "executable": "python3", "libc": "glibc 2.39", "pythonpath": "",
             "packages": {"has": "1"}, "torch": {"version": "2.9", "cuda": "", "hip": ""}}  # fmt: skip
    (folder / "image.sif").touch()
    origin = {"name": "mine", "source": "/x.sif", "file": "owner 1", "sha256": "0" * 64}
    done = process.Done(argv=(), code=0, out="", err="")
    assert adopted_folder.fill(folder, found, **origin, checkout=tmp_path, start=lambda *_: done) == ("a 2", "b 2")
    assert (folder / "a.py").read_text() == "cp312-cp312-linux"
    (registered,) = importlib.metadata.distributions(path=[str(folder)], name="dray")
    assert [(one.group, one.name, one.value) for one in registered.entry_points] == [
        ("torchrun.handlers", "dray", "d:c")
    ]
