"""The hub's files, streamed: nothing is fetched first, and what is read stays at one commit."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

import pyarrow as pa
import pyarrow.parquet as pq

import hubs

pytestmark = pytest.mark.torch

TEXTS = [f"document {number} é" for number in range(300)]
COMMIT = "a" * 40
PROGRAM = """
import json, sys
from dray.contract.findings import DrayError
from dray.train.data import formats, resolve
reading = formats.Reading("text")
for word in sys.argv[1:]:
    name, streamed = word.removeprefix("streamed "), word.startswith("streamed ")
    try:
        pieces = resolve.pieces(resolve.dataset(name, "train", streamed=streamed), reading)
        print(json.dumps([pieces[0].path, [text for piece in pieces for text in formats.documents(piece, reading)]]))
    except DrayError as error:
        print(json.dumps([str(error), None]))
"""


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    parquet = io.BytesIO()
    pq.write_table(pa.table({"text": TEXTS}), parquet, row_group_size=70)
    repositories = {
        "datasets/me/texts": {
            "default/train/0000.parquet": parquet.getvalue(),
            "default/test/0000.parquet": parquet.getvalue(),
            "data/1.jsonl": jsonl(TEXTS[:100]),
            "data/2.jsonl": jsonl(TEXTS[100:]),
        },
        "datasets/me/gated": {"a.jsonl": jsonl(TEXTS)},
        "datasets/me/secret": {"a.jsonl": jsonl(TEXTS)},
        "datasets/me/script": {"script.py": b"raise SystemExit('ran')"},
    }
    with hubs.serving(repositories) as address:
        yield address


def read(hub: str, home: Path, *names: str, **env: str) -> list[tuple[str, Any]]:
    """Of each name the first file's place and the documents; or what was said. The library reads its variables once."""
    mine = {**os.environ, "HF_ENDPOINT": hub, "HF_HOME": str(home), "HF_HUB_OFFLINE": "0", **env}
    argv = [sys.executable, "-c", PROGRAM, *names]
    ended = subprocess.run(argv, env=mine, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    return [tuple(json.loads(line)) for line in ended.stdout.splitlines()]


@pytest.mark.slow
def test_names_and_files_are_streamed(hub: str, tmp_path: Path) -> None:
    names = ["hub:me/texts", "hf://datasets/me/texts/data/*.jsonl", "hf://datasets/me/texts@v1/data"]
    names += ["json:hf://datasets/me/texts/data/*.jsonl"]
    found = read(hub, tmp_path, *(f"streamed {name}" for name in names))
    assert [texts for _, texts in found] == [TEXTS] * 4
    assert found[0][0] == f"hf://datasets/me/texts@{COMMIT}/default/train/0000.parquet"
    assert all(f"hf://datasets/me/texts@{COMMIT}/data/1.jsonl" in place for place, _ in found[1:])
    assert not [*tmp_path.rglob("*.parquet")]


@pytest.mark.slow
def test_a_slice_of_a_name_fetches_no_whole_file(hub: str, tmp_path: Path) -> None:
    ((_, texts),) = read(hub, tmp_path, "hub:me/texts:train[:10%]+test[-5:]")
    assert texts == TEXTS[:30] + TEXTS[-5:]
    assert not [*tmp_path.rglob("*.parquet")]


@pytest.mark.slow
def test_what_was_fetched_before_is_read_offline(hub: str, tmp_path: Path) -> None:
    assert read(hub, tmp_path, "hub:me/texts")[0][1] == TEXTS
    nowhere = {"HF_HUB_OFFLINE": "1", "HF_ENDPOINT": "http://127.0.0.1:9"}
    names = ("hub:me/texts", "streamed hub:me/texts", "hub:me/texts:train[5:9]")
    assert [texts for _, texts in read(hub, tmp_path, *names, **nowhere)] == [TEXTS, TEXTS, TEXTS[5:9]]


REFUSED = {
    "hf://datasets/me/gated/a.jsonl": "accept the terms on its page, and export HF_TOKEN",
    "streamed hub:me/gated": "accept the terms on its page, and export HF_TOKEN",
    "hf://datasets/me/none/a.jsonl": "check its name and revision",
    "hf://datasets/me/secret/a.jsonl": "a private one needs HF_TOKEN exported",
    "hf://datasets/me/texts/none.jsonl": "the dataset does not exist",
    "hub:me/texts:none[:1%]": "found:  default/test, default/train",
    "hub:me/script": "name its original files: hf://datasets/me/script/FOLDER/*.jsonl (dray",
}


def test_what_cannot_be_read_is_said(hub: str, tmp_path: Path) -> None:
    for (said, texts), wanted in zip(read(hub, tmp_path, *REFUSED), REFUSED.values(), strict=True):
        assert texts is None
        assert wanted in said


@pytest.mark.slow
def test_a_token_opens_a_private_one_and_an_offline_job_is_told(hub: str, tmp_path: Path) -> None:
    name = "hf://datasets/me/secret/a.jsonl"
    assert read(hub, tmp_path, name, HF_TOKEN="hf_secret")[0][1] == TEXTS
    ((said, _),) = read(hub, tmp_path, name, HF_HUB_OFFLINE="1")
    assert 'if the nodes reach the hub: env.HF_HUB_OFFLINE = "0"' in said


@pytest.mark.slow
def test_a_hub_that_is_not_reached_is_said(tmp_path: Path) -> None:
    ((said, _),) = read("http://127.0.0.1:9", tmp_path, "hf://datasets/me/texts/data/1.jsonl")
    assert "check the network" in said
