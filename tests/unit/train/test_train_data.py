"""Text from any file to tokens and rows: nothing is lost, nothing comes twice, and what is wrong is said."""

from __future__ import annotations

import bz2
import csv
import gc
import gzip
import hashlib
import json
import lzma
import os
import threading
from collections import Counter
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")

import numpy as np  # noqa: E402
import pyarrow as pa  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

from dray.contract.findings import DrayError  # noqa: E402
from dray.train import objectives  # noqa: E402
from dray.train.checkpoint import manifest, shards, staging  # noqa: E402
from dray.train.data import arrow, datasets, encoding, formats, resolve, synthetic_corpus, tokenizer  # noqa: E402
from dray.train.data.encoding import PLAIN, end_token  # noqa: E402
from dray.train.data.feeds import Stream  # noqa: E402
from dray.train.objectives.base import Objective  # noqa: E402
from trainings import config  # noqa: E402

pytestmark = pytest.mark.torch

NOISE = b"".join(hashlib.sha256(bytes([number])).hexdigest().encode() + b"\n" for number in range(200))
HURT = gzip.compress(NOISE)[:2000] + b"\xff" * 200 + gzip.compress(NOISE)[2200:]


def zstd(parts: list[bytes]) -> bytes:
    return b"".join(pa.compress(part, codec="zstd", asbytes=True) for part in parts)


COMPRESSED = {
    "txt.gz": lambda parts: b"".join(map(gzip.compress, parts)),
    "txt.bz2": lambda parts: b"".join(map(bz2.compress, parts)),
    "txt.xz": lambda parts: b"".join(map(lzma.compress, parts)),
    "txt.zst": zstd,
}
TEXTS = [f"document {number} é 漢" + " and more" * (number % 7) for number in range(300)]


def refused(does, *arguments, code: int = 78) -> str:
    with pytest.raises(DrayError) as stopped:
        does(*arguments)
    assert stopped.value.finding.code == code
    return f"{stopped.value}\n"


def texts(folder: Path, *said: str) -> datasets.Datasets:
    chosen = config(folder, *said)
    return datasets.load(chosen, tokenizer.load(chosen))


def written(folder: Path, kind: str) -> Path:
    """TEXTS in a file of that kind."""
    path = folder / f"my texts.{kind}"
    if kind == "txt":
        path.write_text("\n\n".join(TEXTS) + "\n")
    elif kind.startswith("txt."):
        path.write_bytes(COMPRESSED[kind](["\n".join(TEXTS).encode()]))
    elif kind == "jsonl":
        path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in TEXTS))
    elif kind == "json":
        path.write_text(json.dumps([{"text": text} for text in TEXTS], indent=1))
    elif kind in ("csv", "tsv"):
        with path.open("w", newline="", encoding="utf-8") as file:
            rows = csv.writer(file, delimiter="\t" if kind == "tsv" else ",")
            rows.writerows([("id", "text"), *((number, text) for number, text in enumerate(TEXTS))])
    elif kind == "parquet":
        pq.write_table(pa.table({"text": TEXTS, "id": range(300)}), path, row_group_size=70)
    else:
        table = pa.table({"text": TEXTS})
        new = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
        path = path.with_suffix(".arrow")
        with new(str(path), table.schema) as writer:
            writer.write_table(table, max_chunksize=70)
    return path


READING = formats.Reading("text")
KINDS = ("txt", *COMPRESSED, "jsonl", "json", "csv", "tsv", "parquet", "arrow", "arrow-stream")


def read(path: Path) -> list[str]:
    pieces = resolve.pieces(resolve.dataset(str(path), "train"), READING)
    return [text for piece in pieces for text in formats.documents(piece, READING)]


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_the_same_documents(tmp_path: Path, kind: str) -> None:
    assert read(written(tmp_path, kind)) == TEXTS


class Batch:
    """A batch of pyarrow, with the largest count of rows that became Python's objects at once."""

    largest = 0

    def __init__(self, batch) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(self.batch)

    def slice(self, begin: int, length: int):
        part = self.batch.slice(begin, length)
        Batch.largest = max(Batch.largest, len(part))
        return part


@pytest.mark.parametrize("kind", ["parquet", "arrow", "arrow-stream"])
def test_few_rows_are_objects_at_a_time(tmp_path: Path, kind: str, monkeypatch) -> None:
    """A stream reads many files at once, each with large row groups."""
    table, path = pa.table({"text": [*map(str, range(5000))]}), tmp_path / f"large.{kind.removesuffix('-stream')}"
    if kind == "parquet":
        pq.write_table(table, path)
    else:
        new = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
        with new(str(path), table.schema) as writer:
            writer.write_table(table)
    monkeypatch.setattr(Batch, "largest", 0)
    iterated = pq.ParquetFile.iter_batches
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *args, **named: map(Batch, iterated(*args, **named)))
    for only in (None, (0, 5000), (1023, 1025), (1024, 2048), (4999, 5000), (5000, 6000), (7, 7)):
        expected = [*map(str, range(5000))][slice(*only) if only else slice(None)]
        assert [row["text"] for row in arrow.rows(str(path), ["text"], only)] == expected
    assert Batch.largest <= 1024


@pytest.mark.parametrize("size", [1, 7, 64, 1000, 1 << 20])
def test_a_file_cut_anywhere_gives_each_line_once(tmp_path: Path, size: int, monkeypatch) -> None:
    monkeypatch.setattr(resolve, "_PIECE", size)
    assert read(written(tmp_path, "jsonl")) == TEXTS


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "arrow", "txt.gz"])
@pytest.mark.parametrize(("split", "rows"), [("", slice(0, 300)), (":train[75:205]", slice(75, 205))])
def test_pieces_for_many_readers_have_each_row_once(tmp_path: Path, kind: str, split: str, rows: slice, monkeypatch):
    monkeypatch.setattr(resolve, "_PIECE", 5000)
    monkeypatch.setattr(resolve, "_LEAST", 100)
    reading, named = READING, resolve.dataset(f"{written(tmp_path, kind)}{split}", "train")
    counts = []
    for readers in (1, 2, 7, 40, 1000):
        pieces = resolve.pieces(named, reading, readers)
        assert [text for piece in pieces for text in formats.documents(piece, reading)] == TEXTS[rows]
        counts.append(len(pieces))
    # Of lines any part can be read, of parquet and arrow a group of rows; and a slice's parts of lines by their rows.
    least = {"jsonl": 10, "parquet": 2, "arrow": 2}.get(kind, 1)
    assert counts[3] >= least


def test_folders_and_patterns(tmp_path: Path) -> None:
    for name in ("b.txt", "a.jsonl", "c.csv", "notes.log"):
        (tmp_path / name).write_text("")
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "d.parquet").write_text("")
    names = [Path(name).name for name in resolve.find_files(str(tmp_path))]
    assert names == ["a.jsonl", "b.txt", "c.csv", "d.parquet"]
    assert resolve.find_files(f"{tmp_path}/*.txt") == (str(tmp_path / "b.txt"),)


def test_the_corpus_has_the_same_bytes_everywhere() -> None:
    text = "\n".join(synthetic_corpus.documents())
    assert text.startswith("one: the guard watches the white crate through the night. two: ")
    digest = hashlib.sha256(text.encode()).hexdigest()
    assert digest == "b6db2b02366c8f1323b9fa0a5fe0067fd0591028ad2431800e4d38cbe7fa6288"


@pytest.mark.parametrize("text", ["the crane", "é 漢字 🚢 \t\r\n", "<|endoftext", ""])
def test_any_text_survives_the_tokenizer(tmp_path: Path, text: str) -> None:
    tokens = tokenizer.load(config(tmp_path))
    ids = tokens(text)["input_ids"]
    assert len(ids) == len(text.encode())
    assert tokens.decode(ids) == text


@pytest.mark.parametrize("kind", ["bytes", "bpe", "words", "template"])
def test_documents_in_a_row_are_the_tokens_of_each(tmp_path: Path, kind: str) -> None:
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
    from transformers import PreTrainedTokenizerFast

    tokens = tokenizer.load(config(tmp_path))
    if kind != "bytes":
        fast = Tokenizer(models.BPE(unk_token="?") if kind != "words" else models.WordLevel(unk_token="?"))
        fast.pre_tokenizer = pre_tokenizers.Whitespace() if kind == "words" else pre_tokenizers.ByteLevel(False)
        if kind == "words":
            fast.normalizer = normalizers.Lowercase()
        train = trainers.WordLevelTrainer if kind == "words" else trainers.BpeTrainer
        fast.train_from_iterator(TEXTS, train(special_tokens=["?", "<e>", "<b>"]))
        if kind == "template":
            fast.post_processor = processors.TemplateProcessing("<b> $A <e>", special_tokens=[("<b>", 2), ("<e>", 1)])
        tokens = PreTrainedTokenizerFast(tokenizer_object=fast, eos_token="<e>")
    end = end_token(tokens)
    texts = [*TEXTS, f"it has its end {tokens.eos_token}", tokens.eos_token, "the last"]
    row = PLAIN.encoder(tokens, end_token(tokens))(texts)
    each = [tokens(text)["input_ids"] for text in texts]
    assert row == [token for ids in each for token in (ids if ids[-1] == end else [*ids, end])]
    assert encoding._can_be_joined(tokens.backend_tokenizer, end) == (kind in ("bytes", "bpe"))


def test_a_tokenizer_that_was_saved_with_lengths_cuts_and_pads_nothing(tmp_path: Path) -> None:
    tokens = tokenizer.load(config(tmp_path))
    tokens(["x"], padding="max_length", truncation=True, max_length=8)
    tokens.save_pretrained(tmp_path / "short")
    again = tokenizer.load(config(tmp_path / "b", f"model.tokenizer={tmp_path}/short"))
    assert PLAIN.encoder(again, end_token(again))(["a" * 100, "b"]) == [*[64] * 100, 256, 65, 256]


def test_no_token_is_lost(tmp_path: Path) -> None:
    every = list(synthetic_corpus.documents())
    found = texts(tmp_path)
    tokens = tokenizer.load(config(tmp_path / "other"))
    for part, documents in ((found.training.tokens, every[:570]), (found.validation["eval"], every[570:])):
        assert len(part.ids) == sum(len(text.encode()) + 1 for text in documents)
        assert tokens.decode(part.ids.tolist()) == "".join(f"{text}<|endoftext|>" for text in documents)
    # One pass over the text gives each of its tokens once, whatever the block; the rest begins the next pass.
    count = found.training.order.first(1)
    rows = found.training.rows(range(count)).flatten()
    assert 0 <= len(rows) - found.total < 32
    assert Counter(rows.tolist()) - Counter(found.training.tokens.ids.tolist()) == Counter(
        found.training.tokens.ids[: len(rows) - found.total].tolist()
    )


def test_validation_and_test_by_file_and_limits(tmp_path: Path) -> None:
    path = written(tmp_path, "csv")
    said = [f"data.train={path}", f"data.validation={path}", f"data.test={path}"]
    found = texts(tmp_path / "a", *said)
    total = sum(len(text.encode()) + 1 for text in TEXTS)
    assert found.total == len(found.validation["eval"].ids) == len(found.test.ids) == total
    short = texts(tmp_path / "b", *said, "data.max_train_samples=5", "data.max_eval_samples=2")
    assert (short.total, len(short.validation["eval"].ids), len(short.test.ids)) == (5 * 32, 64, 64)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("gone.txt", None, "the dataset does not exist"),
        ("empty.txt", b"", "there are too few tokens in data.train"),
        ("blank.txt", b"\n \n\n", "there are too few tokens in data.train"),
        ("latin.txt", b"caf\xe9 " * 100, "the dataset is not UTF-8"),
        ("wide.txt", "text".encode("utf-16"), "the dataset is not UTF-8"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": "b",}\n', "the dataset is not JSON"),
        ("deep.jsonl", b'{"text": ' + b"[" * 900 + b"]" * 900 + b"}\n", "column 'text' is not text"),
        ("list.jsonl", b'["a"]\n', "there is no column 'text'"),
        ("other.jsonl", b'{"content": "a"}\n', "there is no column 'text'"),
        ("number.jsonl", b'{"text": 1}\n', "column 'text' is not text"),
        ("bad.json", b'[{"text": "a"},]', "the dataset is not JSON"),
        ("other.csv", b"content,label\na,1\n", "there is no column 'text'"),
        ("latin.csv", b"text\ncaf\xe9\n", "the dataset is not UTF-8"),
        ("open.csv", b'text\na\n"b\nc\nd\n', "the table cannot be read"),
        ("inner.csv", b'text\na\n"b" c\nd\n"e"\n', "the table cannot be read"),
        ("comma.csv", b"text\na\nit is, of course, b\n", "the table cannot be read"),
        ("twice.csv", b"text,text\na,b\n", "the table cannot be read"),
        ("short.csv", b"label,text\n1,a\n2\n", "the table cannot be read"),
        ("open.tsv", b'text\tn\n"a\t1\nb\t2\n', "the table cannot be read"),
        ("bad.parquet", b"PAR1 not at all PAR1", "the dataset cannot be read"),
        ("bad.arrow", b"ARROW1", "the dataset cannot be read"),
        ("bad.txt.gz", b"not gzip", "the dataset cannot be read"),
        ("cut.txt.gz", gzip.compress(NOISE)[:-20], "the dataset cannot be read"),
        ("cut.json.gz", gzip.compress(b'[{"text": "' + NOISE)[:-20], "the dataset cannot be read"),
        ("cut.csv.gz", gzip.compress(b"text\n" + NOISE)[:-20], "the dataset cannot be read"),
        ("hurt.txt.gz", HURT, "the dataset cannot be read"),
        ("bad.txt.bz2", b"not bzip2", "the dataset cannot be read"),
        ("cut.txt.bz2", bz2.compress(NOISE)[:-20], "the dataset cannot be read"),
        ("bad.txt.xz", b"not xz", "the dataset cannot be read"),
        ("cut.jsonl.xz", lzma.compress(b'{"text": "a"}\n' * 99)[:-20], "the dataset cannot be read"),
        ("hurt.txt.xz", lzma.compress(NOISE)[:2000] + b"\xff" * 200, "the dataset cannot be read"),
        ("bad.txt.zst", b"not zstd", "the dataset cannot be read"),
        ("cut.json.zst", zstd([b'[{"text": "' + NOISE])[:-20], "the dataset cannot be read"),
        ("cut.csv.zst", zstd([b"text\n" + NOISE])[:-20], "the dataset cannot be read"),
        ("empty.txt.zst", b"", "there are too few tokens in data.train"),
    ],
)
def test_texts_that_are_not(tmp_path: Path, name: str, content: bytes | None, said: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    told = refused(texts, tmp_path, f"data.train={path}")
    assert told.splitlines()[0] == said
    assert str(path) in told
    assert "  fix:    " in told
    assert not list((tmp_path / "tokens").glob("*.part-*"))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.jsonl", '{"text": "a"}\n' + "[" * 100_000 + "\n", "the dataset is not JSON"),
        ("a.json", "[" * 100_000, "the dataset is not JSON"),
    ],
)
def test_json_that_is_deeper_than_python_reads(tmp_path: Path, name: str, content: str, said: str) -> None:
    gc.collect()  # else what other tests left ends in the midst of it, and has no room to say so
    (tmp_path / name).write_text(content)
    told = refused(texts, tmp_path, f"data.train={tmp_path / name}")
    assert told.splitlines()[0] == said
    assert "maximum recursion depth" in told


def test_a_row_that_would_be_cut_is_named(tmp_path: Path) -> None:
    path = tmp_path / "comma.csv"
    path.write_text("text,n\na,1\nit is, of course, b,2\n")
    assert refused(texts, tmp_path, f"data.train={path}") == (
        "the table cannot be read\n"
        f"  where:  line 3 of {path}\n"
        "  wanted: column names in the first line, and as many fields in each row\n"
        "  found:  not 2 fields (quote a field with a ',' in it)\n"
        "  fix:    correct that row (a quote may be unclosed), or convert the file to parquet\n"
    )


def test_a_cut_parquet_and_one_of_another_column(tmp_path: Path) -> None:
    path = written(tmp_path, "parquet")
    told = refused(texts, tmp_path, f"data.train={path}", "data.column=body")
    assert told == (
        "there is no column 'body'\n"
        f"  wanted: body in {path}\n  found:  text, id\n  fix:    set data.column to one of these\n"
    )
    path.write_bytes(path.read_bytes()[:-100])
    assert refused(texts, tmp_path / "b", f"data.train={path}").startswith("the dataset cannot be read\n")


@pytest.mark.parametrize("content", ["one\r\ntwo\n", '{"text": "one"}\n{"text": "two"}'])
def test_the_mark_that_windows_editors_write_is_no_text(tmp_path: Path, content: str) -> None:
    path = tmp_path / ("a.jsonl" if content[0] == "{" else "a.txt")
    path.write_bytes(content.encode("utf-8-sig"))
    assert read(path) == ["one", "two"]


@pytest.mark.parametrize("kind", COMPRESSED)
def test_several_compressed_parts_are_one_file(tmp_path: Path, kind: str) -> None:
    """As `cat a.gz b.gz`, pbzip2, xz's blocks and pzstd write them."""
    path = tmp_path / f"Parts.{kind.upper()}"
    path.write_bytes(COMPRESSED[kind]([b"one\ntw", b"o\nthree\n"]))
    assert read(path) == ["one", "two", "three"]


class TestStream:
    """What one epoch gives to all stream shards, on whichever rank."""

    def stream(self, folder: Path, kind: str, shards: int = 8) -> Stream:
        path = folder / f"my texts.{kind}"
        named = resolve.dataset(str(path if path.exists() else written(folder, kind)), "train")
        pieces = resolve.pieces(named, READING, shards)
        return Stream(pieces, READING, self.encode, shards=shards, length=16, seed=3)

    @staticmethod
    def encode(documents: list[str]) -> list[int]:
        return [TEXTS.index(text) for text in documents for _ in range(3)]

    @pytest.mark.parametrize("kind", ["jsonl", "parquet", "csv"])
    @pytest.mark.parametrize("shards", [1, 3, 8])
    def test_each_document_comes_once_in_an_epoch(self, tmp_path: Path, kind: str, shards: int, monkeypatch) -> None:
        monkeypatch.setattr(resolve, "_PIECE", 1000)
        stream = self.stream(tmp_path, kind, shards)
        seen: Counter[int] = Counter()
        for number in range(shards):
            shard = stream.shard(number)
            row = []
            while shard.part < stream.parts:
                row += shard.take(1).tolist()
            seen += Counter(row[:-1])  # the last one was asked of the next pass
        assert seen == Counter(dict.fromkeys(range(len(TEXTS)), 3))

    @pytest.mark.parametrize("kind", ["txt", "jsonl"])
    def test_shards_of_one_file_do_not_each_read_all_of_it(self, tmp_path: Path, kind: str, monkeypatch) -> None:
        monkeypatch.setattr(resolve, "_LEAST", 100)
        made, rows = [], formats._rows

        def counted(*arguments):
            for row in rows(*arguments):
                made.append(row)
                yield row

        monkeypatch.setattr(formats, "_rows", counted)
        stream = self.stream(tmp_path, kind, 32)
        for number in range(32):
            shard = stream.shard(number)
            while shard.part < stream.parts:
                shard.take(1)
        # Each has begun another part too; no row was read to count them; txt has a blank line between two documents.
        assert len(TEXTS) <= len(made) < (5 if kind == "txt" else 3) * len(TEXTS)

    @pytest.mark.parametrize("ranks", [1, 2, 4])
    def test_the_samples_are_the_same_on_any_ranks_and_after_a_resume_on_others(self, tmp_path, ranks, monkeypatch):
        monkeypatch.setattr(resolve, "_PIECE", 1000)
        whole = self.stream(tmp_path, "jsonl")
        wanted = whole.rows(range(8 * 40))
        share = 8 // ranks

        def some(streams: list[Stream], steps: range) -> np.ndarray:
            each = [
                stream.rows(range(step * 8 + rank * share, step * 8 + (rank + 1) * share))
                for step in steps
                for rank, stream in enumerate(streams)
            ]
            return np.concatenate(each)

        streams = [self.stream(tmp_path, "jsonl") for _ in range(ranks)]
        before = some(streams, range(15))
        kept = shards.position_shards([state for stream in streams for state in stream.state()])
        staging.write(tmp_path, [kept], {})
        states = shards.Positions(tmp_path, manifest.read(tmp_path)["tensors"])
        assert [*states] == [*range(len(states))] == [*range(8)]
        others = [self.stream(tmp_path, "jsonl") for _ in range(2)]
        for other in others:
            other.load(states)
        share = 4
        assert np.array_equal(np.concatenate([before, some(others, range(15, 40))]), wanted)

    def test_few_documents_for_many_shards_and_long_samples_come_as_often_as_it_takes(self, tmp_path: Path) -> None:
        (tmp_path / "my texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS[:5]))
        stream = self.stream(tmp_path, "jsonl", 64)
        assert set(stream.rows(range(256)).flatten().tolist()) == set(range(5))

    def test_stream_shards_are_tokenized_at_the_same_time_and_give_the_same_rows(self, tmp_path, monkeypatch) -> None:
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
        one_by_one = self.stream(tmp_path, "jsonl", 3)
        wanted = [one_by_one.shard(number).take(16) for number in (0, 1, 2, 0, 1)]
        begun = threading.Barrier(3)
        stream = self.stream(tmp_path, "jsonl", 3)
        # Each shard's first documents give both of its samples.
        stream.encode = lambda documents: (begun.wait(60), self.encode(documents))[1]
        assert np.array_equal(stream.rows(range(5)), wanted)
        assert [shard[0] for shard in stream.state()] == [0, 1, 2]

    def test_nothing_to_read(self, tmp_path: Path) -> None:
        (tmp_path / "my texts.jsonl").write_text("\n")
        stream = self.stream(tmp_path, "jsonl")
        assert refused(stream.rows, range(1)).startswith("the training dataset is empty\n")


class TestObjective:
    """Rows -> what goes in, what is wanted."""

    def objective(self, folder: Path, *said: str) -> Objective:
        chosen = config(folder, *said)
        tokens = tokenizer.load(chosen)
        return objectives.named(chosen.train.objective)(chosen, tokens)

    def test_the_next_token_is_the_label(self, tmp_path: Path) -> None:
        batch = self.objective(tmp_path).batch(np.array([[5, 6, 256, 7]]), range(1))
        assert (batch.input_ids.tolist(), batch.labels.tolist()) == ([[5, 6, 256, 7]], [[6, 256, 7, -100]])
        assert (batch.position_ids, batch.label_count) == (None, 3)

    def test_with_a_document_mask_nothing_is_predicted_across_an_end(self, tmp_path: Path) -> None:
        batch = self.objective(tmp_path, "data.document_mask=true").batch(np.array([[5, 6, 256, 7, 8, 256]]), range(1))
        assert batch.labels.tolist() == [[6, 256, -100, 8, 256, -100]]
        assert batch.position_ids.tolist() == [[0, 1, 2, 0, 1, 2]]

    def test_what_is_masked_follows_the_sample_and_not_the_batch(self, tmp_path: Path) -> None:
        objective = self.objective(tmp_path, "train.objective=masked")
        rows = np.random.default_rng(0).integers(256, size=(64, 512))
        rows[:, ::50] = 256
        whole = objective.batch(rows, range(100, 164))
        part = objective.batch(rows[10:12], range(110, 112))
        assert torch.equal(part.input_ids, whole.input_ids[10:12])
        assert torch.equal(part.labels, whole.labels[10:12])
        chosen = whole.labels != -100
        assert 0.14 < chosen.float().mean() < 0.16
        assert not chosen[:, ::50].any()
        assert torch.equal(whole.labels[chosen], torch.tensor(rows)[chosen])
        masked = (whole.input_ids[chosen] == 257).float().mean()
        kept = (whole.input_ids[chosen] == whole.labels[chosen]).float().mean()
        assert 0.78 < masked < 0.82
        assert 0.08 < kept < 0.12
