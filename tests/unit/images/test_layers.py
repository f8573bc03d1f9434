"""Packages of a user's own beside the image: how they are locked, when a run is refused, how they are bound."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import pytest

import wheels
from dray import render
from dray.cli import main
from dray.config.site import Site
from dray.contract.findings import ConfigError
from dray.facts import Facts, Files, Layer
from dray.images import inputs
from dray.images.layers import layer_lock
from dray.images.locks import lock as locks
from dray.images.sif import format as sif_format
from dray.images.sif import record
from dray.planning.plan import plan
from dray.planning.schema import Plan
from dray.render.node import start_argv
from dray.runs import prepare
from dray.runs.prepare import read_recipe
from helpers import ROOT

PACKAGES = [locks.Pin("transformers", "5.23.0", ("0" * 64,)), locks.Pin("torch", "2.8.0+rocm6.4", ("1" * 64,))]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UV_OFFLINE", "1")


def locked(folder: Path, *requirements: str, needs: tuple[str, ...] = (), **more: Any) -> str:
    wheels.make(folder / "wheels", "1.0", *needs)
    path = folder / "dray-cpu-mine.lock"
    layer_lock.update(path, requirements, inputs.image(ROOT, "cpu"), PACKAGES, wheels=folder / "wheels", **more)
    return path.read_text()


class TestLock:
    """The image's packages decide, and no index is asked for them."""

    def test_only_what_is_added_is_pinned(self, tmp_path: Path) -> None:
        text = locked(tmp_path, "barge", needs=("transformers>=5", "torch==2.8.0"))
        digest = hashlib.sha256((tmp_path / "wheels" / "barge-1.0-py3-none-any.whl").read_bytes()).hexdigest()
        body = (
            f"# needs torch==2.8.0+rocm6.4\n# needs transformers==5.23.0\nbarge==1.0 \\\n    --hash=sha256:{digest}\n"
        )
        assert text.split("\n", 3)[3] == body
        assert layer_lock.needs(tmp_path / "dray-cpu-mine.lock") == {"torch": "2.8.0+rocm6.4", "transformers": "5.23.0"}

    def test_it_stays_until_it_is_asked_for_something_else(self, tmp_path: Path) -> None:
        first = locked(tmp_path, "barge")
        wheels.make(tmp_path / "wheels", "2.0")
        assert locked(tmp_path, "barge") == first
        assert "barge==2.0" in locked(tmp_path, "barge", upgrade=True)
        assert "barge==1.0" in locked(tmp_path, "barge<2")

    def test_a_lock_that_was_changed_by_hand(self, tmp_path: Path) -> None:
        path = tmp_path / "dray-cpu-mine.lock"
        text = locked(tmp_path, "barge")
        path.write_text(text.replace("barge==1.0", "barge==1.1"))
        with pytest.raises(ConfigError, match="the lock was changed after `dray image lock` wrote it"):
            locked(tmp_path, "barge")

    def test_a_package_that_wants_another_image(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError) as refused:
            locked(tmp_path, "barge", needs=("transformers<5",))
        assert refused.value.problem == "these packages conflict with the image's"
        assert refused.value.details["wanted"] == "packages that work with transformers 5.23.0"
        assert "transformers<5" in str(refused.value.details["found"])
        assert not list(tmp_path.glob("*.lock"))

    def test_a_package_that_does_not_exist(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="no set of packages fits"):
            locked(tmp_path, "no-such-barge")

    @pytest.mark.parametrize(
        ("requirements", "name"), [(["Py_Spy>=0.4"], "py-spy"), (["trl[vllm]==1.0"], "trl"), (["a>1", "b"], "a-b")]
    )
    def test_a_name_from_what_is_asked_for(self, requirements: list[str], name: str) -> None:
        assert layer_lock.name_of(requirements) == name

    def test_what_is_other_in_an_image(self) -> None:
        wanted = {"torch": "2.8.0+rocm6.4", "numpy": "2.4.6", "peft": "1.0"}
        found = layer_lock.unfit(wanted, {"torch": "2.8.0", "numpy": "2.5.0"})
        assert found == ["numpy 2.5.0 instead of 2.4.6", "peft none instead of 1.0"]


@pytest.mark.seconds
@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ([], "a layer has packages or a lock"),
        (["--pip", "trl", "--lock", "x.lock"], "a layer has packages or a lock"),
        (["--pip", ""], "takes packages by name"),
        (["--pip", "--index-url=x"], "takes packages by name"),
        (["--pip", "git+https://example.org/x"], "takes packages by name"),
        (["--pip", "trl\nwandb"], "takes packages by name"),
        (["--requirements", "gone.txt"], "the requirements cannot be read"),
        (["--pip", "trl", "--wheels", "gone"], "the folder of wheels does not exist"),
        (["--pip", "trl", "--name", "My Layer"], "a layer cannot have this name"),
        (["--pip", "trl", "--name", "../x"], "a layer cannot have this name"),
    ],
)
def test_what_is_no_layer(
    words: list[str], expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("containers", "pyproject.toml", "recipes", "slurm"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "build").mkdir()
    (tmp_path / "build" / "dray-cpu.sif").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("DRAY_HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["dray", "image", "layer", "cpu", *words])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 78
    assert expected in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "build").iterdir()] == ["dray-cpu.sif"]


FOUND = Layer(file='/a "b"/dray-cpu-rl.sif', digest=f"sha256:{'a' * 64}", variant="cpu", packages={"trl": "1.16.0"})


def made(*words: str, engine: str = "apptainer", layer: Layer | None = FOUND) -> Plan:
    recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", ("layer=rl", *words))
    image = "dray:cpu" if engine == "docker" else "/i.sif"
    scheduler = "local" if engine == "docker" else "slurm"
    facts = Facts(scheduler=scheduler, nodelist="n1", nodes=1, engine=engine, image=image, uid=7, gid=7)
    where = {"run_folder": PurePosixPath("/runs/r"), "scratch": "/tmp/s"}
    return plan(recipe, Site(name="s", about=""), facts, Files(layer=layer), dray="0", **where)


def refused(decided: Plan) -> list[tuple[str, object, object]]:
    return [(found.problem, found.wanted, found.found) for found in decided.findings if found.code]


class TestPlan:
    """What is bound, what is said, and what is refused."""

    @pytest.mark.parametrize("engine", ["apptainer", "singularity"])
    def test_it_is_bound_where_the_image_looks(self, engine: str) -> None:
        decided = made(engine=engine)
        assert refused(decided) == []
        assert start_argv(decided) == [
            *(engine, "--quiet", "exec", "--cleanenv", "--no-eval", "--no-mount=home,cwd", '"${mounts[@]}"'),
            '--mount=type=bind,"src=/a ""b""/dray-cpu-rl.sif","dst=/opt/layer",image-src=/,ro',
            *("--pwd=/runs/r/attempt-1", "/i.sif", "python3", "-m", "dray.runner", "/runs/r/attempt-1/plan.json"),
        ]
        script = render.node_script(decided)
        assert "node::need '/a \"b\"/dray-cpu-rl.sif' 'the layer' " in script
        assert decided.reasons["layer"] == "1 package after the image's own (trl), sha256:aaaaaaaaaaaa"

    def test_a_signature_is_demanded_of_it_too(self) -> None:
        script = render.node_script(made(f"image_signers=['{'A' * 40}']"))
        calls = [line.split(" '\"")[0] for line in script.splitlines() if line.startswith("node::signed apptainer")]
        assert calls == [
            "node::signed apptainer image /i.sif",
            "node::signed apptainer layer '/a \"b\"/dray-cpu-rl.sif'",
        ]

    def test_an_engine_that_binds_none(self) -> None:
        wanted = "apptainer or singularity, since layer is set"
        expected = [("docker cannot bind a layer", wanted, "engine docker")]
        assert refused(made(engine="docker", layer=None)) == expected

    def test_another_image_other_packages_another_digest(self) -> None:
        other = FOUND.model_copy(update={"variant": "rocm"})
        assert refused(made(layer=other)) == [("the layer is for another image", "a layer for cpu", "a layer for rocm")]
        changed = FOUND.model_copy(update={"changed": ("numpy 2 instead of 1",)})
        (problem, _, found) = refused(made(layer=changed))[0]
        assert (problem, found) == ("the layer was made for other packages than the image has", "numpy 2 instead of 1")
        pinned = f"sha256:{'b' * 64}"
        (problem, wanted, found) = refused(made(f"layer_digest={pinned}"))[0]
        assert (problem, wanted) == ("the layer has another digest", pinned)
        assert found == FOUND.digest


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("layer=../x",), "expected a name such as rl, or a file that ends in .sif"),
        (("layer=",), "expected a name such as rl"),
        (("layer=Rl",), "expected a name such as rl"),
        (("layer=rl", "adopted=theirs"), "layer works with dray's own images"),
        ((f"layer_digest=sha256:{'a' * 64}",), "layer_digest pins a layer, but the recipe has none"),
        (("layer=rl", "layer_digest=abc"), "layer_digest"),
    ],
)
def test_what_a_recipe_cannot_say(words: tuple[str, ...], expected: str) -> None:
    with pytest.raises(ConfigError) as wrong:
        read_recipe(ROOT / "recipes" / "smoke-cpu.toml", words)
    assert expected in str(wrong.value.details["found"])


class TestLook:
    """The file and its record."""

    @pytest.fixture
    def file(self, tmp_path: Path) -> Path:
        squashfs = tmp_path / "x.squashfs"
        squashfs.write_bytes(b"hsqs" + bytes(8192))
        file = tmp_path / "my layer.sif"
        sif_format.write(squashfs, file, epoch=1, definition=b"# needs x\n", role=sif_format.DATA)
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        about = record.File(sha256=digest, size=file.stat().st_size)
        made = record.Record(variant="cpu", dray="0", base="b", inputs="0" * 64, epoch=1, tools={}, sif=about,
                             python="3.11", needs={"transformers": "5.23.0"}, packages={"trl": "1"})  # fmt: skip
        record.write(file, made)
        return file

    def look(self, file: Path, engine: str = "apptainer") -> Layer | None:
        recipe = read_recipe(ROOT / "recipes" / "smoke-cpu.toml", (f"layer={file}",))
        facts = Facts(scheduler="slurm", nodelist="n1", nodes=1, engine=engine, image="i")
        assert prepare.ask_for_layer(recipe, Site(name="s", about=""), facts) == (
            [] if engine == "edf" else [f"layer={file}"]
        )
        return prepare.find_layer(recipe, Site(name="s", about=""), facts)

    def test_a_layer(self, file: Path) -> None:
        digest = f"sha256:{hashlib.sha256(file.read_bytes()).hexdigest()}"
        assert self.look(file) == Layer(file=str(file), digest=digest, variant="cpu", packages={"trl": "1"})
        assert self.look(file, "edf") is None

    def test_the_image_has_other_packages(self, file: Path) -> None:
        known = record.read(file)
        assert known
        record.write(file, known.model_copy(update={"needs": {"transformers": "4.0", "torch": "2.13.0"}}))
        found = self.look(file)
        assert found
        assert found.changed == ("transformers 5.23.0 instead of 4.0",)

    def test_no_layer_no_record_an_image_another_file(self, file: Path) -> None:
        with pytest.raises(ConfigError, match="the layer does not exist"):
            self.look(file.with_name("gone.sif"))
        known = record.read(file)
        assert known
        record.write(file, known.model_copy(update={"python": ""}))
        with pytest.raises(ConfigError, match="the layer differs from its record"):
            self.look(file)
        record.path_for(file).unlink()
        with pytest.raises(ConfigError, match="the layer differs from its record"):
            self.look(file)
        record.write(file, known)
        with file.open("ab") as more:
            more.write(b"x")
        with pytest.raises(ConfigError, match="the layer differs from its record"):
            self.look(file)

    @pytest.mark.hostile("runs and checkouts of others")
    def test_a_layer_that_another_user_may_change(self, file: Path) -> None:
        file.chmod(0o666)
        with pytest.raises(ConfigError, match="another user may change the layer") as refused:
            self.look(file)
        assert refused.value.details == {
            "where": str(file),
            "wanted": "a file of yours or of root's, which not everybody may write",
            "found": f"a file of user {os.geteuid()}, mode 0666",
            "fix": f"cp '{file}'{{,.json}} {ROOT}/build/, and name that copy",
        }
        if os.geteuid() == 0:  # only root gives a file away
            file.chmod(0o600)
            os.chown(file, 65534, 65534)
            with pytest.raises(ConfigError, match="another user may change the layer"):
                self.look(file)


def test_a_path_starts_at_the_recipe(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('name = "x"\nlayer = "rl/own.sif"\n[command]\nargv = ["true"]\n')
    assert read_recipe(tmp_path / "mine.toml").layer == str(tmp_path / "rl" / "own.sif")
    assert read_recipe(tmp_path / "mine.toml", ("layer=rl",)).layer == "rl"
