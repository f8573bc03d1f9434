"""Datasets by URL: the same documents as from a disk, and an error with its fix for what goes wrong on the way."""

from __future__ import annotations

import bz2
import gzip
import io
import json
import lzma
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

import pyarrow as pa
import pyarrow.parquet as pq

import stores
from dray.contract.findings import DrayError
from dray.train.data import formats, remote, resolve
from dray.train.data.feeds import Stream
from dray.train.data.formats import Map

pytestmark = pytest.mark.torch

TEXTS = [f"document {number} é" for number in range(300)]
READING = formats.Reading("text")


def jsonl(texts: list[str]) -> bytes:
    return "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts).encode()


def parquet(texts: list[str]) -> bytes:
    file = io.BytesIO()
    pq.write_table(pa.table({"text": texts}), file, row_group_size=70)
    return file.getvalue()


def arrow(texts: list[str]) -> bytes:
    file, table = io.BytesIO(), pa.table({"text": texts})
    with pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=70)
    return file.getvalue()


FILES = {
    "a.txt": "\n".join(TEXTS).encode(),
    "a.jsonl": jsonl(TEXTS),
    "a.json": json.dumps([{"text": text} for text in TEXTS]).encode(),
    "a.csv": ("text,n\n" + "".join(f"{text},1\n" for text in TEXTS)).encode(),
    "a.parquet": parquet(TEXTS),
    "a.arrow": arrow(TEXTS),
    "a.txt.gz": gzip.compress("\n".join(TEXTS).encode()),
    "a.jsonl.bz2": bz2.compress(jsonl(TEXTS)),
    "a.jsonl.xz": lzma.compress(jsonl(TEXTS)),
    "a.jsonl.zst": pa.compress(jsonl(TEXTS), codec="zstd", asbytes=True),
}


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Iterator[stores.Store]:
    objects = {f"all/{name}": content for name, content in FILES.items()}
    objects |= {"two/deep/1.jsonl": jsonl(TEXTS[:100]), "two/deep/2.jsonl": jsonl(TEXTS[100:]), "two/deep/x.log": b"x"}
    objects |= {"private/a.jsonl": jsonl(TEXTS), "nobody/a.jsonl": jsonl(TEXTS)}
    stores.forget()
    with stores.serving(objects) as served:
        monkeypatch.setenv("AWS_ENDPOINT_URL", served.address)
        yield served


def read(name: str, reading: formats.Reading = READING, *, streamed: bool = False) -> list[str]:
    pieces = resolve.pieces(resolve.dataset(name, "train", streamed=streamed), reading)
    return [text for piece in pieces for text in formats.documents(piece, reading)]


def refused(name: str, code: int = 78, does: Callable[..., object] = read) -> str:
    with pytest.raises(DrayError) as stopped:
        does(name)
    assert stopped.value.finding.code == code
    return str(stopped.value)


@pytest.mark.parametrize("name", FILES)
def test_every_kind_of_file_gives_the_same_documents(store: stores.Store, name: str) -> None:
    assert read(f"s3://all/{name}") == TEXTS
    assert read(f"{store.address}/all/{name}") == TEXTS


@pytest.mark.parametrize("name", ["s3://two/deep/*.jsonl", "s3://two/deep", "s3://two/deep/", "s3://two/**/?.jsonl"])
def test_patterns_and_folders(store: stores.Store, name: str) -> None:
    assert read(name) == TEXTS


def test_a_file_by_url_is_cut_as_one_on_a_disk_is(store: stores.Store, tmp_path: Path, monkeypatch) -> None:
    """So that its parts have the same order in a stream."""
    monkeypatch.setattr(resolve, "_PIECE", 1000)
    (tmp_path / "a.jsonl").write_bytes(FILES["a.jsonl"])
    cut = [
        [piece.bytes for piece in resolve.pieces(resolve.dataset(name, "train"), READING)]
        for name in (f"{tmp_path}/a.jsonl", "s3://all/a.jsonl", f"{store.address}/all/a.jsonl")
    ]
    assert len(cut[0]) > 10
    assert cut[0] == cut[1] == cut[2]
    assert read("s3://all/a.jsonl") == TEXTS


def test_only_what_is_asked_for_is_fetched(store: stores.Store) -> None:
    pieces = resolve.dataset("s3://all/a.parquet:train[140:150]", "train").pieces(READING)
    assert [piece.rows for piece in pieces] == [(140, 150)]


@pytest.mark.parametrize("name", ["s3://two/deep/*.jsonl", "s3://all/a.parquet", "{tmp}/a.jsonl", "json:{tmp}/a.jsonl"])
@pytest.mark.parametrize(
    ("split", "rows"),
    [
        ("train", slice(None)),
        ("train[:1%]", slice(3)),
        ("train[10:150]", slice(10, 150)),
        ("train[-20:]", slice(-20, None)),
        ("train[50%:75%]", slice(150, 225)),
        ("train[290:900]", slice(290, 900)),
    ],
)
def test_a_slice_is_those_rows(store: stores.Store, tmp_path: Path, name: str, split: str, rows: slice) -> None:
    (tmp_path / "a.jsonl").write_bytes(FILES["a.jsonl"])
    assert read(f"{name.format(tmp=tmp_path)}:{split}") == TEXTS[rows]


def test_slices_are_joined_and_an_empty_one_is_refused(store: stores.Store) -> None:
    assert read("s3://all/a.txt:train[:5]+train[:2]+train[299:]") == [*TEXTS[:5], *TEXTS[:2], TEXTS[299]]
    assert "rows 300 to 310 of 300" in refused("s3://all/a.txt:train[300:310]")


def test_another_object_has_another_identity_and_is_refused_while_it_is_read(store: stores.Store) -> None:
    for name in ("s3://two/deep/1.jsonl", f"{store.address}/two/deep/1.jsonl"):
        before = resolve.dataset(name, "train")
        assert resolve.dataset(name, "train").identity == before.identity
        assert resolve.dataset(f"{name}:train[:5]", "train").identity != before.identity
        pieces = before.pieces(READING)
        store.objects["two/deep/1.jsonl"] = jsonl([TEXTS[0].upper(), *TEXTS[1:100]])
        assert resolve.dataset(name, "train").identity != before.identity
        streams = [Stream(some, READING, list, shards=1, length=2, seed=1).identity
                   for some in (pieces, resolve.dataset(name, "train").pieces(READING))]  # fmt: skip
        assert streams[0] != streams[1]
        with pytest.raises(DrayError, match="the dataset changed while it was read"):
            list(formats.documents(pieces[0], READING))
        store.objects["two/deep/1.jsonl"] = jsonl(TEXTS[:100])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("s3://none/a.jsonl", "the dataset does not exist"),
        ("s3://all/none.jsonl", "the dataset does not exist"),
        ("s3://all/none*.jsonl", "the dataset does not exist"),
        (
            "s3://private/a.jsonl",
            "export AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (s3://), or GOOGLE_APP",
        ),
        ("s3://nobody/a.jsonl", "no permission: the dataset cannot be read"),
        ("{web}/all/none.jsonl", "the dataset does not exist"),
        ("{web}/nobody/a.jsonl", "no permission: the dataset cannot be read"),
        ("abfs://container/a.jsonl", "--pip adlfs, and layer ="),
        ("nothing://a/b.jsonl", "found:  Protocol not known: nothing"),
    ],
)
def test_what_cannot_be_read_is_said(store: stores.Store, name: str, said: str) -> None:
    assert said in refused(name.format(web=store.address))


def test_a_secret_of_the_environment_is_used(store: stores.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIAMAYREAD")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2hunter2")
    stores.forget()
    assert read("s3://private/a.jsonl") == TEXTS
    stores.forget()


def test_a_transfer_that_breaks_is_taken_up_again(store: stores.Store, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []

    async def wait(seconds: float) -> None:
        waits.append(seconds)

    monkeypatch.setattr(remote.asyncio, "sleep", wait)
    store.breaks = 2
    assert read(f"{store.address}/all/a.jsonl") == TEXTS
    assert waits == [1, 2]
    store.breaks = 1
    assert read("s3://all/a.jsonl") == TEXTS
    store.breaks = 1000
    assert "check the network" in refused(f"{store.address}/all/a.jsonl", code=1)
    assert "check the network" in refused(f"json:{store.address}/all/a.jsonl", code=1)


def test_an_error_with_its_fix_stays_as_it_is(store: stores.Store) -> None:
    reading = formats.Reading("text", map=Map("prep.py:f\ndef f(row):\n    raise FileNotFoundError('words.txt')\n"))
    assert "f of prep.py failed" in refused(f"{store.address}/all/a.jsonl", does=lambda name: read(name, reading))
    with pytest.raises(DrayError) as stopped, remote.refusing_failures(store.address):
        raise DrayError("the server is away", code=1) from ConnectionError()
    assert stopped.value.finding.code == 1


def test_a_server_without_ranges_or_tags_is_refused(store: stores.Store) -> None:
    store.ranges = False
    store.objects["all/a.parquet"] = parquet([text * 99 for text in TEXTS] + [str(n) * 9 for n in range(30_000)])
    assert "appear to support range requests" in refused(f"{store.address}/all/a.parquet")


def test_a_damaged_file_is_no_trouble_of_the_network(store: stores.Store) -> None:
    store.objects["all/a.txt.gz"] = FILES["a.txt.gz"][:400]
    assert "a whole txt file at s3://all/a.txt.gz" in refused("s3://all/a.txt.gz")
    store.objects["all/a.txt.gz"] = b"no gzip"
    assert "a whole txt file at s3://all/a.txt.gz" in refused("s3://all/a.txt.gz")
    store.objects["all/a.parquet"] = FILES["a.parquet"][:-5]
    assert "a whole parquet file" in refused("s3://all/a.parquet")
    store.objects["all/a.jsonl"] = FILES["a.jsonl"] + b'{"text": \n'
    assert f"the line at byte {len(FILES['a.jsonl'])} of s3://all/a.jsonl" in refused("s3://all/a.jsonl")
