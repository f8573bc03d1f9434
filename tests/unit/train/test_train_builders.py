"""What `datasets` reads for dray: each builder's rows, and no row less in silence."""

from __future__ import annotations

import gzip
import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="torch: the training stack is not installed (make demo installs it)")
pytest.importorskip("datasets", reason="datasets: the training stack is not installed (make demo installs it)")

import pyarrow as pa
import pyarrow.parquet as pq

import stores
from dray.contract.findings import DrayError
from dray.train.data import datasets, formats, resolve, tokenizer
from trainings import config

# datasets leaves files of parquet to the garbage collector.
pytestmark = [
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]

TEXTS = [f"document {number} é" for number in range(100)]


def tar(texts: list[str], odd: str = "") -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for number, text in enumerate(texts):
            about = tarfile.TarInfo(f"{number:05}.txt")
            about.size = len(text.encode())
            archive.addfile(about, io.BytesIO(text.encode()))
        if odd:
            archive.addfile(tarfile.TarInfo(odd))
    return file.getvalue()


def written(folder: Path, builder: str) -> str:
    """TEXTS as that builder reads them, and the dataset's name."""
    if builder in ("json", "text", "csv"):
        lines = {"json": [json.dumps({"text": text}) for text in TEXTS], "text": TEXTS, "csv": ["text;n", *(f"{text};1" for text in TEXTS)]}  # noqa: E501  # fmt: skip
        (folder / "x.any").write_text("\n".join(lines[builder]) + "\n")
    elif builder == "parquet":
        pq.write_table(pa.table({"text": TEXTS}), folder / "x.any")
    elif builder == "arrow":
        table = pa.table({"text": TEXTS})
        with pa.ipc.new_stream(str(folder / "x.any"), table.schema) as writer:
            writer.write_table(table)
    elif builder == "webdataset":
        (folder / "1.tar").write_bytes(tar(TEXTS[:60]))
        (folder / "2.tar").write_bytes(tar(TEXTS[60:]))
        return f"{folder}/*.tar"  # by its ending
    elif builder == "hdf5":
        import h5py

        with h5py.File(folder / "x.h5", "w") as file:
            file["text"] = TEXTS
        return f"{folder}/x.h5"
    return f"{builder}:{folder}/x.any"


COLUMNS = {"webdataset": "txt"}
KWARGS = {"csv": {"sep": ";"}}


def read(name: str, column: str = "text", **kwargs: dict) -> list[str]:
    reading = formats.Reading(column, config_kwargs=kwargs)
    pieces = resolve.dataset(name, "train").pieces(reading)
    return [text for piece in pieces for text in formats.documents(piece, reading)]


def refused(name: str, column: str = "text", **kwargs: dict) -> str:
    with pytest.raises(DrayError) as stopped:
        read(name, column, **kwargs)
    assert stopped.value.finding.code == 78
    return str(stopped.value)


@pytest.mark.parametrize("builder", ["json", "csv", "text", "parquet", "arrow", "webdataset", "hdf5"])
def test_every_builder_gives_the_same_documents(tmp_path: Path, builder: str) -> None:
    if builder == "hdf5":
        pytest.importorskip("h5py")
    name, kwargs = written(tmp_path, builder), {builder: KWARGS[builder]} if builder in KWARGS else {}
    assert read(name, COLUMNS.get(builder, "text"), **kwargs) == TEXTS
    assert read(f"{name}:train[90%:]", COLUMNS.get(builder, "text"), **kwargs) == TEXTS[90:]


def test_by_url(monkeypatch: pytest.MonkeyPatch) -> None:
    stores.forget()
    objects = {"all/1.tar": tar(TEXTS[:50]), "all/2.tar": tar(TEXTS[50:]), "all/3.tar.gz": gzip.compress(tar(TEXTS))}
    with stores.serving(objects) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.address)
        assert read("s3://all/*.tar", "txt") == TEXTS
        assert read(f"webdataset:{store.address}/all/1.tar", "txt") == TEXTS[:50]
        assert read(f"webdataset:{store.address}/all/3.tar.gz", "txt") == TEXTS
        store.objects["all/2.tar"] = tar(TEXTS[50:])[: 512 * 20]
        assert "a whole tar file at s3://all/2.tar" in refused("s3://all/*.tar", "txt")


@pytest.mark.parametrize("builder", ["text", "json", "csv"])
def test_a_builder_asks_a_server_for_blocks_and_not_for_bytes(monkeypatch: pytest.MonkeyPatch, builder: str) -> None:
    """They read a block and then a line, which is a request for each of its bytes where nothing is kept between."""
    stores.forget()
    rows = [text * 200 for text in TEXTS]
    lines = [json.dumps({"text": row}) for row in rows] if builder == "json" else rows
    with stores.serving({"all/a": "\n".join([*["text"] * (builder == "csv"), *lines]).encode()}) as store:
        monkeypatch.setenv("AWS_ENDPOINT_URL", store.address)
        # The builder `text` gives fsspec's client of the web an encoding, which it refuses.
        for name in ("s3://all/a", *([f"{store.address}/all/a"] if builder != "text" else [])):
            store.asked.clear()
            assert read(f"{builder}:{name}") == rows
            assert len(store.asked) < 40


class TestDamage:
    def test_an_archive_that_ends_between_two_files(self, tmp_path: Path) -> None:
        """Python's tarfile gives what there is, and no error."""
        (tmp_path / "a.tar").write_bytes(tar(TEXTS)[: 512 * 100])
        assert f"a whole tar file at {tmp_path}/a.tar" in refused(f"{tmp_path}/a.tar", "txt")

    def test_a_shard_in_the_middle_is_named_with_its_row(self, tmp_path: Path) -> None:
        for number in range(3):
            (tmp_path / f"{number}.jsonl").write_text('{"text": "a"}\n' * 5)
        (tmp_path / "1.jsonl").write_text('{"text": "a"}\n' * 3 + "{broken\n")
        said = refused(f"json:{tmp_path}/*.jsonl")
        assert f"of json:{tmp_path}/1.jsonl" in said
        (tmp_path / "1.tar").write_bytes(tar(TEXTS[:10], odd="odd.npy"))
        said = refused(f"{tmp_path}/1.tar", "txt")
        assert f"where:  after row 10 of webdataset:{tmp_path}/1.tar" in said, said

    def test_another_column_and_another_kind_of_file(self, tmp_path: Path) -> None:
        (tmp_path / "a.tar").write_bytes(tar(TEXTS))
        assert "found:  txt, __key__, __url__" in refused(f"{tmp_path}/a.tar")
        (tmp_path / "a.h5").write_bytes(b"no HDF5")
        assert "cannot be read" in refused(f"{tmp_path}/a.h5")
        assert "unexpected keyword" in refused(f"csv:{tmp_path}/a.tar", csv={"between": ";"})

    def test_a_package_that_is_not_here(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setitem(sys.modules, "h5py", None)
        (tmp_path / "x.h5").write_text("x")
        assert "fix:    dray image layer VARIANT --pip h5py, and layer = " in refused(f"{tmp_path}/x.h5")


@pytest.mark.slow
def test_nothing_is_left_and_no_hub_is_asked(tmp_path: Path) -> None:
    """datasets keeps a cache and locks, and tells the hub which builder was used."""
    name, home = written(tmp_path, "webdataset"), tmp_path / "home"
    program = (
        "import os, sys, socket\n"
        "def refuse(*_): raise SystemExit('asked the network')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from dray.train.data import formats\n"
        "print(len([*formats.builder_rows('webdataset', sys.argv[1], {})]), flush=True)\n"
        "stream = formats.builder_rows('webdataset', sys.argv[1], {})\n"
        "next(stream)\n"
        "os._exit(0)  # as a rank ends\n"
    )
    env = {**os.environ, "HOME": str(home), "TMPDIR": str(tmp_path / "tmp"), "HF_HUB_OFFLINE": "0"}
    env = {key: value for key, value in env.items() if key not in ("HF_HOME", "HF_DATASETS_CACHE")}
    (tmp_path / "tmp").mkdir()
    argv = [sys.executable, "-c", program, name.replace("*", "1")]
    ended = subprocess.run(argv, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "60\n", "")
    assert not [path for path in home.rglob("*") if path.is_file()]
    assert not [*(tmp_path / "tmp").iterdir()]


def test_a_script_of_that_name_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "webdataset.py").write_text("raise SystemExit('ran')")
    (tmp_path / "webdataset").mkdir()
    (tmp_path / "webdataset" / "webdataset.py").write_text("raise SystemExit('ran')")
    name = written(tmp_path, "webdataset")
    monkeypatch.chdir(tmp_path)
    assert read(name, "txt") == TEXTS
    with pytest.raises(DrayError):
        [*formats.builder_rows("./webdataset", name, {})]


def test_other_arguments_make_other_tokens(tmp_path: Path) -> None:
    (tmp_path / "a.any").write_text("text;more\n" + "".join(f"{text};x,y\n" for text in TEXTS))

    def tokens(sep: str) -> int:
        words = (f"data.train=csv:{tmp_path}/a.any", f"data.config_kwargs.csv.sep={sep}")
        chosen = config(tmp_path, *words, "data.column=text" if sep == ";" else "data.column=text;more")
        return datasets.load(chosen, tokenizer.load(chosen)).total

    assert tokens(";") != tokens("|")


@pytest.mark.parametrize(
    ("split", "rows"),
    [
        ("train[:1%]", (0, 10)),
        ("train[:0.1]", None),
        ("train-clean.100[10%:-10%]", (100, 900)),
        ("train[-5:]", (995, 1000)),
        ("train[990:2000]", (990, 1000)),
        ("train[33%:66%]", (330, 660)),
    ],
)
def test_rows_of_a_slice(split: str, rows: tuple[int, int] | None) -> None:
    if rows is None:
        with pytest.raises(ValueError, match="Unrecognized"):  # a recipe with it is refused before
            formats.slice_bounds(split, 1000)
    else:
        assert formats.slice_bounds(split, 1000) == [rows]
