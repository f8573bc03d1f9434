"""The rows of one file of each kind: by dray's readers, and by `datasets`, in turn, on this machine.

    .venv/bin/python benchmarks/read.py [PYTHON [MEGABYTES [ROUNDS]]]

PYTHON is another one that has `datasets`. Each way takes each text once, in a process that has imported everything.
`datasets` reads as a stream, row by row or 1,000 rows at a time; prepared, it writes an Arrow file first, as it
does without `streaming`. `by URL` is s3:// from a server on loopback; `datasets` opens it by s3fs too. CPU
seconds are those of all threads, without the server's.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

import stores

KINDS = {"txt": "text", "jsonl": "json", "parquet": "parquet", "arrow": "arrow"}
WAYS = ("dray", "streamed", "streamed in batches", "prepared", "dray by URL", "streamed by URL")


def write(folder: Path, megabytes: int) -> None:
    """The same documents in a file of each kind, with a second column beside them."""
    folder.mkdir(exist_ok=True)
    chance, size, texts = random.Random(1), 0, []  # noqa: S311  texts, not secrets
    words = [f"word{number}" for number in range(5000)]
    while not texts or size < megabytes * 10**6:
        texts.append(" ".join(chance.choices(words, k=chance.randint(10, 200))))
        size += len(texts[-1])
    table = pa.table({"id": range(len(texts)), "text": texts})
    (folder / "rows.txt").write_text("\n".join(texts) + "\n")
    with (folder / "rows.jsonl").open("w") as file:
        file.writelines(json.dumps({"id": number, "text": text}) + "\n" for number, text in enumerate(texts))
    pq.write_table(table, folder / "rows.parquet", row_group_size=10_000)
    with pa.ipc.new_stream(str(folder / "rows.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=10_000)


def texts(way: str, path: Path, kind: str, cache: str) -> Iterator[str]:
    """Every text of the file."""
    file = f"s3://{path.parent.name}/{path.name}" if way.endswith("by URL") else str(path)
    if way.startswith("dray"):
        from dray.train.data import formats, resolve  # noqa: PLC0415  each process has one of the two

        reading = formats.Reading("text")
        for piece in resolve.dataset(file, "train").pieces(reading):
            yield from formats.documents(piece, reading)
        return
    from datasets import load_dataset  # noqa: PLC0415

    if way.endswith("by URL"):
        from dray.train.data import remote  # noqa: PLC0415  the others have none of dray

        remote.register()
    given = {"data_files": file, "split": "train", "cache_dir": cache}
    found = load_dataset(KINDS[kind], streaming=way != "prepared", **given).select_columns("text")
    if way.startswith("streamed") and "batches" not in way:
        yield from (row["text"] for row in found)
    else:
        for batch in found.iter(1000):
            yield from batch["text"]


def measure(way: str, folder: Path) -> None:
    """By kind: wall and CPU seconds, texts and characters, as JSON."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_DISABLE_PROGRESS_BARS": "1"}
    found = {}
    for kind in KINDS:
        list(texts(way, folder / f"few/rows.{kind}", kind, tempfile.mkdtemp(dir=folder)))
        wall, cpu = time.perf_counter(), time.process_time()
        count = size = 0
        for text in texts(way, folder / f"rows.{kind}", kind, tempfile.mkdtemp(dir=folder)):
            count, size = count + 1, size + len(text)
        found[kind] = [time.perf_counter() - wall, time.process_time() - cpu, count, size]
    print(json.dumps(found))


def main(python: str = sys.executable, megabytes: str = "100", rounds: str = "3") -> None:
    """Tables of wall and CPU seconds, and each way's ratio to dray's in the same round."""
    with tempfile.TemporaryDirectory(prefix="dray-read-") as name, ExitStack() as stack:
        folder = Path(name)
        write(folder, int(megabytes))
        write(folder / "few", 0)
        found: dict[tuple[str, str], list[list[float]]] = {}
        files = (*folder.glob("rows.*"), *folder.glob("few/rows.*"))
        served = stack.enter_context(
            stores.serving({f"{one.parent.name}/{one.name}": one.read_bytes() for one in files})
        )
        os.environ["AWS_ENDPOINT_URL"] = served.address
        for _ in range(int(rounds)):
            for way in WAYS:
                argv = [sys.executable if "dray" in way or "URL" in way else python, __file__, "--measure", way, name]
                ended = subprocess.run(argv, check=True, capture_output=True, text=True)  # noqa: S603  this file
                for kind, one in json.loads(ended.stdout).items():
                    found.setdefault((kind, way), []).append(one)
        for kind in KINDS:
            size = {tuple(one[2:]) for way in WAYS for one in found[kind, way]}
            assert len(size) == 1, size  # every way has read the same
            for way in WAYS:
                wall, cpu = ([one[place] for one in found[kind, way]] for place in (0, 1))
                ratios = [
                    statistics.median(
                        one[place] / own[place] for one, own in zip(found[kind, way], found[kind, "dray"], strict=True)
                    )
                    for place in (0, 1)
                ]
                print(
                    f"| {kind} | {way} | {', '.join(f'{one:.2f}' for one in wall)} | {ratios[0]:.1f} | "
                    f"{', '.join(f'{one:.2f}' for one in cpu)} | {ratios[1]:.1f} |"
                )


if __name__ == "__main__":
    if sys.argv[1:2] == ["--measure"]:
        measure(sys.argv[2], Path(sys.argv[3]))
    else:
        main(*sys.argv[1:])
