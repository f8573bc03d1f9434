"""S3 by s3fs, without the options of `open` that `datasets` gives to a file system: botocore refuses them."""

from __future__ import annotations

from typing import Any

from s3fs import S3FileSystem


class S3(S3FileSystem):  # type: ignore[misc]  # it has no types
    """s3fs for dray and for the builders of `datasets`."""

    def __init__(self, **options: Any) -> None:  # noqa: ANN401  fsspec's own
        for name in ("block_size", "encoding", "errors"):
            options.pop(name, None)
        super().__init__(**options)
