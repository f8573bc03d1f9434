"""Trainings that read by URL and by a builder: the same on any number of ranks, and resumed to the last bit."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")
pytest.importorskip("datasets", reason="datasets: the training stack is not installed (make demo installs it)")

import stores
from dray.train.data import synthetic_corpus
from helpers import PYTHON, ROOT
from trainings import Forks, Run

pytestmark = pytest.mark.torch
BEGUN = Callable[..., Run]


def tar(texts: list[str]) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for number, text in enumerate(texts):
            about = tarfile.TarInfo(f"{number:05}.txt")
            about.size = len(text.encode())
            archive.addfile(about, io.BytesIO(text.encode()))
    return file.getvalue()


@pytest.fixture(scope="module")
def store() -> Iterator[stores.Store]:
    texts = list(synthetic_corpus.documents())[:60]
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
    objects = {"b/1.jsonl": lines[: len(lines) // 2], "b/x.txt": "\n".join(texts).encode(), "b/all.jsonl": lines}
    objects |= {f"b/{number}.tar": tar(texts[number * 20 : number * 20 + 20]) for number in range(3)}
    with stores.serving(objects) as served:
        yield served


@pytest.fixture(scope="module")
def run(forks: Forks, tmp_path_factory) -> BEGUN:
    folder, count = tmp_path_factory.mktemp("my runs"), iter(range(1000))
    return lambda ranks, *words: Run(forks, folder / f"run-{next(count)}", ranks, *words)


@pytest.mark.slow
def test_losses_are_those_of_files_on_a_disk_on_any_ranks(run: BEGUN, store: stores.Store, tmp_path: Path) -> None:
    """By URL, by a builder of datasets, by a slice of all: the same tokens, on 1, 2 and 4 ranks."""
    texts = list(synthetic_corpus.documents())[:60]
    (tmp_path / "texts.txt").write_text("\n".join(texts))
    wanted = run(1, f"data.train={tmp_path}/texts.txt").end()
    ways = {
        1: ("data.train=s3://b/*.tar", "data.column=txt"),
        2: ("data.train=s3://b/all.jsonl:train[:100%]",),
        4: (f"data.train=json:{store.address}/b/all.jsonl",),
    }
    for ranks, words in ways.items():
        found = run(ranks, *words).end(AWS_ENDPOINT_URL=store.address)
        assert found.losses() == (wanted.losses() if ranks == 1 else pytest.approx(wanted.losses(), rel=2e-5))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["webdataset", pytest.param("jsonl", marks=pytest.mark.slow)])
def test_a_stream_resumes_to_the_last_bit_and_is_the_same_on_other_ranks(
    run: BEGUN, store: stores.Store, name: str
) -> None:
    source = {"webdataset": ("s3://b/*.tar", "txt"), "jsonl": ("s3://b/all.jsonl", "text")}[name]
    words = ("data.streaming=true", f"data.train={source[0]}", f"data.validation={source[0]}:train[:5]",
             f"data.column={source[1]}", "checkpoint.every=[[0, 9]]", "checkpoint.keep=9")  # fmt: skip
    whole = run(1, *words).end(AWS_ENDPOINT_URL=store.address)
    for ranks in (1, 4):
        again = run(ranks, *words)
        shutil.copytree(whole.folder / "checkpoints/step-9", again.folder / "checkpoints/step-9")
        again.end(AWS_ENDPOINT_URL=store.address)
        tail = whole.losses()[9:]
        assert again.losses() == (tail if ranks == 1 else pytest.approx(tail, rel=5e-5))


@pytest.mark.slow
def test_an_object_that_was_replaced_is_not_resumed_and_makes_new_tokens(run: BEGUN, store: stores.Store) -> None:
    store.objects["b/own.txt"] = store.objects["b/x.txt"]
    words = ("data.streaming=true", "data.train=s3://b/own.txt", "data.validation=s3://b/x.txt", "train.steps=6",
             "checkpoint.every=[[0, 3]]", "checkpoint.keep=9")  # fmt: skip
    whole = run(1, *words).end(AWS_ENDPOINT_URL=store.address)
    kept = run(1, "data.train=s3://b/own.txt", "train.steps=6").end(AWS_ENDPOINT_URL=store.address)
    store.objects["b/own.txt"] = store.objects["b/x.txt"].upper()
    again = run(1, *words)
    shutil.copytree(whole.folder / "checkpoints/step-3", again.folder / "checkpoints/step-3")
    again.end(78, AWS_ENDPOINT_URL=store.address)
    other = run(1, "data.train=s3://b/own.txt", "train.steps=6").end(AWS_ENDPOINT_URL=store.address)
    assert other.losses() != kept.losses()


@pytest.mark.slow
def test_data_inspect_shows_what_is_elsewhere(store: stores.Store, tmp_path: Path) -> None:
    """The whole command; a key goes by its name alone, and is in nothing that is written."""
    words = ["data.train=s3://b/*.tar", "data.column=txt", f"data.cache_dir={tmp_path}/tokens", "train.steps=5"]
    words += ['pass_env=["AWS_ENDPOINT_URL","AWS_ACCESS_KEY_ID","AWS_SECRET_ACCESS_KEY"]']
    words += ["data.test=s3://b/x.txt:train[:50%]"]
    env = {**PYTHON, "DRAY_HOME": str(ROOT), "HOME": str(tmp_path), "AWS_ENDPOINT_URL": store.address}
    env |= {"AWS_ACCESS_KEY_ID": "AKIAMAYREAD", "AWS_SECRET_ACCESS_KEY": "hunter2hunter2"}
    argv = [sys.executable, "-m", "dray", "data", "inspect", str(ROOT / "tests/tiny.toml"), "--json", *words]
    ended = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    training, test = found["training"][0], found["evaluation"][1]
    assert (training["dataset"], training["files"], test["documents"]) == ("s3://b/*.tar", 3, 30)
    assert training["bytes"] == sum(len(said) for name, said in store.objects.items() if name.endswith(".tar"))
    assert training["documents"] + found["evaluation"][0]["documents"] == 60
    kept = ended.stdout + ended.stderr + "".join(one.read_text() for one in tmp_path.rglob("*.json"))
    assert "hunter2" not in kept


def test_what_is_missing_fails_on_all_ranks_alike(run: BEGUN, store: stores.Store) -> None:
    failed = run(2, "data.train=s3://b/none.jsonl").end(78, AWS_ENDPOINT_URL=store.address)
    assert set(failed.codes) - {-9} == {78}  # the first that ends ends the others, as a launcher
    assert "the dataset does not exist" in failed.said()
    assert "where:  s3://b/none.jsonl" in failed.said()
