"""What is brought to a remote and stays there: there.sh, in a folder of this machine."""

from __future__ import annotations

import hashlib
import io
import shlex
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest

from dray.contract.findings import UnfitError
from dray.remote import bring, parcel
from dray.remote.names import Remote
from dray.remote.parcel import Parcel
from dray.remote.ssh import Brought
from helpers import ROOT

SCRIPT = ROOT / "src" / "dray" / "remote" / "there.sh"
# As slurm/login.sh is called: what it was given.
LOGIN = 'printf "%s\\n" "$0" "$@"\n'


def call(function: str, *argv: str | Path, feed: bytes = b"") -> tuple[int, str, str]:
    # This disk may be slow, and nobody pulls its plug.
    main = shlex.join(["there::main", "mark", function, *map(str, argv)])
    script = f"sync() {{ :; }}; . {shlex.quote(str(SCRIPT))}; {main}"
    done = subprocess.run(["bash", "-c", script], input=feed, capture_output=True, check=False)
    return done.returncode, done.stdout.decode().removeprefix("mark\n"), done.stderr.decode()


class Here:
    """The connection, without ssh."""

    def __init__(self, folder: Path, between: Callable[[str], None] = lambda _: None) -> None:
        self.remote, self._between = Remote("mine", "cluster", str(folder)), between

    def ask(self, function: str, *argv: str, feed: Iterable[bytes] = ()) -> str:
        self._between(function)
        code, out, err = call(function, *argv, feed=b"".join(feed))
        assert code == 0, err
        return out


@pytest.fixture
def recipe(tmp_path: Path) -> Parcel:
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "state.txt").write_text("new")
    (tmp_path / "work" / "train.py").write_text("train")
    (tmp_path / "work" / "SHA256SUMS").write_text("the sums of my data\n")
    return parcel.recipe(None, [], tmp_path / "work", tmp_path / "work", None)


def an_image(tmp_path: Path, content: bytes = b"a") -> Path:
    file = tmp_path / f"{content.hex()}.sif"
    file.write_bytes(content)
    return file


def brought(folder: Path, image: Path, dray: Parcel, recipe: Parcel | None) -> Brought:
    return bring.bring(Here(folder), image, lambda _: None, dray, recipe)  # type: ignore[arg-type]


def scripts(tmp_path: Path, name: str = "dray") -> Parcel:
    (tmp_path / name / "slurm").mkdir(parents=True)
    (tmp_path / name / "slurm" / "login.sh").write_text(f"{LOGIN}# {name}\n")
    made = parcel.recipe(None, [], tmp_path / name, tmp_path / name, None)
    return made._replace(item=made.item.replace("recipes/", "dray/"))


def test_a_folder_that_a_job_has_changed_stays_and_the_next_has_another(tmp_path: Path, recipe: Parcel) -> None:
    there, image, dray = tmp_path / "there", an_image(tmp_path), scripts(tmp_path)
    first = brought(there, image, dray, recipe)
    assert first == Brought(dray.item, f"images/{hashlib.sha256(b'a').hexdigest()}.sif", recipe.item)
    folder = there / first.recipe
    inode = folder.stat().st_ino
    (folder / "checkpoint").write_text("weeks of work")
    assert brought(there, image, dray, recipe) == first, "a job's own files change nothing of what was brought"
    (folder / "state.txt").write_text("step 900")
    second = brought(there, image, dray, recipe)
    assert second == first._replace(recipe=f"{recipe.item}-2")
    assert (folder.stat().st_ino, (folder / "state.txt").read_text()) == (inode, "step 900")
    assert (folder / "checkpoint").read_text() == "weeks of work"
    names = sorted(path.name for path in (there / second.recipe).iterdir())
    assert names == [".dray-sums", "SHA256SUMS", "state.txt", "train.py"]
    assert (there / second.recipe / "SHA256SUMS").read_text() == "the sums of my data\n"
    assert brought(there, image, dray, recipe) == second
    (there / second.recipe / "train.py").unlink()
    assert brought(there, image, dray, recipe).recipe == f"{recipe.item}-3"
    assert not list(there.rglob(".arriving-*"))


def test_an_empty_folder_is_brought_once(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    nothing = parcel.recipe(None, [], tmp_path / "empty", tmp_path / "empty", None)
    there, image, dray = tmp_path / "there", an_image(tmp_path), scripts(tmp_path)
    assert brought(there, image, dray, nothing) == brought(there, image, dray, nothing)


@pytest.mark.parametrize(("change", "code"), [("", 0), ("other", 69)])
def test_the_same_that_two_bring_at_once(tmp_path: Path, recipe: Parcel, change: str, code: int) -> None:
    """The second one is told `missing` before the first one's copy has its name."""
    there, digest = tmp_path / "there", recipe.item.partition("/")[2]
    receive = (there, recipe.item, str(len(recipe.data)), digest)
    assert call("receive", *receive, feed=recipe.data)[0] == 0
    if change:
        (there / recipe.item / "state.txt").write_text(change)
    found, _, err = call("receive", *receive, feed=recipe.data)
    assert (found, "the copy cannot be renamed" in err) == (code, bool(change)), err
    assert (there / recipe.item / "state.txt").read_text() == (change or "new")
    assert [path.name for path in (there / "recipes").iterdir()] == [digest]


def test_a_link_to_nowhere_is_no_free_name(tmp_path: Path, recipe: Parcel) -> None:
    (tmp_path / "there" / "recipes").mkdir(parents=True, mode=0o700)
    (tmp_path / "there" / recipe.item).symlink_to("nowhere")
    (tmp_path / "there").chmod(0o700)
    assert call("has", tmp_path / "there", recipe.item)[1] == f"missing {recipe.item}-2\n"


def test_each_of_two_submits_gets_its_own_image_and_scripts(tmp_path: Path, recipe: Parcel) -> None:
    there = tmp_path / "there"
    one = brought(there, an_image(tmp_path, b"a"), scripts(tmp_path), recipe)
    other = brought(there, an_image(tmp_path, b"b"), scripts(tmp_path, "newer"), recipe)
    assert (one.dray != other.dray, one.image != other.image) == (True, True)
    for mine, used in ((one, one), (other, other), (Brought(), other)):
        _, out, err = call("verb", there, *mine, "", "submit", "a b")
        run_in = there / mine.recipe if mine.recipe else there
        script = there / used.dray / "slurm" / "login.sh"
        assert out.splitlines() == [*map(str, (script, there, there / used.image, run_in)), "", "submit", "a b"], err


@pytest.mark.parametrize(
    "answer", ["", "here", "here ../x", "missing images/x.sif; rm", "here {item}-2-3", "no {item}"]
)
def test_an_answer_that_is_none(tmp_path: Path, recipe: Parcel, answer: str) -> None:
    class Other(Here):
        def ask(self, function: str, *argv: str, feed: Iterable[bytes] = ()) -> str:
            assert function == "has"
            return answer.format(item=argv[1])

    with pytest.raises(UnfitError, match="the remote gave an unexpected answer"):
        bring.bring(Other(tmp_path), an_image(tmp_path), print, recipe)  # type: ignore[arg-type]


def test_an_image_that_cannot_be_read_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a network disk that fails in the middle."""

    class Failing(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            raise OSError(5, "Input/output error")

    image, dray = an_image(tmp_path), scripts(tmp_path)
    monkeypatch.setattr("dray.images.sif.verify.digest", lambda _: f"sha256:{hashlib.sha256(b'a').hexdigest()}")
    monkeypatch.setattr(Path, "open", lambda *_: Failing())
    with pytest.raises(UnfitError, match="the image cannot be read") as refused:
        brought(tmp_path / "there", image, dray, None)
    assert str(refused.value).splitlines()[1:] == [f"  where:  {image}", "  found:  Input/output error"]


def test_a_folder_that_only_the_image_has_ends_the_call(tmp_path: Path) -> None:
    """The program in the image waits for the exit code of the one outside."""
    door, inside = tmp_path / "door", tmp_path / "inside"
    (door / "bin").mkdir(parents=True)
    (door / "bin" / "squeue").symlink_to(ROOT / "slurm" / "door.sh")
    inside.mkdir()
    # login.sh without what it runs at once, and with a squeue of its own.
    script = """
        set -euo pipefail
        shopt -s extglob
        source <(sed -n '/^readonly -a login__commands/p;/^login::serve/,/^}/p;/^login::answer/,/^}/p' "$0")
        squeue() { printf 'a queue\\n'; }
        door="$1"
        mkfifo "$door/calls"
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
    argv = ["bash", "-c", script, ROOT / "slurm" / "login.sh", door, inside]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=20, check=False)
    assert (done.returncode, done.stdout) == (1, "a queue\n")
    assert done.stderr.endswith(f"cd: {inside}: No such file or directory\n")
