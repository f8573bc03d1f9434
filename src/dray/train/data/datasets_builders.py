"""Rows of a file by a builder of `datasets`. dray turns off all that it does beside reading.

It runs no code of a dataset, asks no hub, keeps nothing in a cache, and loses no row in silence.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from tempfile import TemporaryDirectory
from typing import Any

from dray.contract.findings import ConfigError, DrayError
from dray.train.data import files, remote
from dray.train.errors import described

_TAR_ENDS = 1024  # bytes of zeros


def rows(builder: str, path: str, options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The rows; `options` are load_dataset's for that builder."""
    number = 0
    if builder == "webdataset" and path.lower().endswith(".tar"):
        _require_whole_tar(path)
    try:
        with TemporaryDirectory(prefix="dray-datasets-") as cache:  # a stream uses it only until it is open
            dataset = _library().load_dataset(
                builder, data_files={"train": [path]}, split="train", streaming=True, cache_dir=cache,
                **options,
            )  # fmt: skip
        for row in dataset:
            yield row
            number += 1
    except (DrayError, OSError, EOFError, MemoryError):
        raise
    except ImportError as error:
        raise remote.missing_package(error.name or builder, f"{builder}:", str(error)) from error
    except Exception as error:  # of which builders have many kinds
        if remote.is_networks(error):
            raise
        raise ConfigError(
            "a shard of the dataset cannot be read",
            where=f"after row {number} of {builder}:{path}",
            wanted=f"rows that the datasets builder {builder} can read",
            found=described(error.__cause__ or error.__context__ or error),
            fix="write that file again; or set data.config_kwargs for its builder",
        ) from error


def slices(split: str, total: int) -> list[tuple[int, int]]:
    """The first and last row of each slice, such as train[:1%], of so many rows."""
    rows = "train[" + split.partition("[")[2]  # a split of the hub may have a name that it does not take
    instructions = _library().ReadInstruction.from_spec(rows).to_absolute({"train": total})
    return [(instruction.from_, instruction.to) for instruction in instructions]


def _library() -> Any:  # noqa: ANN401  it has no types
    import datasets  # noqa: PLC0415  a second, and its packages are of the images and the training stack alone

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    datasets.config.HF_UPDATE_DOWNLOAD_COUNTS = False  # else each use of a builder is told to the hub
    datasets.config.STREAMING_READ_MAX_RETRIES = 1  # dray's own file systems have tried again
    remote.register()
    return datasets


def _require_whole_tar(path: str) -> None:
    """Python's tarfile takes an archive that ends between two files for a whole one."""
    with files.opened(path) as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _TAR_ENDS))
        if file.read() != bytes(_TAR_ENDS):
            raise EOFError("the tar archive is cut off: the two empty blocks at its end are missing")
