"""What a newcomer types first: help, misspelt options, `dray recipe new` and `keys`, and `make image-` of none."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from dray import cli
from dray.cli.model import _step as step_of
from dray.config.load_toml import load
from dray.config.recipe import Recipe
from dray.contract.findings import ConfigError, counted
from dray.facts import Facts
from dray.planning.world import divide
from dray.runs.prepare import read_recipe, write
from helpers import PYTHON, ROOT

pytestmark = pytest.mark.hostile("command line")

ENV = {**PYTHON, "DRAY_HOME": str(ROOT), "HOME": "/nonexistent"}
Dray = Callable[..., tuple[int, str, str]]


@pytest.fixture
def dray(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Dray:
    """The verb in this process: its exit code, its output and its errors."""
    monkeypatch.setenv("DRAY_HOME", str(ROOT))

    def run(folder: Path, *words: str | Path) -> tuple[int, str, str]:
        monkeypatch.chdir(folder)
        code = cli._code(list(map(str, words)))
        return code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "plan x --nodes two",
            "invalid value for '--nodes' / '-N': Input should be a valid integer, "
            "unable to parse string as an integer\n  found:  two\n  fix:    P plan -h\n",
        ),
        (
            "plan x -N0",
            "invalid value for '--nodes' / '-N': Input should be greater than or equal to 1\n"
            "  found:  0\n  fix:    P plan -h\n",
        ),
        (
            "run x --engine foo",
            "invalid value for '--engine': 'foo' is not one of 'bare', 'docker', 'podman', 'apptainer', "
            "'singularity'\n  found:  foo\n  fix:    P run -h\n",
        ),
        (
            "model generate x --temperature nan",
            "invalid value for '--temperature': Input should be greater than or equal to 0\n"
            "  found:  nan\n  fix:    P model generate -h\n",
        ),
        (
            "model generate",
            "missing argument 'RUN'\n  wanted: The run: its folder, its name or the beginning of it, or a job number.\n"
            "  fix:    P model generate -h\n",
        ),
        ("plan --nodes", "option '--nodes' requires an argument\n  fix:    dray -h\n"),
        ("run --nope", "no such option: --nope (Possible options: --node, --nodes)\n  fix:    P run -h\n"),
        ("pln", "dray has no verb 'pln'\n  fix:    dray plan\n"),
        ("doctor a", "got unexpected extra argument(s) (a)\n  fix:    P doctor -h\n"),
    ],
)  # fmt: skip
def test_what_no_verb_takes(dray: Dray, tmp_path: Path, words: str, message: str) -> None:
    assert dray(tmp_path, *words.split()) == (78, "", f"dray: {message.replace('P ', 'dray ')}")


def test_help_has_a_short_form(dray: Dray) -> None:
    code, out, err = dray(ROOT, "recipe", "new", "-h")
    assert (code, err, "--text" in out) == (0, "", True)
    code, out, err = dray(ROOT, "recipe")
    assert (code, err, "Usage:" in out) == (78, "", True)


def test_a_new_recipe_trains_on_the_users_own_text(dray: Dray, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / 'a "b.txt').write_text("one\n")
    code, out, err = dray(tmp_path, "recipe", "new", "My Model.toml", "--text", 'texts/a "b.txt')
    assert (code, err) == (0, "")
    written = (tmp_path / "My Model.toml").read_text()
    assert out == f"{written}\nMy Model.toml is written. Next: dray run 'My Model.toml'\n"
    made = load(Recipe, tmp_path / "My Model.toml")
    own = str(tmp_path / 'texts/a "b.txt')
    assert (made.name, made.data.train, "image" in made.model_fields_set) == ("my-model", own, False)
    assert made.batch
    assert divide(made.batch, world_size=2).per_device == 8
    assert dray(tmp_path, "recipe", "check", "My Model.toml")[0] == 0
    (tmp_path / "below").mkdir()
    assert dray(tmp_path, "recipe", "new", "below/x.toml", "--text", "texts")[0] == 0
    assert load(Recipe, tmp_path / "below" / "x.toml").data.train == str(tmp_path / "texts")
    assert dray(tmp_path, "recipe", "new", "plain")[0] == 0
    assert load(Recipe, tmp_path / "plain.toml").data.train == "builtin"


FIX = "name a new file, in a folder to which you may write"
UNWRITTEN = f"cannot write the recipe\n  where:  {{}}\n  found:  {{}}\n  fix:    {FIX}\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("x.toml", "--text", "gone.txt"),
            "--text names nothing\n  where:  HERE/gone.txt\n  fix:    leave out --text\n",
        ),
        (("there",), UNWRITTEN.format("there.toml", "File exists")),
        (("no/x.toml",), UNWRITTEN.format("no/x.toml", "No such file or directory")),
        ((f"{'x' * 300}.toml",), UNWRITTEN.format(f"{'x' * 300}.toml", "File name too long")),
    ],
)
def test_a_recipe_that_cannot_be_written(dray: Dray, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    (tmp_path / "there.toml").write_text("mine")
    assert dray(tmp_path, "recipe", "new", *words) == (78, "", f"dray: {message}".replace("HERE", str(tmp_path)))
    assert [path.name for path in tmp_path.iterdir()] == ["there.toml"]
    assert (tmp_path / "there.toml").read_text() == "mine"


@pytest.mark.parametrize("as_json", [True, False])
def test_other_toml_beside_a_user_s_recipes_is_left_out(
    dray: Dray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, as_json: bool
) -> None:
    (tmp_path / "containers" / "steps").mkdir(parents=True)
    (tmp_path / "recipes" / "tool" / "deeper").mkdir(parents=True)
    monkeypatch.setenv("DRAY_HOME", str(tmp_path))
    assert dray(tmp_path, "recipe", "new", "recipes/own")[0] == 0
    for name in ("tool/config.toml", "tool/deeper/other.toml"):
        (tmp_path / "recipes" / name).write_text("[tool]\nlevel = 3\n")
    (tmp_path / "recipes" / "half.toml").write_text("name = ")
    code, out, err = dray(tmp_path, "recipe", "list", *(["--json"] if as_json else []))
    names = [entry["name"] for entry in json.loads(out)] if as_json else [line.split()[0] for line in out.splitlines()]
    assert (code, names) == (0, ["own"])
    assert [line for line in err.splitlines() if line.startswith("dray: ")] == [
        f"dray: warning: not listed: recipe {tmp_path}/recipes/half.toml is not valid TOML",
        f"dray: warning: not listed: recipe {tmp_path}/recipes/tool/config.toml has 2 errors",
    ]


def test_without_docstrings_there_are_no_options(tmp_path: Path) -> None:
    program = [sys.executable, "-OO", "-m", "dray"]
    for words, code, line in (
        (["--version"], 0, ""),
        (["recipe", "list"], 78, "dray: python -OO drops the docstrings, in which dray has its options"),
        (["finish", "x", "--code", "0"], 78, "dray: python -OO drops the docstrings, in which dray has its options"),
    ):
        ended = subprocess.run([*program, *words], cwd=tmp_path, env=ENV, capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stderr.partition("\n")[0]) == (code, line)


def test_keys_of_one_table(dray: Dray) -> None:
    _, out, _ = dray(ROOT, "recipe", "keys", "train")
    names = [line.split()[0] for line in out.splitlines()[::2]]
    assert names[:2] == ["train.steps", "train.epochs"]
    assert all(name.startswith("train.") for name in names)
    assert dray(ROOT, "recipe", "keys", "train.lr")[1].startswith("train.lr  (a number")
    assert dray(ROOT, "site", "keys", "fabric")[1].startswith("fabric.kind  (")
    code, out, err = dray(ROOT, "recipe", "keys", "trian")
    assert (code, out) == (78, "")
    assert err.startswith("dray: there is no such key or table\n  wanted: version, name, about, ")
    more = len(Recipe.model_fields) - 5
    assert err.endswith(f" and {more} more\n  found:  trian\n  fix:    dray recipe keys train\n")


@pytest.mark.seconds
@pytest.mark.parametrize("target", ["image-foo", "image-foo-docker"])
def test_make_says_which_images_there_are(target: str) -> None:
    ended = subprocess.run(["make", target], cwd=ROOT, env=ENV, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith(
        "dray: there is no image foo\n  fix:    make image-cpu; the images are cpu, cuda, cuda12, rocm, rocm6\n"
    )


FIX_STEP = "--step N with a step of this run; checkpoint.every=N in the recipe keeps checkpoints"


class TestRunsOfCommandsAndOthers:
    def test_what_reads_a_model_says_why_a_command_has_none(self, dray: Dray, tmp_path: Path) -> None:
        recipe = read_recipe(None, (), ["python3", "--lr", "1"])
        facts = Facts(scheduler="local", nodelist="node1", nodes=1, engine="bare", image=sys.executable)
        _, paths = write(recipe, facts, runs=tmp_path, run="r1")
        for words in (("generate", "r1", "one"), ("push", "r1", "me/mine")):
            assert dray(tmp_path, "model", *words) == (
                78,
                "",
                "dray: this run started a command, and dray knows only the models of its own trainer\n"
                f"  where:  {paths.run}\n"
                "  wanted: a run of a recipe with [train]\n"
                "  found:  the command python3\n"
                "  fix:    load the model with your own program\n",
            )

    def test_a_run_exports_its_own_checkpoints_of_a_folder_that_several_keep_theirs_in(self, tmp_path: Path) -> None:
        for step, of in ((10, "mine"), (20, "mine"), (30, "other"), (100, "other")):
            (tmp_path / f"step-{step}").mkdir()
            (tmp_path / f"step-{step}" / "manifest.json").write_text(json.dumps({"run": of}))
        (tmp_path / "step-40.part-mine").mkdir()
        assert (step_of(tmp_path, "mine", None), step_of(tmp_path, "mine", 10)) == (20, 10)
        assert step_of(tmp_path, "other", 30) == 30
        with pytest.raises(ConfigError) as refused:
            step_of(tmp_path, "mine", 30)
        assert (refused.value.problem, refused.value.details) == (
            "this run has no such checkpoint",
            {"where": str(tmp_path), "found": "steps 10, 20", "fix": FIX_STEP},
        )
        with pytest.raises(ConfigError, match="this run has no such checkpoint"):
            step_of(tmp_path, "third", None)

    @pytest.mark.parametrize("manifest", [None, "", "[]", "{}", "[" * 5000, "\0"])
    def test_a_damaged_checkpoint_is_left_to_the_export_which_says_more(self, tmp_path: Path, manifest) -> None:
        (tmp_path / "step-7").mkdir()
        if manifest is not None:
            (tmp_path / "step-7" / "manifest.json").write_text(manifest)
        assert step_of(tmp_path, "mine", 7) == 7


def test_one_has_no_s() -> None:
    assert [counted(number, "node") for number in (0, 1, 2)] == ["0 nodes", "1 node", "2 nodes"]
