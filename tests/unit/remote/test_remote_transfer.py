"""What is copied to a remote and stays there: rsync and there.sh, in a folder of this machine."""

from __future__ import annotations

import hashlib
import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from dray import process
from dray.contract.findings import ConfigError
from dray.remote import remotes_file, transfer
from dray.remote.ssh import Connection
from dray.remote.transfer import Copied
from dray.runs.prepare import read_recipe
from helpers import ROOT

pytestmark = pytest.mark.skipif(not shutil.which("rsync"), reason="rsync is not installed")
SCRIPT = ROOT / "src" / "dray" / "remote" / "there.sh"


class Here(Connection):
    """The connection, without ssh."""

    def __init__(self, folder: Path) -> None:
        super().__init__(remotes_file.parse("mine", f"cluster:{folder}"), [])

    def ask(self, function: str, *argv: str) -> str:
        # This disk may be slow, and nobody pulls its plug.
        main = shlex.join(["there::main", function, self.remote.path, *argv])
        script = f"sync() {{ :; }}; . {shlex.quote(str(SCRIPT))}; {main}"
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def rsync(self, source: str, item: str, *options: str) -> None:
        process.run(["rsync", *options, source, f"{self.remote.path}/{item}"])


@pytest.fixture
def there(tmp_path: Path) -> Here:
    return Here(tmp_path / "there")


@pytest.fixture
def image(tmp_path: Path) -> Path:
    (tmp_path / "a.sif").write_bytes(b"a")
    return tmp_path / "a.sif"


def work(tmp_path: Path, **links: str) -> Path:
    """A command's folder, with links; beside it what nobody has named."""
    folder = tmp_path / "work"
    for name in (
        "work/train.py",
        "work/sets/v2/a.jsonl",
        "work/runs/1/log",
        "work/.env",
        "secret",
        "elsewhere/b.jsonl",
    ):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    for name, target in links.items():
        (folder / name).symlink_to(target.format(work=folder))
    return folder


def copied(folder: Path, there: Here, run: str = "first") -> Path:
    there.ask("image", "images/none.sif")
    transfer.copy_files(there, folder, transfer.files_of(folder), f"code/{run}")
    return Path(there.remote.path, "code", run)


def test_the_image_and_the_scripts_are_copied_once(image: Path, there: Here) -> None:
    said: list[str] = []
    first = transfer.copy_image(there, image, said.append)
    sif = f"images/{hashlib.sha256(b'a').hexdigest()}.sif"
    assert (first.image, said) == (sif, [f"copying a.sif to cluster:{there.remote.path}"])
    home = Path(there.remote.path)
    assert (home / sif).read_bytes() == b"a"
    assert (home / first.dray / "slurm/login.sh").read_bytes() == (ROOT / "slurm/login.sh").read_bytes()
    assert (home / "current").read_text() == f"{first.dray}\n{sif}\n"
    assert (transfer.copy_image(there, image, said.append), len(said)) == (first, 1)


def test_each_of_two_submits_uses_its_own_image_and_scripts(tmp_path: Path, image: Path, there: Here) -> None:
    first = transfer.copy_image(there, image, print)
    image.write_bytes(b"b")
    other = transfer.copy_image(there, image, print)
    login = Path(there.remote.path, first.dray, "slurm/login.sh")
    login.write_text('printf "%s\\n" "$0" "$@"\n')
    for mine, used in ((first._replace(code="code/first"), first), (Copied(), other)):
        out = there.ask("verb", *mine, "", "submit", "a b")
        home = there.remote.path
        run_in = f"{home}/{mine.code}" if mine.code else home
        assert out.splitlines() == [str(login), home, f"{home}/{used.image}", run_in, "", "submit", "a b"]


def test_what_a_job_wrote_beside_its_code_stays(tmp_path: Path, there: Here) -> None:
    folder = work(tmp_path)
    code = copied(folder, there)
    (code / "checkpoint").write_text("weeks of work")
    (folder / "train.py").write_text("mended")
    copied(folder, there)
    assert (code / "checkpoint").read_text() == "weeks of work"
    assert (code / "train.py").read_text() == "mended"
    assert sorted(path.name for path in code.iterdir()) == ["checkpoint", "sets", "train.py"]


@pytest.mark.parametrize("recipe", sorted((ROOT / "recipes").glob("*.toml")), ids=lambda path: path.stem)
def test_each_of_our_recipes_has_its_files_there(recipe: Path, tmp_path: Path, there: Here) -> None:
    code = copied(recipe.parent, there)
    written = recipe.read_text()
    for overrides in ([], ["scale=tiny"]) if "\n[tiny]" in written else ([],):
        here = read_recipe(recipe, overrides).model_dump_json()
        remote = read_recipe(code / recipe.name, overrides).model_dump_json()
        assert remote.replace(str(code), "") == here.replace(str(recipe.parent), "")


def test_a_link_in_the_folder_is_a_link_there_and_is_not_walked(tmp_path: Path, there: Here) -> None:
    code = copied(work(tmp_path, data="sets/v2", loop=".", latest="runs/1", main="train.py"), there)
    links = {path.name: str(path.readlink()) for path in code.iterdir() if path.is_symlink()}
    assert links == {"data": "sets/v2", "latest": "runs/1", "loop": ".", "main": "train.py"}
    assert (code / "data" / "a.jsonl").read_text() == "work/sets/v2/a.jsonl"


@pytest.mark.parametrize(
    "link",
    [
        "../secret",
        "{work}/train.py",
        "{work}/sets",
        "{work}/../secret",
        "../elsewhere",
        "/",
        "/etc/passwd",
        "/nowhere",
        "../..",
    ],
)
def test_a_link_that_leads_out(tmp_path: Path, link: str) -> None:
    folder = work(tmp_path, out=link)
    with pytest.raises(ConfigError) as refused:
        transfer.files_of(folder)
    assert str(refused.value).splitlines() == [
        "a link points outside the folder that dray copies to a remote, or has an absolute path",
        f"  where:  {folder}/out",
        f"  wanted: a relative link to something in {folder}",
        f"  found:  {link.format(work=folder)}",
        "  fix:    replace it by a copy, or remove it and give an absolute path on the remote",
    ]


def test_a_folder_that_is_too_large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(4):
        (tmp_path / str(number)).write_text("x")
    monkeypatch.setattr(transfer, "BYTES", 4)
    assert transfer.files_of(tmp_path) == ["0", "1", "2", "3"]
    monkeypatch.setattr(transfer, "BYTES", 3)
    with pytest.raises(ConfigError, match="too large to copy"):
        transfer.files_of(tmp_path)


def test_a_folder_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def scandir(path: str) -> None:
        raise PermissionError(13, "Permission denied", path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(PermissionError):
        transfer.files_of(tmp_path)


def test_of_two_copies_of_an_image_the_second_finds_it_there(image: Path, there: Here) -> None:
    made = transfer.copy_image(there, image, print)
    assert there.ask("arrived", made.image) == ""


def test_a_folder_that_only_the_image_has_ends_the_call(tmp_path: Path) -> None:
    """The program in the image waits for the exit code of the one outside."""
    relay, inside = tmp_path / "relay", tmp_path / "inside"
    (relay / "bin").mkdir(parents=True)
    (relay / "bin" / "squeue").symlink_to(ROOT / "slurm" / "slurm_command.sh")
    inside.mkdir()
    # login.sh without what it runs at once, and with a squeue of its own.
    script = """
        set -euo pipefail
        shopt -s extglob
        source <(sed -n '/^readonly -a login__commands/p;/^login::serve/,/^}/p;/^login::answer/,/^}/p' "$0")
        squeue() { printf 'a queue\\n'; }
        relay="$1"
        mkfifo "$relay/calls"
        login::serve &
        trap "kill $!" EXIT
        cd -- "$2"
        rmdir -- "$2"
        code=0
        "$1/bin/squeue" || code=$?
        cd /
        "$1/bin/squeue"
        exit "$code"
    """
    argv = ["bash", "-c", script, ROOT / "slurm" / "login.sh", relay, inside]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (1, "a queue\n")
    assert done.stderr.endswith(f"cd: {inside}: No such file or directory\n")
