"""`--on` through a real sshd on the loopback."""

from __future__ import annotations

import re
import shlex
import subprocess
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from desk import Desk, at
from dray.contract.findings import ConfigError
from dray.facts import Facts
from dray.remote import remotes_file
from dray.runs.prepare import read_recipe, write
from helpers import ROOT

pytestmark = pytest.mark.skipif(not Path("/usr/sbin/sshd").exists(), reason="openssh-server is not installed")


OF_THE_DESK = {"DRAY_RUNS": "/of/the/desk", "DRAY_SITE": "lumi"}
"""What a user exports here, and the remote has no part in."""


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    with at(tmp_path_factory.mktemp("remote")) as made:
        yield made


@pytest.mark.seconds
def test_a_run_is_submitted_and_seen_from_here(desk: Desk) -> None:
    shown, _ = desk.dray("remote", "check", "mine")
    assert shown.splitlines()[-1] == f"mine can run jobs: cluster:{desk.there}"
    submit = ("submit", "--on", "mine", "recipes/smoke-cpu.toml")
    out, err = desk.dray(*submit, "--run=first", "train.steps=50", env=OF_THE_DESK)
    assert out == f"job 4711 is in the queue\nrun folder: {desk.there}/runs/first\n", err
    digest = next((desk.there / "images").glob("*.sif"))
    home, sent = next((desk.there / "dray").iterdir()), desk.there / "code" / "first"
    called = [line for line in (desk.folder / "calls").read_text().splitlines() if line.startswith("sbatch --parsable")]
    assert called[-1].split(" --job-name")[0] == f"sbatch --parsable --output={desk.there}/runs/first/job-%j.log"
    assert called[-1].split("--ntasks-per-node=1 ")[1] == (
        f"{home}/slurm/multinode.sh --run={desk.there}/runs/first --image={digest} --site= "
        f"{sent}/smoke-cpu.toml train.steps=50"
    )
    assert (sent / "smoke-cpu.toml").read_bytes() == (ROOT / "recipes" / "smoke-cpu.toml").read_bytes()
    _, err = desk.dray("submit", "--on=mine", "recipes/smoke-cpu.toml", "--run=second")
    assert "copying" not in err
    listed, _ = desk.dray("runs", "--on", "mine")
    assert [line.split()[0] for line in listed.splitlines()[1:]] == ["second", "first"], listed
    assert not (ROOT / "pwned").exists()
    assert not list(desk.there.rglob("*.part"))


@pytest.mark.seconds
def test_a_file_is_brought_back(desk: Desk, tmp_path: Path) -> None:
    desk.dray("remote", "check", "mine", "--image", str(desk.image))
    facts = Facts(
        scheduler="slurm", job=17, nodelist="n1", nodes=1, engine="apptainer", image="/i.sif", home="/home/me"
    )
    write(read_recipe(ROOT / "recipes" / "smoke-cpu.toml"), facts, runs=desk.there / "runs", run="seen")
    for argv, name in ((("report",), "dray-report-seen.html"), (("why", "--bundle"), "dray-why-seen.tar.gz")):
        out, _ = desk.dray(*argv, "--on", "mine", "seen", cwd=tmp_path, env=OF_THE_DESK)
        assert out == f"{argv[0]}: {tmp_path / name}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["dray-report-seen.html", "dray-why-seen.tar.gz"]
    assert "seen" in (tmp_path / "dray-report-seen.html").read_text()
    assert tarfile.is_tarfile(tmp_path / "dray-why-seen.tar.gz")


@pytest.mark.slow
def test_exit_codes_and_refusals_pass_through(desk: Desk) -> None:
    desk.dray("remote", "check", "mine", "--image", str(desk.image))
    _, err = desk.dray("status", "--on", "mine", "no-such-run", code=78)
    assert "no-such-run" in err


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("place", "code", "problem"),
    [
        ("unknown:/tmp/x", 69, "ssh cannot reach the remote"),
        ("closed:/tmp/x", 69, "ssh cannot reach the remote"),
        ("cluster:/etc/passwd/x", 78, "the remote's folder cannot be created"),
        ("cluster:/tmp", 78, "other users could change what your jobs start"),
    ],
)
def test_what_cannot_be_used(desk: Desk, place: str, code: int, problem: str) -> None:
    desk.dray("remote", "add", "bad", place)
    _, err = desk.dray("remote", "check", "bad", code=code)
    assert err.splitlines()[0] == f"dray: {problem}"


@pytest.mark.slow
def test_another_file_under_the_image_s_name_is_refused(desk: Desk) -> None:
    desk.dray("remote", "check", "mine", "--image", str(desk.image))
    file = next((desk.there / "images").glob("*.sif"))
    whole = file.read_bytes()
    file.write_bytes(b"other")
    _, err = desk.dray("remote", "check", "mine", "--image", str(desk.image), code=69)
    assert err.splitlines()[0] == "dray: another file has the image's name"
    file.write_bytes(whole)
    desk.dray("remote", "check", "mine", "--image", str(desk.image))


def test_half_a_copy_never_counts(tmp_path: Path) -> None:
    script = f"{shlex.quote(str(ROOT / 'src/dray/remote/there.sh'))}"
    image = tmp_path / "images" / f"{'0' * 64}.sif"
    image.parent.mkdir()
    Path(f"{image}.part").write_bytes(b"half")
    call = f". {script}; sync() {{ :; }}; there::main arrived {shlex.quote(str(tmp_path))} images/{image.name}"
    done = subprocess.run(["bash", "-c", call], capture_output=True, check=False)
    assert done.returncode == 69
    assert b"the copy arrived damaged, and was removed" in done.stderr
    assert list(image.parent.iterdir()) == []


def test_a_program_that_is_missing_there_is_named(tmp_path: Path) -> None:
    script = shlex.quote(str(ROOT / "src/dray/remote/there.sh"))
    call = f". {script}; there::main check {shlex.quote(str(tmp_path / 'there'))}"
    done = subprocess.run(
        ["bash", "-c", call], env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 69
    assert re.match(r"dray: a program is missing on the remote:.* sbatch .*apptainer", done.stderr)


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("a", "-oProxyCommand=x:/p"), ("a", "h"), ("a", "h:p"), ("a", "h:/"),
        ("a", "h:/a\nb"), ("a", "u@-h:/p"), ("a", "h;x:/p"), ("a", "h:/a\x1b[31m"),
        ("a", "ssh://me@h/x"), ("a", "ssh://me@h:22/x"),
    ],
)  # fmt: skip
def test_a_name_or_place_that_is_none(name: str, place: str) -> None:
    with pytest.raises(ConfigError):
        remotes_file.parse(name, place)


def test_the_file_of_remotes_is_the_user_s_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    one = remotes_file.parse("lumi", 'me@lumi:/scratch/a "b" \\ $(c)')
    remotes_file.write({"lumi": one})
    assert (remotes_file.read(), oct(remotes_file.file().stat().st_mode & 0o777)) == ({"lumi": one}, "0o600")
    remotes_file.file().chmod(0o666)
    with pytest.raises(ConfigError, match="other users could change"):
        remotes_file.read()
    remotes_file.file().chmod(0o600)
    remotes_file.file().write_text('lumi = "no place"\n')
    with pytest.raises(ConfigError, match="this is not a folder of yours") as refused:
        remotes_file.read()
    assert refused.value.finding.where == str(remotes_file.file())
