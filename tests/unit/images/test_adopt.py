"""Images of others: what running one tells, what is refused and leaves nothing, and what a plan does with it."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
from contextlib import closing
from pathlib import Path, PurePosixPath

import pytest

from command import dray
from dray import process, render
from dray.clients import builder, docker
from dray.config.site import Site
from dray.contract.findings import ConfigError, DrayError
from dray.facts import Facts
from dray.images import adopt, store
from dray.images.sif import format as sif_format
from dray.images.sif import record
from dray.planning import missing_facts
from dray.planning.plan import plan
from dray.runs.prepare import read_recipe
from helpers import ROOT

FOUND = {
    "python": "3.12.3", "executable": "/opt/env/bin/python3", "machine": "x86_64", "libc": "glibc 2.39",
    "pythonpath": "", "packages": {}, "torch": {"version": "2.9.0", "cuda": "", "hip": ""},
}  # fmt: skip
SAYS = 'while read -r line; do echo "$line"; done </told'
REFUSED = {
    "an old Python": ({"python": "3.10.12"}, "the image's Python is too old for dray", "3.10.12"),
    "an old glibc": ({"libc": "glibc 2.17"}, "the image has no glibc that torch's wheels can use", "glibc 2.17"),
    "musl": (
        {"libc": ""},
        "the image has no glibc that torch's wheels can use",
        "another C library, such as musl",
    ),
    "no torch": (
        {"torch": {"error": "No module named 'torch'"}},
        "the image's Python cannot import torch",
        "No module named 'torch'",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Path:
    """dray's own, made once."""
    return tmp_path_factory.mktemp("wheels")


@pytest.fixture
def checkout(tmp_path, wheels, monkeypatch) -> Path:
    """One with a build folder of its own."""
    root = tmp_path / "checkout"
    (root / "build").mkdir(parents=True)
    (root / "build" / "wheels").symlink_to(wheels)
    for made in (ROOT / "build" / "base", *(ROOT / "build").glob("builder-*")):
        (root / "build" / made.name).symlink_to(made)
    for name in ("containers", "src", "pyproject.toml", "hatch_build.py", "README.md", ".gitignore", "recipes", "slurm",
                 "LICENSE", "Makefile"):  # fmt: skip
        (root / name).symlink_to(ROOT / name)
    monkeypatch.setattr(adopt, "_START_S", 60)
    monkeypatch.setenv("DRAY_HOME", str(root))
    return root


def whole(checkout: Path) -> list[str]:
    """What is left in build/, but for what any build keeps there."""
    return sorted(
        path.name for path in (checkout / "build").iterdir() if not path.name.startswith(("wheels", "base", "builder-"))
    )


def refusal(checkout: Path, source: object, name: str = "mine") -> DrayError:
    with pytest.raises(DrayError) as refused:
        adopt.adopt(checkout, str(source), name=name, say=lambda _: None)
    assert whole(checkout) == []
    return refused.value


class TestFiles:
    """What never starts."""

    def sif(self, folder: Path) -> Path:
        (folder / "squashfs").write_bytes(b"hsqs" + bytes(200))
        sif_format.write(folder / "squashfs", folder / "x.sif", epoch=1, definition=b"a\n")
        return folder / "x.sif"

    @pytest.mark.parametrize("name", ["cpu", "Mine", "a b", "../x", "a.b", "-x", "x" * 64])
    def test_a_name(self, checkout, tmp_path, name):
        assert refusal(checkout, self.sif(tmp_path), name).problem == "not a name for an adopted image"

    def test_no_file(self, checkout, tmp_path):
        assert refusal(checkout, tmp_path / "none.sif").problem == "the image does not exist"

    @pytest.mark.parametrize("content", [b"", b"text", b"\x7fELF" + bytes(100)])
    def test_no_image(self, checkout, tmp_path, content):
        (tmp_path / "x.sif").write_bytes(content)
        refused = refusal(checkout, tmp_path / "x.sif")
        assert refused.problem == "not a usable image"
        assert "docker-archive:FILE" in refused.details["fix"]

    def test_a_file_that_was_cut_short(self, checkout, tmp_path):
        sif = self.sif(tmp_path)
        sif.write_bytes(sif.read_bytes()[:-100])
        assert "cut short" in refusal(checkout, sif).details["wanted"]

    def test_another_architecture(self, checkout, tmp_path):
        sif = self.sif(tmp_path)
        sif.write_bytes(sif.read_bytes().replace(b"\x0002\0", b"\x0004\0").replace(b"02\0", b"04\0"))
        refused = refusal(checkout, sif)
        assert (refused.problem, refused.details["found"]) == ("the image is for another architecture", "arm64")

    def test_a_failure_at_the_end_leaves_the_one_of_before(self, checkout, tmp_path, monkeypatch):
        sif = self.adoptable(tmp_path, monkeypatch)
        adopt.adopt(checkout, sif, name="mine", say=lambda _: None)
        folder = checkout / "build" / "dray-mine"
        before = {path.name: path.lstat().st_mtime_ns for path in folder.iterdir()}
        monkeypatch.setattr(adopt, "inside", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            adopt.adopt(checkout, sif, name="mine", force=True, say=lambda _: None)
        assert {path.name: path.lstat().st_mtime_ns for path in folder.iterdir()} == before
        assert whole(checkout) == ["dray-mine"]

    def adoptable(self, tmp_path, monkeypatch) -> str:
        """A SIF that need not start."""
        monkeypatch.setattr(adopt, "probe", lambda *_: FOUND)
        monkeypatch.setattr(adopt.adopted_folder, "_packages", lambda *_, **__: {})
        done = process.Done(argv=(), code=0, out="", err="")
        monkeypatch.setattr(adopt, "inside", lambda *_: done)
        return str(self.sif(tmp_path))

    @pytest.mark.parametrize(
        ("mode", "above", "copied"),
        [(0o644, 0o755, False), (0o640, 0o2770, False), (0o664, 0o755, True), (0o646, 0o755, True),
         (0o644, 0o757, True), (0o644, 0o1777, False)],
    )  # fmt: skip
    def test_a_file_is_used_where_it_is_unless_others_may_write_it(
        self, checkout, tmp_path, monkeypatch, mode, above, copied
    ):
        theirs = tmp_path / "theirs"
        theirs.mkdir()
        sif = Path(self.adoptable(theirs, monkeypatch))
        sif.chmod(mode)
        theirs.chmod(above)
        before = sif.stat()
        image = adopt.adopt(checkout, str(sif), name="mine", say=lambda _: None).file
        assert (sif.stat().st_nlink, sif.stat().st_ctime_ns) == (1, before.st_ctime_ns)
        assert image.is_symlink() != copied
        assert image.samefile(sif) != copied
        assert image.read_bytes() == sif.read_bytes()

    @pytest.mark.parametrize("mode", [0o644, 0o664])
    def test_a_file_that_was_changed_is_refused_before_it_is_queued(self, checkout, tmp_path, monkeypatch, mode):
        sif = Path(self.adoptable(tmp_path, monkeypatch))
        sif.chmod(mode)
        adopt.adopt(checkout, str(sif), name="mine", say=lambda _: None)
        before = store.stat(sif)
        assert store.required(checkout, "mine") == store.required(checkout, str(sif))
        sif.write_bytes(sif.read_bytes())
        with pytest.raises(ConfigError) as refused:
            store.required(checkout, "mine")
        assert refused.value.problem == "the image was changed since it was adopted"
        assert refused.value.details == {
            "where": str(sif), "wanted": before, "found": store.stat(sif),
            "fix": f"dray image adopt {sif} --name mine --force",
        }  # fmt: skip
        sif.unlink()
        with pytest.raises(ConfigError, match="the image was changed"):
            store.required(checkout, "mine")

    @pytest.mark.parametrize(
        ("name", "problem", "fix"),
        [
            ("mnie", "there is no adopted image mnie", "adopted=mine"),
            ("other", "there is no adopted image other", "dray image adopt SOURCE --name other"),
            ("/x y.sif", "the image is not adopted yet", "dray image adopt '/x y.sif'"),
        ],
    )
    def test_a_name_that_nothing_has(self, checkout, tmp_path, monkeypatch, name, problem, fix):
        adopt.adopt(checkout, self.adoptable(tmp_path, monkeypatch), name="mine", say=lambda _: None)
        with pytest.raises(ConfigError) as refused:
            store.required(checkout, name)
        assert (refused.value.problem, refused.value.details["fix"]) == (problem, fix)
        assert refused.value.details["wanted"] == "one of mine"

    def test_an_oci_sif_of_singularity(self, checkout, tmp_path):
        """Its table has blobs and an index in the place of a root file system."""
        sif = self.sif(tmp_path)
        row = 4096 + 585
        whole = bytearray(sif.read_bytes())
        whole[row : row + 4] = struct.pack("<i", 0x4009)
        sif.write_bytes(whole)
        refused = refusal(checkout, sif)
        assert refused.details["found"] == "an OCI-SIF of SingularityCE 4, which Apptainer does not start"
        assert "singularity pull --no-oci" in refused.details["wanted"]


@pytest.fixture(scope="module")
def root(tmp_path_factory) -> Path:
    """A file system with dash and env, of the builder's own files."""
    folder = tmp_path_factory.mktemp("foreign")
    with closing(docker.client()) as client:
        builder.image(client, ROOT, on_line=lambda _: None)
    copies = "for f in dash env; do cp -L --parents $(ldd /usr/bin/$f | grep -o '/[^ ]*') /usr/bin/$f .; done"
    script = f"mkdir {folder}/root && cd {folder}/root && {copies} && ln -s dash usr/bin/sh && ln -s usr/bin bin"
    done = builder.tool(["sh", "-c", f"{script} && mkdir -p proc sys dev tmp etc root"], binds={folder: True})
    assert done.code == 0, done.err
    return folder / "root"


@pytest.mark.docker
class TestStarted:
    """A real Apptainer starts them. In the place of Python, a script says what an image of others would."""

    @pytest.fixture
    def image(self, root, tmp_path):
        """With this as its python3."""

        def make(script: str | None, **told: object) -> Path:
            (root / "told").write_text(json.dumps({**FOUND, **told}) + "\n")
            python = root / "usr" / "bin" / "python3"
            python.unlink(missing_ok=True)
            if script is not None:
                python.write_text(f"#!/bin/sh\n{script}\n")
                python.chmod(0o755)
            argv = ["mksquashfs", str(root), str(tmp_path / "fs"), "-noappend", "-quiet", "-no-progress", "-all-root"]
            done = builder.tool(argv, binds={root: False, tmp_path: True})
            assert done.code == 0, done.err
            sif_format.write(tmp_path / "fs", tmp_path / "x.sif", epoch=1, definition=b"theirs\n")
            return tmp_path / "x.sif"

        return make

    @pytest.mark.seconds
    def test_no_python(self, checkout, image):
        refused = refusal(checkout, image(None))
        assert (refused.problem, refused.details["wanted"]) == (
            "the image has no Python", "python3 on the image's PATH"
        )  # fmt: skip

    @pytest.mark.seconds
    @pytest.mark.parametrize(
        "script",
        [
            "exit 1",
            "echo text",
            pytest.param("echo 5", marks=pytest.mark.slow),
            pytest.param("echo '{}'", marks=pytest.mark.slow),
            pytest.param("kill -9 $$", marks=pytest.mark.slow),
            pytest.param("echo ImportError >&2; exit 2", marks=pytest.mark.slow),
        ],
    )
    def test_a_python_that_says_nothing(self, checkout, image, script):
        assert refusal(checkout, image(script)).problem == "the image does not start"

    @pytest.mark.seconds
    @pytest.mark.parametrize(("change", "problem", "found"), REFUSED.values(), ids=REFUSED)
    def test_what_dray_cannot_run_on(self, checkout, image, change, problem, found):
        refused = refusal(checkout, image(SAYS, **change))
        assert (refused.problem, refused.details["found"]) == (problem, found)

    @pytest.mark.seconds
    def test_a_damaged_file_system(self, checkout, image):
        sif = image(SAYS)
        part = sif_format.read(sif).system
        with sif.open("r+b") as file:
            file.seek(part.offset + 96)
            file.write(b"\xff" * (part.size - 200))
        assert refusal(checkout, sif).problem in ("the image does not start", "the image has no Python")

    def test_what_dray_does_not_start_in_leaves_nothing(self, checkout, image):
        """It says that it has all that dray needs, and then fails."""
        packages = {"pydantic": "9", "pyyaml": "9", "rich": "99", "typer": "9"}
        fails = '[ "$1" != -B ] || { echo "no module" >&2; exit 1; }\n'
        refused = refusal(checkout, image(fails + SAYS, packages=packages))
        assert (refused.problem, refused.details["found"]) == ("dray does not start in the image", "no module")

    @pytest.mark.seconds
    def test_a_python_without_wheels(self, checkout, image):
        refused = refusal(checkout, image(SAYS, python="3.99.1"))
        assert refused.problem == "the image lacks packages that dray needs, and pip cannot fetch them"
        assert refused.details["wanted"].startswith("wheels for Python 3.99: jinja2 3.")

    @pytest.mark.seconds
    @pytest.mark.parametrize(
        ("torch", "variant"),
        [
            ({"cuda": "13.0", "nccl": "2.29.7"}, "cuda"),
            pytest.param({"cuda": "12.8"}, "cuda12", marks=pytest.mark.slow),
            ({"hip": "6.4.2", "nccl": "2.22.3"}, "rocm6"),
            pytest.param({"hip": "7.0.51831-a3e329ad8", "nccl": "2.26.6"}, "rocm", marks=pytest.mark.slow),
            pytest.param({"hip": "7.1.25424"}, "rocm", marks=pytest.mark.slow),
            ({}, "cpu"),
        ],
    )
    def test_an_image_becomes_usable(self, checkout, image, torch, variant):
        """With what it has, and with dray and what it lacks beside it."""
        has = {"rich": "15.0.0", "transformers": "4.57.1"}
        sif = image(SAYS, packages=has, pythonpath="/theirs", torch={**FOUND["torch"], **torch})
        made = adopt.adopt(checkout, str(sif), name="mine", say=lambda _: None)
        assert whole(checkout) == ["dray-mine"]
        assert made.variant == variant
        assert {name.split()[0] for name in made.brought} >= {"pydantic", "pydantic-core", "typer", "pyyaml"}
        assert "rich" not in {name.split()[0] for name in made.brought}
        assert "transformers 5 or newer: the image has 4.57.1" in made.lacks
        folder = made.file.parent
        assert not (folder / "rich").exists()
        path = f"{folder}:{checkout}/src:/theirs"
        assert store.described(made.file) == {
            "adopted": str(folder), "adopted_from": str(sif), "adopted_source": f"{checkout}/src",
            "adopted_path": path, "adopted_lacks": "accelerate deepspeed ray", "image_variant": variant,
        }  # fmt: skip
        known = record.read(made.file)
        assert known is not None
        assert (known.variant, f"sha256:{known.sif.sha256}") == (variant, made.digest)
        assert known.tools.get("RCCL" if "hip" in torch else "NCCL") == torch.get("nccl")
        with pytest.raises(DrayError, match="there is an image of this name"):
            adopt.adopt(checkout, str(sif), name="mine", say=lambda _: None)


class TestPlans:
    @pytest.fixture
    def seen(self) -> Facts:
        return Facts(
            scheduler="slurm", nodelist="n[1-2]", nodes=2, engine="apptainer", image="/c/build/dray-mine/image.sif",
            image_variant="cpu", adopted="/c/build/dray-mine", adopted_path="/c/build/dray-mine:/c/src:/theirs",
            adopted_from="/i/x.sif", adopted_source="/c/src", image_file="owner 1, inode 2, 3 bytes, changed 4.5",
        )  # fmt: skip

    def made(self, seen: Facts, *settings: str):
        recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", settings)
        site = Site(name="s", about="")
        return plan(recipe, site, seen, run_folder=PurePosixPath("/r"), scratch="/tmp/dray-7-r", dray="0")

    def test_ranks_find_dray_beside_the_image(self, seen):
        planned = self.made(seen, "adopted=mine")
        assert [one for one in planned.findings if one.code] == []
        binds = [one for one in planned.binds if one.source == "dray image adopt"]
        assert [(one.path, one.write) for one in binds] == [("/c/build/dray-mine", False), ("/c/src", False)]
        same = "node::same /c/build/dray-mine/image.sif 'owner 1, inode 2, 3 bytes, changed 4.5' "
        assert same in render.node_script(planned)
        env = {one.name: (one.value, one.source) for one in planned.env}
        assert env["PYTHONPATH"] == ("/c/build/dray-mine:/c/src:/theirs", "dray")

    def test_a_recipe_s_own_path_comes_first(self, seen):
        env = {one.name: one.value for one in self.made(seen, "adopted=mine", "env.PYTHONPATH=/mine").env}
        assert env["PYTHONPATH"] == "/mine:/c/build/dray-mine:/c/src:/theirs"

    @pytest.mark.parametrize(
        ("settings", "facts", "problem"),
        [
            (("adopted=other",), {}, "the image is not the adopted one that the recipe names"),
            (
                ("adopted=mine",),
                {"adopted": "", "adopted_path": ""},
                "the image is not the adopted one that the recipe names",
            ),
            (
                ("adopted=mine", "image=cpu"),
                {"image_variant": "cuda"},
                "the image has another variant than the recipe",
            ),
            (
                ("adopted=mine", "launcher=accelerate"),
                {"adopted_lacks": "accelerate ray"},
                "the adopted image lacks the launcher accelerate",
            ),
            (("adopted=mine",), {"engine": "pyxis"}, "pyxis cannot start an adopted image, which is a SIF"),
            (("adopted=mine",), {"engine": "docker"}, "docker cannot start an adopted image, which is a SIF"),
        ],
    )
    def test_another_image_is_refused(self, seen, settings, facts, problem):
        planned = self.made(seen.model_copy(update=facts), *settings)
        assert [one.problem for one in planned.findings if one.code] == [problem]

    @pytest.mark.parametrize(
        ("settings", "facts", "answer"),
        [
            (("adopted=mine",), {}, []),
            (("adopted=/i/x.sif",), {}, []),
            (("adopted=/i/y.sif",), {}, ["image=/i/y.sif"]),
            (("adopted=mine",), {"adopted": "", "adopted_path": ""}, ["image=mine"]),
            (("adopted=other",), {}, ["image=other"]),
            ((), {}, ["image=cpu"]),
            ((), {"image_given": True}, []),
            (("adopted=mine",), {"engine": "pyxis", "adopted": ""}, []),
            (("adopted=mine",), {"engine": "podman-hpc", "adopted": ""}, []),
        ],
    )
    def test_the_batch_script_is_told_which_image(self, seen, settings, facts, answer):
        recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", settings)
        assert missing_facts.ask(recipe, Site(name="s", about=""), seen.model_copy(update=facts)) == answer

    @pytest.mark.parametrize("name", ["a b", "../x", "", "A"])
    def test_a_name_that_none_can_have(self, name):
        with pytest.raises(DrayError, match="1 error"):
            read_recipe(ROOT / "recipes" / "smoke-cpu.toml", [f'adopted="{name}"'])


def test_probe_runs_in_any_python_of_this_machine():
    """As an image's own: the text alone, by -c."""
    for name in ("python3", "/usr/bin/python3"):
        if shutil.which(name):
            code = (ROOT / "src" / "dray" / "checks" / "list_packages.py").read_text()
            done = subprocess.run([name, "-c", code], capture_output=True, text=True, check=True)
            found = json.loads(done.stdout)
            assert found["libc"].startswith("glibc 2.")
            assert found["torch"].keys() & {"version", "error"}


@pytest.mark.seconds
@pytest.mark.parametrize("verb", ["plan", "submit"])
def test_a_name_that_is_typed_wrong_is_told_before_the_queue(checkout, tmp_path, verb):
    folder = checkout / "build" / "dray-theirs"
    folder.mkdir()
    (folder / "image.json").write_text("{}")
    done = dray(verb, "adopted=thers", "--", "python3", "-c", "1", cwd=tmp_path, DRAY_HOME=str(checkout))
    assert done.returncode == 78
    assert done.stderr == (
        f"dray: there is no adopted image thers\n  where:  {checkout}/build\n  wanted: one of theirs\n"
        "  fix:    adopted=theirs\n"
    )


@pytest.mark.seconds
def test_an_adopted_image_is_not_signed_here(checkout, tmp_path):
    """The signature would go into the file of another, which dray then takes for changed."""
    theirs, folder = tmp_path / "theirs.sif", checkout / "build" / "dray-theirs"
    theirs.write_bytes(b"an image")
    folder.mkdir()
    (folder / "image.json").write_text("{}")
    (folder / "image.sif").symlink_to(theirs)
    done = dray("image", "sign", "theirs", cwd=tmp_path, DRAY_HOME=str(checkout))
    assert (done.returncode, theirs.read_bytes()) == (78, b"an image")
    assert done.stderr == (
        f"dray: an adopted image cannot be signed here: it stays as its owner made it\n  where:  {theirs}\n"
        "  fix:    ask its owner to sign it (apptainer sign); then dray image adopt FILE --force\n"
    )
