"""`dray data prefetch`: after it, a run finds all of its recipe without a network."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from command import dray

pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

import pyarrow as pa
import pyarrow.parquet as pq

import hubs
from dray.train.data import synthetic_corpus, tokenizer
from dray.train.model import build
from trainings import config

pytestmark = pytest.mark.torch

RECIPE = """
name = "named"
[batch]
global_size = 2
[data]
train = "hub:me/texts"
sequence_length = 32
max_eval_samples = 4
[model]
name = "me/small"
[train]
steps = 2
lr = 1e-3
precision = "fp32"
"""


def fetch(*said: str | Path, **env: str) -> subprocess.CompletedProcess[str]:
    return dray("data", "prefetch", *said, **env)


@pytest.fixture(scope="module")
def hub(tmp_path_factory):
    folder = tmp_path_factory.mktemp("hub")
    chosen = config(folder)
    tokens = tokenizer.load(chosen)
    build.build(chosen, tokens, with_weights=True).save_pretrained(folder / "model")
    tokens.save_pretrained(folder / "model")
    pq.write_table(pa.table({"text": [*synthetic_corpus.documents()]}), folder / "texts.parquet")
    files = {path.name: path.read_bytes() for path in (folder / "model").iterdir()}
    repositories = {
        "models/me/small": files,
        "models/me/secret": files,
        "datasets/me/texts": {
            "default/train/0000.parquet": (folder / "texts.parquet").read_bytes(),
            "default/more/0000.parquet": (folder / "texts.parquet").read_bytes(),
        },
    }
    with hubs.serving(repositories) as address:
        yield address


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "my recipe.toml"
    path.write_text(RECIPE)
    return path


def test_splits_may_be_one_text(hub: str, recipe: Path, tmp_path: Path) -> None:
    fetched = fetch(recipe, "data.train=hub:me/texts:train+more", HF_HOME=str(tmp_path), HF_ENDPOINT=hub)
    assert "data.train = hub:me/texts:train+more\n  2 files" in fetched.stdout
    wrong = fetch(recipe, "data.train=hub:me/texts:train+none", HF_HOME=str(tmp_path), HF_ENDPOINT=hub)
    assert (wrong.returncode, "wanted: default/none/*.parquet" in wrong.stdout) == (78, True)


def test_a_mix_s_sources_are_fetched(hub: str, recipe: Path, tmp_path: Path) -> None:
    sources = ["data.train=builtin", "data.mix.web.dataset=hub:me/texts", "model.name="]
    fetched = fetch(recipe, *sources, HF_HOME=str(tmp_path), HF_ENDPOINT=hub)
    assert fetched.stdout.startswith("data.mix.web.dataset = hub:me/texts\n  1 file, 0."), fetched.stderr


def test_what_is_pinned_is_fetched_by_its_revision(hub: str, recipe: Path, tmp_path: Path) -> None:
    pins = ["data.train=hub:me/texts@v1/default:train", "model.name=", "model.tokenizer=me/small"]
    fetched = fetch(recipe, *pins, "model.tokenizer_revision=v2", HF_HOME=str(tmp_path), HF_ENDPOINT=hub)
    assert fetched.returncode == 0, fetched.stdout + fetched.stderr
    assert f", commit {'a' * 40}\n" in fetched.stdout
    cached = tmp_path / "hub"
    refs = {str(path.relative_to(cached)) for path in cached.glob("*/refs/**/*") if path.is_file()}
    assert refs == {"datasets--me--texts/refs/v1", "models--me--small/refs/v2"}


@pytest.mark.slow
def test_a_run_is_offline_after_it(hub: str, recipe: Path, tmp_path: Path) -> None:
    home, runs = f"{tmp_path}/hf home", tmp_path / "runs"
    fetched = fetch(recipe, HF_HOME=home, HF_ENDPOINT=hub)
    assert (fetched.returncode, fetched.stderr) == (0, "")
    assert re.fullmatch(
        r"data\.train = hub:me/texts\n  1 files?, 0\.\d MB, commit a{40}\n"
        r"model\.name = me/small\n  5 files, 0\.\d MB, commit a{40}\n",
        fetched.stdout,
    )
    nowhere = {"HF_HOME": home, "HF_ENDPOINT": "http://127.0.0.1:9"}
    ended = dray("run", recipe, "ranks_per_node=1", "--runs", runs, **nowhere)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "done: 2 steps" in ended.stdout
    empty = dray("run", recipe, "ranks_per_node=1", "--runs", runs, HF_HOME=f"{tmp_path}/other", HF_ENDPOINT=hub)
    assert empty.returncode == 78
    assert "dray data prefetch RECIPE, on a machine that reaches the hub" in empty.stdout + empty.stderr


@pytest.mark.parametrize(
    ("words", "env", "code", "said"),
    [
        (
            (),
            {"XDG_CACHE_HOME": "{tmp}/cache"},
            0,
            "HF_HOME is not set: fetching into {tmp}/cache/huggingface, which all nodes",
        ),
        ((), {"HF_HOME": "here"}, 78, "found:  HF_HOME = 'here'"),
        (("data.train=builtin", "model.name="), {}, 0, "names nothing of the hub; there is nothing to fetch"),
        (("model.name=me/gated",), {"HF_HOME": "{tmp}"}, 78, "accept the terms on its page"),
        pytest.param(
            ("model.name=me/none",), {"HF_HOME": "{tmp}"}, 78, "check its name and revision", marks=pytest.mark.slow
        ),
        pytest.param(
            ("data.train=hub:me/texts:none",), {"HF_HOME": "{tmp}"}, 78, "has no such split", marks=pytest.mark.slow
        ),
        (("data.texts=x",), {"HF_HOME": "{tmp}"}, 78, "unknown key"),
    ],
)
def test_what_cannot_be_fetched(hub, recipe, tmp_path, words, env, code: int, said: str) -> None:
    env = {name: value.format(tmp=tmp_path) for name, value in env.items()}
    ended = fetch(recipe, *words, HF_ENDPOINT=hub, **env)
    assert ended.returncode == code
    assert said.format(tmp=tmp_path) in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stdout + ended.stderr


def test_a_hub_that_is_not_reached_is_said(recipe: Path, tmp_path: Path) -> None:
    ended = fetch(recipe, HF_HOME=str(tmp_path / "hf"), HF_ENDPOINT="http://127.0.0.1:9")
    assert ended.returncode != 0
    assert "dataset me/texts is missing" in ended.stdout + ended.stderr
