"""Rows of a file by a builder of `datasets`: what it does beside reading is kept out.

It runs no code of a dataset's, asks no hub, keeps nothing in a cache, and loses no row in silence.
"""

from __future__ import annotations

import io
import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, cast

from dray.contract.findings import ConfigError, DrayError
from dray.train.data import files, remote
from dray.train.errors import described

_PACKAGES = {"lance": "pylance", "vortex": "vortex-data", "sql": "sqlalchemy"}  # where it has another name
_TAR_ENDS = 1024  # bytes of zeros


def rows(builder: str, path: str, column: str | None, options: str) -> Iterator[Any]:
    """The column's cells, or whole rows; `options` are load_dataset's options for that builder, as JSON."""
    place, number = f"{builder}:{path}", 0
    if builder == "webdataset":
        _require_whole_tar(path)
    with TemporaryDirectory(prefix="dray-datasets-") as cache, _explained(place, lambda: number):
        for row in _opened(builder, path, cache, json.loads(options)):
            if column is not None and column not in row:
                files.no_column(path, column, [*row])
            yield row if column is None else row[column]
            number += 1


def slices(split: str, total: int) -> list[tuple[int, int]]:
    """The first and last row of each slice, such as train[:1%], of so many rows."""
    rows = "train[" + split.partition("[")[2]  # a split of the hub may have a name that it does not take
    found = _library().ReadInstruction.from_spec(rows).to_absolute({"train": total})
    return [(one.from_, one.to) for one in found]


def _opened(builder: str, path: str, cache: str, options: dict[str, Any]) -> Iterable[dict[str, Any]]:
    library = _library()
    if builder == "xml":  # the one of datasets 5.2.0 opens a list in the place of a file
        with files.opened(path) as file:
            return [{"xml": io.TextIOWrapper(file, **{"encoding": "utf-8"} | options).read()}]
    if builder == "sql":  # load_dataset knows no such name, and asks the hub for it
        made = import_module("datasets.packaged_modules.sql.sql").Sql(
            cache_dir=cache, con=f"sqlite:///{path}", **options
        )
        return cast(Iterable[dict[str, Any]], made.as_streaming_dataset(split="train"))
    parts = [path]
    if builder == "lance":  # a folder, whose files it knows by themselves
        parts = sorted(str(file) for file in Path(path).rglob("*") if file.is_file())
    found = library.load_dataset(
        builder, data_files={"train": parts}, split="train", streaming=True, cache_dir=cache, **options
    )
    return cast(Iterable[dict[str, Any]], found)


def _library() -> Any:  # noqa: ANN401  it has no types
    try:
        import datasets  # noqa: PLC0415  a second, and its packages are of the images and the training stack alone
    except ImportError as error:
        raise ConfigError(
            "datasets is not installed in this Python",
            wanted="the package datasets, which dray's images have",
            found=str(error),
            fix="run it in the image, or: pip install datasets==5.2.0",
        ) from error
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else each use of a builder is told to the hub
    datasets.config.STREAMING_READ_MAX_RETRIES = 1  # dray's own file systems have tried again
    remote.register()
    return datasets


def _require_whole_tar(path: str) -> None:
    """Python's tarfile takes an archive that ends between two files for a whole one."""
    with files.opened(path) as file:
        if path.lower().endswith(".tar"):
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _TAR_ENDS))
            end = file.read()
        else:
            end = b""
            while block := file.read(1 << 20):
                end = (end + block)[-_TAR_ENDS:]
    if end != bytes(_TAR_ENDS):
        raise EOFError("the tar archive is cut off: the two empty blocks at its end are missing")


@contextmanager
def _explained(place: str, number: Any) -> Iterator[None]:  # noqa: ANN401  a function that counts rows
    """An error of a builder, of which there are many kinds, with the shard and the row."""
    try:
        yield
    except (DrayError, OSError, EOFError, GeneratorExit):
        raise
    except ImportError as error:
        name = error.name or place.partition(":")[0]
        package = _PACKAGES.get(name, name).lower()
        raise remote.missing_package(package, f"{place.partition(':')[0]}:", str(error)) from error
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:
        if "zstd not supported" in str(error):
            raise remote.missing_package("zstandard", f"{place.partition(':')[0]}: with .zst", str(error)) from error
        cause = error.__cause__ or error.__context__ or error
        text = described(error) + (f"; {described(cause)}" if cause is not error else "")
        raise ConfigError(
            "a shard of the dataset cannot be read",
            where=f"after row {number()} of {place}",
            wanted=f"rows that the datasets builder {place.partition(':')[0]} can read",
            found=text[:400],
            fix="write that file again; or set data.config_kwargs for its builder",
        ) from error
